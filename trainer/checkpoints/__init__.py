"""Files of checkpoints, in a run and on a node."""
