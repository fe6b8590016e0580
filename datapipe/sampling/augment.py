"""Crop and flip as data: pure functions of the images' sizes and (seed, epoch, position)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..checks import check_bool, check_name, checked_int
from ..errors import SettingError
from ..names import CROPS, Crop, Flip
from .order import AUGMENT, FIRST_FLIP, uniform

MAX_RATIO = 100
TRIES = 10  # of RandomResizedCrop, before it falls back to the centre, as in torchvision
_DRAWS = 4 * TRIES + 1  # area, ratio, left and top of each try, then the flip
# It is usual to evaluate 224-pixel crops of images resized to 256 (Krizhevsky et al. 2012).
CENTRE_FRACTION = 224 / 256


@dataclass(frozen=True)
class Augment:
    """How training images are cropped and mirrored. Raises SettingError for a value out of range.

    Attributes:
        crop: "random_resized" (Szegedy et al. 2015), "pad" (He et al. 2016: black pixels around the image, then a
            random crop), "none" (as for evaluation), or "auto": "pad" when every image already has the output's
            size, else "random_resized".
        flip: Whether to mirror each image, left to right, with a probability of ½; "alternate": that is drawn in the
            first epoch, and in each other epoch an image is mirrored if it was not in the epoch before (Jordan 2024,
            arXiv:2404.00498, section 3.6).
        pad: Pixels added on each side by "pad", at least 0.
        scale: Least and greatest share of the image's area that "random_resized" keeps, above 0, up to 1.
        ratio: Least and greatest aspect ratio (width / height) of "random_resized", above 0, up to 100.
    """

    crop: Crop = "auto"
    flip: Flip = True
    pad: int = 4
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        check_name("crop", self.crop, CROPS)
        if self.flip != "alternate":
            check_bool("flip", self.flip)
        object.__setattr__(self, "pad", checked_int("pad", self.pad, 0))
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
        """Return the same settings with "auto" decided for a data set.

        Args:
            width: Width of every image, in pixels; None if they differ.
            height: Height of every image, in pixels; None if they differ.
            size: Side of the output, in pixels.
        """
        if self.crop != "auto":
            return self
        return replace(self, crop="pad" if (width, height) == (size, size) else "random_resized")

    def check(self, width: int, height: int, size: int) -> None:
        """Refuse a padding with which an image is too small to be cropped.

        Args:
            width: Width of the smallest image, in pixels.
            height: Height of the smallest image, in pixels.
            size: Side of the output, in pixels.

        Raises:
            SettingError: The padded image is smaller than the output.
        """
        if self.crop == "pad" and min(width, height) + 2 * self.pad < size:
            raise SettingError(
                f"pad: {self.pad} is too little to cut {size} pixels from an image of {width}×{height}; "
                f"allowed: {(size - min(width, height) + 1) // 2} and more"
            )


class Crops(NamedTuple):
    """The crop of each image that is scaled to the output's size, then mirrored where `flips` says so.

    With crop "pad", one may reach beyond the image; what lies outside is black.
    """

    boxes: np.ndarray  # int64[N, 4]: left, top, width, height in pixels of the image
    flips: np.ndarray  # bool[N]


def train_crops(
    augment: Augment,
    widths: np.ndarray,
    heights: np.ndarray,
    size: int,
    seed: int,
    epoch: int,
    positions: np.ndarray,
    samples: np.ndarray | None = None,
) -> Crops:
    """Choose the crops of training images.

    Args:
        augment: Settings, whose `crop` is not "auto" (see `Augment.resolve`).
        widths: Widths of the images, int64[N], in pixels.
        heights: Heights of the images, int64[N], in pixels.
        size: Side of the output, in pixels.
        seed: Seed of the user, any integer.
        epoch: Number of the epoch, from 0.
        positions: Positions of the images in the epoch, int64[N]. An image's crop depends on its own position alone.
        samples: Numbers of the images in the data set, int64[N], by which flips alternate.

    Returns:
        A box and a flip for each image, int64[N, 4] and bool[N].

    Raises:
        SettingError: An image with its padding is smaller than the output.
    """
    assert augment.crop != "auto", "a crop must not depend on which images come together"
    draws = uniform(seed, epoch, AUGMENT, positions, _DRAWS)
    if augment.flip == "alternate":
        assert samples is not None, "which images were mirrored in the epoch before is known by their numbers"
        flips = (uniform(seed, 0, FIRST_FLIP, samples, 1)[:, 0] < 0.5) ^ bool(epoch % 2)
    else:
        flips = (draws[:, -1] < 0.5) & augment.flip
    if augment.crop == "none":
        boxes = eval_crops(widths, heights, size).boxes
    elif augment.crop == "pad":
        augment.check(widths.min(), heights.min(), size)
        room_w, room_h = widths + 2 * augment.pad - size, heights + 2 * augment.pad - size
        left, top = _integers(draws[:, 0], room_w + 1), _integers(draws[:, 1], room_h + 1)
        side = np.full_like(left, size)
        boxes = np.stack([left - augment.pad, top - augment.pad, side, side], axis=1)
    else:
        boxes = snap(_random_resized(augment, widths, heights, draws), size)
    return Crops(boxes, flips)


def eval_crops(widths: np.ndarray, heights: np.ndarray, size: int) -> Crops:
    """Choose the crops of evaluation images: the central square of 7/8 of the shorter side.

    An image that has the output's size already is taken whole.

    Args:
        widths: Widths of the images, int64[N], in pixels.
        heights: Heights of the images, int64[N], in pixels.
        size: Side of the output, in pixels.

    Returns:
        A box for each image, int64[N, 4], and no flips.
    """
    side = np.maximum(1, np.round(np.minimum(widths, heights) * CENTRE_FRACTION).astype(np.int64))
    side = np.where((widths == size) & (heights == size), size, side)
    boxes = snap(np.stack([(widths - side) // 2, (heights - side) // 2, side, side], axis=1), size)
    return Crops(boxes, np.zeros(len(boxes), bool))


def scales(boxes: np.ndarray, size: int) -> np.ndarray:
    """Return by how much an image may be decoded smaller: 8, 4 or 2 times, or 1 for its full size.

    The result, int64[N], is the largest of these with which the crop (`boxes`: int64[N, 4]) still has `size` pixels
    on each side:

        >>> scales(np.array([[0, 0, 900, 500], [0, 0, 300, 300]]), size=224).tolist()
        [2, 1]
    """
    smaller = boxes[:, 2:].min(axis=1)
    return np.select([smaller >= n * size for n in (8, 4, 2)], [8, 4, 2], 1)


def snap(boxes: np.ndarray, size: int) -> np.ndarray:
    """Round boxes (int64[N, 4]) down to multiples of their scales, so that they also fit an image decoded smaller.

    Otherwise they would be rounded to pixels of the smaller image, and half of such a pixel changes fine detail.
    """
    scale = scales(boxes, size)[:, None]
    rounded: np.ndarray = boxes // scale * scale
    return rounded


def _integers(draws: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Turn uniform draws into integers in [0, limit)."""
    integers: np.ndarray = np.minimum((draws * limits).astype(np.int64), limits.astype(np.int64) - 1)
    return integers


def _random_resized(augment: Augment, widths: np.ndarray, heights: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Make all tries of all images at once, and take the first that fits inside its image."""
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
    """Return the largest central crop whose aspect ratio is allowed."""
    low, high = augment.ratio
    w = np.clip(np.minimum(widths, np.round(heights * high).astype(np.int64)), 1, None)
    h = np.clip(np.minimum(heights, np.round(widths / low).astype(np.int64)), 1, None)
    return np.stack([(widths - w) // 2, (heights - h) // 2, w, h], axis=1)
