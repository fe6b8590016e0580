"""What a scheduler tells of a job. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import SettingError

NUM_NODES = "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "PBS_NUM_NODES"  # of a job, as schedulers tell
JOBS = "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID"  # of schedulers


def job_end(environ: Mapping[str, str], now: float) -> float | None:
    """Return the time at which the job ends at the latest, in seconds since 1970; None where nothing tells it.

    Slurm tells the time itself, Torque the length (PBS_WALLTIME). PBS Pro, LSF and Grid Engine tell neither.

    >>> job_end({"SLURM_JOB_END_TIME": "1700000000"}, now=0), job_end({"PBS_WALLTIME": "3600"}, now=1.0), job_end({}, 0)
    (1700000000.0, 3601.0, None)
    """
    for name, begin in (("SLURM_JOB_END_TIME", 0.0), ("PBS_WALLTIME", now)):
        value = environ.get(name, "")
        if re.fullmatch("[0-9]{1,12}", value) and value != "0":
            return begin + int(value)
    return None


def parse_time_limit(text: str) -> int:
    """Return the seconds of a time limit, written as Slurm's --time. Raises SettingError.

    >>> [parse_time_limit(text) for text in ("90", "1:30", "4:00:00", "1-12", "1-12:30", "1-0:0:5")]
    [5400, 90, 14400, 129600, 131400, 86405]
    """
    match = re.fullmatch(r"(?:(\d{1,5})-)?(\d{1,7})(?::(\d{1,7}))?(?::(\d{1,7}))?", text.strip())
    seconds = 0
    if match:
        days, *parts = match.groups()
        given = [int(part) for part in parts if part is not None]
        # With days, hours come first; else one number is minutes, two are minutes and seconds.
        units = (3600, 60, 1) if days is not None or len(given) == 3 else (60, 1)
        seconds = 86400 * int(days or 0) + sum(n * unit for n, unit in zip(given, units, strict=False))
    if not seconds:
        raise SettingError(f"time limit {text!r}: not a time; such as 90 (minutes), 4:00:00 or 1-12:00:00 (days-h:m:s)")
    return seconds


def ended_job(environ: Mapping[str, str]) -> str:
    """Return the number of the job that has just ended, where this is Slurm's epilog for it; "" elsewhere."""
    is_epilog = environ.get("SLURM_SCRIPT_CONTEXT", "").startswith("epilog")
    return environ.get("SLURM_JOB_ID", "") if is_epilog else ""


def num_nodes(environ: Mapping[str, str]) -> int:
    """Return how many nodes the job has, as its scheduler tells; 1 where none does."""
    counts = (environ.get(name, "") for name in NUM_NODES)
    return max(1, next((int(nodes) for nodes in counts if nodes.isdecimal()), 1))
