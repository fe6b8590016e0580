"""The choice of parameters that decay."""

from __future__ import annotations

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float, vector_lr_factor: float = 1.0) -> list[dict[str, Any]]:
    """Return two groups for an optimizer: matrices and filters decay, vectors (norms and biases) do not.

    Decay of norms' scales and of biases costs accuracy with large batches (Goyal et al. 2017, section 5.1;
    Jia et al. 2018, arXiv:1807.11205, section 3.2).

    Args:
        model: The network.
        weight_decay: Decay of matrices and filters.
        vector_lr_factor: Multiple of the others' learning rate that `set_lr` gives vectors.

    Returns:
        The groups that have parameters.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0, "lr_factor": vector_lr_factor},
    ]
    return [group for group in groups if group["params"]]
