"""The processors and the memory that threads share which decode images."""

from __future__ import annotations

import threading
from collections.abc import Callable

RESERVED_SHARE = 0.25  # of the memory, at most, is for reading


class Budget:
    """Lets threads decode as long as a processor and enough memory are free.

    Memory is reserved for good (to read into), claimed (while an image is decoded) or held (by a decoded image until
    it is written). Threads get their turn in the order in which they ask, but those that others wait for come first.
    Such a thread may continue as soon as no other image is being decoded, however much memory is held. So there is no
    deadlock: what is held is always written in the end, and released.
    """

    def __init__(self, total_bytes: int, processors: int) -> None:
        self._total_bytes = total_bytes
        self._largest = int((1 - RESERVED_SHARE) * total_bytes)  # does not depend on the number of threads
        self._processors = processors
        self._lock = threading.Lock()
        self._reserved_bytes = self._claimed_bytes = self._held_bytes = self._decoding = 0
        self._closed = False
        self._waiting: list[_Waiting] = []

    def reserve(self, size: int, needed: bool) -> bool:
        """Reserve memory for good. False, and nothing is reserved, if it is too much; `needed` memory never is."""
        with self._lock:
            if self._reserved_bytes + size > RESERVED_SHARE * self._total_bytes and not needed:
                return False
            self._reserved_bytes += size
            return True

    def claim(self, size: int, is_awaited: Callable[[], bool]) -> bool:
        """Wait for a processor and for `size` bytes; False when the budget is closed.

        `is_awaited` says whether other threads wait for this one. Raises MemoryError for more bytes than may ever be
        claimed for an image.
        """
        if size > self._largest:
            needed, total, most = (f"{num / 1e6:,.0f} MB" for num in (size, self._total_bytes, self._largest))
            message = f"decoding it takes about {needed} of memory, and --memory ({total}) allows {most} for an image"
            raise MemoryError(message)
        with self._lock:
            if self._closed:
                return False
            waiting = _Waiting(size, is_awaited)
            self._waiting.append(waiting)
            self._start_next()
        waiting.turn.acquire()
        return not self._closed

    def close(self) -> None:
        """End all waits: `claim` returns False from now on."""
        with self._lock:
            self._closed = True
            while self._waiting:
                self._waiting.pop().turn.release()

    def release(self, size: int, hold: int = 0) -> None:
        """Release a claim of `size` bytes, of which `hold` stay in use until `let_go`."""
        with self._lock:
            self._claimed_bytes -= size
            self._decoding -= 1
            self._held_bytes += hold
            self._start_next()

    def hold(self, size: int) -> None:
        """Count memory that is in use already, without waiting."""
        with self._lock:
            self._held_bytes += size

    def let_go(self, size: int) -> None:
        """Release memory that was held."""
        with self._lock:
            self._held_bytes -= size
            self._start_next()

    def look_again(self) -> None:
        """Let threads continue that have come to be awaited."""
        if self._waiting:
            with self._lock:
                self._start_next()

    def _fits(self, size: int, awaited: bool) -> bool:
        if self._decoding >= self._processors:
            return False
        used = self._reserved_bytes + self._claimed_bytes + self._held_bytes
        return used + size <= self._total_bytes or (not self._decoding and (awaited or not self._held_bytes))

    def _start_next(self) -> None:
        while self._waiting and self._decoding < self._processors:
            awaited = next((waiting for waiting in self._waiting if waiting.is_awaited()), None)
            chosen = awaited or self._waiting[0]
            if not self._fits(chosen.size, awaited is not None):
                return
            self._waiting.remove(chosen)
            self._claimed_bytes += chosen.size
            self._decoding += 1
            chosen.turn.release()


class _Waiting:
    """A thread that waits for its turn."""

    def __init__(self, size: int, is_awaited: Callable[[], bool]) -> None:
        self.size, self.is_awaited = size, is_awaited
        self.turn = threading.Lock()
        self.turn.acquire()
