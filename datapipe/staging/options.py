"""What is asked for: the settings of staging, checked, and the data sets that are to be copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .. import watched
from ..checks import check_name, check_seconds, checked_int, is_number
from ..cluster import Placement
from ..dataset.manifest import find_data_sets, read_content
from ..errors import SettingError
from ..names import STAGE_MODES, TRANSPORTS
from ..watched import STREAMS, TIMEOUT_S
from .local_copy import LocalCopy


@dataclass(frozen=True)
class StageOptions:
    """How to stage. Raises SettingError for a setting out of its range.

    Attributes:
        mode: "copy", every node copies all; "exchange", each node reads its share and sends it to the others; "auto",
            exchange where there are several nodes; "slice", each node has room for a part, which its loaders fill.
        capacity_bytes: Number of bytes that a node may hold, with "slice".
        max_mbps: Greatest number of megabytes (10⁶ bytes) that this node reads from the source in a second, above 0;
            None: any.
        streams: Number of chunks that are copied at a time, from 1; None: 4, or 2 in the background, where loaders
            read, too.
        chunk_mib: Size of a chunk in MiB, from 1.
        retries: Number of times that a failed read is tried again, from 0, after 0.1 s, 0.2 s, 0.4 s and so on.
        replace: Whether a copy of another data set may be replaced. That of an earlier version of the same always is.
        evict: Whether copies beside LOCAL that nobody uses may be removed, least recently used first, to make room.
        timeout_s: Longest time that a read, a write or another process may make no progress, in seconds, above 0.
        placement: Placement of this process in its job.
        interface: Network interface for exchange, such as eth0; None: the one that leads to process 0.
        transport: Library by which nodes exchange bytes: "gloo", which is a part of torch, or "mpi", by mpi4py.
        in_background: Whether loaders may use what has landed while this process is still at work.
    """

    mode: str = "auto"
    capacity_bytes: int | None = None
    max_mbps: float | None = None
    streams: int | None = None
    chunk_mib: int = 8
    retries: int = 6
    replace: bool = False
    evict: bool = False
    timeout_s: float = TIMEOUT_S
    placement: Placement = field(default_factory=Placement)
    interface: str | None = None
    transport: str = "gloo"
    in_background: bool = False

    def __post_init__(self) -> None:
        check_name("mode", self.mode, STAGE_MODES)
        check_name("transport", self.transport, TRANSPORTS)
        settings = {"streams": (self.num_streams, 1), "chunk_mib": (self.chunk_mib, 1), "retries": (self.retries, 0)}
        for name, (value, lowest) in settings.items():
            checked_int(name, value, lowest)
        if self.mode == "slice" and self.capacity_bytes is None:
            raise SettingError("capacity: is missing; mode 'slice' needs it, such as 500GiB")
        if self.mode != "slice" and self.capacity_bytes is not None:
            raise SettingError(f"capacity: has no meaning for mode {self.mode!r}; allowed: with 'slice'")
        if self.transport != "gloo" and self.mode not in ("auto", "exchange"):
            raise SettingError(f"transport: has no meaning for mode {self.mode!r}; allowed: with 'exchange'")
        if self.capacity_bytes is not None:
            checked_int("capacity", self.capacity_bytes, 1)
        check_seconds("timeout_s", self.timeout_s)
        if self.max_mbps is not None and not (is_number(self.max_mbps) and self.max_mbps > 0):
            raise SettingError(f"max_mbps: {self.max_mbps!r} is out of range; allowed: MB/s, above 0")

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_mib << 20

    @property
    def num_streams(self) -> int:
        if self.streams is not None:
            return self.streams
        return STREAMS // 2 if self.in_background else STREAMS

    def resolved_mode(self) -> str:
        """Return the mode, "auto" decided."""
        if self.mode != "auto":
            return self.mode
        return "exchange" if self.placement.world_size > 1 and self.placement.master else "copy"


@dataclass(frozen=True)
class Request:
    """Data sets that are to be copied to a folder.

    Attributes:
        source: Folder that contains the data sets.
        local: Folder for the copies.
        copies: Copies of the data sets.
        options: Settings of staging.
        trusts: Whether files that were checked since the node booted, and not changed since, count as good.
        waits: Whether to wait for another process that stages to the same folder.
        checks_beside: Whether no other data sets may be in the folder.
        part: Copy that is to be slots for a part of its data set, if one is.
    """

    source: Path
    local: Path
    copies: Sequence[LocalCopy]
    options: StageOptions
    trusts: bool = False
    waits: bool = True
    checks_beside: bool = True
    part: LocalCopy | None = None

    @classmethod
    def read(cls, source: Path, local: Path, options: StageOptions) -> Request:
        """Return the request for the data sets at `source` (itself, or its splits). Raises ManifestError for none.

        Args:
            source: A data set, or the folder of its splits.
            local: The folder for the copy; splits become its sub-folders.
            options: Settings of staging.
        """
        copies = watched.call(lambda: _list_copies(source, local), options.timeout_s, source)
        return cls(source, local, copies, options)

    @property
    def cache(self) -> Path:
        """Folder that contains `local`, and other copies, which may make room."""
        return self.local.absolute().parent

    @property
    def spared(self) -> set[Path]:
        """Folders that do not make room: the copies', and their sources'."""
        return {self.source, self.local} | {path for copy in self.copies for path in (copy.source, copy.target)}


def _list_copies(source: Path, local: Path) -> list[LocalCopy]:
    """List the data sets at `source` (itself, or its splits), and where in `local` their copies belong.

    Raises ManifestError when there is none.
    """
    folders = find_data_sets(source)
    if folders == [source]:
        return [replace(LocalCopy.of_content(source, local, read_content(source)), splits=())]
    copies = [LocalCopy.of_content(path, local / path.name, read_content(path)) for path in folders]
    return [replace(copy, splits=tuple(path.name for path in folders)) for copy in copies]
