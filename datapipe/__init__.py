"""From image files on a shared filesystem to batches on the device."""

__version__ = "0.1.0"
