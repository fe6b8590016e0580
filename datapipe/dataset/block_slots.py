"""Blocks of a data set on a node's own disk, which is too small for all: in slots of equal size.

    LOCAL/.slots    the slots, one behind the other
    LOCAL/.tags     TAG[num_slots + 1]: first the sizes of the blocks' cells and of the slots, then what each slot holds

Any process of the node's user writes to them. A slot is written under a tag that says so, and what is read is compared
with its tag's checksum: what is replaced while it is read, or was written in part by a killed process, is a miss.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import xxhash

from .. import clock
from ..errors import StagingError
from ..foreign import open_plain
from ..fsio import Descriptor

logger = logging.getLogger(__name__)

SLOTS, TAGS = ".slots", ".tags"
TAG = np.dtype([("block", "<i8"), ("size", "<i8"), ("checksum", "<u8")])
FREE, BUSY = -1, -2  # in place of a block: nothing; a process is writing
_LOCK_TRIES, _LOCK_PAUSE_S = 50, 0.002
_MOMENT_S = 1.0  # who only looks at slots has let go of their lock by then


class BlockSlots:
    """The slots of a folder, open. Thread-safe.

    Args:
        folder: Folder made by `make_slots`.

    Attributes:
        folder: Folder of the slots, as given.
        num_slots: Number of slots.
        slot_bytes: Size of each slot, in bytes.
        block_bytes: Size of the cells of the blocks that the slots hold, in bytes.
        is_writable: Whether blocks can be kept.

    Raises:
        StagingError: The slots cannot be opened, or are damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()  # the lock of the file is the process's
        try:
            slots, tags = (_OpenFile(folder / name) for name in (SLOTS, TAGS))
            size = os.fstat(slots.fd).st_size
            content = mmap.mmap(tags.fd, os.fstat(tags.fd).st_size, prot=mmap.PROT_READ)
            head, self._tags = np.frombuffer(content, TAG, 1)[0], np.frombuffer(content, TAG, offset=TAG.itemsize)
        except (OSError, ValueError) as error:
            raise StagingError(f"its slots cannot be opened: {error}", path=folder) from error
        self._files: tuple[_OpenFile, _OpenFile] | None = (slots, tags)
        self.is_writable = slots.is_writable and tags.is_writable
        self.block_bytes, self.slot_bytes, self.num_slots = int(head["block"]), int(head["size"]), len(self._tags)
        is_sound = head["checksum"] == _checksum_head(self.block_bytes, self.slot_bytes)
        if not is_sound or size != self.num_slots * self.slot_bytes:
            raise StagingError("its slots are damaged: remove it, and stage again", path=folder)
        self._hold(slots, tags)

    def _hold(self, slots: _OpenFile, tags: _OpenFile) -> None:
        """Hold the slots as long as they are open. If nobody else does, free those that a killed process wrote to."""
        with suppress(OSError):
            fcntl.flock(slots.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.is_writable:
                for slot in np.flatnonzero(self._tags["block"] == BUSY).tolist():
                    _write_tag(tags, slot, FREE)
        deadline = clock.now() + _MOMENT_S
        while True:  # until another process has freed its own; some filesystems have no locks
            try:
                fcntl.flock(slots.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if clock.now() < deadline:
                    time.sleep(_MOMENT_S / 20)
                    continue
            except OSError:
                pass
            return

    def blocks(self) -> np.ndarray:
        """Return the block that each slot holds, or FREE or BUSY: int64[num_slots]."""
        return np.array(self._tags["block"])

    def held_bytes(self) -> int:
        """Return the bytes of all blocks that the slots hold."""
        return int(self._tags["size"].sum())

    def read(self, block: int, size: int, into: memoryview) -> memoryview | None:
        """Read a block.

        Args:
            block: Number of the block.
            size: Size of the block, in bytes.
            into: Memory for the block.

        Returns:
            Its bytes in `into`; None if it is not there, or damaged.
        """
        if self._files is None:
            return None
        slots, tags = self._files  # not closed as long as this function has them
        for slot in np.flatnonzero(self._tags["block"] == block).tolist():
            tag = self._tags[slot].copy()
            if tag["size"] != size:
                continue
            done = 0
            while done < size and (count := os.preadv(slots.fd, [into[done:size]], slot * self.slot_bytes + done)):
                done += count
            if xxhash.xxh3_64_intdigest(into[:size]) == tag["checksum"]:
                return into[:size]
            with self._claiming(tags) as is_mine:
                if is_mine and self.is_writable and self._tags[slot] == tag:  # nobody has replaced it meanwhile
                    logger.warning("%s: slot %d does not hold what was written to it", self.folder / SLOTS, slot)
                    _write_tag(tags, slot, FREE)
        return None

    def keep(self, block: int, data: memoryview, choose: Callable[[np.ndarray], int | None]) -> None:
        """Write a block to the slot that `choose` names, given `blocks()`, unless it is there already.

        Args:
            block: Number of the block.
            data: Bytes of the block.
            choose: Function that returns the number of a slot that is not BUSY, or None.
        """
        if self._files is None or not self.is_writable:
            return
        slots, tags = self._files
        with self._claiming(tags) as is_mine:
            blocks = self.blocks()
            slot = choose(blocks) if is_mine and not (blocks == block).any() else None
            if slot is None or blocks[slot] == BUSY:
                return
            _write_tag(tags, slot, BUSY)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(slots.fd, data[done:], slot * self.slot_bytes + done)
            _write_tag(tags, slot, block, len(data), xxhash.xxh3_64_intdigest(data))
        except OSError as error:
            logger.warning("%s: %s; it is not filled further", self.folder / SLOTS, error.strerror)
            self.is_writable = False

    @contextmanager
    def _claiming(self, tags: _OpenFile) -> Iterator[bool]:
        """Lock the tags; yield whether they are: another process that holds them for long is not waited for."""
        with self._lock:
            is_mine = False
            for _ in range(_LOCK_TRIES):
                with suppress(OSError):
                    fcntl.flock(tags.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    is_mine = True
                    break
                time.sleep(_LOCK_PAUSE_S)
            try:
                yield is_mine
            finally:
                with suppress(OSError):
                    fcntl.flock(tags.fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the files, when no thread is reading or writing any more. May be called twice."""
        self._files = None


class _OpenFile(Descriptor):
    """An open file, and whether it can be written to."""

    def __init__(self, path: Path) -> None:
        fd, self.is_writable = open_plain(path)
        super().__init__(fd)


def _write_tag(tags: _OpenFile, slot: int, block: int, size: int = 0, checksum: int = 0) -> None:
    os.pwrite(tags.fd, np.array((block, size, checksum), TAG).tobytes(), (slot + 1) * TAG.itemsize)


def _checksum_head(block_bytes: int, slot_bytes: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{block_bytes} {slot_bytes}".encode())


def count_held(folder: Path, sizes: tuple[int, int, int] | None = None) -> int | None:
    """Return the bytes of all blocks in a folder's slots; None if it has none.

    Args:
        folder: Folder of the slots.
        sizes: Number and size of the slots, and size of the blocks' cells, if other slots do not count.
    """
    try:
        slots = BlockSlots(folder)
    except StagingError:
        return None
    num_bytes = slots.held_bytes()
    slots.close()
    return num_bytes if sizes in (None, (slots.num_slots, slots.slot_bytes, slots.block_bytes)) else None


def make_slots(folder: Path, num_slots: int, slot_bytes: int, block_bytes: int) -> None:
    """Make the files of a folder's slots, which are free, and have the filesystem reserve their space.

    Args:
        folder: Folder of the slots, which must exist; no process may use it.
        num_slots: Number of slots, from 1.
        slot_bytes: Size of each slot, in bytes.
        block_bytes: Size of the cells of the blocks, in bytes, see `block_order.grid`.

    Raises:
        OSError: There is not enough space; nothing is left then.
    """
    paths = folder / SLOTS, folder / TAGS
    tags = np.full(num_slots + 1, np.array((FREE, 0, 0), TAG))
    tags[0] = block_bytes, slot_bytes, _checksum_head(block_bytes, slot_bytes)
    try:
        for path, content in zip(paths, (b"", tags.tobytes()), strict=True):
            path.unlink(missing_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)  # others may not change it
            try:
                os.posix_fallocate(fd, 0, len(content) or num_slots * slot_bytes)
                os.pwrite(fd, content, 0)
            finally:
                os.close(fd)
    except OSError:
        for path in paths:
            path.unlink(missing_ok=True)
        raise
