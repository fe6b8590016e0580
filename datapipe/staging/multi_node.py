"""Stage on all nodes of a job: all know what is wrong on one before a byte moves, and none needs another to finish."""

from __future__ import annotations

import hashlib
import logging
from contextlib import ExitStack, closing
from pathlib import Path

from .. import watched
from ..errors import DatapipeError, OtherNodeError, SettingError, StagingError
from ..jobgroup.group import Crew
from ..jobgroup.network import address_of
from ..jobgroup.rendezvous import open_crew
from ..jobgroup.store import CrewError, LeftError, UnreachableError
from ..jobgroup.survivors import Backups, regrouped
from ..locks import BusyError
from ..watched import Moved, work_on_files
from .apply import prepare
from .check import check
from .copy import Staged, copy_missing, report, stage_copies, transfers
from .exchange import chunk_bytes_for, exchange
from .lease import EvictedError
from .local_copy import LocalCopy, list_copies
from .options import StageOptions
from .transfer import Transfer, lacking_bytes, missing_chunks

logger = logging.getLogger(__name__)

ATTEMPTS = 4  # to exchange with the nodes that are left
PROTOCOL = 4  # of what nodes tell each other; to be raised when that changes


def stage_together(source: Path, local: Path, options: StageOptions, problem: Exception | None = None) -> list[Staged]:
    """Do what `stage` does, with mode "exchange". Raises what `stage` does.

    Args:
        source: Data set, or the folder of its splits.
        local: Folder for the copy.
        options: Settings of staging.
        problem: Problem that this node has already, of which the others are told.

    Returns:
        One result per data set.
    """
    try:
        with open_crew(options.placement, options.timeout_s) as crew:
            return _stage(source, local, options, crew, problem)
    except CrewError as error:
        if problem is None:
            raise
        raise problem from error


def _stage(source: Path, local: Path, options: StageOptions, crew: Crew, problem: Exception | None) -> list[Staged]:
    if not crew.is_leader:
        try:
            crew.follow()
        except LeftError:  # the one that stages for this node, and for a reason that concerns it
            raise
        except CrewError as error:
            logger.warning("%s: this process looks by itself whether its node is staged", error.message)
        copies = watched.call(lambda: list_copies(source, local), options.timeout_s, source)
        return stage_copies(source, local, copies, options, trusts=True)
    results = _lead(source, local, options, crew, problem)
    crew.done()
    return results


def _lead(source: Path, local: Path, options: StageOptions, crew: Crew, problem: Exception | None) -> list[Staged]:
    busy, copies = "", []
    with ExitStack() as stack:
        try:
            if options.interface:
                address_of(options.interface)
            copies = watched.call(lambda: list_copies(source, local), options.timeout_s, source)
            check(source, local, copies, options)
        except (DatapipeError, SettingError, OSError) as error:
            problem = problem or error
        _agree(crew, "hello", copies, options, problem)  # before anything is removed
        try:
            prepared = prepare(source, local, copies, options, stack, waits=False)
            files = transfers(prepared, options, chunk_bytes_for(len(crew), options.chunk_bytes))
            _drop_wrong(files, options)
        except BusyError as error:
            busy = str(error)
        except (DatapipeError, SettingError, OSError) as error:
            problem = error
        if not _agree(crew, "ready", copies, options, problem, busy):
            lacked = lacking_bytes(files)
            copied = _get(files, source, options, crew)
            try:
                with ExitStack() as holds:
                    for its in prepared:
                        its.complete(holds, options.timeout_s)
                return report(prepared, files, copied, lacked)
            except EvictedError as error:
                logger.info("%s: this node stages it again by itself", error)
    return stage_copies(source, local, copies, options)  # without the locks, for which another job may wait


def _drop_wrong(files: list[Transfer], options: StageOptions) -> None:
    """Compare what has landed here before with its checksums, before it is sent to other nodes."""

    def drop(file: Transfer, moved: Moved) -> None:
        file.landing.drop_wrong(moved)

    with closing(work_on_files(drop, files, lambda file: file.landing.target, options.timeout_s)) as results:
        for _ in results:
            pass


def _agree(
    crew: Crew, name: str, copies: list[LocalCopy], options: StageOptions, problem: Exception | None, busy: str = ""
) -> bool:
    """Raise on all nodes what is wrong on one, and StagingError where they do not have the same before them.

    Args:
        crew: Processes of the job, and its nodes.
        name: Name of what they agree on.
        copies: Copies of the data sets.
        options: Settings of staging.
        problem: Problem of this node.
        busy: Description of another process that is staging on this node; "" if there is none.

    Returns:
        Whether a node is busy: then each stages alone, lest two jobs wait for each other.
    """
    setup = [PROTOCOL, options.chunk_mib, *(hashlib.sha256(copy.content).hexdigest() for copy in copies)]
    said = crew.gather(name, {"setup": setup, "problem": problem and str(problem), "busy": busy})
    if problem is not None:
        raise problem
    for host, other in zip(crew.hosts, said, strict=True):
        if other["problem"]:
            raise OtherNodeError(f"nothing is staged, because of node {host}: {other['problem']}")
    for host, other in zip(crew.hosts, said, strict=True):
        protocol, chunk_mib, *digests = other["setup"]
        if protocol != PROTOCOL:
            message = f"has another version of datapipe (protocol {protocol}, and this node {PROTOCOL})"
            raise StagingError(f"node {host} {message}: install the same on all nodes, or use --mode copy")
        if digests != setup[2:]:
            raise StagingError(f"node {host} sees another data set, or other splits, than this node")
        if chunk_mib != options.chunk_mib:
            raise StagingError(f"node {host} was given chunk_mib {chunk_mib}, and this node {options.chunk_mib}")
    for host, other in zip(crew.hosts, said, strict=True):
        if other["busy"]:
            logger.warning("node %s: %s: each node stages by itself", host, other["busy"])
    return any(other["busy"] for other in said)


def _get(files: list[Transfer], source: Path, options: StageOptions, crew: Crew) -> list[int]:
    """Get what is missing: from the other nodes as long as all take part, then alone.

    Returns:
        The bytes that this node has read from the source, by file.
    """
    copied = [0] * len(files)
    with ExitStack() as stack:
        try:
            _exchange(files, source, options, crew, copied, stack)
        except CrewError as error:
            logger.warning("%s: this node reads by itself what it still lacks", error.message)
            _look_again(files)
        alone = copy_missing(files, source, options)
    return [together + by_itself for together, by_itself in zip(copied, alone, strict=True)]


def _look_again(files: list[Transfer]) -> None:
    for file in files:
        file.landing.look_again()


def _exchange(
    files: list[Transfer], source: Path, options: StageOptions, crew: Crew, copied: list[int], stack: ExitStack
) -> None:
    """Exchange what nodes lack, and again without those that are lost. Raises CrewError if no others are left.

    What a lost node has given, the others have, or some of them, which give it to the rest.
    """
    backups = None
    for attempt in range(ATTEMPTS):
        try:
            if len(crew) == 1 or not any(crew.gather("lacks", bool(missing_chunks(files)))):
                return
            if backups is None and options.transport != "mpi":
                backups = Backups(crew)
            address = "" if options.transport == "mpi" else crew.find_address(options.interface)
            exchange(files, crew, address, source, options, copied)
            return
        except UnreachableError:
            raise
        except CrewError as error:
            if backups is None or attempt == ATTEMPTS - 1:
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
