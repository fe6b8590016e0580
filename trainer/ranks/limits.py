"""Until when a run may take, and how much of that is kept for its end."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from datapipe.cluster import job_end, parse_time_limit
from datapipe.errors import SettingError

logger = logging.getLogger(__name__)

RESERVE_S = 30.0  # for the checkpoint and the end, besides twice the longest step
SHORTEST_S = int(RESERVE_S) + 1  # that may be asked for


def parse_limit(option: str, text: str) -> int:
    """Return the seconds of an option's time, written as Slurm's --time. Raises SettingError if no step fits in it."""
    seconds = parse_time_limit(text)
    if seconds <= RESERVE_S:
        raise SettingError(
            f"{option} {text}: is {seconds} s, of which {RESERVE_S:g} s are kept for the last checkpoint; allowed: "
            "more than that, such as 0:90 (minutes:seconds), 90 (minutes) or 4:00:00"
        )
    return seconds


def find_end(environ: Mapping[str, str], max_time: str | None, now: float) -> float | None:
    """Find out when a run is to have ended, at the latest.

    Args:
        environ: The environment variables, which may tell when the job ends.
        max_time: The user's --max-time, from `now`; None: without.
        now: The time, in seconds since 1970.

    Returns:
        The earlier of both, in seconds since 1970; None where nothing limits the run.

    Raises:
        SettingError: `max_time` is not a time, or too short.
    """
    ends = [job_end(environ, now), None if max_time is None else now + parse_limit("--max-time", max_time)]
    return min((end for end in ends if end is not None), default=None)


def warn_if_short(ends_at: float | None, now: float) -> None:
    """Say so where so little time is left that the run stops after its first step. Both are seconds since 1970."""
    if ends_at is not None and ends_at - now <= RESERVE_S:
        left = f"{max(0, ends_at - now):.0f} s are left before the time is over"
        logger.warning(
            "%s, and %g s are kept for the last checkpoint: this attempt does a single step", left, RESERVE_S
        )
