"""Images into the slots of a batch by the decoder in C, as far as it takes them: the same pixels as `painter`'s."""

from __future__ import annotations

import logging
from functools import lru_cache

import numpy as np

from .. import native
from ..images.codec import decode_jpeg, encode_jpeg
from .delivery import Images
from .prefetch import PendingImage
from .resize import crop_resize_flip

logger = logging.getLogger(__name__)


class NativePixels:
    """Decodes images into slots.

    Args:
        library: The decoder.
        channels: 1 or 3.
        only_pixels: The images are nothing but pixels.
    """

    def __init__(self, library: native.Native, channels: int, only_pixels: bool) -> None:
        self._library, self._channels, self._only_pixels = library, channels, only_pixels

    def put(self, slots: Images, images: list[PendingImage]) -> tuple[list[PendingImage], dict[str, float]]:
        """Put images into their slots; return those that are left to other decoders, and the seconds of each stage."""
        jobs = np.zeros(len(images), native.JOB)
        # An array of each image's bytes keeps them alive, and gives their address.
        arrays = [np.frombuffer(image.data, np.uint8) for image in images]
        jobs["data"] = [array.ctypes.data for array in arrays]
        jobs["size"] = [array.size for array in arrays]
        jobs["box"] = [image.box for image in images]
        jobs["width"], jobs["height"] = np.array([image.size for image in images], np.int32).T
        jobs["flip"] = [image.flip for image in images]
        jobs["scale"] = [image.scale for image in images]
        jobs["is_pixels"] = self._only_pixels
        size, spent_s = slots.images.shape[1], np.zeros(native.STAGES)
        slot_bytes = slots.images[0].nbytes
        jobs["out"] = [slots.images.ctypes.data + image.slot * slot_bytes for image in images]
        left = []
        if self._library.decode(jobs, self._channels, size, slots.stop, spent_s):
            left = [images[i] for i in np.flatnonzero(jobs["status"])]
        return left, {"decode": float(spent_s[0]), "resize": float(spent_s[1])}


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
            slots = Images(np.arange(1), 1, np.zeros((1, 20, 20, 3), np.uint8))
            expected = np.zeros((20, 20, 3), np.uint8)
            crop_resize_flip(pixels, box, True, expected)
            image = PendingImage(0, 0, data, (38, 50), box, 1, True)
            left, _ = NativePixels(library, 3, name == "resize").put(slots, [image])
            if left or not np.array_equal(slots.images[0], expected):
                other = "torch" if name == "resize" else "libjpeg-turbo"
                return f"it does not {name} as the installed {other} does"
    return ""
