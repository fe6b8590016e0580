"""The decoder in C: images in files or memory to crops in a batch's slots, or to JPEGs of a window for another decoder,
one call for many, without the interpreter's lock.

It is compiled when the package is installed, where there is a compiler: with vectors for AVX2 or NEON, and in plain C.
Without vectors libraries are faster, and only DATAPIPE_NATIVE=plain chooses it; DATAPIPE_NATIVE=0 chooses none.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import platform
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import SettingError

VERSION = 3  # NATIVE_VERSION in native.h
VARIABLE = "DATAPIPE_NATIVE"
REBUILD = "to build it, with a C compiler (cc): python -m pip install --no-deps -e CHECKOUT, the folder of this project"
AVX2, NEON, PLAIN = "avx2", "neon", "plain"
VECTORS = {"x86_64": AVX2, "AMD64": AVX2, "aarch64": NEON, "arm64": NEON}  # by platform.machine()

DONE, UNSUPPORTED, UNREAD = range(3)  # enum Status

JOB = np.dtype(  # struct Job in native.h
    [
        ("data", np.uintp),
        ("size", np.int64),
        ("out", np.uintp),
        ("offset", np.int64),
        ("box", np.int32, (4,)),
        ("width", np.int32),
        ("height", np.int32),
        ("fd", np.int32),
        ("checksum", np.uint32),
        ("has_checksum", np.uint8),
        ("is_direct", np.uint8),
        ("flip", np.uint8),
        ("is_pixels", np.uint8),
        ("status", np.uint8),
        ("scale", np.uint8),
    ],
    align=True,
)
FILE = np.dtype(  # struct File in native.h
    [("name", np.uintp), ("size", np.int64), ("folder", np.int32), ("checksum", np.uint32)], align=True
)
STAGES = ("read", "decode", "resize")  # of which the seconds are told
CUT_STAGES = ("read", "window")
PROGRESS = 2  # int64: the number of the job that is being read, from 1, and since when; 0: none


class UnusableError(Exception):
    """A library cannot be used; the message says why."""


class _Workspace:
    """Memory of one thread in the library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library, self.pointer = library, library.native_open(find_hash())
        if not self.pointer:
            raise MemoryError("no memory for a decoder")

    def __del__(self) -> None:
        self._library.native_close(self.pointer)


class Native:
    """A loaded library. Thread-safe.

    Attributes:
        version: Version of the library: two with the same version give the same pixels.

    Args:
        path: The library.
        name: AVX2, NEON or PLAIN.

    Raises:
        UnusableError: It is not this version's library, or does not run here.
    """

    def __init__(self, path: str, name: str) -> None:
        self.name, self.version = name, VERSION
        try:
            self._library = library = ctypes.CDLL(path)
            pointer, number = ctypes.c_void_p, ctypes.c_int
            functions: list[tuple[str, Any, list[Any]]] = [
                ("native_version", number, []),
                ("native_has_avx2", number, []),
                ("native_open", pointer, [pointer]),
                ("native_close", None, [pointer]),
                ("native_decode_chunk", number, [pointer, pointer, number, number, number, *[pointer] * 3]),
                (
                    "native_read_files",
                    ctypes.c_int64,
                    [*[pointer] * 2, number, number, pointer, ctypes.c_int64, *[pointer] * 2],
                ),
                ("native_cut_chunk", number, [pointer, pointer, number, number, *[pointer] * 3]),
            ]
            for function, result, arguments in functions:
                entry = getattr(library, function)
                entry.restype, entry.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise UnusableError(f"{path} is not a library of this package: {error}; {REBUILD}") from error
        if (version := library.native_version()) != VERSION:
            raise UnusableError(f"{path} is of version {version}, and this package of {VERSION}; {REBUILD}")
        self._local = threading.local()

    def has_avx2(self) -> bool:
        """Return whether this processor runs the library that was compiled for AVX2."""
        return bool(self._library.native_has_avx2())

    def decode(
        self,
        jobs: np.ndarray,
        channels: int,
        size: int,
        abandoned: np.ndarray,
        progress: np.ndarray,
        spent_s: np.ndarray,
    ) -> int:
        """Do the jobs whose status is DONE, and set the status of those that fail.

        Args:
            jobs: JOB[N]. The memory and the files that they point to must live. The bytes of those that were read, and
                are UNSUPPORTED, lie at `data` until this thread calls again.
            channels: 1 or 3.
            size: S: a slot is uint8[S, S, channels].
            abandoned: Flag, uint8[1]: the rest is not done once it is not 0.
            progress: Number of the job that is being read, from 1, and its begin in nanoseconds since the call began,
                int64[PROGRESS].
            spent_s: Seconds of each stage, float64[len(STAGES)], to which those of this call are added.

        Returns:
            Number of jobs that are not DONE.
        """
        return self._call(self._library.native_decode_chunk, jobs, [channels, size], abandoned, progress, spent_s)

    def cut(
        self, jobs: np.ndarray, may_end_late: bool, abandoned: np.ndarray, progress: np.ndarray, spent_s: np.ndarray
    ) -> int:
        """Cut the windows of the jobs whose status is DONE, and set the status of those that fail.

        The bytes of each window are those of `images.window.cut`, and lie at `out`, which has room for `size` bytes.
        The `size` and the `box` of the job become those of the window.

        Args:
            jobs: JOB[N], as for `decode`.
            may_end_late: Whether windows may have data behind their last row; else images stay whole instead.
            abandoned, progress, spent_s: Arrays as for `decode`; the stages are CUT_STAGES.

        Returns:
            Number of jobs that are not DONE.
        """
        return self._call(self._library.native_cut_chunk, jobs, [may_end_late], abandoned, progress, spent_s)

    def _call(self, function: Any, jobs: np.ndarray, numbers: list[int], *arrays: np.ndarray) -> int:
        """Call a function for a chunk with this thread's workspace."""
        addresses, workspace = (array.ctypes.data for array in arrays), self._workspace()
        return int(function(workspace.pointer, jobs.ctypes.data, len(jobs), *numbers, *addresses))

    def read_files(
        self,
        places: Sequence[tuple[int, str]],
        flags: int,
        memory: memoryview,
        abandoned: np.ndarray,
        progress: np.ndarray,
    ) -> list[tuple[int, int]]:
        """Read files one behind the other.

        Args:
            places: Descriptor of each file's folder, which stays open, or -1 to leave the file alone; and the file's
                name.
            flags: Flags of open(2).
            memory: Memory for the files' content.
            abandoned, progress: Arrays as for `decode`, of files instead of jobs.

        Returns:
            For each file, the size in bytes, and the lower half of the xxh3-64; -1 and 0 for a file that was not read,
            or cannot be, or does not fit.
        """
        files, names = np.zeros(len(places), FILE), [os.fsencode(name) + b"\0" for _, name in places]
        joined = b"".join(names)
        starts = np.cumsum([0, *map(len, names[:-1])])
        files["name"] = np.frombuffer(joined, np.uint8).ctypes.data + starts
        files["folder"], files["size"] = [folder for folder, _ in places], -1
        room, workspace = np.frombuffer(memory, np.uint8), self._workspace()
        self._library.native_read_files(
            workspace.pointer, files.ctypes.data, len(files), flags, room.ctypes.data, room.size,
            abandoned.ctypes.data, progress.ctypes.data,
        )  # fmt: skip
        return list(zip(files["size"].tolist(), files["checksum"].tolist(), strict=True))

    def _workspace(self) -> _Workspace:
        """Return this thread's memory, for the caller to hold during its call: when the interpreter ends, it takes what
        is a daemon thread's own, but not what its functions hold."""
        workspace: _Workspace | None = getattr(self._local, "workspace", None)
        if workspace is None:
            workspace = self._local.workspace = _Workspace(self._library)
        return workspace

    def accepts(self, data: bytes | bytearray | memoryview, width: int, height: int) -> bool:
        """Return whether a JPEG can be read to its end without damage; False also for what this does not take.

        Args:
            data: The JPEG.
            width: In pixels, as its header says.
            height: The same.
        """
        memory, job = np.frombuffer(data, np.uint8), np.zeros(1, JOB)
        job["data"], job["size"], job["width"], job["height"] = memory.ctypes.data, memory.size, width, height
        stop, progress, spent_s = np.zeros(1, np.uint8), np.zeros(PROGRESS, np.int64), np.zeros(len(STAGES))
        return not self.decode(job, 1, 0, stop, progress, spent_s)


@lru_cache(maxsize=1)
def find_hash() -> int | None:
    """Return the address of the function XXH3_64bits in the package xxhash; None where that does not show it."""
    try:
        library = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
        return ctypes.cast(library.XXH3_64bits, ctypes.c_void_p).value
    except (ImportError, OSError, AttributeError):
        return None


class Choice(NamedTuple):
    """The library in use, or why none is."""

    native: Native | None
    reason: str

    def __str__(self) -> str:
        """Say it in words, such as "version 1 for AVX2" and "none (DATAPIPE_NATIVE=0)"."""
        if self.native is None:
            return f"none ({self.reason})"
        vectors = "without vectors" if self.native.name == PLAIN else f"for {self.native.name.upper()}"
        return f"version {self.native.version} {vectors}"


@lru_cache(maxsize=1)
def choose() -> Choice:
    """Choose the library by DATAPIPE_NATIVE and the processor, once per process.

    Raises:
        SettingError: DATAPIPE_NATIVE is none of its values.
    """
    setting = os.environ.get(VARIABLE, "1")
    if setting not in ("0", "1", PLAIN):
        raise SettingError(
            f"{VARIABLE}: {setting!r}; allowed: 0 (not to use the decoder in C), 1, {PLAIN} (without vectors)"
        )
    if setting == "0":
        return Choice(None, f"{VARIABLE}=0")
    try:
        return Choice(open_library(PLAIN if setting == PLAIN else VECTORS.get(platform.machine(), "")), "")
    except UnusableError as error:
        return Choice(None, str(error))


def open_library(name: str) -> Native:
    """Load a library.

    Args:
        name: Kind of library: AVX2, NEON or PLAIN; empty for a processor that VECTORS does not list.

    Raises:
        UnusableError: It was not compiled, or does not run here.
    """
    unfit = f"this processor has no {'AVX2' if name == AVX2 else 'AVX2 or NEON'}, and libraries are faster without it; "
    unfit += f"{VARIABLE}={PLAIN} uses it"
    if not name:
        raise UnusableError(unfit)
    spec = importlib.util.find_spec(f"{__name__}._{name}")
    if spec is None or spec.origin is None:
        raise UnusableError(f"it was not compiled when this package was installed; {REBUILD}")
    if name == AVX2 and not open_library(PLAIN).has_avx2():  # asked of code that runs on every processor
        raise UnusableError(unfit)
    return Native(spec.origin, name)
