"""The thread by which a process says each second that it lives."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .secret import SignedStore

BEAT_S = 1.0  # how often a process says that it lives
LISTEN_S = 5 * BEAT_S  # how long to listen for that
LOST = "another node has lost its connection"
BROKEN = "broken"  # the key under which a process says that the others do not continue as they are


class Heart:
    """The heart of a process. It beats until it is stopped.

    Args:
        store: A connection to the job's store that nothing else uses.
        rank: Number of the process.
        describe: Function that returns what it tells the others of itself; JSON must hold it.

    Attributes:
        is_broken: Set as soon as a process has said that the others do not continue as they are, or the store is gone.
    """

    def __init__(self, store: SignedStore, rank: int, describe: Callable[[], Any]) -> None:
        self._store, self._rank, self._describe = store, rank, describe
        self.is_broken, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="datapipe-beat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        with suppress(RuntimeError):
            for count in itertools.count():
                self._store.set(f"beat/{self._rank}", json.dumps([count, self._describe()]))
                if self._store.check([BROKEN]):
                    self.is_broken.set()
                if self._ended.wait(BEAT_S):
                    return
        self.is_broken.set()

    def stop(self, limit_s: float = LISTEN_S) -> None:
        """Beat no more. A thread that is in the store when Python ends would abort the process.

        Args:
            limit_s: Longest time to wait for it, in seconds.
        """
        self._ended.set()
        self._thread.join(limit_s)
