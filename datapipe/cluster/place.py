"""Where a process is in its job, and where the processes of the job can meet. Pure."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..errors import SettingError
from .launchers import SLURM_STEP, innermost, is_on_one_host, launchers_job, number_of, parse_task
from .scheduler import JOBS

MAX_PORT = 65535


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
    job = next((environ[name] for name in JOBS if name in environ), "")
    place = Placement(job=job)
    if explicit is not None:
        node = parse_task(explicit, "--node")
        place = replace(place, rank=node.index, world_size=node.count, launcher="--node")
    else:
        task = innermost(environ)
        if task is not None:
            place = replace(place, rank=task.index, world_size=task.count, launcher=task.launcher)
    its_job = launchers_job(environ, place.launcher)
    place = replace(place, job=job or its_job)
    is_step = place.launcher == SLURM_STEP.name
    has_store = place.launcher == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port = _port(job, environ.get("SLURM_STEP_ID", "") if is_step else its_job)
    if "MASTER_PORT" in environ:  # which the training will use, unless torchrun keeps a store there
        port = number_of(environ, "MASTER_PORT") + (0 if has_store else 1)
        if not 1 < port <= MAX_PORT:
            allowed = f"1 to {MAX_PORT - 1}, as staging takes the next"
            raise SettingError(f"MASTER_PORT: {environ['MASTER_PORT']} is out of range; allowed: {allowed}")
    address = master or environ.get("MASTER_ADDR") or _first_host(environ, is_step)
    if not address and is_on_one_host(environ, place.launcher):
        address = "localhost"
    has_own_port = bool(place.job) or "MASTER_PORT" in environ or explicit is not None
    return replace(place, master=address, port=port, has_store=has_store, has_own_port=has_own_port)


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
