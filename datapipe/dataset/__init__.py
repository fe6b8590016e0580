"""A packed data set on disk: its manifest, its index, how its samples are read and how all is verified."""

from .dataset import DataSet

__all__ = ["DataSet"]
