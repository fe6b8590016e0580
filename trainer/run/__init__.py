"""A training from its start to its report."""
