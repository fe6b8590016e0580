"""The copy of a data set that is asked for: where from, where to, and which of its files are in place and right."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Collection
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from ..dataset.manifest import MANIFEST, FileInfo, Manifest, find_data_sets, read_content
from ..errors import StagingError
from ..foreign import read_own
from ..fsio import atomic_write, boot_id, checksum, sync_folder
from ..watched import Moved, work_on_files
from .folder_content import CHECKED, ORIGIN, FolderContent, Origin, compute_digest, compute_identity

logger = logging.getLogger(__name__)

TOUCH_S = 5.0  # how often a process that holds a folder's lock shows that it is at work

States = dict[str, list[int]]  # by a file's name: its inode, size and time of change


@dataclass(frozen=True)
class LocalCopy:
    """A data set, and the folder that its copy is in, or will be.

    Attributes:
        source: Folder of the data set.
        resolved: The same, without links.
        target: Folder of the copy.
        content: Bytes of the manifest's file: read once, and written to the target unchanged.
        manifest: The same, parsed.
        splits: Names of all data sets that are staged to the folder above the target; none for one by itself; None if
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
        """Describe the copy of a data set, and return that. Raises ManifestError for an unreadable manifest.

        Args:
            source: Folder of the data set.
            target: Folder of the copy.
            content: Bytes of the manifest's file.
        """
        return cls(source, source.resolve(), target, content, Manifest.parse(content, source / MANIFEST))

    @cached_property
    def digest(self) -> str:
        """What tells the data set from others, see `compute_digest`."""
        return compute_digest(self.content)

    @cached_property
    def identity(self) -> str:
        """What the versions of the data set have in common, see `compute_identity`."""
        return compute_identity(self.manifest)

    @property
    def names(self) -> list[str]:
        """Names of its files, the manifest's first."""
        return [MANIFEST, *(file.name for file in self.manifest.all_files())]

    @property
    def num_files(self) -> int:
        return sum(1 for _ in self.manifest.all_files())

    def bytes_of(self, names: Collection[str]) -> int:
        """Return the size of the files with these names."""
        return sum(file.size_bytes for file in self.manifest.all_files() if file.name in names)

    def read_folder(self) -> FolderContent:
        """Read what lies in the folder of the copy."""
        return FolderContent.read(self.target, self.target.absolute().parent, follows=True)

    def write_origin(
        self, present: Collection[str], is_complete: bool, in_background: bool = False, capacity_bytes: int = 0
    ) -> None:
        """Write what the folder is, or will be, a copy of.

        Args:
            present: Names of the files that are in place.
            is_complete: Whether nothing is missing.
            in_background: Whether loaders may use what has landed.
            capacity_bytes: Size of its slots, if it has these.
        """
        splits = self.splits
        if splits is None and (origin := self.read_folder().origin):
            splits = tuple(origin.splits)
        Origin(
            str(self.resolved),
            self.digest,
            [file.name for file in self.manifest.all_files()],
            is_complete,
            in_background,
            self.manifest.size_bytes,
            time.time(),
            self.bytes_of(present),
            capacity_bytes,
            [*(splits or ())],
            self.identity,
        ).write(self.target)

    def note_splits(self, content: FolderContent) -> None:
        """Note which copies are staged together with this one, unless the folder says so; not in another user's."""
        origin = content.origin
        if origin and self.splits is not None and origin.splits != [*self.splits] and content.owner == os.geteuid():
            with suppress(OSError):  # it may be read-only
                replace(origin, splits=[*self.splits]).write(self.target)

    def touch(self) -> None:
        """Note that the copy is used; not in another user's."""
        with suppress(OSError):
            if os.lstat(self.target / ORIGIN).st_uid == os.geteuid():
                os.utime(self.target / ORIGIN, follow_symlinks=False)

    def is_checked(self) -> bool:
        """Return whether all files were checked since the node booted, and have not changed since."""
        try:
            return self._read_checked() == {file.name: self._state_of(file.name) for file in self.manifest.all_files()}
        except FileNotFoundError:
            return False

    def find_present(self, timeout_s: float, trusts: bool, is_locked: bool) -> States:
        """Find the files that are in place with their checksum.

        Args:
            timeout_s: Longest time that a read may take.
            trusts: Whether files that were checked since the node booted, and not changed since, count as good.
            is_locked: Whether this process has the folder's lock; a process that waits for it sees that this one works.

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
        """Compute a file's checksum; "" if it cannot be read, and must be copied again."""
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
            present: States of `find_present`; the other files were checked when they got their names.
            is_locked: Whether this process has the folder's lock.

        Raises:
            StagingError: Without the lock: another process has changed the copy.
        """
        states = {file.name: self._state_of(file.name) for file in self.manifest.all_files()}  # all are there
        content = self.read_folder()
        if content.content != self.content:
            if not is_locked:
                raise StagingError("was changed by another process meanwhile: stage again", path=self.target)
            if MANIFEST in content.entries:
                logger.warning("%s is damaged: writing it again", self.target / MANIFEST)
            sync_folder(self.target)
            with atomic_write(self.target / MANIFEST, alone=False, is_own=True) as file:
                file.write(self.content)
        if ORIGIN in content.entries and not self._is_complete(content.origin):  # else it is not staging's
            with suppress(OSError):  # it may be read-only
                self.write_origin(states, is_complete=True)
        states |= present
        if states != self._read_checked():
            with suppress(OSError), atomic_write(self.target / CHECKED, alone=False, is_own=True) as file:
                file.write(json.dumps({"boot": boot_id(), "files": states}).encode())  # unless it is read-only

    def _is_complete(self, origin: Origin | None) -> bool:
        return (
            origin is not None
            and origin.is_complete
            and not origin.capacity_bytes
            and origin.manifest == self.digest
            and (self.splits is None or origin.splits == [*self.splits])
        )

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


def list_copies(source: Path, local: Path) -> list[LocalCopy]:
    """List the data sets at `source` (itself, or its splits), and where in `local` their copies belong.

    Raises ManifestError when there is none.
    """
    folders = find_data_sets(source)
    if folders == [source]:
        return [replace(LocalCopy.of_content(source, local, read_content(source)), splits=())]
    copies = [LocalCopy.of_content(path, local / path.name, read_content(path)) for path in folders]
    return [replace(copy, splits=tuple(path.name for path in folders)) for copy in copies]
