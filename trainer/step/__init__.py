"""What a training step computes."""
