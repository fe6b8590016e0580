"""The number of bad samples that a loader tolerates."""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable

from ..errors import DatapipeError

logger = logging.getLogger(__name__)


class BadBudget:
    """The number of bad samples that a loader tolerates. Thread-safe."""

    def __init__(self, max_bad: int, rank: int) -> None:
        self._max_bad, self._rank = max_bad, rank
        self._bad: set[Hashable] = set()
        self._lock = threading.Lock()

    def spend(self, sample: Hashable, error: DatapipeError) -> None:
        """Count a bad sample and log it, once. Raises the error when the budget is spent."""
        with self._lock:
            if sample in self._bad:
                return
            if len(self._bad) >= self._max_bad:
                raise error
            self._bad.add(sample)
            count = len(self._bad)
        logger.warning(
            "rank %d: bad sample, %d of max_bad=%d; its slot is black and not valid: %s",
            self._rank,
            count,
            self._max_bad,
            error,
        )
