"""Which process of a job this is, from the environment variables that its launcher sets. Pure.

Launchers nest, and a process inherits the variables of all of them: a process of torchrun under srun has torchrun's
and Slurm's. The innermost launcher says how many processes there are. A job array is the outermost: each of its
elements runs a whole command of its own, so the numbers multiply.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import SettingError


@dataclass(frozen=True)
class Task:
    """A process's share of a pack: number `index` (from 0) of `count`.

    `launcher` names what said so, for messages; it is empty where nothing did.
    """

    index: int
    count: int
    launcher: str


@dataclass(frozen=True)
class _Launcher:
    """A launcher, recognised by the variables in which it gives a process's number and the number of processes.

    `beside`: one of these must be set, too. Needed where the names of the other two are so common that something else
    may have set them.
    """

    name: str
    index: str
    count: str
    beside: tuple[str, ...] = ()

    def task(self, environ: Mapping[str, str]) -> Task | None:
        if not {self.index, self.count} <= environ.keys() or (self.beside and not environ.keys() & {*self.beside}):
            return None
        index, count = _number(environ, self.index), _number(environ, self.count)
        if index >= count:
            raise SettingError(f"{self.index}: {index} is out of range; allowed: below {self.count}, which is {count}")
        return Task(index, count, self.name)


# Not SLURM_NTASKS: a batch script, which runs once, has that and SLURM_PROCID=0 as well.
_SLURM_STEP = _Launcher("Slurm job step", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
# Innermost first. Both mpiruns start a helper on each node by srun, whose variables our process then inherits; torchrun
# is started once per node by any of the others.
_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", beside=("TORCHELASTIC_RUN_ID", "LOCAL_RANK")),
    _Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    _Launcher("MPICH/PMI", "PMI_RANK", "PMI_SIZE"),  # Intel MPI, Cray PALS and srun --mpi=pmi2, too
    _SLURM_STEP,
)


def detect(environ: Mapping[str, str], explicit: str | None = None) -> Task:
    """Find out this process's task. `explicit`, "I/N" from the user, overrides the environment.

    Raises SettingError when the numbers contradict each other, or do not say how many tasks there are.
    """
    if explicit is not None:
        return _explicit(explicit)
    inner = next(filter(None, (launcher.task(environ) for launcher in _LAUNCHERS)), None)
    if inner and inner.launcher == _SLURM_STEP.name:
        _check_step(environ, inner)
    array = _array(environ)
    if array is None:
        return inner or Task(0, 1, "")
    if inner is None or inner.count == 1:
        return array
    index, count = array.index * inner.count + inner.index, array.count * inner.count
    return Task(index, count, f"{array.launcher}, {inner.launcher}")


def _explicit(value: str) -> Task:
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", value)
    if not match or int(match[1]) >= int(match[2]):
        raise SettingError(f"--task: {value!r} is not a task; allowed: I/N with I from 0 to N - 1, such as 0/4")
    return Task(int(match[1]), int(match[2]), "--task")


def _check_step(environ: Mapping[str, str], step: Task) -> None:
    """Refuse variables of another job: sbatch, called in a step, passes on that step's, and its script is in none."""
    tasks = environ.get("SLURM_NTASKS", str(step.count))
    if step.count > 1 and tasks != str(step.count):
        raise SettingError(
            f"SLURM_STEP_NUM_TASKS: {step.count} is not SLURM_NTASKS, which is {tasks}; it may be left from the job "
            "that submitted this one. Run this by srun, or give --task I/N (0/1: everything)"
        )


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
        _number(environ, f"SLURM_ARRAY_TASK_{name}") for name in ("ID", "MIN", "MAX", "STEP", "COUNT")
    )
    # The environment does not list the numbers: a number's place is known only if they are a range with a fixed step.
    numbers = range(first, last + 1, step or 1)
    if len(numbers) != count or number not in numbers:
        raise SettingError(
            f"SLURM_ARRAY_TASK_ID: {number} is one of {count} between {first} and {last}, which are not a plain range, "
            "so its place is not known; submit the job with --array=0-7, say, or give --task I/N"
        )
    return Task(numbers.index(number), count, "Slurm job array")


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    if not re.fullmatch("[0-9]{1,9}", value):
        raise SettingError(f"{name}: {value!r} in the environment is not a number; allowed: 0 and more")
    return int(value)
