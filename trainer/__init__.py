"""Training runs: from a packed data set to a network of a target accuracy, and the time it took."""
