"""The start and the end of a rank: which one this process is, its device, and its connections to the others."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# Import this now, while no process group exists: its functions capture the default group as a default argument, and DDP
# would import it after init_process_group. The group, and gloo's threads, would then live until the interpreter shuts
# down, where a thread that frees a tensor aborts a process that has finished its work.
import torch.distributed.nn

from datapipe import clock
from datapipe.cluster import Placement, rank_placement
from datapipe.console import raised_by_signal
from datapipe.errors import DatapipeError, SettingError
from datapipe.jobgroup.group import Crew
from datapipe.jobgroup.network import interface_addresses
from datapipe.jobgroup.rendezvous import explain_end, open_crew
from datapipe.jobgroup.secret import choose_file
from datapipe.jobgroup.store import CrewError

from ..errors import TrainingError
from ..reporting.metrics import device_name
from .device import check_own_gpus, choose_device, explain_idle, explain_unlike, share_cores
from .heartbeat import LONG_FACTOR, RANK_TIMEOUT_S, Watch
from .world import World

logger = logging.getLogger(__name__)

_TIMEOUT = timedelta(minutes=30)  # for torch to connect the ranks
_REFUSE_S = 10.0  # how long a rank waits for the others only to tell them that it does not come
NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_GLOO_INTERFACE, _NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"

_connections: list[Placement] = []  # of this process: at most one; it stays when the connections have ended
_refusals: list[tuple[str, Path]] = []  # why this process did not connect, and the folder of its run: at most one


@contextmanager
def ended_by_signals(world_size: int) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C end one of several ranks at once: Python's handlers wait until torch no longer does."""
    numbers = (signal.SIGTERM, signal.SIGINT) if world_size > 1 else ()
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def connected(
    place: Placement,
    device: str = "auto",
    rank_timeout_s: float = RANK_TIMEOUT_S,
    run: Path | None = None,
    after_staging: bool = False,
) -> Iterator[World]:
    """Connect the ranks for as long as the block runs. Alone, there is nothing to do.

    When the block fails, the ranks stay connected: under NCCL, closing the connections waits for the other ranks, which
    wait in a collective for this one. The command says what went wrong and then calls `leave`.

    A model that `wrap` wrapped keeps the connections' threads; nothing outside the block may refer to it.

    Args:
        place: Placement of this process, whose number is its rank.
        device: Device of the ranks: auto, cpu or cuda; see `choose_device`.
        rank_timeout_s: Longest time that a rank may do nothing, or not come, in seconds; see `Watch`.
        run: Folder of the run, in which the ranks share a secret until they have met; None: the user's own is used.
        after_staging: Whether the ranks have staged before, for which another node may need much longer.

    Yields:
        This process's place among the ranks.

    Raises:
        SettingError: A rank has no device; on all ranks.
        TrainingError: A rank did not come.
    """
    if place.world_size == 1:
        world = World(device=choose_device(device))
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device)
            if idle := explain_idle(torch.cuda.device_count()):
                logger.warning("%s", idle)
        yield world
        return
    logger.info("waiting for %d ranks, at %s, port %d", place.world_size, place.master, place.train_port)
    _connections.append(place)
    with ExitStack() as stack:
        start_s = rank_timeout_s * (LONG_FACTOR if after_staging else 1)
        secret, port = choose_file(run), replace(place, port=place.train_port)
        watch = Watch()
        with _removing(secret if place.rank == 0 else None, run):
            crew = stack.enter_context(open_crew(port, start_s, "rank", option="--rank-timeout", secret=secret))
        crew.timeout_s = rank_timeout_s
        watch.start(crew, place.rank, place.world_size, rank_timeout_s)
        stack.callback(watch.stop)
        world = _meet(crew, place, device, watch)
        with _explaining(crew, watch):
            yield world
        gc.collect()  # cycles that refer to DDP
        dist.destroy_process_group()


@contextmanager
def _explaining(crew: Crew, watch: Watch) -> Iterator[None]:
    """Raise TrainingError for the error of a connection: a rank that ends closes its own, and says why it ended."""
    try:
        yield
    except RuntimeError as error:
        if any(words in str(error).lower() for words in ("connection", "gloo", "nccl")):
            reason = crew.explain(error)
            watch.blame(crew.missing)
            raise TrainingError(f"lost contact with another rank: {reason}") from error
        raise


@contextmanager
def _removing(secret: Path | None, run: Path | None) -> Iterator[None]:
    """Remove a run's secret after the block, in which all ranks have read it, and the folder if that is empty then."""
    try:
        yield
    finally:
        if run is not None and secret is not None and secret.parent == run:
            with suppress(OSError):  # the folder is not empty
                secret.unlink(missing_ok=True)  # a signal may have come before it was made
                run.rmdir()


def _meet(crew: Crew, place: Placement, device: str, watch: Watch) -> World:
    """Connect the ranks of a crew. Raises what `connected` does."""
    local_rank, local_world_size = crew.local_ranks.index(place.rank), len(crew.local_ranks)
    chosen, devices = _choose_devices(crew, place, device, watch)
    if len(crew) > 1:
        _choose_interface(crew)
    _leave_errors_to_watch(os.environ)
    # gloo for numbers on the CPU, so that agreeing on something never waits for the GPU. With its device, NCCL connects
    # at once, and what is wrong with that is said here.
    is_gpu = chosen.type == "cuda"
    backend, device_id = ("cpu:gloo,cuda:nccl", chosen) if is_gpu else ("gloo", None)
    options = {"timeout": _TIMEOUT, "rank": place.rank, "world_size": place.world_size, "device_id": device_id}
    try:
        with ended_by_signals(place.world_size):
            dist.init_process_group(backend, store=crew.open_store("group"), **options)  # type: ignore[arg-type]
    except (dist.DistError, ValueError) as error:
        raise TrainingError(f"rank {place.rank} could not reach the other ranks: {error}") from error
    dist.distributed_c10d._set_pg_timeout(clock.OUTLASTS_ALL)  # from here on, the watch ends what hangs
    cores = share_cores(crew.gather_from_local_ranks("cores", sorted(os.sched_getaffinity(0))), local_rank)
    watch.doing("starting", is_long=True)
    ranks = place.rank, local_rank, place.world_size, local_world_size
    return World(*ranks, chosen, tuple(crew.hosts_of_ranks), *cores, watch, devices)


def _choose_devices(crew: Crew, place: Placement, device: str, watch: Watch) -> tuple[torch.device, tuple[str, ...]]:
    """Choose this rank's device, and compare it with those of the others.

    Returns:
        (this rank's device, kind and model of each rank's).

    Raises:
        SettingError: A rank has none, or two have the same GPU, or some train on processors and others on GPUs.
    """
    chosen, gpu, model, problem = torch.device("cpu"), "", "", ""
    watch.doing("choosing a device")
    try:
        chosen = choose_device(device, crew.local_ranks.index(place.rank), len(crew.local_ranks))
        if chosen.type == "cuda":
            gpu = str(torch.cuda.get_device_properties(chosen).uuid)
        model = device_name(chosen)
    except SettingError as error:
        problem = str(error)
    watch.doing("connecting to the other ranks")
    answers = crew.gather_from_ranks("device", [chosen.type, gpu, model, problem])
    hosts = crew.hosts_of_ranks
    for rank, (kind, _, _, problem) in enumerate(answers):
        if problem:
            raise SettingError(problem if rank == place.rank else f"{crew.names([rank])}: {problem}")
        if kind != answers[0][0]:
            raise SettingError(f"{crew.names([rank])} would train on {kind}, and rank 0 on {answers[0][0]}")
    check_own_gpus([(host, gpu) for host, (_, gpu, _, _) in zip(hosts, answers, strict=True)])
    devices = tuple(model for _, _, model, _ in answers)
    if place.rank == 0 and (unlike := explain_unlike(devices)):
        logger.warning("%s: a step takes as long as on the slowest, and they may round differently", unlike)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return chosen, devices


def _leave_errors_to_watch(environ: MutableMapping[str, str]) -> None:
    """Let NCCL end no process when another one is gone, which it does without a name, and before the watch names it.

    torchrun sets 1, which is also torch's default in effect; what else is set is the user's.
    """
    if environ.get(NCCL_ERRORS, "1") == "1":
        environ[NCCL_ERRORS] = "0"


def _choose_interface(crew: Crew) -> None:
    """Let gloo and NCCL use the network that leads to the other nodes; else gloo would use that of the host's name.

    Raises CrewError where a node does not reach another; names the addresses of both sides.
    """
    chosen = os.environ.get(_GLOO_INTERFACE, "").split(",")[0] or None  # gloo takes several; the first must reach
    address = crew.find_address(chosen, _GLOO_INTERFACE) if crew.is_leader else ""
    address = crew.gather_from_ranks("interface", address)[crew.local_ranks[0]]
    names = [name for name, other in interface_addresses().items() if other == address]
    if names and not chosen:
        os.environ[_GLOO_INTERFACE] = names[0]
        os.environ.setdefault(_NCCL_INTERFACE, names[0])


@contextmanager
def telling_others(run: Path) -> Iterator[None]:
    """Let `leave` tell the other ranks if the block fails before this one is connected: they would wait for it.

    Args:
        run: Folder of the run, see `connected`.
    """
    try:
        yield
    except (DatapipeError, SettingError, OSError, KeyboardInterrupt) as error:
        _refusals.append((explain_end(error), run))
        raise
    except SystemExit as error:
        if raised_by_signal(error):
            _refusals.append((explain_end(error), run))
        raise


def _refuse(place: Placement, reason: str, run: Path) -> None:
    """Tell the other ranks that this one does not come, as far as they do within moments."""
    if place.world_size > 1 and place.master:
        port = replace(place, port=place.train_port)
        secret = choose_file(run)
        met = open_crew(port, _REFUSE_S, "rank", refusal=reason, secret=secret)
        with suppress(CrewError, SettingError), met:  # they may be gone already
            pass


def leave(code: int, error: BaseException | None = None) -> None:
    """End this process at once if it was connected to other ranks; else do nothing.

    Skips destructors and does not wait for other threads. After a failure the ranks are still connected, and the
    threads of the connections would wait for ranks that wait for this one. After a success a thread that is left, and
    frees a tensor while Python ends, would abort a process that has done its work.

    Args:
        code: Exit code of the process.
        error: An error whose message has not been written yet; it is written as Python would.
    """
    if not _connections and _refusals:
        with suppress(SettingError):  # without a place there are no others
            _refuse(rank_placement(os.environ), *_refusals[0])
    if not _connections:
        return
    if error is not None and not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has ended
            stream.flush()
    os._exit(code)
