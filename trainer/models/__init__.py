"""The networks, by name. A new one is one file and one line here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from datapipe.errors import SettingError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["REGISTRY", "build"]

REGISTRY = {
    "resnet8": "resnet:resnet8",
    "resnet20": "resnet:resnet20",
    "resnet32": "resnet:resnet32",
    "whitened_small": "whitened:whitened_small",
    "whitened": "whitened:whitened",
    "resnet18": "resnet:resnet18",
    "resnet50": "resnet:resnet50",
}
WITHOUT_STRIDES = "whitened", "whitened_small"
SMALLEST_INPUT = {"whitened": 9, "whitened_small": 9}  # pixels on a side: less is nothing after three poolings


def build(name: str, *, num_classes: int, in_channels: int = 3, blur_pool: bool = False) -> nn.Module:
    """Return a network with new weights: float [B, in_channels, H, W] -> logits [B, num_classes].

    Args:
        name: Name of the network, of those in REGISTRY.
        num_classes: Number of outputs.
        in_channels: Channels of the images.
        blur_pool: Whether to blur before pixels are dropped (Zhang 2019).

    Raises:
        KeyError: `name` is not in REGISTRY; recipes are checked before.
        SettingError: This network has none of what `blur_pool` changes.
    """
    options = {"blur_pool": True} if blur_pool else {}
    if options and name in WITHOUT_STRIDES:
        raise SettingError(f"model.blur_pool: {name} drops no pixels but in pooling; allowed: false")
    module, function = REGISTRY[name].split(":")
    return getattr(import_module(f".{module}", __name__), function)(num_classes, in_channels, **options)
