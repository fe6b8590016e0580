"""Residual networks for small images: 6n+2 layers, He et al. 2015 (arXiv:1512.03385), section 4.2.

Shortcuts are the paper's option A, without parameters: every second pixel, and zeros for the new channels.

B batch, C channels, H height, W width
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blur import Blur


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut; [B, in, H, W] -> [B, out, H/stride, W/stride]."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, blur_pool: bool) -> None:
        super().__init__()
        is_blurred = blur_pool and stride > 1
        self.blur = Blur() if is_blurred else nn.Identity()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        # Takes every second pixel, as slicing does, but keeps channels last in the gradient.
        self.shrink = Blur(stride) if is_blurred else nn.AvgPool2d(1, stride)
        self.stride, self.new_channels = stride, out_channels - in_channels

    def forward(self, x_BCHW: Tensor) -> Tensor:
        out_BCHW = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(self.blur(x_BCHW))))))
        if self.stride > 1 or self.new_channels:
            before = self.new_channels // 2
            x_BCHW = F.pad(self.shrink(x_BCHW), (0, 0, 0, 0, before, self.new_channels - before))
        return F.relu(out_BCHW + x_BCHW)


class SmallResNet(nn.Module):
    """Three stages of `blocks` blocks with 16, 32 and 64 channels, at full, half and quarter resolution."""

    def __init__(self, blocks: int, num_classes: int, in_channels: int = 3, blur_pool: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(blocks, 16, 16, 1, blur_pool)
        self.layer2 = _stage(blocks, 16, 32, 2, blur_pool)
        self.layer3 = _stage(blocks, 32, 64, 2, blur_pool)
        self.fc = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x_BCHW = F.relu(self.bn1(self.conv1(images_BCHW)))
        x_BCHW = self.layer3(self.layer2(self.layer1(x_BCHW)))
        return self.fc(torch.mean(x_BCHW, dim=(2, 3)))


def _stage(blocks: int, in_channels: int, out_channels: int, stride: int, blur_pool: bool) -> nn.Sequential:
    first = Block(in_channels, out_channels, stride, blur_pool)
    return nn.Sequential(first, *(Block(out_channels, out_channels, 1, blur_pool) for _ in range(blocks - 1)))


resnet8 = partial(SmallResNet, 1)  # of one block per stage
resnet20 = partial(SmallResNet, 3)  # of three
resnet32 = partial(SmallResNet, 5)  # of five
