"""What a run says of itself: metrics, times, its summary, and the report."""
