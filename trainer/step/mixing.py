"""Mixup and CutMix: pairs of images become one, and its label a mixture of theirs.

B batch, C channels, H height, W width
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class MixedBatch:
    """Images, and what they show: `labels` with the weight `weight`, `others` with the rest."""

    images: Tensor  # [B, C, H, W], from 0 to 255: uint8, or float32 once mixed
    labels: Tensor  # int64[B]
    valid: Tensor  # bool[B]: whether an image may be learnt from
    others: Tensor | None = None  # int64[B]; None: nothing is mixed
    weight: float = 1.0


def mix(batch: MixedBatch, mixup_alpha: float, cutmix_alpha: float, seed: tuple[int, ...]) -> MixedBatch:
    """Mix each image of a batch with another; where both ways are on, one of them is drawn.

    Mixup adds two images with weights λ and 1 - λ (Zhang et al. 2017, arXiv:1710.09412, equation 1). CutMix replaces a
    rectangle, of the share 1 - λ of the area before it is cut off at the border, by that of the other image (Yun et al.
    2019, arXiv:1905.04899, section 3.1). λ is drawn from Beta(α, α), once per batch.

    Args:
        batch: Batch whose images are mixed, of which nothing is mixed yet.
        mixup_alpha: Parameter α of mixup; 0: none.
        cutmix_alpha: Parameter α of CutMix; 0: none.
        seed: Numbers, each at least 0, on which alone the draws depend.

    Returns:
        A new batch; without either way, the same.
    """
    alphas = [alpha for alpha in (mixup_alpha, cutmix_alpha) if alpha]
    if not alphas:
        return batch
    draws = np.random.default_rng(seed)
    is_cutmix = bool(cutmix_alpha) and (not mixup_alpha or draws.random() < 0.5)
    alpha = cutmix_alpha if is_cutmix else mixup_alpha
    kept = draws.beta(alpha, alpha)
    shift = int(draws.integers(1, max(2, len(batch.labels))))
    images = batch.images.to(torch.float32, copy=True)  # in place from here on: one memory format for both ways
    others = [tensor.roll(shift, 0) for tensor in (images, batch.labels, batch.valid)]
    if is_cutmix:
        kept = _cut_in(images, others[0], kept, draws)
    else:
        images.lerp_(others[0], 1.0 - kept)
    # An image that could not be read is black, and its label unknown.
    return replace(batch, images=images, valid=batch.valid & others[2], others=others[1], weight=kept)


def _cut_in(images_BCHW: Tensor, others_BCHW: Tensor, kept: float, draws: np.random.Generator) -> float:
    """Replace a rectangle of images by that of others; return the share of the area that is left of them."""
    height, width = images_BCHW.shape[-2:]
    sides = np.array([height, width])
    half = sides * (1.0 - kept) ** 0.5 / 2
    centre = draws.random(2) * sides
    top, left = np.rint(np.clip(centre - half, 0, sides)).astype(int).tolist()
    bottom, right = np.rint(np.clip(centre + half, 0, sides)).astype(int).tolist()
    images_BCHW[..., top:bottom, left:right] = others_BCHW[..., top:bottom, left:right]
    return 1.0 - (bottom - top) * (right - left) / (height * width)
