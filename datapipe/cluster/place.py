"""Where a process is in its job, where the processes of the job can meet, and which rank of a training it is. Pure."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import SettingError
from .launchers import LAUNCHERS, SLURM_STEP, Task, innermost, is_on_one_host, launchers_job, number_of, parse_task
from .scheduler import JOBS, NUM_NODES

MAX_PORT = 65535
# What salloc's own shell is a step of, on the job's first node: SLURM_INTERACTIVE_STEP in slurm.h.
INTERACTIVE_STEP = "4294967290"
# What connects the processes of several nodes, by launcher. {0}: how many nodes or tasks there are.
REMEDIES = {
    "torchrun": "start one torchrun on each, as by srun, with --nnodes={0} and one --rdzv-endpoint, not --standalone",
    "Open MPI": "let one mpirun start the processes of all",
    "MPICH/PMI": "let one mpirun start the processes of all",
}


@dataclass(frozen=True)
class Placement:
    """Where a process is in its job, and where the processes can meet.

    Attributes:
        rank: Number of the process, from 0.
        world_size: Number of processes.
        master: Host name or address of process 0; "" if that is not known.
        port: TCP port there that this job may use, such as for staging.
        has_store: Whether the launcher keeps a store of torch's at that port.
        launcher: Source of these numbers, for messages; empty if nothing told them.
        job: Number that the scheduler gave the job, or else the launcher's own name of it; "" without one.
        has_own_port: Whether other jobs have another port: the job has a name, or the user has set the port, or
            numbers the processes by hand, and knows which jobs share a host.
    """

    rank: int = 0
    world_size: int = 1
    master: str = ""
    port: int = 0
    has_store: bool = False
    launcher: str = ""
    job: str = ""
    has_own_port: bool = True

    def find_port_problem(self) -> str:
        """Say what to do where processes of other jobs would meet at the same port; "" elsewhere."""
        if self.world_size == 1 or self.has_own_port:
            return ""
        message = f"MASTER_PORT: is not set, and {self.launcher} does not tell a name of the job, so that processes of"
        example = "export MASTER_PORT=29417"
        return f"{message} other jobs would meet at the same port: set it for all processes of this one, as {example}"

    @property
    def train_port(self) -> int:
        """Return the port for training: another one than for staging, unless the launcher keeps a store there."""
        return self.port if self.has_store else self.port - 1


def placement(environ: Mapping[str, str], explicit: str | None = None, master: str | None = None) -> Placement:
    """Find out where this process is in its job.

    Args:
        environ: The environment variables.
        explicit: "I/N" from the user; it overrides them.
        master: Host of process 0, from the user; it overrides them.

    Returns:
        A process alone where nothing says otherwise.

    Raises:
        SettingError: The numbers contradict each other, only some of a launcher's are set, or `explicit` is not I/N.
    """
    task = parse_task(explicit, "--node") if explicit is not None else innermost(environ) or Task(0, 1, "")
    schedulers_job = next((environ[name] for name in JOBS if name in environ), "")
    its_job = launchers_job(environ, task.launcher)
    is_step = task.launcher == SLURM_STEP.name
    has_store = task.launcher == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    names = f"{schedulers_job}/{environ.get('SLURM_STEP_ID', '') if is_step else its_job}"
    # Two jobs on a node hardly ever share it: 20000 to 29999, below those that Linux gives away.
    port = 20000 + zlib.crc32(names.encode()) % 10000
    if "MASTER_PORT" in environ:  # which the training will use, unless torchrun keeps a store there
        port = number_of(environ, "MASTER_PORT") + (0 if has_store else 1)
        if not 1 < port <= MAX_PORT:
            allowed = f"1 to {MAX_PORT - 1}, as staging takes the next"
            raise SettingError(f"MASTER_PORT: {environ['MASTER_PORT']} is out of range; allowed: {allowed}")
    # Process 0 is on the first host of the step, or else of the job. What mpirun starts on other nodes than its own
    # inherits the variables of a step that has only these.
    nodes = environ.get("SLURM_STEP_NODELIST" if is_step else "SLURM_JOB_NODELIST", "")
    address = master or environ.get("MASTER_ADDR") or first_host(nodes)
    if not address and is_on_one_host(environ, task.launcher):
        address = "localhost"
    job = schedulers_job or its_job
    has_own_port = bool(job) or "MASTER_PORT" in environ or explicit is not None
    return Placement(task.index, task.count, address, port, has_store, task.launcher, job, has_own_port)


def first_host(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it; "" of none.

    >>> first_host("gpu[007-009,12],login1"), first_host("a1,a2"), first_host("rack[1-2]node[3-4]-ib")
    ('gpu007', 'a1', 'rack1node3-ib')
    """
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])


def rank_placement(environ: Mapping[str, str]) -> Placement:
    """Find out which rank of a training this process is, as `placement` does.

    Args:
        environ: The environment variables.

    Returns:
        A process alone only where nothing speaks against that.

    Raises:
        SettingError: As `placement`; or what would train alone is one part of several, as it seems.
    """
    place = placement(environ)
    problem = lonely(environ, place)
    if place.world_size > 1 and not place.master:
        problem = problem or f"MASTER_ADDR: {place.launcher} does not tell the host of rank 0; set it, on all nodes"
    if problem := problem or place.find_port_problem():
        raise SettingError(problem)
    return place


def name_rank(environ: Mapping[str, str]) -> tuple[str, bool]:
    """Return what this rank is called in the log, and whether it is the first, which informs; ("", True) for one alone.

    An environment that is wrong is not refused here: the command itself says so, if it needs it.

    >>> name_rank({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}), name_rank({"RANK": "3"})
    (('rank 3', False), ('', True))
    """
    try:
        place = placement(environ)
    except SettingError:
        return "", True
    return (f"rank {place.rank}", place.rank == 0) if place.world_size > 1 else ("", True)


def lonely(environ: Mapping[str, str], place: Placement) -> str:
    """Say what to do where this process knows only of those on its node, and its job has more; "" otherwise.

    RANK, WORLD_SIZE and MASTER_ADDR that no torchrun has set are the user's own word, and so is a step of one task.
    """
    launcher = place.launcher
    is_explicit = launcher == "torchrun" and "TORCHELASTIC_RUN_ID" not in environ
    is_of_one_host = place.world_size == 1 or is_on_one_host(environ, launcher)
    if launcher == "--node" or is_explicit or not is_of_one_host:
        return ""
    several = _tasks_around(environ, launcher) or _nodes_of_job(environ)
    if several:
        whole, name, count = several
        known = "this process knows of one" if place.world_size == 1 else f"{launcher} connects those of this node"
        remedy = REMEDIES.get(launcher, "start it on each, as by srun").format(count)
        insist = "start it by srun -N1 -n1" if name.startswith("SLURM_") else f"unset {name}"
        return f"{whole} ({name}), and {known}: {remedy}; or, if one node is meant, {insist}"
    processes = environ.get("WORLD_SIZE") or "1"
    if processes != "1" and not launcher:
        message = f"WORLD_SIZE: is {processes} in the environment, and MASTER_ADDR is not set"
        return f"{message}: set RANK, MASTER_ADDR and MASTER_PORT as well, or use torchrun"
    node = environ.get("PBS_NODENUM", "0")
    if node.isdecimal() and int(node) > 0 and launcher in ("", "torchrun"):  # 0 may be of a job of one node
        message = f"this is node {node} of a job (PBS_NODENUM), and PBS does not tell how many there are"
        return f"{message}: set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or give torchrun --nnodes"
    return ""


def _tasks_around(environ: Mapping[str, str], launcher: str) -> tuple[str, str, int] | None:
    """Return what a launcher around this one has started, the variable that says so, and how many; None: only one."""
    names = [known.name for known in LAUNCHERS]
    for outer in LAUNCHERS[names.index(launcher) + 1 :] if launcher in names else ():
        count = environ.get(outer.count, "")
        if outer.index not in environ or not count.isdecimal() or int(count) < 2:
            continue
        if outer is not SLURM_STEP or _is_step(environ):
            kind = "step" if outer is SLURM_STEP else "job"
            return f"this {kind} has {count} tasks", outer.count, int(count)
    return None


def _nodes_of_job(environ: Mapping[str, str]) -> tuple[str, str, int] | None:
    """Return how many nodes the job has, as `_tasks_around`; None: one, or this is a step, which may have fewer."""
    if _is_step(environ):
        return None
    for name in NUM_NODES:
        nodes = environ.get(name, "1")
        if nodes.isdecimal() and int(nodes) > 1:
            return f"this job has {nodes} nodes", name, int(nodes)
    return None


def _is_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun has started this: its variables may also be left from where the job was submitted."""
    tasks = environ.get(SLURM_STEP.count)
    is_of_this_job = tasks is not None and environ.get("SLURM_NTASKS", tasks) == tasks
    return is_of_this_job and environ.get("SLURM_STEP_ID") != INTERACTIVE_STEP
