"""What threads that decode images share: processors, and memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

RESERVED_SHARE = 0.25  # of the memory: at most so much is for reading


class Budget:
    """Lets threads decode while there is a processor, and room for what that takes.

    Memory is reserved for good, claimed for an image while it is decoded, and held for what came of it. Threads get
    their turn in the order in which they ask, those that others wait for first. Such a thread continues as soon as
    nothing else is decoded, whatever is held: so what is held is always written in the end, and let go of.
    """

    def __init__(self, total_bytes: int, processors: int) -> None:
        self._total_bytes = total_bytes
        self._largest = int((1 - RESERVED_SHARE) * total_bytes)  # the same for any number of threads
        self._processors = processors
        self._lock = threading.Lock()
        self._reserved = self._claimed = self._held = self._decoding = 0
        self._closed = False
        self._waiting: list[_Waiting] = []

    def reserve(self, size: int, needed: bool) -> bool:
        """Take memory for as long as the budget is used; False if that would be too much of it, and is not needed."""
        with self._lock:
            if self._reserved + size > RESERVED_SHARE * self._total_bytes and not needed:
                return False
            self._reserved += size
            return True

    def claim(self, size: int, is_awaited: Callable[[], bool]) -> bool:
        """Wait for a processor and for room; False when the budget has been closed meanwhile.

        Raises MemoryError for more than may ever be claimed at once.
        """
        if size > self._largest:
            raise MemoryError(
                f"decoding it takes about {_mb(size)} of memory, and --memory ({_mb(self._total_bytes)}) allows "
                f"{_mb(self._largest)} for an image"
            )
        with self._lock:
            if self._closed:
                return False
            if not self._waiting and self._fits(size, False):
                self._start(size)
                return True
            mine = _Waiting(size, is_awaited)
            self._waiting.append(mine)
            self._start_next()
        mine.turn.acquire()
        return not self._closed

    def close(self) -> None:
        """Send those that wait away."""
        with self._lock:
            self._closed = True
            while self._waiting:
                self._waiting.pop().turn.release()

    def release(self, size: int, hold: int = 0) -> None:
        """Give back a claim, but hold so much of it, until `let_go`."""
        with self._lock:
            self._claimed -= size
            self._decoding -= 1
            self._held += hold
            self._start_next()

    def hold(self, size: int) -> None:
        """Count memory that is there already: it waits for nothing."""
        with self._lock:
            self._held += size

    def let_go(self, size: int) -> None:
        with self._lock:
            self._held -= size
            self._start_next()

    def look_again(self) -> None:
        """Others may be awaited now."""
        if self._waiting:
            with self._lock:
                self._start_next()

    def _fits(self, size: int, awaited: bool) -> bool:
        if self._decoding >= self._processors:
            return False
        used = self._reserved + self._claimed + self._held
        return used + size <= self._total_bytes or (not self._decoding and (awaited or not self._held))

    def _start(self, size: int) -> None:
        self._claimed += size
        self._decoding += 1

    def _start_next(self) -> None:
        while self._waiting and self._decoding < self._processors:
            awaited = next((waiting for waiting in self._waiting if waiting.is_awaited()), None)
            chosen = awaited or self._waiting[0]
            if not self._fits(chosen.size, awaited is not None):
                return
            self._waiting.remove(chosen)
            self._start(chosen.size)
            chosen.turn.release()


class _Waiting:
    def __init__(self, size: int, is_awaited: Callable[[], bool]) -> None:
        self.size, self.is_awaited = size, is_awaited
        self.turn = threading.Lock()
        self.turn.acquire()


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
