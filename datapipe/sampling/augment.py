"""Crop and flip as data: pure functions of the images' sizes and (seed, epoch, position)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..errors import SettingError
from ..names import CROPS, Crop
from .order import AUGMENT, uniform

MAX_RATIO = 100
TRIES = 10  # of RandomResizedCrop before it falls back to the centre, as in torchvision
_DRAWS = 4 * TRIES + 1  # area, ratio, left and top of each try, and the flip
# The field evaluates 224-pixel crops of images resized to 256 (Krizhevsky et al. 2012).
CENTRE_FRACTION = 224 / 256


@dataclass(frozen=True)
class Augment:
    """How training images are cut.

    `crop`: "random_resized" (Szegedy et al. 2015: `scale` of the area, aspect `ratio`), "pad" (He et
    al. 2016: `pad` black pixels around, then a random crop), "none" (as for evaluation), or "auto":
    "pad" when every image already has the output's size, else "random_resized". `flip`: mirror each
    image, left to right, with a probability of ½.
    """

    crop: Crop = "auto"
    flip: bool = True
    pad: int = 4
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        if self.crop not in CROPS:
            raise SettingError(f"crop: {self.crop!r} is not one of {', '.join(CROPS)}")
        if not isinstance(self.flip, bool):
            raise SettingError(f"flip: {self.flip!r} is neither True nor False")
        if not isinstance(self.pad, int) or self.pad < 0:
            raise SettingError(f"pad: {self.pad!r} is out of range; allowed: 0 and more pixels")
        for name, high in (("scale", 1), ("ratio", MAX_RATIO)):
            value = getattr(self, name)
            try:
                lower, upper = value
                fits = 0 < lower <= upper <= high
            except (TypeError, ValueError):
                fits = False
            if not fits:
                raise SettingError(f"{name}: {value!r} is out of range; allowed: 0 < low <= high <= {high}")

    def resolve(self, width: int | None, height: int | None, size: int) -> Augment:
        """Without "auto", for a data set whose images have this common size in pixels (None: differing)."""
        if self.crop != "auto":
            return self
        return replace(self, crop="pad" if (width, height) == (size, size) else "random_resized")

    def check(self, width: int, height: int, size: int) -> None:
        """Raises SettingError when the smallest image, padded, is too small to cut `size` pixels from."""
        if self.crop == "pad" and min(width, height) + 2 * self.pad < size:
            raise SettingError(
                f"pad: {self.pad} is too little to cut {size} pixels from an image of {width}×{height}; "
                f"allowed: {(size - min(width, height) + 1) // 2} and more"
            )


class Windows(NamedTuple):
    """What to cut from each image: the window is scaled to the output, then mirrored if told.

    A window of "pad" may reach beyond the image; what lies outside is black.
    """

    boxes: np.ndarray  # int64[N, 4]: left, top, width, height in pixels of the image
    flips: np.ndarray  # bool[N]


def train_windows(
    augment: Augment, widths: np.ndarray, heights: np.ndarray, size: int, seed: int, epoch: int, positions: np.ndarray
) -> Windows:
    """Windows for the images of the given sizes (int64[N], pixels) at the given positions (int64[N]).

    `augment` is resolved. Raises SettingError when an image and its padding are smaller than `size`.
    """
    assert augment.crop != "auto", "what is cut must not depend on which images come together"
    draws = uniform(seed, epoch, AUGMENT, positions, _DRAWS)
    flips = (draws[:, -1] < 0.5) & augment.flip
    if augment.crop == "none":
        boxes = eval_windows(widths, heights, size).boxes
    elif augment.crop == "pad":
        augment.check(widths.min(), heights.min(), size)
        room_w, room_h = widths + 2 * augment.pad - size, heights + 2 * augment.pad - size
        left, top = _integers(draws[:, 0], room_w + 1), _integers(draws[:, 1], room_h + 1)
        side = np.full_like(left, size)
        boxes = np.stack([left - augment.pad, top - augment.pad, side, side], axis=1)
    else:
        boxes = snapped(_random_resized(augment, widths, heights, draws), size)
    return Windows(boxes, flips)


def eval_windows(widths: np.ndarray, heights: np.ndarray, size: int) -> Windows:
    """The centred square of 7/8 of the shorter side, or the whole image where it has the output's size."""
    side = np.maximum(1, np.round(np.minimum(widths, heights) * CENTRE_FRACTION).astype(np.int64))
    side = np.where((widths == size) & (heights == size), size, side)
    boxes = snapped(np.stack([(widths - side) // 2, (heights - side) // 2, side, side], axis=1), size)
    return Windows(boxes, np.zeros(len(boxes), bool))


def scales(boxes: np.ndarray, size: int) -> np.ndarray:
    """int64[N]: 8, 4 or 2 where a box (int64[N, 4]) is at least so many times the output's size, else 1."""
    smaller = boxes[:, 2:].min(axis=1)
    return np.select([smaller >= n * size for n in (8, 4, 2)], [8, 4, 2], 1)


def snapped(boxes: np.ndarray, size: int) -> np.ndarray:
    """Boxes on multiples of their scales, so that they are the same in an image decoded at 1/2, 1/4 or 1/8.

    Half a pixel of the smaller image, to which they would have to be rounded otherwise, changes fine detail.
    """
    scale = scales(boxes, size)[:, None]
    return boxes // scale * scale


def _integers(draws: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Integers in [0, limit) from uniform draws."""
    return np.minimum((draws * limits).astype(np.int64), limits.astype(np.int64) - 1)


def _random_resized(augment: Augment, widths: np.ndarray, heights: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """All tries of all images at once; the first that fits inside its image is taken."""
    tries = draws[:, :-1].reshape(-1, TRIES, 4)
    W, H = widths[:, None], heights[:, None]
    low, high = augment.scale
    area = W * H * (low + (high - low) * tries[:, :, 0])
    log_low, log_high = np.log(augment.ratio)
    ratio = np.exp(log_low + (log_high - log_low) * tries[:, :, 1])
    w, h = np.round(np.sqrt(area * ratio)).astype(np.int64), np.round(np.sqrt(area / ratio)).astype(np.int64)
    fits = (w > 0) & (w <= W) & (h > 0) & (h <= H)
    first = fits.argmax(axis=1)
    rows = np.arange(len(widths))
    w, h = w[rows, first], h[rows, first]
    left, top = _integers(tries[rows, first, 2], widths - w + 1), _integers(tries[rows, first, 3], heights - h + 1)
    boxes = np.stack([left, top, w, h], axis=1)
    misfits = ~fits.any(axis=1)
    if misfits.any():
        boxes[misfits] = _centred(augment, widths[misfits], heights[misfits])
    return boxes


def _centred(augment: Augment, widths: np.ndarray, heights: np.ndarray) -> np.ndarray:
    """The largest centred window whose aspect ratio is allowed."""
    low, high = augment.ratio
    w = np.clip(np.minimum(widths, np.round(heights * high).astype(np.int64)), 1, None)
    h = np.clip(np.minimum(heights, np.round(widths / low).astype(np.int64)), 1, None)
    return np.stack([(widths - w) // 2, (heights - h) // 2, w, h], axis=1)
