"""Which process of a job this is, from the environment variables that its launcher sets. Pure.

Launchers nest, and a process inherits the variables of all of them: a process of torchrun under srun has torchrun's
and Slurm's. The innermost launcher says how many processes there are. A job array is the outermost: each of its
elements runs a whole command of its own, so the numbers multiply.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

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
class Placement:
    """Where a process is in its job, and where the processes can meet.

    Attributes:
        rank: its number, from 0.
        world_size: how many processes there are.
        master: host name or address of process 0; "" where that is not known.
        port: a TCP port there that this job may use.
        has_store: whether the launcher keeps a store of torch's at that port.
        launcher: what said so, for messages; empty where nothing did.
        job: the scheduler's number of the job, or else the launcher's own name of it; "" without one.
    """

    rank: int = 0
    world_size: int = 1
    master: str = ""
    port: int = 0
    has_store: bool = False
    launcher: str = ""
    job: str = ""


@dataclass(frozen=True)
class _Launcher:
    """A launcher, recognised by the variables in which it gives a process's number and the number of processes.

    `beside`: one of these must be set, too. Needed where the names of the other two are so common that something else
    may have set them. `jobs`: variables with the launcher's own name of a job, the same for all its processes.
    """

    name: str
    index: str
    count: str
    beside: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()

    def task(self, environ: Mapping[str, str]) -> Task | None:
        if not {self.index, self.count} <= environ.keys() or (self.beside and not environ.keys() & {*self.beside}):
            return None
        index, count = _number(environ, self.index), _number(environ, self.count)
        if index >= count:
            raise SettingError(f"{self.index}: {index} is out of range; allowed: below {self.count}, which is {count}")
        return Task(index, count, self.name)

    def check_unset(self, environ: Mapping[str, str]) -> None:
        """Raise SettingError when only some of the variables are set: a process would take itself to be alone."""
        names = {self.index, self.count}
        # A batch script of Slurm, which runs once, has the first.
        if names & environ.keys() and not names <= environ.keys() and self.name != "Slurm job step":
            (has,), (lacks,) = names & environ.keys(), names - environ.keys()
            raise SettingError(f"{has}: is set in the environment, and {lacks} is not; set both, or give --node I/N")


# Not SLURM_NTASKS: a batch script, which runs once, has that and SLURM_PROCID=0 as well.
_SLURM_STEP = _Launcher("Slurm job step", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
# Innermost first. Both mpiruns start a helper on each node by srun, whose variables our process then inherits; torchrun
# is started once per node by any of the others.
_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", beside=("TORCHELASTIC_RUN_ID", "LOCAL_RANK")),
    # PMIx tells the name of a job since Open MPI 2; before, and beside it until 4, Open MPI itself did.
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        jobs=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    # Intel MPI, Cray PALS and srun --mpi=pmi2, too. The last two name the job; MPICH's own mpiexec does not.
    _Launcher("MPICH/PMI", "PMI_RANK", "PMI_SIZE", jobs=("PMI_JOBID",)),
    _SLURM_STEP,
)


# Torque's pbsdsh tells both; that of PBS Pro and OpenPBS only the first. The number is the host's, not the process's.
_PBSDSH = _Launcher("pbsdsh", "PBS_NODENUM", "PBS_NUM_NODES")
_SCRIPT_TASK = 1  # PBS_TASKNUM of a job's script, which has the others' variables as well

NUM_NODES = "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "PBS_NUM_NODES"  # of a job, as schedulers tell
JOBS = "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID"  # of schedulers


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


def placement(environ: Mapping[str, str], explicit: str | None = None, master: str | None = None) -> Placement:
    """Find out where this process is in its job.

    Args:
        environ: the environment variables.
        explicit: "I/N" from the user; it overrides them.
        master: host of process 0, from the user; it overrides them.

    Returns:
        A process alone where nothing says otherwise.

    Raises:
        SettingError: The numbers contradict each other, only some of a launcher's are set, or `explicit` is not I/N.
    """
    job = next((environ[name] for name in JOBS if name in environ), "")
    place = Placement(job=job)
    if explicit is not None:
        node = _explicit(explicit, "--node")
        place = replace(place, rank=node.index, world_size=node.count, launcher="--node")
    else:
        task = _innermost(environ)
        if task is not None:
            place = replace(place, rank=task.index, world_size=task.count, launcher=task.launcher)
    launchers_job = _launchers_job(environ, place.launcher)
    place = replace(place, job=job or launchers_job)
    is_step = place.launcher == _SLURM_STEP.name
    has_store = place.launcher == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port = _port(job, environ.get("SLURM_STEP_ID", "") if is_step else launchers_job)
    if "MASTER_PORT" in environ:  # which the training will use, unless torchrun keeps a store there
        port = _number(environ, "MASTER_PORT") + (0 if has_store else 1)
    address = master or environ.get("MASTER_ADDR") or _first_host(environ, is_step)
    return replace(place, master=address, port=port, has_store=has_store)


def job_end(environ: Mapping[str, str], now: float) -> float | None:
    """Return the time at which the job ends at the latest, in seconds since 1970; None where nothing tells it.

    Slurm tells the time itself, Torque the length (PBS_WALLTIME). PBS Pro, LSF and Grid Engine tell neither.

    >>> job_end({"SLURM_JOB_END_TIME": "1700000000"}, now=0), job_end({"PBS_WALLTIME": "3600"}, now=100), job_end({}, 0)
    (1700000000.0, 3700.0, None)
    """
    for name, begin in (("SLURM_JOB_END_TIME", 0.0), ("PBS_WALLTIME", now)):
        value = environ.get(name, "")
        if re.fullmatch("[0-9]{1,12}", value) and value != "0":
            return begin + int(value)
    return None


def ended_job(environ: Mapping[str, str]) -> str:
    """Return the number of the job that has just ended, where this is Slurm's epilog for it; "" elsewhere."""
    is_epilog = environ.get("SLURM_SCRIPT_CONTEXT", "").startswith("epilog")
    return environ.get("SLURM_JOB_ID", "") if is_epilog else ""


def _innermost(environ: Mapping[str, str]) -> Task | None:
    """Return what the innermost launcher says. Raises SettingError when only some of its variables are set."""
    for launcher in _LAUNCHERS:
        task = launcher.task(environ)
        if task is not None:
            if launcher is _SLURM_STEP:
                _check_step(environ, task)
            return task
        launcher.check_unset(environ)
    return _PBSDSH.task(environ) if _is_one_per_host(environ) else None


def _is_one_per_host(environ: Mapping[str, str]) -> bool:
    """Return whether pbsdsh has started this process, and only this one on its host."""
    number = environ.get("PBS_TASKNUM", "")
    is_started = re.fullmatch("[0-9a-fA-F]{1,8}", number) is not None and int(number, 16) != _SCRIPT_TASK
    return is_started and environ.get("PBS_NUM_PPN", "1") == "1"


def _launchers_job(environ: Mapping[str, str], launcher: str) -> str:
    """Return the launcher's own name of a job, which differs between two jobs on a host; "" where it gives none."""
    names = next((known.jobs for known in _LAUNCHERS if known.name == launcher), ())
    return next((environ[name] for name in names if name in environ), "")


def num_nodes(environ: Mapping[str, str]) -> int:
    """Return how many nodes the job has, as its scheduler tells; 1 where none does."""
    counts = (environ.get(name, "") for name in NUM_NODES)
    return max(1, next((int(nodes) for nodes in counts if nodes.isdecimal()), 1))


def lonely(environ: Mapping[str, str], placement: Placement) -> str:
    """Say so where a process that believes to be alone is in a job of several nodes; "" otherwise."""
    if placement.world_size > 1 or placement.launcher == "--node":
        return ""
    for name in NUM_NODES:
        nodes = environ.get(name, "1")
        if nodes.isdecimal() and int(nodes) > 1:
            return f"this job has {nodes} nodes ({name}), and this process knows of one: start it on each, as by srun"
    node = environ.get("PBS_NODENUM", "0")
    if node.isdecimal() and int(node) > 0:  # the first one's does not tell it from a job of one node
        return f"this is node {node} of a job (PBS_NODENUM), and PBS does not tell how many there are: give --node I/N"
    return ""


def _port(*job: str) -> int:
    """Return a port that two jobs on a node hardly ever share: 20000 to 29999, below those that Linux gives away."""
    return 20000 + zlib.crc32("/".join(job).encode()) % 10000


def _first_host(environ: Mapping[str, str], is_step: bool) -> str:
    """Return the first host of Slurm's step, or else of its job: process 0 is there.

    What mpirun starts on other nodes than its own inherits the variables of a step that has only these.
    """
    nodes = environ.get("SLURM_STEP_NODELIST" if is_step else "SLURM_JOB_NODELIST", "")
    return first_host(nodes) if nodes else ""


def first_host(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it.

    >>> first_host("gpu[007-009,12],login1"), first_host("a1,a2"), first_host("rack[1-2]node[3-4]-ib")
    ('gpu007', 'a1', 'rack1node3-ib')
    """
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])


def _explicit(value: str, option: str = "--task") -> Task:
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", value)
    if not match or int(match[1]) >= int(match[2]):
        raise SettingError(
            f"{option}: {value!r} is not a number of N; allowed: I/N with I from 0 to N - 1, such as 0/4"
        )
    return Task(int(match[1]), int(match[2]), option)


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
