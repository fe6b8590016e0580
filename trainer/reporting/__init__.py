"""A run's account of itself: metrics, times, its summary, and the report."""
