"""A process's share of a pack, where a job array may be around the launchers. Pure.

A job array is the outermost: each of its elements runs a whole command of its own, so the numbers multiply.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import SettingError
from .launchers import LAUNCHERS, SLURM_STEP, Task, check_step, number_of, parse_task


def detect(environ: Mapping[str, str], explicit: str | None = None) -> Task:
    """Find out this process's task. `explicit`, "I/N" from the user, overrides the environment.

    Raises SettingError when the numbers contradict each other, or do not say how many tasks there are.
    """
    if explicit is not None:
        return parse_task(explicit)
    inner = next(filter(None, (launcher.task(environ) for launcher in LAUNCHERS)), None)
    if inner and inner.launcher == SLURM_STEP.name:
        check_step(environ, inner, "give --task I/N (0/1: everything)")
    array = _array(environ)
    if array is None:
        return inner or Task(0, 1, "")
    if inner is None or inner.count == 1:
        return array
    index, count = array.index * inner.count + inner.index, array.count * inner.count
    return Task(index, count, f"{array.launcher}, {inner.launcher}")


def name_task(environ: Mapping[str, str]) -> str:
    """Return what this process is called in the log, where there are several; "" otherwise. It never raises.

    Each task informs of its own share.

    >>> name_task({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}), name_task({}), name_task({"PBS_ARRAYID": "3"})
    ('task 3', '', '')
    """
    try:
        task = detect(environ)
    except SettingError:  # which the command itself says, if it needs it
        return ""
    return f"task {task.index}" if task.count > 1 else ""


def _array(environ: Mapping[str, str]) -> Task | None:
    for name in ("PBS_ARRAY_INDEX", "PBS_ARRAYID"):  # PBS Pro, Torque
        if name in environ:
            raise SettingError(
                f"{name}: {environ[name]} is set, but PBS does not tell how many elements the array has; "
                f"give --task ${name}/N, for an array of 0 to N - 1"
            )
    if "SLURM_ARRAY_TASK_ID" not in environ:
        return None
    number, first, last, step, count = (
        number_of(environ, f"SLURM_ARRAY_TASK_{name}") for name in ("ID", "MIN", "MAX", "STEP", "COUNT")
    )
    # The environment does not list the numbers: a number's place is known only if they are a range with a fixed step.
    numbers = range(first, last + 1, step or 1)
    if len(numbers) != count or number not in numbers:
        raise SettingError(
            f"SLURM_ARRAY_TASK_ID: {number} is one of {count} between {first} and {last}, which are not a plain range, "
            "so its place is not known; submit the job with --array=0-7, say, or give --task I/N"
        )
    return Task(numbers.index(number), count, "Slurm job array")
