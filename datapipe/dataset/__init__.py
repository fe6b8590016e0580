"""A packed data set on disk: its manifest, its index, and how its samples are read and verified."""

from .dataset import DataSet

__all__ = ["DataSet"]
