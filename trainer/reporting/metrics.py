"""The writer of metrics.jsonl: one JSON object per line, each with its "event"."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import metadata
from io import FileIO
from itertools import count
from pathlib import Path

import torch

from datapipe.fsio import named

from .loggers import LoggerFactory, Loggers
from .runlog import finite, read_lines

logger = logging.getLogger(__name__)
_DIGEST_BYTES = 4096
_STEP = re.compile(rb'"step": ([0-9]{1,18})')  # in a line


class MetricsFile:
    """A file to which lines are appended; each has left this process when `write` returns.

    Where `path` is None, nothing is written. What cannot be written, as on a full disk, is kept, and comes before the
    next line; `write` raises nothing, as the other ranks would wait for this one. `sync`, for which all wait, does.
    Each enters `at`, with the file's path, while the filesystem may hang.

    `waited_s` is how long nothing was written before it was opened, in seconds; `cut_step` the last step that stood in
    what was cut off then, 0 if none did.
    """

    def __init__(self, path: Path | None, at: Callable[[Path], AbstractContextManager[object]] = nullcontext) -> None:
        self._path, self._at = path, at
        self._file: FileIO | None = None
        self._unwritten = b""
        self.waited_s, self.cut_step = 0.0, 0
        self.loggers: Loggers | None = None

    def open(self, keep_bytes: int = 0) -> None:
        """Open the file after its first `keep_bytes`, which the checkpoint knows; the rest is cut off.

        A file that does not belong to the checkpoint, or is too short for it, is kept under another name. Raises
        OSError.
        """
        if self._path is not None:
            with self._at(self._path):
                self._open(self._path, keep_bytes)

    def _open(self, path: Path, keep_bytes: int) -> None:
        size = path.stat().st_size if path.exists() else 0
        if size and not 0 < keep_bytes <= size:
            _put_aside(path)
            size = 0
        if size:
            self.waited_s = max(0.0, time.time() - path.stat().st_mtime)
            self.cut_step = max((int(step) for step in _STEP.findall(path.read_bytes()[keep_bytes:])), default=0)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - stays open
        if size > keep_bytes:
            self._file.truncate(keep_bytes)
        self.is_empty = size == 0

    def log_to(self, factories: Mapping[str, LoggerFactory]) -> None:
        """Tell loggers whatever is written from now on, and at first the lines so far.

        Raises what `Loggers` does; the folder holds no run then, if it held none before.
        """
        if self._path is None or not factories:
            return
        try:
            self.loggers = Loggers(factories, self._path.parent, read_lines(self._path))
        except BaseException:
            if self.is_empty:
                self._path.unlink(missing_ok=True)
            raise

    def write(self, event: str, **fields: object) -> None:
        """Append one line."""
        if self._path is None or self._file is None:
            return
        content: dict[str, object] = {"event": event, "written_at": round(time.time(), 3)}
        content |= {key: finite(value) for key, value in fields.items()}
        text = json.dumps(content, ensure_ascii=False, allow_nan=False)
        # Names of files need not be UTF-8: Python's surrogates for their bytes are written as JSON's \udcXX.
        self._unwritten += text.encode(errors="backslashreplace") + b"\n"
        with suppress(OSError), self._at(self._path):  # `sync` meets it again
            self._write_rest(self._file)
        if self.loggers is not None:
            with self._at(self._path.parent):
                self.loggers.write(content)

    def _write_rest(self, file: FileIO) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[file.write(self._unwritten) :]

    def sync(self) -> int:
        """Make all lines survive a power cut; return the file's length in bytes. Raises OSError."""
        length = self.flush()
        if self._path is not None:
            with self._at(self._path):
                self.fsync()
        return length

    def flush(self) -> int:
        """Have all lines leave this process; return the file's length in bytes. Raises OSError."""
        if self._path is None or self._file is None:
            return 0
        with named(self._path), self._at(self._path):
            self._write_rest(self._file)
            return os.fstat(self._file.fileno()).st_size

    def fsync(self) -> None:
        """Make what has left this process survive a power cut; in any thread. Raises OSError."""
        if self._path is not None and self._file is not None:
            with named(self._path):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, if it is open, and the loggers."""
        if self.loggers is not None:
            self.loggers.close()
        if self._file is not None:
            with suppress(OSError):  # `sync` has raised it, or another error is being raised
                self._file.close()


def digest_before(path: Path, size: int) -> str:
    """Return a digest of the last bytes of a file before `size`: lines with times, which no other attempt has."""
    with named(path), open(path, "rb") as file:
        file.seek(max(0, size - _DIGEST_BYTES))
        return hashlib.blake2b(file.read(min(size, _DIGEST_BYTES)), digest_size=16).hexdigest()


def _put_aside(path: Path) -> None:
    """Rename metrics.jsonl to metrics-1.jsonl, or to the first number that is free."""
    names = (path.with_stem(f"{path.stem}-{number}") for number in count(1))
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    logger.warning("%s does not belong to the checkpoint of its run: kept as %s", path, aside.name)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a run's result may depend on."""
    names = {"torch": "torch", "numpy": "numpy", "datapipe": "datapipe-trainer"}
    by_name = {"python": platform.python_version()}
    for key, name in names.items():
        try:
            by_name[key] = metadata.version(name)
        except metadata.PackageNotFoundError:  # run from a checkout that is not installed
            from datapipe import __version__

            by_name[key] = __version__
    return by_name


def commit() -> str | None:
    """Return the commit of the code that runs, where it runs from a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        git = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return git.stdout.strip() if git.returncode == 0 else None


def device_name(device: torch.device) -> str:
    """Return the kind and the model of a device, e.g. "cuda (NVIDIA H100 80GB HBM3)"."""
    model = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_model()
    return f"{device.type} ({model})"


def hardware(device: torch.device, cores: int, hosts: int) -> dict[str, str | int]:
    """Return what a run is computed on, as the first rank's host has it: memory in bytes, cores, the GPU.

    Args:
        device: The rank's.
        cores: Number of cores of the host that its ranks may use.
        hosts: The number of hosts.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts: dict[str, str | int] = {"hosts": hosts, "cpu": _cpu_model(), "cores": cores, "memory_bytes": memory}
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        facts |= {"gpu": gpu.name, "gpu_memory_bytes": gpu.total_memory}
    return facts


def memory_bytes(device: torch.device) -> dict[str, int]:
    """Return the most memory that this process has had so far: of the host, and of a GPU what torch has reserved."""
    unit = 1 if sys.platform == "darwin" else 1024
    most = {"memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if device.type == "cuda":
        most["gpu_memory_bytes"] = torch.cuda.max_memory_reserved(device)
    return most


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
