"""A data set's copy in a local folder, and what is known of it.

LOCAL/manifest.json    written last: it makes the folder a data set
LOCAL/.origin.json     written first: of which folder and version it is a copy (see Origin). When it was last used is
                       its time
LOCAL/.checked.json    the state of each file when its checksum was last compared, and in which life of the node
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Collection
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..dataset.block_slots import SLOTS, TAGS
from ..dataset.manifest import MANIFEST, FileInfo, Manifest, read_content
from ..errors import ManifestError, StagingError
from ..foreign import read_own
from ..fsio import atomic_write, boot_id, checksum, sync_folder
from ..streams import Moved, work_on_files
from .lock import find_holder
from .origin import ORIGIN, Origin

logger = logging.getLogger(__name__)

CHECKED = ".checked.json"
TOUCH_S = 5.0  # how often who holds a folder's lock shows that it is at work

States = dict[str, list[int]]  # by a file's name: its inode, size and time of change


@dataclass(frozen=True)
class LocalCopy:
    """A data set, and the folder that its copy is in, or will be.

    Attributes:
        source: The data set's folder.
        resolved: The same, without links.
        target: The copy's.
        content: Of the manifest's file: read once, and written to the target unchanged.
        manifest: The same, parsed.
        splits: Names of all data sets that are staged to the folder above the target; none for one by itself; None:
            that is not known.
    """

    source: Path
    resolved: Path
    target: Path
    content: bytes
    manifest: Manifest
    splits: tuple[str, ...] | None = None

    @classmethod
    def of_content(cls, source: Path, target: Path, content: bytes) -> LocalCopy:
        """Describe the copy of a data set, and return that. Raises ManifestError where the manifest cannot be read.

        Args:
            source: the data set's folder.
            target: the copy's.
            content: of the manifest's file.
        """
        return cls(source, source.resolve(), target, content, Manifest.parse(content, source / MANIFEST))

    @property
    def num_files(self) -> int:
        return sum(1 for _ in self.manifest.all_files())

    def bytes_of(self, names: Collection[str]) -> int:
        """Return the size of the files with these names."""
        return sum(file.size_bytes for file in self.manifest.all_files() if file.name in names)

    def has_manifest(self) -> bool:
        """Return whether the manifest is in place and whole."""
        try:
            return _read_there(self.target) == self.content
        except ManifestError:
            return False

    def other_manifest(self) -> Manifest | None:
        """Return the manifest that is in place, if it is whole and another data set's."""
        try:
            content = _read_there(self.target)
            other = Manifest.parse(content, self.target / MANIFEST)
        except ManifestError:
            return None
        return None if content == self.content or other == self.manifest else other

    def check_other(self, may_replace: bool) -> None:
        """Raise StagingError where another data set is in place, unless it is a copy that may be replaced.

        A copy of an earlier version of the same data set always may; what staging did not put there never.
        """
        if self.is_of_same_source() or (self.other_manifest() is None and not self._is_begun_by_another()):
            return
        message = f"holds another data set than {self.source}"
        if not (self.target / ORIGIN).exists():
            raise StagingError(f"{message}, which staging has not put there; choose another folder", path=self.target)
        if not may_replace:
            raise StagingError(f"{message}; choose another folder, or replace it with --replace", path=self.target)

    def _is_begun_by_another(self) -> bool:
        """Return whether the folder says that it is, or will be, a copy of something else."""
        with suppress(StagingError):
            return Origin.read(self.target).manifest not in ("", self._digest)
        return False

    def is_of_same_source(self) -> bool:
        """Return whether the folder says that it is a copy of the same data set, or of an earlier version of it."""
        with suppress(StagingError):
            return Origin.read(self.target).source == str(self.resolved)
        return False

    def is_named(self) -> bool:
        """Return whether the folder says that it is, or will be, a copy of this version of the data set."""
        with suppress(StagingError):
            return Origin.read(self.target).manifest == self._digest
        return self.has_manifest()

    @property
    def _digest(self) -> str:
        return compute_digest(self.content)

    def _is_complete(self) -> bool:
        with suppress(StagingError):
            origin = Origin.read(self.target)
            is_this = origin.manifest == self._digest and (self.splits is None or origin.splits == [*self.splits])
            return origin.is_complete and is_this and not origin.capacity_bytes
        return False

    def may_be_used(self) -> bool:
        """Return whether a process is copying in the background, so that loaders may use what has landed."""
        with suppress(StagingError, FileNotFoundError):
            origin = Origin.read(self.target)
            return origin.in_background and origin.manifest == self._digest and bool(find_holder(self.target))
        return False

    def has_slots(self) -> bool:
        """Return whether the folder has slots for a part of this version of the data set.

        Raises StagingError where it is to have them, but they are not ready: it has no room for all.
        """
        try:
            origin = Origin.read(self.target)
        except StagingError:
            return False
        if not origin.capacity_bytes or origin.manifest != self._digest:
            return False
        if origin.is_complete and all((self.target / name).exists() for name in (SLOTS, TAGS)):
            return True
        raise StagingError("its room for a part is not ready: stage to it again, with --mode slice", path=self.target)

    def write_origin(
        self, present: Collection[str], is_complete: bool, in_background: bool = False, capacity_bytes: int = 0
    ) -> None:
        """Write what the folder is, or will be, a copy of.

        Args:
            present: names of the files that are in place.
            is_complete: whether nothing is missing.
            in_background: whether loaders may use what has landed.
            capacity_bytes: of its slots, if it has these.
        """
        Origin(
            str(self.resolved),
            self._digest,
            [file.name for file in self.manifest.all_files()],
            is_complete,
            in_background,
            self.manifest.size_bytes,
            time.time(),
            self.bytes_of(present),
            capacity_bytes,
            self._splits_to_write(),
        ).write(self.target)

    def note_splits(self) -> None:
        """Note which copies are staged together with this one, if it says something else; not in another user's."""
        with suppress(StagingError, OSError):
            origin, is_mine = Origin.read(self.target), (self.target / ORIGIN).stat().st_uid == os.geteuid()
            if is_mine and origin.splits != self._splits_to_write():
                replace(origin, splits=self._splits_to_write()).write(self.target)

    def _splits_to_write(self) -> list[str]:
        if self.splits is not None:
            return [*self.splits]
        with suppress(StagingError):
            return Origin.read(self.target).splits
        return []

    def touch(self) -> None:
        """Note that the copy is used; not in another user's."""
        with suppress(OSError):
            if os.lstat(self.target / ORIGIN).st_uid == os.geteuid():
                os.utime(self.target / ORIGIN, follow_symlinks=False)

    def find_present(self, timeout_s: float, trusts: bool, is_locked: bool) -> States:
        """Find the files that are in place with their checksum.

        Args:
            timeout_s: how long a read may take.
            trusts: whether files that were checked since the node booted, and not changed since, count as good.
            is_locked: whether this process has the folder's lock; who waits for it sees that something happens.

        Returns:
            By name, the state that the file had before its checksum was compared.
        """
        states: States = {}
        for file in self.manifest.all_files():
            with suppress(FileNotFoundError):
                states[file.name] = self._state_of(file.name)
        checked = self._read_checked() if trusts else {}
        good = {name: state for name, state in states.items() if checked.get(name) == state}
        files = [file for file in self.manifest.all_files() if file.name in states and file.name not in good]
        sums = work_on_files(partial(self._checksum, is_locked), files, lambda file: self.target / file.name, timeout_s)
        with closing(sums):
            for file, actual in zip(files, sums, strict=True):
                if actual == file.xxh3_128:
                    good[file.name] = states[file.name]
        return good

    def _checksum(self, is_locked: bool, file: FileInfo, moved: Moved) -> str:
        """Compute a file's checksum; "" where it cannot be read, and must be copied again."""
        touched = time.monotonic()

        def touch(path: Path | None = None) -> None:
            nonlocal touched
            moved(path)
            if is_locked and time.monotonic() - touched > TOUCH_S:
                touched = time.monotonic()
                with suppress(OSError):
                    os.utime(self.target)

        try:
            return checksum(self.target / file.name, touch)
        except OSError as error:
            logger.warning("%s: %s", self.target / file.name, error.strerror)
            return ""

    def complete(self, present: States, is_locked: bool) -> None:
        """Write what makes the folder a data set, and note that all files have their checksums.

        Args:
            present: of `find_present`; the other files were checked when they got their names.
            is_locked: whether this process has the folder's lock.

        Raises:
            StagingError: without the lock: another process has changed the copy meanwhile.
        """
        states = {file.name: self._state_of(file.name) for file in self.manifest.all_files()}  # all are there
        is_ours = (self.target / ORIGIN).exists()  # else somebody has made it, who may not want it to be removed
        if not self.has_manifest():
            if not is_locked:
                raise StagingError("was changed by another process meanwhile: stage again", path=self.target)
            if (self.target / MANIFEST).exists():
                logger.warning("%s is damaged: writing it again", self.target / MANIFEST)
            sync_folder(self.target)
            with atomic_write(self.target / MANIFEST, alone=False, is_own=True) as file:
                file.write(self.content)
        if is_ours and not self._is_complete():
            with suppress(OSError):  # it may be read-only
                self.write_origin(states, is_complete=True)
        states |= present
        if states != self._read_checked():
            with suppress(OSError), atomic_write(self.target / CHECKED, alone=False, is_own=True) as file:
                file.write(json.dumps({"boot": boot_id(), "files": states}).encode())  # unless it is read-only

    def _read_checked(self) -> States:
        try:
            checked = json.loads(read_own(self.target / CHECKED))
            return dict(checked["files"]) if checked["boot"] and checked["boot"] == boot_id() else {}
        except StagingError as error:
            logger.warning("%s; until then all files are checked each time", error)
            return {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _state_of(self, name: str) -> list[int]:
        info = (self.target / name).stat()
        return [info.st_ino, info.st_size, info.st_mtime_ns]


def _read_there(folder: Path) -> bytes:
    """Read a copy's manifest. Raises ManifestError, also where it is a pipe, whose writer might never come."""
    if not (folder / MANIFEST).is_file():
        raise ManifestError("is not a file", path=folder / MANIFEST)
    return read_content(folder)


def compute_digest(content: bytes) -> str:
    """Compute what tells a manifest from others: the beginning of the SHA-256 of its content."""
    return hashlib.sha256(content).hexdigest()[:16]
