"""Processes that train together: who they are, what connects them, and how they end."""
