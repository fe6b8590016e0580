"""Running averages of factors, of which those of a step are updated together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class RunningAverage:
    """f ← (decay · w · f + (1 - decay) · new) / w' with the weight w' = decay · w + 1 - decay.

    The division corrects the bias: the average begins with the first value, and not with zero or the identity. See
    `update_averages`.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.value = torch.zeros(shape, dtype=dtype, device=device)
        self.weight = torch.zeros((), dtype=torch.float64, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors themselves, not copies."""
        return {"value": self.value, "weight": self.weight, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy the values of another average into this one's tensors."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


def update_averages(updates: Sequence[Sequence[tuple[RunningAverage, Tensor]]], decay: float) -> None:
    """Average new values in, or count them as skipped. All work is done on the device, without waiting for it.

    Args:
        updates: For each layer its averages and their new values, which are overwritten. A layer's values are skipped
            together if one of them is not finite.
        decay: The weight of what was before, from 0 to below 1.
    """
    alike: dict[tuple[int, torch.dtype], list[Sequence[tuple[RunningAverage, Tensor]]]] = {}
    for update in updates:
        if update:
            alike.setdefault((len(update), update[0][0].value.dtype), []).append(update)
    for (number, dtype), some in alike.items():
        averages, new = zip(*(pair for update in some for pair in update), strict=True)
        largest = torch.stack(torch._foreach_norm(new, math.inf))
        finite = largest.isfinite().reshape(-1, number).all(1, keepdim=True).expand(-1, number).flatten()
        weights = torch.stack([average.weight for average in averages])
        weights = torch.where(finite, decay * weights + 1 - decay, weights)
        shares = torch.where(finite, (1 - decay) / weights, 0.0).to(dtype)
        torch._foreach_copy_([average.weight for average in averages], weights.unbind())
        torch._foreach_add_([average.skipped for average in averages], (~finite).long().unbind())
        for average, value, share in zip(averages, new, shares.unbind(), strict=True):
            # Where the share is zero, the value must still be a number.
            average.value.lerp_(value.nan_to_num_(0, 0, 0).to(dtype), share)
