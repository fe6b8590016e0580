"""Stage on all nodes of a job: all know what is wrong on one before a byte moves, and none needs another to finish."""

from __future__ import annotations

import hashlib
import logging
from contextlib import ExitStack
from pathlib import Path

from ..errors import DatapipeError, SettingError, StagingError
from ..streams import in_time
from .copy import Staged, check_space, copy_missing, missing_chunks, report, stage_copies, take, transfers
from .crew import Crew, CrewError, open_crew
from .exchange import chunk_bytes_for, exchange
from .local_copy import LocalCopy, list_copies
from .options import StageOptions
from .plan import needed_bytes
from .transfer import Transfer

logger = logging.getLogger(__name__)

PROTOCOL = 1  # of what nodes tell each other; to be raised when that changes


def stage_together(source: Path, local: Path, options: StageOptions) -> list[Staged]:
    """Do what `stage` does, with mode "exchange". Raises what `stage` does.

    Args:
        source: a data set, or the folder of its splits.
        local: the folder for the copy.
        options: how to copy.

    Returns:
        One result per data set.
    """
    with open_crew(options.placement, options.timeout_s) as crew:
        if crew.is_leader:
            try:
                return _lead(source, local, options, crew)
            finally:
                crew.done()
        crew.follow()
        copies = in_time(lambda: list_copies(source, local), source, options.timeout_s)
        return stage_copies(source, local, copies, options, trusts=True)


def _lead(source: Path, local: Path, options: StageOptions, crew: Crew) -> list[Staged]:
    problem: Exception | None = None
    with ExitStack() as stack:
        try:
            copies = in_time(lambda: list_copies(source, local), source, options.timeout_s)
            present, own_name = take(source, local, copies, options, False, stack)
            files = transfers(copies, present, own_name, options, chunk_bytes_for(len(crew), options.chunk_bytes))
            check_space(local, needed_bytes(missing_chunks(files)))
        except (DatapipeError, SettingError, OSError) as error:
            problem, copies = error, []
        _agree(crew, copies, problem)
        copied = _get(files, source, local, options, crew)
        for copy in copies:
            copy.complete()
    return report(copies, present, files, copied)


def _agree(crew: Crew, copies: list[LocalCopy], problem: Exception | None) -> None:
    """Raise on all nodes what is wrong on one, and StagingError where they do not have the same before them."""
    digests = [hashlib.sha256(copy.content).hexdigest() for copy in copies]
    said = crew.gather("hello", {"protocol": PROTOCOL, "digests": digests, "problem": problem and str(problem)})
    if problem is not None:
        raise problem
    for host, other in zip(crew.hosts, said, strict=True):
        if other["problem"]:
            raise StagingError(f"nothing is staged, because of node {host}: {other['problem']}")
    for host, other in zip(crew.hosts, said, strict=True):
        if other["protocol"] != PROTOCOL:
            message = f"has another version of datapipe (protocol {other['protocol']}, and this node {PROTOCOL})"
            raise StagingError(f"node {host} {message}: install the same on all nodes, or use --mode copy")
        if other["digests"] != digests:
            raise StagingError(f"node {host} sees another data set, or other splits, than this node")


def _get(files: list[Transfer], source: Path, local: Path, options: StageOptions, crew: Crew) -> list[int]:
    """Get what is missing: from the other nodes as long as all take part, then alone.

    Returns:
        The bytes that this node has read from the source, by file.
    """
    copied = [0] * len(files)
    if len(crew) > 1:
        try:
            crew.connect(options.interface)
            copied = exchange(files, files[0].landing.chunk_bytes, crew, source, options)
        except CrewError as error:
            logger.warning("%s: this node reads by itself what it still lacks", error)
    alone = copy_missing(files, source, local, options)
    return [together + by_itself for together, by_itself in zip(copied, alone, strict=True)]
