"""Waiting for a loader that has begun the next epoch's batches."""

from __future__ import annotations

import time

from benchmarks.measure import cpu_s

IDLE_S = 0.05


def wait_until_idle() -> None:
    """Wait until this process and its children do nothing: what they do for the next epoch belongs to this one, which
    was given its own first batches by the one before."""
    used_s = -1.0
    while cpu_s() - used_s > IDLE_S / 10:
        used_s = cpu_s()
        time.sleep(IDLE_S)
