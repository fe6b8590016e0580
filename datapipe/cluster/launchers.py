"""Which process of a launcher's this is, from the environment variables that the launcher sets. Pure.

Launchers nest, and a process inherits the variables of all of them: a process of torchrun under srun has torchrun's
and Slurm's. The innermost launcher says how many processes there are. Of a pack, a job array is the outermost: each of
its elements runs a whole command of its own, so the numbers multiply.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import SettingError


@dataclass(frozen=True)
class Task:
    """A process's share of a pack: number `index` (from 0) of `count`.

    `launcher` names what said so, for messages; it is empty where nothing did.
    """

    index: int
    count: int
    launcher: str


@dataclass(frozen=True)
class Launcher:
    """A launcher, recognised by the variables in which it gives a process's number and the number of processes.

    `beside`: one of these must be set, too. Needed where the names of the other two are so common that something else
    may have set them. `jobs`: variables with the launcher's own name of a job, the same for all its processes.
    `local_count`: that with the number of processes on this host.
    """

    name: str
    index: str
    count: str
    beside: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    local_count: str = ""

    def task(self, environ: Mapping[str, str]) -> Task | None:
        if not {self.index, self.count} <= environ.keys() or (self.beside and not environ.keys() & {*self.beside}):
            return None
        if not (environ[self.index] or environ[self.count]):
            return None  # emptied, as in RANK= WORLD_SIZE= trainer train
        index, count = number_of(environ, self.index), number_of(environ, self.count)
        if index >= count:
            raise SettingError(f"{self.index}: {index} is out of range; allowed: below {self.count}, which is {count}")
        return Task(index, count, self.name)

    def check_unset(self, environ: Mapping[str, str]) -> None:
        """Raise SettingError when only some of the variables are set: a process would take itself to be alone."""
        names = {self.index, self.count}
        given = {name for name in names if environ.get(name)}
        if len(given) == 1 and self.name != "Slurm job step":  # a batch script of Slurm, which runs once, has the first
            (has,), (lacks,) = given, names - given
            raise SettingError(f"{has}: is set in the environment, and {lacks} is not; set both, or unset {has}")


# Not SLURM_NTASKS: a batch script, which runs once, has that and SLURM_PROCID=0 as well.
SLURM_STEP = Launcher("Slurm job step", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
# Innermost first. Both mpiruns start a helper on each node by srun, whose variables our process then inherits; torchrun
# is started once per node by any of the others.
LAUNCHERS = (
    Launcher(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        beside=("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "MASTER_ADDR"),
        local_count="LOCAL_WORLD_SIZE",
    ),
    # PMIx tells the name of a job since Open MPI 2; before, and beside it until 4, Open MPI itself did.
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        jobs=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        local_count="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # Intel MPI, Cray PALS and srun --mpi=pmi2, too. The last two name the job; MPICH's own mpiexec does not.
    Launcher("MPICH/PMI", "PMI_RANK", "PMI_SIZE", jobs=("PMI_JOBID",), local_count="MPI_LOCALNRANKS"),
    SLURM_STEP,
)

# Torque's pbsdsh tells both; that of PBS Pro and OpenPBS only the first. The number is the host's, not the process's.
_PBSDSH = Launcher("pbsdsh", "PBS_NODENUM", "PBS_NUM_NODES")
_SCRIPT_TASK = 1  # PBS_TASKNUM of a job's script, which has the others' variables as well


def innermost(environ: Mapping[str, str]) -> Task | None:
    """Return what the innermost launcher says. Raises SettingError when only some of its variables are set."""
    for launcher in LAUNCHERS:
        task = launcher.task(environ)
        if task is not None:
            if launcher is SLURM_STEP:
                _check_step(environ, task)
            return task
        launcher.check_unset(environ)
    return _PBSDSH.task(environ) if _is_one_per_host(environ) else None


def _is_one_per_host(environ: Mapping[str, str]) -> bool:
    """Return whether pbsdsh has started this process, and only this one on its host."""
    number = environ.get("PBS_TASKNUM", "")
    is_started = re.fullmatch("[0-9a-fA-F]{1,8}", number) is not None and int(number, 16) != _SCRIPT_TASK
    return is_started and environ.get("PBS_NUM_PPN", "1") == "1"


def launchers_job(environ: Mapping[str, str], launcher: str) -> str:
    """Return the launcher's own name of a job, which differs between two jobs on a host; "" where it gives none."""
    names = next((known.jobs for known in LAUNCHERS if known.name == launcher), ())
    return next((environ[name] for name in names if name in environ), "")


def is_on_one_host(environ: Mapping[str, str], launcher: str) -> bool:
    """Return whether the launcher tells that all its processes are on this host."""
    known = next((known for known in LAUNCHERS if known.name == launcher and known.local_count), None)
    return known is not None and environ.get(known.local_count) == environ[known.count]


def parse_task(value: str, option: str = "--task") -> Task:
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", value)
    if not match or int(match[1]) >= int(match[2]):
        raise SettingError(
            f"{option}: {value!r} is not a number of N; allowed: I/N with I from 0 to N - 1, such as 0/4"
        )
    return Task(int(match[1]), int(match[2]), option)


def _check_step(environ: Mapping[str, str], step: Task, remedy: str = "unset SLURM_STEP_NUM_TASKS") -> None:
    """Refuse variables of another job: sbatch, called in a step, passes on that step's, and its script is in none.

    `remedy`: what to do if the process is not to be started by srun. Raises SettingError.
    """
    tasks = environ.get("SLURM_NTASKS", str(step.count))
    if step.count > 1 and tasks != str(step.count):
        raise SettingError(
            f"SLURM_STEP_NUM_TASKS: {step.count} is not SLURM_NTASKS, which is {tasks}; it may be left from the job "
            f"that submitted this one. Run this by srun, or {remedy}"
        )


def number_of(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    if not re.fullmatch("[0-9]{1,9}", value):
        raise SettingError(f"{name}: {value!r} in the environment is not a number; allowed: 0 and more")
    return int(value)


def detect(environ: Mapping[str, str], explicit: str | None = None) -> Task:
    """Find out this process's task. `explicit`, "I/N" from the user, overrides the environment.

    Raises SettingError when the numbers contradict each other, or do not say how many tasks there are.
    """
    if explicit is not None:
        return parse_task(explicit)
    inner = next(filter(None, (launcher.task(environ) for launcher in LAUNCHERS)), None)
    if inner and inner.launcher == SLURM_STEP.name:
        _check_step(environ, inner, "give --task I/N (0/1: everything)")
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
