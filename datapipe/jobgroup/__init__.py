"""Processes of a job that know each other: how they meet, and what they tell each other."""
