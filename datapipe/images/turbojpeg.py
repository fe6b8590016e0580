"""Work on JPEG below the level of pixels: move coefficients (restart markers, rotation), read and write planes.

It is done by libturbojpeg, through version 3 of the TurboJPEG C API (libjpeg-turbo 3.0 has the planes, 3.1 also restart
markers in lossless transforms), or by the program jpegtran (of any libjpeg), which takes a process per image. What a
library can do is tried, not derived from its version.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import sysconfig
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np

from ..errors import DatapipeError, MissingBackendError
from . import Buffer, UndecodableError, jpeg
from .codec import decode, encode_jpeg

# (image, restart interval in MCUs, EXIF orientation to undo) -> baseline JPEG without metadata, with the same pixels.
# Raises ValueError when the image is damaged, or cannot be rotated without losing its edges.
Restart = Callable[[Buffer, int, int], bytes]

COMPRESS, DECOMPRESS, TRANSFORM = range(3)  # enum TJINIT
QUALITY, SUBSAMPLING, WIDTH, HEIGHT, COLOURS, SCANS, RESTART = 3, 4, 5, 6, 8, 13, 18  # enum TJPARAM
PERFECT, NO_METADATA = 1 << 0, 1 << 6  # TJXOPT
SAMP_420, SAMP_GREY = 2, 3  # enum TJSAMP
CHROMA = (1, 1), (2, 1), (2, 2), (1, 1), (1, 2), (4, 1), (1, 4)  # by TJSAMP: pixels per sample, across and down
YCBCR_OR_GREY = (1, 2)  # enum TJCS
MAX_SCANS = 500  # a progressive JPEG has about 10; thousands of empty ones would take hours
# By EXIF orientation, 1 to 8: enum TJXOP, and the same as options of jpegtran.
TURNS = (0, 1, 6, 2, 3, 5, 4, 7)
OPTIONS = ("", "-flip horizontal", "-rotate 180", "-flip vertical", "-transpose", "-rotate 90", "-transverse",
           "-rotate 270")  # fmt: skip


class _Transform(ctypes.Structure):  # tjtransform
    _fields_ = [
        ("region", ctypes.c_int * 4),
        ("op", ctypes.c_int),
        ("options", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("filter", ctypes.c_void_p),
    ]


class _Factor(ctypes.Structure):  # tjscalingfactor
    _fields_ = [("numerator", ctypes.c_int), ("denominator", ctypes.c_int)]


class _Handle:
    """A TurboJPEG instance, for use by a single thread at a time."""

    def __init__(self, library: ctypes.CDLL, kind: int) -> None:
        self.library, self.pointer = library, library.tj3Init(kind)
        if not self.pointer:
            raise MemoryError("tj3Init failed")

    def __call__(self, function: str, *arguments: object) -> None:
        """Call a function of the library on this instance. Raises UndecodableError with the library's message."""
        if getattr(self.library, function)(self.pointer, *arguments):
            message = self.library.tj3GetErrorStr(self.pointer).decode(errors="replace")
            raise UndecodableError("refused by libturbojpeg", message)

    def __del__(self) -> None:
        if self.pointer:
            self.library.tj3Destroy(self.pointer)


class _TurboJpeg:
    """libturbojpeg. Thread-safe; its functions run without the interpreter's lock.

    Raises OSError or AttributeError when `path` is not a libturbojpeg with version 3 of the API.
    """

    def __init__(self, path: str) -> None:
        self._library = library = ctypes.CDLL(path)
        pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        for name, result, *arguments in (
            ("tj3Init", pointer, number),
            ("tj3Destroy", None, pointer),
            ("tj3Free", None, pointer),
            ("tj3GetErrorStr", ctypes.c_char_p, pointer),
            ("tj3Set", number, pointer, number, number),
            ("tj3Get", number, pointer, number),
            ("tj3SetScalingFactor", number, pointer, _Factor),
            ("tj3YUVPlaneWidth", number, number, number, number),
            ("tj3YUVPlaneHeight", number, number, number, number),
            ("tj3DecompressHeader", number, pointer, pointer, size),
            ("tj3DecompressToYUVPlanes8", number, pointer, pointer, size, pointer, pointer),
            ("tj3CompressFromYUVPlanes8", number, pointer, pointer, number, pointer, number, pointer, pointer),
            ("tj3Transform", number, pointer, pointer, size, number, pointer, pointer, pointer),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self._local = threading.local()  # each thread's own instances, by kind

    def restart(self, data: Buffer, interval: int, orientation: int) -> bytes:
        """Give a JPEG restart markers without changing its pixels (see Restart)."""
        handle, source = self._handle(TRANSFORM), np.frombuffer(data, np.uint8)
        handle("tj3Set", RESTART, interval)
        transform = _Transform(op=TURNS[orientation - 1], options=PERFECT | NO_METADATA)
        given = source.ctypes.data, len(source), 1
        return self._output(lambda *to: handle("tj3Transform", *given, *to, ctypes.byref(transform)))

    def planes(self, data: Buffer, smallest: tuple[int, int]) -> tuple[list[np.ndarray], int, tuple[int, int]]:
        """Decode a JPEG's planes as they are stored, without interpolating chroma; `smallest` as in `codec.decode`.

        Returns Y, or Y, Cb and Cr, uint8[height, width] each, which may be a sample larger than the image; how often
        they were halved; how many pixels a sample of chroma covers, across and down. Raises ValueError for a JPEG that
        is damaged, or neither YCbCr nor grey.
        """
        handle, source = self._handle(DECOMPRESS), np.frombuffer(data, np.uint8)
        get, pointer = self._library.tj3Get, handle.pointer
        handle("tj3DecompressHeader", source.ctypes.data, len(source))
        sampling, width, height = (get(pointer, name) for name in (SUBSAMPLING, WIDTH, HEIGHT))
        if sampling < 0 or get(pointer, COLOURS) not in YCBCR_OR_GREY:
            raise ValueError("neither YCbCr nor grey, or of unknown subsampling")
        enough = (n for n in (3, 2, 1) if width >> n >= smallest[0] > 0 and height >> n >= smallest[1] > 0)
        halved = next(enough, 0)
        handle("tj3SetScalingFactor", _Factor(1, 1 << halved))
        width, height = -(-width >> halved), -(-height >> halved)
        plane_size = self._library.tj3YUVPlaneHeight, self._library.tj3YUVPlaneWidth
        planes = [
            np.empty([size(i, n, sampling) for size, n in zip(plane_size, (height, width), strict=True)], np.uint8)
            for i in range(1 if sampling == SAMP_GREY else 3)
        ]
        handle("tj3DecompressToYUVPlanes8", source.ctypes.data, len(source), _pointers(planes), None)
        return planes, halved, CHROMA[sampling]

    def compress(self, planes: list[np.ndarray], width: int, height: int, quality: int, interval: int) -> bytes:
        """Encode planes as a baseline JPEG of an image of `width` and `height`, with `interval` MCUs between markers.

        The planes are Y, or Y, Cb and Cr subsampled 4:2:0, uint8[height, width] each. In colour, Y's sides are even.
        Raises ValueError with libturbojpeg's message.
        """
        handle = self._handle(COMPRESS)
        handle("tj3Set", QUALITY, quality)
        handle("tj3Set", SUBSAMPLING, SAMP_GREY if len(planes) == 1 else SAMP_420)
        handle("tj3Set", RESTART, interval)
        planes = [np.ascontiguousarray(plane) for plane in planes]
        given = _pointers(planes), width, None, height
        return self._output(lambda *to: handle("tj3CompressFromYUVPlanes8", *given, *to))

    def _handle(self, kind: int) -> _Handle:
        handles = vars(self._local).setdefault("handles", {})
        if kind not in handles:
            handles[kind] = _Handle(self._library, kind)
            if kind != COMPRESS:
                handles[kind]("tj3Set", SCANS, MAX_SCANS)
        return handles[kind]

    def _output(self, write: Callable[..., None]) -> bytes:
        """Call a function that writes a JPEG into memory which the library allocates."""
        memory, size = ctypes.c_void_p(), ctypes.c_size_t()
        try:
            write(ctypes.byref(memory), ctypes.byref(size))
            return ctypes.string_at(memory, size.value)
        finally:
            self._library.tj3Free(memory)


def _pointers(planes: list[np.ndarray]) -> ctypes.Array:
    return (ctypes.c_void_p * 3)(*(plane.ctypes.data for plane in planes))


def jpegtran(program: str) -> Restart:
    """Return the function that gives a JPEG restart markers by running jpegtran."""

    def restart(data: Buffer, interval: int, orientation: int) -> bytes:
        # Files in memory and posix_spawn: no pipes to serve, and a third of subprocess.run's time in Python.
        command = [program, "-copy", "none", "-perfect", "-restart", f"{interval}B", *OPTIONS[orientation - 1].split()]
        given, made, silence = os.memfd_create("jpeg"), os.memfd_create("jpeg"), os.open(os.devnull, os.O_WRONLY)
        try:
            os.write(given, data)
            os.lseek(given, 0, os.SEEK_SET)
            streams = [(os.POSIX_SPAWN_DUP2, fd, i) for i, fd in enumerate((given, made, silence))]
            child = os.posix_spawn(program, command, os.environ, file_actions=streams)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code < 0:
                raise DatapipeError(f"was ended by signal {-code}", path=program)
            if code:  # 2: it warns of damage
                raise ValueError("jpegtran cannot read it, or not without damage")
            return os.pread(made, os.fstat(made).st_size, 0)
        finally:
            for fd in (given, made, silence):
                os.close(fd)

    return restart


@lru_cache(1)
def turbojpeg() -> _TurboJpeg | None:
    """Load the first libturbojpeg whose API has version 3 and writes restart markers: conda's, the system's, pip's."""
    bundled = Path(sysconfig.get_path("platlib")).glob("turbojpeg.libs/libturbojpeg-*.so*")
    for path in (Path(sys.prefix, "lib", "libturbojpeg.so.0"), "libturbojpeg.so.0", *bundled):
        try:
            library = _TurboJpeg(str(path))
            planes = [np.tile(np.arange(n, dtype=np.uint8) * 3, (n, 1)) for n in (32, 16, 16)]
            plain, marked = (library.compress(planes, 32, 32, 90, interval) for interval in (0, 1))
            if _same(plain, marked):
                return library
        except (OSError, AttributeError, ValueError):
            continue
    return None


@lru_cache(1)
def lossless() -> Restart | None:
    """Return what writes restart markers without loss here: libturbojpeg, jpegtran, or None."""
    library, program = turbojpeg(), shutil.which("jpegtran")
    restarts = ([library.restart] if library else []) + ([jpegtran(program)] if program else [])
    tile = np.add.outer(np.arange(32), np.arange(32)).astype(np.uint8)
    plain = encode_jpeg(np.stack([tile * 3, tile * 2, tile], axis=-1), 90)
    for restart in restarts:
        try:
            if _same(plain, restart(plain, 1, 1)):
                return restart
        except (OSError, ValueError):
            continue
    return None


def need_lossless() -> Restart:
    """Return what writes restart markers without loss. Raises MissingBackendError if there is nothing."""
    restart = lossless()
    if restart is None:
        raise MissingBackendError(
            "restart markers without re-encoding need libturbojpeg 3.1 or newer, or the program jpegtran, and pip "
            "installs neither (the extra turbo has 3.0). Without root: conda install -c conda-forge libjpeg-turbo, or "
            "on a cluster perhaps module load libjpeg-turbo; with root: apt install libjpeg-turbo-progs, or dnf "
            "install libjpeg-turbo-utils. Or re-encode all images, which needs none of these: --quality 90"
        )
    return restart


def _same(plain: bytes, marked: bytes) -> bool:
    """Return whether `marked` is `plain` with a restart marker after each MCU, and the same pixels."""
    marks = jpeg.read_markers(marked).restart_interval == 1 and b"\xff\xd0" in marked
    return marks and np.array_equal(decode(plain, 3), decode(marked, 3))
