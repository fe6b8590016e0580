"""Which rank of a training a process is, and whether it would train alone by mistake. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import SettingError
from .launchers import LAUNCHERS, SLURM_STEP, is_on_one_host
from .place import Placement, placement
from .scheduler import NUM_NODES

# What salloc's own shell is a step of, on the job's first node: SLURM_INTERACTIVE_STEP in slurm.h.
INTERACTIVE_STEP = "4294967290"
# What connects the processes of several nodes, by launcher. {0}: how many nodes or tasks there are.
REMEDIES = {
    "torchrun": "start one torchrun on each, as by srun, with --nnodes={0} and one --rdzv-endpoint, not --standalone",
    "Open MPI": "let one mpirun start the processes of all",
    "MPICH/PMI": "let one mpirun start the processes of all",
}


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
    if problem:
        raise SettingError(problem)
    if place.world_size > 1 and not place.master:
        raise SettingError(f"MASTER_ADDR: {place.launcher} does not tell the host of rank 0; set it, on all nodes")
    if problem := place.find_port_problem():
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


def lonely(environ: Mapping[str, str], placement: Placement) -> str:
    """Say what to do where this process knows only of those on its node, and its job has more; "" otherwise.

    RANK, WORLD_SIZE and MASTER_ADDR that no torchrun has set are the user's own word, and so is a step of one task.
    """
    launcher = placement.launcher
    is_explicit = launcher == "torchrun" and "TORCHELASTIC_RUN_ID" not in environ
    is_of_one_host = placement.world_size == 1 or is_on_one_host(environ, launcher)
    if launcher == "--node" or is_explicit or not is_of_one_host:
        return ""
    several = _tasks_around(environ, launcher) or _nodes_of_job(environ)
    if several:
        whole, name, count = several
        known = "this process knows of one" if placement.world_size == 1 else f"{launcher} connects those of this node"
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
