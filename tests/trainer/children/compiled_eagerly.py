"""`trainer`, whose network is tiny, and compiled to what it was: compiled_eagerly.py, then the words of the command.

With RANK_THAT_FAILS, the compiler of that rank fails.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn

from trainer import models
from trainer.cli import main

COMPILE = nn.Module.compile


def build_tiny(_: str, num_classes: int, in_channels: int, blur_pool: bool) -> nn.Module:
    """Build a network of few layers: each is a graph of its own under K-FAC, whose hooks are not compiled."""
    layers = nn.Conv2d(in_channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))


def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
    if os.environ["RANK"] == os.environ.get("RANK_THAT_FAILS"):
        raise RuntimeError("no compiler here")
    return graph


def compile_eagerly(module: nn.Module, **_: Any) -> None:
    COMPILE(module, backend=backend)


if __name__ == "__main__":
    models.build = build_tiny
    nn.Module.compile = compile_eagerly
    sys.exit(main())
