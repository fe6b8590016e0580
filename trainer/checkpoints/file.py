"""Checkpoints: files that each hold everything a run needs to continue as if it had never stopped.

`checkpoint.pt` is the last one, `checkpoint-1.pt` the one before it, `best.pt` that of the best epoch. A damaged one in
whose place an earlier one is used becomes `checkpoint-damaged.pt`.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from datapipe.foreign import open_regular
from datapipe.fsio import atomic_write, named, partial_path

from ..errors import CheckpointError

_FORMAT = 1
CHECKPOINT = "checkpoint.pt"
BEST = "best.pt"
_FOLDER = 0x10  # MS-DOS's bit for one in a ZIP archive: torch would take what memory holds for such a part's bytes
# Errors that zipfile and torch raise for bytes that are not a checkpoint, and a disk that cannot read them.
_UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def save_checkpoint(path: Path, content: dict[str, Any], keep: int = 1) -> None:
    """Write a checkpoint, whole or not at all.

    Args:
        path: Path of the file.
        content: Tensors, numbers, text, and lists and dicts of them; "random" is a `random_state`. Added is "format".
        keep: Number of the last checkpoints that are kept, with this one.

    Raises:
        OSError: It cannot be written; the file that was there before stays.
    """
    with atomic_write(path) as file:
        writer = _Writer(file)
        try:
            # It calls `write` and `flush`, and nothing else of a file.
            torch.save({"format": _FORMAT} | content, writer)  # type: ignore[arg-type]
        except RuntimeError:
            if writer.error is not None:
                raise writer.error from None
            raise
        file.flush()
        os.fsync(file.fileno())  # an error comes before the earlier ones are moved
        move_earlier(path, keep)


def _earlier_path(path: Path, number: int) -> Path:
    return path.with_stem(f"{path.stem}-{number}") if number else path


def move_earlier(path: Path, keep: int) -> None:
    """Give each checkpoint the name of the one before it. The last one keeps its own, too, until it is replaced."""
    for number in range(keep - 1, 1, -1):
        with suppress(FileNotFoundError):  # there are fewer so far
            os.replace(_earlier_path(path, number - 1), _earlier_path(path, number))
    if keep > 1 and path.exists():
        keep_as(path, _earlier_path(path, 1))


def keep_as(path: Path, name: Path) -> None:
    """Give a file a second name, whatever had that before; where the filesystem has no links, copy it."""
    partial = partial_path(name)
    partial.unlink(missing_ok=True)
    try:
        os.link(path, partial)
    except OSError:
        shutil.copyfile(path, partial)
    os.replace(partial, name)
    partial.unlink(missing_ok=True)  # rename(2) does nothing where both are names of one file


def list_checkpoints(run: Path) -> list[Path]:
    """List the last checkpoints of a run that are there, the newest first."""
    numbers = [re.fullmatch(r"checkpoint-(\d+)\.pt", path.name) for path in run.glob("checkpoint-*.pt")]
    paths = [_earlier_path(run / CHECKPOINT, number) for number in sorted(int(match[1]) for match in numbers if match)]
    return [path for path in (run / CHECKPOINT, *paths) if path.exists()]


def set_aside(run: Path, damaged: Iterable[str]) -> None:
    """Give damaged checkpoints names under which they displace no other, and the last one that is left its own."""
    for path in map(Path, damaged):
        os.replace(path, path.with_stem(f"{path.stem}-damaged"))
    last = next(iter(list_checkpoints(run)), None)
    if last is not None and last.name != CHECKPOINT:
        os.replace(last, run / CHECKPOINT)


class _Writer:
    """A file that keeps its first error.

    After an error, torch.save still writes the end of its archive, and raises what that leads to.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        with self._keep_error():
            return self._file.write(data)

    def flush(self) -> None:
        with self._keep_error():
            self._file.flush()

    @contextmanager
    def _keep_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error
            raise


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return what `save_checkpoint` was given, with its tensors on the CPU. Runs no code from the file.

    Raises:
        CheckpointError: The file is not a checkpoint, is damaged (its checksums are compared), cannot be read from its
            disk, or has the format of another version.
        FileNotFoundError: There is none.
        PermissionError: It may not be read.
    """
    try:
        # torch does not compare the CRC-32 sums that it writes
        with named(path), open(path, "rb", opener=open_regular) as file, zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
            folders = [part.filename for part in archive.infolist() if part.external_attr & _FOLDER]
        if damaged is not None:
            raise CheckpointError(f"damaged: wrong checksum of {damaged!r}", path=path)
        if folders:
            raise CheckpointError(f"damaged: {folders[0]!r} should not be a folder", path=path)
        with named(path):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, PermissionError):  # says nothing of what the file holds
        raise
    except _UNREADABLE as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
        reason = f"not a readable checkpoint: {reason or type(error).__name__}"
        raise CheckpointError(reason, path=path) from error
    version = content.get("format") if isinstance(content, dict) else None
    if version != _FORMAT:
        raise CheckpointError(f"has format {version!r}; this version reads {_FORMAT}", path=path)
    return content


def random_state() -> dict[str, torch.Tensor]:
    """Return where torch's random numbers are."""
    random = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # a run on the processor starts nothing on a GPU, which others may use
        random["cuda"] = torch.cuda.get_rng_state()
    return random


def restore_random(content: dict[str, Any]) -> None:
    """Set torch's random numbers to where they were when `content` was saved."""
    torch.set_rng_state(content["random"]["cpu"])
    if "cuda" in content["random"] and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(content["random"]["cuda"])
