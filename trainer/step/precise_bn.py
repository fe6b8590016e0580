"""Precise BN: running statistics from batches of the network as it is, and not as it was in the steps before.

Wu and Johnson 2021, arXiv:2105.07576, section 3.2: the mean over batches of each batch's mean and variance.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from datapipe.loaders import Batch

from .precision import Precision


@torch.no_grad()
def estimate_statistics(
    module: nn.Module,
    batches: Iterable[Batch],
    count: int,
    precision: Precision,
) -> None:
    """Replace the running statistics of all BN layers by means over batches. Leaves the module in training mode.

    Args:
        module: The network: uint8 [B, C, H, W] -> logits [B, K].
        batches: Training batches of this rank.
        count: Greatest number of batches.
        precision: Arithmetic of the forward pass.
    """
    norms = [layer for layer in module.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]
    momenta = [layer.momentum for layer in norms]
    module.train()
    for layer in norms:
        layer.reset_running_stats()
        layer.momentum = None  # a plain mean
    try:
        for batch in islice(batches, count):
            # A mean's weight is another for each batch, and compiled code has it as a constant.
            with precision.autocast(), torch.compiler.set_stance("force_eager"):
                module(batch.images)
    finally:
        for layer, momentum in zip(norms, momenta, strict=True):
            layer.momentum = momentum
