"""Anti-aliased downsampling: a blur before pixels are dropped (Zhang 2019, arXiv:1904.11486).

B batch, C channels, H height, W width
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Blur(nn.Module):
    """The binomial filter [1, 2, 1] ⊗ [1, 2, 1] / 16 on each channel; [B, C, H, W] -> [B, C, H/stride, W/stride].

    It is two means over 2x2 pixels, one after the other. What lies beyond the border counts as zero.
    """

    def __init__(self, stride: int = 1) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.avg_pool2d(F.avg_pool2d(x_BCHW, 2, stride=1, padding=1), 2, self.stride)


class MaxBlurPool(nn.Module):
    """The maximum over 3x3 pixels, blurred before every second one is dropped; [B, C, H, W] -> [B, C, H/2, W/2]."""

    def __init__(self) -> None:
        super().__init__()
        self.blur = Blur(2)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.blur(F.max_pool2d(x_BCHW, 3, stride=1, padding=1))
