"""The copy of a data set that is asked for: where from, where to, and which of its files are in place and right."""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from ..dataset.manifest import (
    MANIFEST,
    FileInfo,
    Manifest,
    compute_digest,
    compute_identity,
)
from ..errors import StagingError
from ..foreign import read_own
from ..fsio import atomic_write, boot_id, checksum, sync_folder
from ..watched import Moved, work_on_files
from .folder_content import CHECKED, ORIGIN, FolderContent, Origin
from .lease import hold_copy

logger = logging.getLogger(__name__)

_TOUCH_S = 5.0  # how often a process that holds a folder's lock shows that it is at work

_IF_WRITABLE = suppress(OSError)  # a copy may be read-only, or another user's

States = dict[str, list[int]]  # by a file's name: its inode, size and time of change


@dataclass(frozen=True)
class LocalCopy:
    """A data set, and the folder that its copy is in, or will be; and what is known of that once it is prepared.

    Attributes:
        source: Folder of the data set.
        resolved: The same, without links.
        target: Folder of the copy.
        content: Bytes of the manifest's file: read once, and written to the target unchanged.
        manifest: The same, parsed.
        splits: Names of all data sets that are staged to the folder above the target; none for one by itself; None if
            that is not known.
        present: Files that are in place, see `find_present`.
        is_locked: Whether this process has the folder for itself.
        own_name: Word that makes temporary names this process's own, if the folder cannot be locked.
    """

    source: Path
    resolved: Path
    target: Path
    content: bytes
    manifest: Manifest
    splits: tuple[str, ...] | None = None
    present: States = field(default_factory=dict)
    is_locked: bool = False
    own_name: str = ""

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

    @property
    def missing(self) -> list[FileInfo]:
        """Files that are not in place."""
        return [file for file in self.manifest.all_files() if file.name not in self.present]

    @property
    def present_bytes(self) -> int:
        """Size of the files that are in place."""
        return sum(file.size_bytes for file in self.manifest.all_files() if file.name in self.present)

    def read_folder(self) -> FolderContent:
        """Read what lies in the folder of the copy."""
        return FolderContent.read(self.target, self.target.absolute().parent, follows=True)

    def write_origin(self, is_complete: bool, in_background: bool = False, capacity_bytes: int = 0) -> None:
        """Write what the folder is, or will be, a copy of.

        Args:
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
            self.manifest.size_bytes if is_complete else self.present_bytes,
            capacity_bytes,
            [*(splits or ())],
            self.identity,
        ).write(self.target)

    def note_splits(self, content: FolderContent) -> None:
        """Note which copies are staged together with this one, unless the folder says so; not in another user's."""
        origin = content.origin
        if origin and self.splits is not None and origin.splits != [*self.splits] and content.owner == os.geteuid():
            with _IF_WRITABLE:
                replace(origin, splits=[*self.splits]).write(self.target)

    def touch(self) -> None:
        """Note that the copy is used; not in another user's."""
        with _IF_WRITABLE:
            if os.lstat(self.target / ORIGIN).st_uid == os.geteuid():
                os.utime(self.target / ORIGIN, follow_symlinks=False)

    def is_checked(self) -> bool:
        """Return whether all files were checked since the node booted, and have not changed since."""
        states = self._states()
        return len(states) == self.num_files and states == self._read_checked()

    def find_present(self, timeout_s: float, trusts: bool) -> States:
        """Find the files that are in place with their checksum. A process that waits for them sees that this one works.

        Args:
            timeout_s: Longest time that a read may take, in seconds.
            trusts: Whether files that were checked since the node booted, and not changed since, count as good.

        Returns:
            By name, the state that the file had before its checksum was compared.
        """
        states = self._states()
        checked = self._read_checked() if trusts else {}
        good = {name: state for name, state in states.items() if checked.get(name) == state}
        files = [file for file in self.manifest.all_files() if file.name in states and file.name not in good]
        sums = work_on_files(self._checksum, files, lambda file: self.target / file.name, timeout_s)
        with closing(sums):
            for file, actual in zip(files, sums, strict=True):
                if actual == file.xxh3_128:
                    good[file.name] = states[file.name]
        return good

    def _checksum(self, file: FileInfo, moved: Moved) -> str:
        """Compute a file's checksum; "" if it cannot be read, and must be copied again."""
        touched = time.monotonic()

        def touch(path: Path | None = None) -> None:
            nonlocal touched
            moved(path)
            if self.is_locked and time.monotonic() - touched > _TOUCH_S:
                touched = time.monotonic()
                with _IF_WRITABLE:
                    os.utime(self.target)

        try:
            return checksum(self.target / file.name, touch)
        except OSError as error:
            logger.warning("%s: %s", self.target / file.name, error.strerror)
            return ""

    def complete(self, holds: ExitStack, patience_s: float) -> None:
        """Make the folder a data set, of which all files are there, and hold it, so that no process removes it.

        Args:
            holds: Stack that lets it go.
            patience_s: Longest time to wait for a process that has it for itself, in seconds.

        Raises:
            EvictedError: It was removed, to make room, since it was found to be in place.
            StagingError: Another process has changed it.
        """
        is_new = self.is_locked or bool(self.own_name)
        if is_new:
            self._write_notes(is_new)
        holds.enter_context(closing(hold_copy(self.target, patience_s)))
        if not is_new:
            self._write_notes(is_new)
        self.touch()

    def _write_notes(self, is_new: bool) -> None:
        """Write what makes the folder a data set, and that all files have their checksums.

        Those that are not `present` were checked when they got their names.
        """
        states, content = self._states(), self.read_folder()
        if len(states) < self.num_files or (content.content != self.content and not is_new):
            raise StagingError("was changed by another process meanwhile: stage again", path=self.target)
        if content.content != self.content:
            if MANIFEST in content.entries:
                logger.warning("%s is damaged: writing it again", self.target / MANIFEST)
            sync_folder(self.target)
            with atomic_write(self.target / MANIFEST, alone=False, is_own=True) as file:
                file.write(self.content)
        if ORIGIN in content.entries and not self._is_complete(content.origin):  # else it is not staging's
            with _IF_WRITABLE:
                self.write_origin(is_complete=True)
        states |= self.present
        if states != self._read_checked():
            with _IF_WRITABLE, atomic_write(self.target / CHECKED, alone=False, is_own=True) as file:
                file.write(json.dumps({"boot": boot_id(), "files": states}).encode())

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

    def _states(self) -> States:
        """Return the state of each file that is there."""
        states: States = {}
        for file in self.manifest.all_files():
            with suppress(FileNotFoundError):  # it is missing
                info = (self.target / file.name).stat()
                states[file.name] = [info.st_ino, info.st_size, info.st_mtime_ns]
        return states
