"""Stage on all nodes of a job: all know what is wrong on one before a byte moves, and none needs another to finish."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from .. import watched
from ..errors import DatapipeError, OtherNodeError, SettingError, StagingError
from ..jobgroup.group import Crew
from ..jobgroup.mpi import find_mpi_problem
from ..jobgroup.network import address_of
from ..jobgroup.rendezvous import leave_crews, open_crew
from ..jobgroup.store import CrewError, LeftError, UnreachableError
from ..jobgroup.survivors import Backups, regrouped
from ..locks import BusyError
from ..watched import work_on_files
from .apply import prepare
from .check import check
from .copy import Staged, copy_missing, report, stage_copies, transfers
from .exchange import chunk_bytes_for, exchange
from .lease import EvictedError
from .options import Request, StageOptions
from .partial_file import PartialFile
from .transfer import Transfer, missing_chunks

logger = logging.getLogger(__name__)

_ATTEMPTS = 4  # to exchange with the nodes that are left
PROTOCOL = 4  # of what nodes tell each other; to be raised when that changes


def stage_together(source: Path, local: Path, options: StageOptions) -> list[Staged]:
    """Do what `stage` does, with mode "exchange"; return one result per data set.

    Args:
        source: Data set, or the folder of its splits.
        local: Folder for the copy.
        options: Settings of staging.
    """
    problem = find_mpi_problem(options.placement) if options.transport == "mpi" else None  # in the thread of MPI

    def meet() -> list[Staged]:
        try:
            with open_crew(options.placement, options.timeout_s) as crew:
                return _stage(source, local, options, crew, problem)
        except CrewError as error:
            if problem is None:
                raise
            raise problem from error

    try:
        return watched.call(meet, None, source, is_quiet=True)
    except (KeyboardInterrupt, SystemExit) as end:
        leave_crews(end)
        raise


def _stage(source: Path, local: Path, options: StageOptions, crew: Crew, problem: Exception | None) -> list[Staged]:
    if not crew.is_leader:
        try:
            crew.follow()
        except LeftError:  # the one that stages for this node, and for a reason that concerns it
            raise
        except CrewError as error:
            logger.warning("%s: this process looks by itself whether its node is staged", error.message)
        return stage_copies(replace(Request.read(source, local, options), trusts=True))
    results = _lead(source, local, options, crew, problem)
    crew.done()
    return results


def _lead(source: Path, local: Path, options: StageOptions, crew: Crew, problem: Exception | None) -> list[Staged]:
    request, busy = Request(source, local, (), options), ""
    with ExitStack() as stack:
        try:
            if options.interface:
                address_of(options.interface)
            request = Request.read(source, local, options)
            check(request)
        except (DatapipeError, SettingError, OSError) as error:
            problem = problem or error
        _agree(crew, "hello", request, problem)  # before anything is removed
        try:
            prepared = prepare(replace(request, waits=False), stack)
            files = transfers(prepared, options, chunk_bytes_for(len(crew), options.chunk_bytes))
            _drop_wrong(files, options)
        except BusyError as error:
            busy = str(error)
        except (DatapipeError, SettingError, OSError) as error:
            problem = error
        if not _agree(crew, "ready", request, problem, busy):
            lacked = [file.landing.missing_bytes for file in files]
            _get(files, request, crew)
            try:
                with ExitStack() as holds:
                    for copy in prepared:
                        copy.complete(holds, options.timeout_s)
                return report(prepared, files, lacked)
            except EvictedError as error:
                logger.info("%s: this node stages it again by itself", error)
    return stage_copies(request)  # without the locks, for which another job may wait


def _drop_wrong(files: list[Transfer], options: StageOptions) -> None:
    """Compare what has landed here before with its checksums, before it is sent to other nodes."""
    landings = [file.landing for file in files]
    results = work_on_files(PartialFile.drop_wrong, landings, lambda landing: landing.target, options.timeout_s)
    with closing(results):
        deque(results, maxlen=0)


def _agree(crew: Crew, name: str, request: Request, problem: Exception | None, busy: str = "") -> bool:
    """Raise on all nodes what is wrong on one, and StagingError where they do not have the same before them.

    Args:
        crew: Processes of the job, and its nodes.
        name: Name of what they agree on.
        request: Data sets, and the folder for their copies.
        problem: Problem of this node.
        busy: Description of another process that is staging on this node; "" if there is none.

    Returns:
        Whether a node is busy: then each stages alone, lest two jobs wait for each other.
    """
    digests = [hashlib.sha256(copy.content).hexdigest() for copy in request.copies]
    setup = [PROTOCOL, request.options.chunk_mib, *digests]
    said = crew.gather(name, {"setup": setup, "problem": problem and str(problem), "busy": busy})
    if problem is not None:
        raise problem
    for host, other in zip(crew.hosts, said, strict=True):
        if other["problem"]:
            raise OtherNodeError(f"nothing is staged, because of node {host}: {other['problem']}")
    for host, other in zip(crew.hosts, said, strict=True):
        protocol, chunk_mib, *others_digests = other["setup"]
        if protocol != PROTOCOL:
            message = f"has another version of datapipe (protocol {protocol}, and this node {PROTOCOL})"
            raise StagingError(f"node {host} {message}: install the same on all nodes, or use --mode copy")
        if others_digests != digests:
            raise StagingError(f"node {host} sees another data set, or other splits, than this node")
        if chunk_mib != setup[1]:
            raise StagingError(f"node {host} was given chunk_mib {chunk_mib}, and this node {setup[1]}")
        if other["busy"]:
            logger.warning("node %s: %s: each node stages by itself", host, other["busy"])
    return any(other["busy"] for other in said)


def _get(files: list[Transfer], request: Request, crew: Crew) -> None:
    """Get what is missing: from the other nodes as long as all take part, then alone."""
    with ExitStack() as stack:
        try:
            _exchange(files, request, crew, stack)
        except CrewError as error:
            logger.warning("%s: this node reads by itself what it still lacks", error.message)
            _look_again(files)
        copy_missing(files, request)


def _look_again(files: list[Transfer]) -> None:
    for file in files:
        file.landing.look_again()


def _exchange(files: list[Transfer], request: Request, crew: Crew, stack: ExitStack) -> None:
    """Exchange what nodes lack, and again without those that are lost. Raises CrewError if no others are left.

    What a lost node has given, the others have, or some of them, which give it to the rest.
    """
    is_mpi = request.options.transport == "mpi"
    backups = None
    for attempt in range(_ATTEMPTS):
        try:
            if len(crew) == 1 or not any(crew.gather("lacks", bool(missing_chunks(files)))):
                return
            if backups is None and not is_mpi:
                backups = Backups(crew)
            address = "" if is_mpi else crew.find_address(request.options.interface)
            exchange(files, crew, address, request)
            return
        except UnreachableError:
            raise
        except CrewError as error:
            if backups is None or attempt == _ATTEMPTS - 1:
                raise
            crew.break_up()
            reason = crew.explain(error)
            _look_again(files)
            num_lost = len(crew)
            try:
                crew = stack.enter_context(regrouped(crew, backups))
                num_lost -= len(crew)
            except CrewError as alone:
                raise CrewError(f"{reason}: {alone.message}") from alone
            logger.warning("%s: %d nodes exchange%s", reason, len(crew), " without it" if num_lost else " again")
