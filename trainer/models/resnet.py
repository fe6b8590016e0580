"""Residual networks for ImageNet: He et al. 2015 (arXiv:1512.03385), table 1.

Parameters carry torchvision's names, so that its weights load here and these load there. The stride of a
bottleneck sits in its 3x3 convolution ("v1.5"), and the last BN of every block starts at zero, so that each
block starts as the identity (Goyal et al. 2017, arXiv:1706.02677, section 5.1).

B batch, C channels, H height, W width
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from .blur import Blur, MaxBlurPool


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut; [B, in, H, W] -> [B, width, H/stride, W/stride]."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int, blur_pool: bool = False) -> None:
        super().__init__()
        self.blur = Blur() if blur_pool and stride > 1 else nn.Identity()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _projection(in_channels, width, stride, blur_pool)
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
        self.downsample = _projection(in_channels, 4 * width, stride, blur_pool)
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


def _projection(in_channels: int, out_channels: int, stride: int, blur_pool: bool) -> nn.Sequential | None:
    """Return the shortcut where the shape changes (option B): a 1x1 convolution and BN. None elsewhere.

    Where it is blurred, that drops the pixels, and not the convolution.
    """
    if in_channels == out_channels and stride == 1:
        return None
    blur = [("blur", Blur(stride))] if blur_pool and stride > 1 else []
    convolution = nn.Conv2d(in_channels, out_channels, 1, 1 if blur else stride, bias=False)
    return nn.Sequential(OrderedDict([*blur, ("0", convolution), ("1", nn.BatchNorm2d(out_channels))]))


resnet18 = partial(ResNet, BasicBlock, (2, 2, 2, 2))  # of two basic blocks per stage
resnet50 = partial(ResNet, Bottleneck, (3, 4, 6, 3))  # of 3, 4, 6 and 3 bottlenecks
