"""The way of a shard's samples into its file, in chunks: read in any order, placed in the shard's, written in any."""

from __future__ import annotations

import threading

from ..memory import return_free_bytes
from .budget import Budget
from .shard import Good, ShardFile, Stopped
from .state import BadSample

LARGE_BYTES = 64 << 20  # decoded: worth a call that gives the memory back to the kernel


class ShardQueue:
    """The chunks of a shard that wait for their turn, and how much of the shard is written.

    Many threads deliver chunks, one at a time places the one whose turn it is, and many write what is placed.
    """

    def __init__(self, shard: ShardFile) -> None:
        self.shard = shard
        self.num_samples = len(shard.task.which)
        self._lock = threading.Lock()
        self._ready: dict[int, SampleChunk] = {}  # by the first sample
        self._next = 0  # the first sample of the chunk whose turn it is
        self._is_placing = False
        self._num_written = 0

    def is_next(self, chunk: SampleChunk) -> bool:
        """Whether it is the turn of `chunk`."""
        return chunk.which.start == self._next

    def deliver(self, chunk: SampleChunk) -> None:
        """Take a chunk that has been read."""
        with self._lock:
            self._ready[chunk.which.start] = chunk

    def begin_placing(self) -> SampleChunk | None:
        """Return the chunk whose turn it is; None when it has not been read, or another thread is placing one."""
        with self._lock:
            chunk = None if self._is_placing else self._ready.pop(self._next, None)
            self._is_placing = self._is_placing or chunk is not None
            return chunk

    def end_placing(self, chunk: SampleChunk) -> None:
        """Let the chunk behind this one be placed."""
        with self._lock:
            self._is_placing = False
            self._next = chunk.which.stop

    def end_writing(self, count: int) -> bool:
        """Count samples that are written; return whether the shard has no others."""
        with self._lock:
            self._num_written += count
            return self._num_written == self.num_samples


class SampleChunk:
    """Consecutive samples of a shard, with the memory that they are read into."""

    def __init__(self, budget: Budget, queue: ShardQueue, which: range, memory: memoryview) -> None:
        self.queue, self.which, self.memory = queue, which, memory  # which of the shard's samples
        self.images: list[Good | BadSample] = []
        self._budget = budget
        self._claimed_bytes = self._held_bytes = 0

    def is_awaited(self) -> bool:
        """Whether the shard cannot continue without this chunk."""
        return self.queue.is_next(self)

    def claim(self, size: int) -> None:
        """Wait until an image may be decoded. Raises MemoryError, Stopped."""
        if not self._budget.claim(size, self.is_awaited):
            raise Stopped
        self._claimed_bytes = size

    def end_claim(self, hold: int) -> None:
        """Release what was claimed, if anything was; `hold` bytes of it remain in use until the image is written."""
        if self._claimed_bytes:
            if self._claimed_bytes >= LARGE_BYTES:
                return_free_bytes()
            self._budget.release(self._claimed_bytes, hold)
            self._claimed_bytes, self._held_bytes = 0, self._held_bytes + hold

    def hold(self, size: int) -> None:
        """Count memory beside the chunk's own."""
        self._budget.hold(size)
        self._held_bytes += size

    def let_go(self) -> None:
        """Release everything: the chunk is written."""
        self.images.clear()
        if self._held_bytes:
            self._budget.let_go(self._held_bytes)
