"""What all decoders of loaders have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic

from .batch_slots import SlotsT
from .image_chunk import ImageChunk
from .options import LoaderOptions


class Decoder(ABC, Generic[SlotsT]):
    """What makes pixels of encoded images."""

    chunk = 32  # images at a time: few enough to share a batch among threads, many enough for numpy's overhead

    def count_threads(self, options: LoaderOptions) -> int:
        """Return the number of threads that have work for the processor."""
        return options.num_threads()

    @abstractmethod
    def put(self, slots: SlotsT, chunk: ImageChunk) -> dict[str, float]:
        """In a thread: put images into their slots, until the batch is abandoned, and the errors of others into
        `chunk.bad`. Returns the seconds of each stage."""
