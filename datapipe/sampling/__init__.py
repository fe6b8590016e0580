"""Pure functions of (seed, epoch, position): which sample, and which crop and flip of it."""
