"""Images into the slots of a batch by the decoder in C, as far as it takes them: the same pixels as `painter`'s."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np

from .. import native
from ..images.codec import decode_jpeg, encode_jpeg
from .batch_slots import ImageSlots
from .image_chunk import ChunkInMemory, ImageChunk
from .resize import crop_resize_flip

logger = logging.getLogger(__name__)


def decode_in_c(library: native.Native, slots: ImageSlots, chunk: ImageChunk) -> tuple[list[int], dict[str, float]]:
    """Put images into their slots, as far as the library takes them.

    Args:
        library: The decoder.
        slots: The batch.
        chunk: The images.

    Returns:
        The images that are left to other decoders, and the seconds of each stage.
    """
    jobs, images = chunk.jobs, slots.images
    jobs["is_pixels"] = chunk.only_pixels
    jobs["out"] = images.ctypes.data + np.array(chunk.slots) * images[0].nbytes
    size, channels = images.shape[2:]
    return do_jobs(chunk, partial(library.decode, jobs, channels, size, slots.stop), native.STAGES)


def do_jobs(
    chunk: ImageChunk, work: Callable[[np.ndarray, np.ndarray], int], stages: Sequence[str]
) -> tuple[list[int], dict[str, float]]:
    """Have the library do the jobs of a chunk, and take over the bytes of those that it does not.

    Args:
        chunk: The images.
        work: Function that calls the library with the arrays for its progress and for the seconds of each stage;
            returns how many jobs are left.
        stages: Names of the library's stages.

    Returns:
        The images that are left, and the seconds of each stage.
    """
    began = time.perf_counter()
    jobs, spent_s = chunk.jobs, np.zeros(len(stages))
    watching, progress = chunk.locate()
    stage_s = {"read": time.perf_counter() - began}
    left: list[int] = []
    with watching:
        if work(progress, spent_s):
            left = np.flatnonzero(jobs["status"]).tolist()
        for i in left:
            if jobs["status"][i] == native.UNSUPPORTED and i not in chunk.data:
                chunk.data[i] = ctypes.string_at(int(jobs["data"][i]), int(jobs["size"][i]))
    for name, seconds in zip(stages, spent_s.tolist(), strict=True):
        stage_s[name] = stage_s.get(name, 0.0) + seconds
    return left, stage_s


@lru_cache(maxsize=1)
def choose_native() -> native.Choice:
    """Choose the library as `native.choose` does, if its pixels are those of the installed torch and libjpeg-turbo."""
    choice = native.choose()
    if choice.native is None:
        return choice
    if difference := _find_difference(choice.native):
        logger.warning("the decoder in C is not used: %s", difference)
        return native.Choice(None, difference)
    return choice


def _find_difference(library: native.Native) -> str:
    """Compare a resized picture, and a decoded one; return in what they differ. Takes a millisecond."""
    random = np.random.default_rng(0)
    picture = random.integers(0, 256, (50, 38, 3), dtype=np.uint8)
    # smooth, as photographs are, but with colours to interpolate
    picture = (np.cumsum(picture.astype(np.int32) - 128, axis=1).clip(-99, 99) + 128).astype(np.uint8)
    encoded = encode_jpeg(picture, 90, restart_interval=2)
    for name, data, pixels in (
        ("resize", picture.tobytes(), picture),
        ("decode", encoded, decode_jpeg(encoded, 3)),
    ):
        for box in ((3, 5, 33, 41), (8, 8, 11, 9)):
            slots = ImageSlots(np.arange(1), 1, np.zeros((1, 20, 20, 3), np.uint8))
            expected = np.zeros((20, 20, 3), np.uint8)
            crop_resize_flip(pixels, box, True, expected)
            jobs = np.zeros(1, native.JOB)
            jobs["width"], jobs["height"], jobs["box"], jobs["scale"], jobs["flip"] = 38, 50, box, 1, True
            chunk = ChunkInMemory([0], np.arange(1), jobs, [data])
            chunk.only_pixels = name == "resize"
            left, _ = decode_in_c(library, slots, chunk)
            if left or not np.array_equal(slots.images[0], expected):
                other = "torch" if name == "resize" else "libjpeg-turbo"
                return f"it does not {name} as the installed {other} does"
    return ""
