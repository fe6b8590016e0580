"""What lies in the folder of a copy: read once into a value, which no question afterwards opens the disk for.

LOCAL/manifest.json    written last: it makes the folder a data set
LOCAL/.origin.json     written first: of which data set and version it is a copy, see `Origin`. When it was last used
                       is its time
LOCAL/.checked.json    the state of each file when its checksum was last compared, and in which life of the node
LOCAL/.stage.log       what a process in the background says
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from ..dataset.block_slots import SLOTS, TAGS
from ..dataset.manifest import MANIFEST, MAX_BYTES, Manifest, compute_digest, compute_identity
from ..dataset.partial_reader import KINDS, PARTIAL, temporary_path
from ..errors import ManifestError
from ..foreign import find_problem, open_regular, read_note
from ..fsio import list_entries, list_folders, named
from ..process_id import make_own_name
from .lease import LEASE, Lease, is_pinned, leases_in

ORIGIN, CHECKED, LOG = ".origin.json", ".checked.json", ".stage.log"
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
TEMPORARY = re.compile(rf"\..+\.({'|'.join(KINDS)})")
_BLOCK_BYTES = 512  # of st_blocks, stat(2)


@dataclass(frozen=True)
class Origin:
    """What a copy says of itself.

    Attributes:
        source: Folder of the data set.
        manifest: `compute_digest` of its manifest; "" in copies of earlier versions of this software.
        files: Names of its files; none in those.
        is_complete: Whether all files were in place once.
        in_background: Whether loaders may use what has landed while a process is at work.
        total_bytes: Size of all files.
        began: Time when the copying began, in seconds since 1970.
        began_bytes: Bytes that were in place then.
        capacity_bytes: Size of the slots that the folder has for blocks; 0 for a copy of all of the data set.
        splits: Names of the copies that were staged together with this one, its own included; none for one by itself.
        identity: `compute_identity` of its manifest; "" in copies of earlier versions of this software.
    """

    source: str
    manifest: str = ""
    files: list[str] = field(default_factory=list)
    is_complete: bool = True
    in_background: bool = False
    total_bytes: int = 0
    began: float = field(default_factory=time.time)
    began_bytes: int = 0
    capacity_bytes: int = 0
    splits: list[str] = field(default_factory=list)
    identity: str = ""

    @classmethod
    def parse(cls, content: bytes) -> Origin:
        """Read what a copy says. Raises ValueError or TypeError for anything else."""
        try:
            origin = cls(**json.loads(content))
            str_fields = origin.source, origin.manifest, origin.identity, *origin.files, *origin.splits
            numbers = origin.total_bytes, origin.began, origin.began_bytes, origin.capacity_bytes
        except RecursionError as error:
            raise ValueError("lists in lists in lists") from error
        if not all(isinstance(text, str) for text in str_fields) or not all(
            isinstance(number, (int, float)) for number in numbers
        ):
            raise ValueError("is not a note of staging")
        return origin

    def write(self, folder: Path) -> None:
        """Write it into the copy's folder, with a mode for which it is believed, whatever the umask."""
        path = folder / ORIGIN
        partial = temporary_path(path, PARTIAL, make_own_name())  # `sweep` knows its process, also without locks
        try:
            with named(partial):
                with open(partial, "xb", opener=lambda path, flags: os.open(path, flags, 0o644)) as file:
                    file.write(json.dumps(asdict(self)).encode())
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)  # of a full disk
            raise


@dataclass(frozen=True)
class FolderContent:
    """What lies in a folder that is, was or will be a copy of a data set; of any user.

    Attributes:
        folder: Path of the folder.
        cache: Folder above it, or the same, up to which notes keep copies.
        info: Result of fstat(2) for the folder; None if there is none, or it cannot be read.
        entries: Result of lstat(2) for each entry of the folder, by name.
        origin: Origin that the folder tells of itself; None if it says nothing that is believed.
        content: Bytes of its manifest's file; none if that is missing or damaged.
        is_writable: Whether this user may write to it.
        leases: Jobs that it is kept for.
        is_pinned: Whether it is kept for good.
    """

    folder: Path
    cache: Path
    info: os.stat_result | None = None
    entries: Mapping[str, os.stat_result] = field(default_factory=dict)
    origin: Origin | None = None
    content: bytes = b""
    is_writable: bool = False
    leases: tuple[Lease, ...] = ()
    is_pinned: bool = False

    @classmethod
    def read(cls, folder: Path, cache: Path, follows: bool = False) -> FolderContent:
        """Read a folder, and return what lies in it.

        Args:
            folder: Path of the folder.
            cache: Folder above it, or the same.
            follows: Whether it may be a link.
        """
        try:
            fd = os.open(folder, FOLDER | (0 if follows else os.O_NOFOLLOW))
        except OSError:
            return cls(folder, cache)
        try:
            entries, info = list_entries(fd), os.fstat(fd)
            origin = _read_origin(fd, info.st_uid) if ORIGIN in entries else None  # else it is written at this moment
            content = _read_manifest(fd, folder) if MANIFEST in entries else b""
        finally:
            os.close(fd)
        levels = [folder, *(parent for parent in folder.absolute().parents if parent.is_relative_to(cache.absolute()))]
        leases = tuple(lease for level in levels for lease in leases_in(level) if lease.is_valid())
        is_writable = os.access(folder, os.W_OK)
        return cls(folder, cache, info, entries, origin, content, is_writable, leases, any(map(is_pinned, levels)))

    @cached_property
    def manifest(self) -> Manifest | None:
        """The manifest; None if there is none."""
        return Manifest.parse(self.content, self.folder / MANIFEST) if self.content else None

    @property
    def is_begun(self) -> bool:
        """Whether staging has begun here: it has left a note, or was killed while it wrote the first one."""
        return ORIGIN in self.entries or any(
            name.startswith(f".{ORIGIN}.") and name.endswith(f".{PARTIAL}") for name in self.entries
        )

    @property
    def is_copy(self) -> bool:
        """Whether staging has put here what lies here, and its user says so."""
        return self.origin is not None and self.entries[ORIGIN].st_uid == self.owner

    @property
    def is_whole(self) -> bool:
        """Whether it is a data set, or has slots for a part of one."""
        has_slots = self.origin is not None and self.origin.capacity_bytes > 0 and self.origin.is_complete
        return MANIFEST in self.entries or (has_slots and {SLOTS, TAGS} <= self.entries.keys())

    @property
    def owner(self) -> int:
        """Number of its user."""
        return self.info.st_uid if self.info else -1

    @property
    def device(self) -> int:
        """Number of its filesystem."""
        return self.info.st_dev if self.info else -1

    @property
    def last_used(self) -> float:
        """Time when its user last staged or opened it, in seconds since 1970."""
        return self.entries[ORIGIN].st_mtime if ORIGIN in self.entries else 0.0

    @property
    def source(self) -> str:
        """Folder that it was copied from; "" if that is not known."""
        return self.origin.source if self.origin else ""

    @property
    def digest(self) -> str:
        """`compute_digest` of what it is, or will be, a copy of; "" if that is not known."""
        return (self.origin.manifest if self.origin else "") or (compute_digest(self.content) if self.content else "")

    @property
    def identity(self) -> str:
        """`compute_identity` of the same."""
        known = self.origin.identity if self.origin else ""
        return known or (compute_identity(self.manifest) if self.manifest else "")

    @property
    def names(self) -> set[str]:
        """Names of the data sets' files: of what it is, and of what it will be, a copy of."""
        names = {os.path.basename(name) for name in self.origin.files} if self.origin else set()
        return names | {file.name for file in self.manifest.all_files()} if self.manifest else names

    @property
    def size_bytes(self) -> int:
        """What staging's files take on the disk."""
        names = self.names
        return sum(self.allocated_bytes(name) for name in self.entries if name in names or is_note(name))

    @property
    def missing_bytes(self) -> int:
        """What files that are still to come will take on the disk."""
        if self.origin is None or self.origin.is_complete or self.origin.capacity_bytes:
            return 0
        names = self.names
        on_disk = sum(self.allocated_bytes(name) for name in self.entries if name in names or TEMPORARY.fullmatch(name))
        return max(0, self.origin.total_bytes - on_disk)

    def allocated_bytes(self, name: str) -> int:
        """Return what a file takes on the disk; 0 if it is not there."""
        return self.entries[name].st_blocks * _BLOCK_BYTES if name in self.entries else 0

    def has_name_of_cache(self) -> bool:
        """Return whether the folder is named as `stage_once` names one: after the data set and its manifest."""
        return self.folder.name == f"{Path(self.source).name}-{self.digest}"


def _read_origin(fd: int, owner: int) -> Origin | None:
    """Read what a copy says of itself; None if it is not believed: not its user's, this user's or root's word."""
    with suppress(OSError, ValueError, TypeError):  # it is removed, or is something else
        info = os.stat(ORIGIN, dir_fd=fd, follow_symlinks=False)
        if not find_problem(info) or not find_problem(info, owner):
            return Origin.parse(read_note(Path(ORIGIN), fd))
    return None


def _read_manifest(fd: int, folder: Path) -> bytes:
    """Read a manifest's file; b"" if it is damaged, or is a pipe, whose writer might never come."""
    with suppress(OSError, ManifestError), open(open_regular(MANIFEST, os.O_RDONLY, fd), "rb") as file:
        content = file.read(MAX_BYTES + 1)
        Manifest.parse(content, folder / MANIFEST)
        return content
    return b""


def is_note(name: str) -> bool:
    """Return whether staging has put a file with this name beside the data set's."""
    return name in (MANIFEST, ORIGIN, CHECKED, LOG, SLOTS, TAGS) or bool(
        LEASE.fullmatch(name) or TEMPORARY.fullmatch(name)
    )


def find_copies(cache: Path) -> list[FolderContent]:
    """List the copies in a cache, of all users, as far as they can be read."""
    copies, cache = [], cache.resolve()
    for folder in list_folders(cache):
        if (content := FolderContent.read(folder, cache)).is_copy:
            copies.append(content)
        else:
            splits = (FolderContent.read(split, cache) for split in list_folders(folder))
            copies += [split for split in splits if split.is_copy]
    return copies
