"""Residual networks of He et al. 2015 (arXiv:1512.03385): for ImageNet (table 1), and for small images (section 4.2).

In those for ImageNet parameters carry torchvision's names, so that its weights load here and these load there. The
stride of a bottleneck sits in its 3x3 convolution ("v1.5"), and the last BN of every block starts at zero, so that each
block starts as the identity (Goyal et al. 2017, arXiv:1706.02677, section 5.1).

Either may blur before pixels are dropped, against aliasing (Zhang 2019, arXiv:1904.11486).

B batch, C channels, H height, W width
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

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


class PaddedShortcut(nn.Module):
    """Every second pixel, and zeros for the new channels: the paper's option A, without parameters."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, blur_pool: bool) -> None:
        super().__init__()
        # Takes every second pixel, as slicing does, but keeps channels last in the gradient.
        self.shrink = Blur(stride) if blur_pool and stride > 1 else nn.AvgPool2d(1, stride)
        self.new_channels = out_channels - in_channels

    def forward(self, x_BCHW: Tensor) -> Tensor:
        before = self.new_channels // 2
        return F.pad(self.shrink(x_BCHW), (0, 0, 0, 0, before, self.new_channels - before))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut; [B, in, H, W] -> [B, width, H/stride, W/stride]."""

    expansion = 1

    def __init__(
        self, in_channels: int, width: int, stride: int, blur_pool: bool = False, is_small: bool = False
    ) -> None:
        super().__init__()
        self.blur = Blur() if blur_pool and stride > 1 else nn.Identity()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(in_channels, width, stride, blur_pool, is_small)
        if not is_small:
            nn.init.zeros_(self.bn2.weight)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        out_BCHW = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(self.blur(x_BCHW))))))
        return F.relu(out_BCHW + (x_BCHW if self.downsample is None else self.downsample(x_BCHW)))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 beside a shortcut; [B, in, H, W] -> [B, 4 * width, H/stride, W/stride]."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int, blur_pool: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.blur = Blur() if blur_pool and stride > 1 else nn.Identity()
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = _shortcut(in_channels, 4 * width, stride, blur_pool)
        nn.init.zeros_(self.bn3.weight)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        out_BCHW = F.relu(self.bn1(self.conv1(x_BCHW)))
        out_BCHW = F.relu(self.bn2(self.conv2(self.blur(out_BCHW))))
        out_BCHW = self.bn3(self.conv3(out_BCHW))
        return F.relu(out_BCHW + (x_BCHW if self.downsample is None else self.downsample(x_BCHW)))


class ResNet(nn.Module):
    """A stem, four stages of `blocks[i]` blocks, and a linear layer over the mean of each channel."""

    layer1: nn.Sequential
    layer2: nn.Sequential
    layer3: nn.Sequential
    layer4: nn.Sequential

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: tuple[int, ...],
        num_classes: int,
        in_channels: int = 3,
        blur_pool: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.pool = MaxBlurPool() if blur_pool else nn.MaxPool2d(3, stride=2, padding=1)
        channels = 64
        for stage, count in enumerate(blocks):
            width, layers = 64 * 2**stage, list[nn.Module]()
            for i in range(count):
                layers.append(block(channels, width, stride=2 if stage and i == 0 else 1, blur_pool=blur_pool))
                channels = width * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*layers))
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x_BCHW = self.pool(F.relu(self.bn1(self.conv1(images_BCHW))))
        x_BCHW = self.layer4(self.layer3(self.layer2(self.layer1(x_BCHW))))
        return self.fc(x_BCHW.mean(dim=(2, 3)))


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
        return self.fc(x_BCHW.mean(dim=(2, 3)))


def _stage(blocks: int, in_channels: int, out_channels: int, stride: int, blur_pool: bool) -> nn.Sequential:
    first = BasicBlock(in_channels, out_channels, stride, blur_pool, is_small=True)
    others = (BasicBlock(out_channels, out_channels, 1, is_small=True) for _ in range(blocks - 1))
    return nn.Sequential(first, *others)


def _shortcut(
    in_channels: int, out_channels: int, stride: int, blur_pool: bool, is_small: bool = False
) -> nn.Module | None:
    """Return the shortcut where the shape changes; None elsewhere.

    It is `PaddedShortcut` in a small network, otherwise a 1x1 convolution and BN (option B). Where it is blurred, that
    drops the pixels, and not the convolution.
    """
    if in_channels == out_channels and stride == 1:
        return None
    if is_small:
        return PaddedShortcut(in_channels, out_channels, stride, blur_pool)
    blur = [("blur", Blur(stride))] if blur_pool and stride > 1 else []
    convolution = nn.Conv2d(in_channels, out_channels, 1, 1 if blur else stride, bias=False)
    return nn.Sequential(OrderedDict([*blur, ("0", convolution), ("1", nn.BatchNorm2d(out_channels))]))


resnet8 = partial(SmallResNet, 1)  # of one block per stage
resnet20 = partial(SmallResNet, 3)  # of three
resnet32 = partial(SmallResNet, 5)  # of five
resnet18 = partial(ResNet, BasicBlock, (2, 2, 2, 2))  # of two basic blocks per stage
resnet50 = partial(ResNet, Bottleneck, (3, 4, 6, 3))  # of 3, 4, 6 and 3 bottlenecks
