"""Small networks over whitened patches, for the fewest seconds: Jordan 2024 (arXiv:2404.00498), section 3.

The first layer's filters are the eigenvectors of the covariance of 2x2 patches, divided by the roots of their
eigenvalues, with both signs (Page 2019, "How to Train Your ResNet", part 8). They are computed once, and not trained.

B batch, C channels, H height, W width
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

PATCH = 2  # pixels on each side
SMALLEST_VARIANCE = 5e-4  # that is added to the eigenvalues: noise is not to count as much as edges


def patch_moments(images_BCHW: Tensor) -> Tensor:
    """Return the second moments of the patches of images, float64[n, n] with n = C PATCH².

    Args:
        images_BCHW: Training images as the network sees them; a thousand are enough.
    """
    patches_BCHWpq = images_BCHW.unfold(2, PATCH, 1).unfold(3, PATCH, 1)
    vectors = patches_BCHWpq.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(0, 2).double()
    return vectors.T @ vectors / len(vectors)


class PooledGroup(nn.Module):
    """Two 3x3 convolutions, with a pooling after the first; [B, in, H, W] -> [B, out, H/2, W/2]."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = _convolution(in_channels, out_channels)
        self.pool = nn.MaxPool2d(2)
        self.bn1 = _norm(out_channels)
        self.conv2 = _convolution(out_channels, out_channels)
        self.bn2 = _norm(out_channels)
        self.activation = nn.GELU()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = self.activation(self.bn1(self.pool(self.conv1(x_BCHW))))
        return self.activation(self.bn2(self.conv2(x_BCHW)))


class WhitenedNet(nn.Module):
    """Whitened patches, three groups, and a linear layer over the maximum of each channel."""

    def __init__(self, widths: tuple[int, int, int], num_classes: int, in_channels: int = 3) -> None:
        super().__init__()
        patch_size = in_channels * PATCH**2
        self.patches = nn.Conv2d(in_channels, 2 * patch_size, PATCH)
        self.patches.weight.requires_grad_(False)
        if self.patches.bias is not None:
            nn.init.zeros_(self.patches.bias)
        channels = (2 * patch_size, *widths)
        self.activation = nn.GELU()
        self.groups = nn.Sequential(*map(PooledGroup, channels[:-1], channels[1:]))
        self.pool = nn.AdaptiveMaxPool2d(1)
        self.fc = nn.Linear(widths[-1], num_classes)
        nn.init.normal_(self.fc.weight, std=1 / widths[-1])
        nn.init.zeros_(self.fc.bias)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x_BCHW = self.groups(self.activation(self.patches(images_BCHW)))
        return self.fc(self.pool(x_BCHW).flatten(1))

    @torch.no_grad()
    def whiten(self, moments_nn: Tensor) -> None:
        """Set the first layer's filters to those that whiten patches.

        Args:
            moments_nn: Moments of the patches of training images, see `patch_moments`.
        """
        variances, directions = torch.linalg.eigh(moments_nn)
        filters = (directions / (variances + SMALLEST_VARIANCE).sqrt()).T
        weight = self.patches.weight
        weight.copy_(torch.cat([filters, -filters]).view_as(weight))


def _convolution(in_channels: int, out_channels: int) -> nn.Conv2d:
    """Return a convolution that begins by handing its input on, in the first of its channels."""
    convolution = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
    with torch.no_grad():
        nn.init.dirac_(convolution.weight[:in_channels])
    return convolution


def _norm(channels: int) -> nn.BatchNorm2d:
    """Return BN without a scale that is trained, whose running statistics follow a short training."""
    norm = nn.BatchNorm2d(channels, momentum=0.4)
    norm.weight.requires_grad_(False)
    return norm


whitened = partial(WhitenedNet, (64, 256, 256))  # of CIFAR-10's speedrun
whitened_small = partial(WhitenedNet, (16, 48, 64))  # for grey images on a CPU
