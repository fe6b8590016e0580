"""Checkpoints: one file that holds everything a run needs to continue as if it had never stopped."""

from __future__ import annotations

import pickle
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from datapipe.fsio import atomic_write, named

from .errors import CheckpointError

FORMAT = 1
NAME = "checkpoint.pt"
# Errors that zipfile and torch raise for bytes that are not a checkpoint.
UNREADABLE = (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError)


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write `content` (tensors, numbers, text, and lists and dicts of them) to `path`, whole or not at all.

    Adds "format" and the state of torch's random numbers.

    Raises:
        OSError: It cannot be written; the file that was there before stays.
    """
    random = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # a run on the processor starts nothing on a GPU, which others may use
        random["cuda"] = torch.cuda.get_rng_state()
    with atomic_write(path) as file:
        writer = _Writer(file)
        try:
            # It calls `write` and `flush`, and nothing else of a file.
            torch.save({"format": FORMAT, "random": random} | content, writer)  # type: ignore[arg-type]
        except RuntimeError:
            if writer.error is not None:
                raise writer.error from None
            raise


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
        CheckpointError: The file is not a checkpoint, is damaged (its checksums are compared), or has the format of
            another version.
    """
    try:
        with named(path), zipfile.ZipFile(path) as archive:  # torch does not compare the CRC-32 sums that it writes
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(f"damaged: wrong checksum of {damaged}; start a new run", path=path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        first = str(error).partition("\n")[0]
        raise CheckpointError(f"not a readable checkpoint: {first}; start a new run", path=path) from error
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT:
        raise CheckpointError(f"has format {version!r}; this version reads {FORMAT}", path=path)
    return content


def restore_random(content: dict[str, Any]) -> None:
    """Set torch's random numbers to where they were when `content` was saved."""
    torch.set_rng_state(content["random"]["cpu"])
    if "cuda" in content["random"] and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(content["random"]["cuda"])
