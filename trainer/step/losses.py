"""The losses by which a network learns, per sample.

B batch, K classes
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

LOSSES = "cross_entropy", "bce"


def per_sample_loss(name: str, logits_BK: Tensor, labels_B: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the loss of each sample.

    The target is 1 - `label_smoothing` for the label, plus `label_smoothing` / K for each class (Szegedy et al. 2015,
    arXiv:1512.00567, section 7). "bce" is the sum over classes of their binary cross-entropies (Beyer et al. 2020,
    arXiv:2006.07159, section 5).

    Args:
        name: "cross_entropy" or "bce".
        logits_BK: Logits, float[B, K].
        labels_B: Labels, int64[B], from 0 to K - 1.
        label_smoothing: Smoothing of the labels, from 0, below 1.

    Returns:
        Losses, float[B].
    """
    if name == "cross_entropy":
        return F.cross_entropy(logits_BK, labels_B, label_smoothing=label_smoothing, reduction="none")
    # -t log σ(z) - (1 - t) log(1 - σ(z)) is softplus(z) - t z
    label_B = logits_BK.gather(1, labels_B[:, None]).squeeze(1)
    expected_B = (1.0 - label_smoothing) * label_B + label_smoothing * logits_BK.mean(dim=1)
    return F.softplus(logits_BK).sum(dim=1) - expected_B


def begin_bias(name: str, module: nn.Module) -> None:
    """Set the last layer's bias to what a loss begins with.

    With "bce" that is the log-odds of one class among all: with zeros, the first steps would learn little else.

    Args:
        name: Name of the loss.
        module: A network whose last linear layer gives the logits.
    """
    if name == "bce":
        *_, last = (layer for layer in module.modules() if isinstance(layer, nn.Linear))
        nn.init.constant_(last.bias, -math.log(max(last.out_features - 1, 1)))
