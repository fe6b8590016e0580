"""Running averages of factors, which values that are not finite never enter."""

from __future__ import annotations

import torch
from torch import Tensor


class RunningAverage:
    """f ← (decay · w · f + (1 - decay) · new) / w' with the weight w' = decay · w + 1 - decay.

    The division corrects the bias: the average begins with the first value, and not with zero or the identity. All
    work is done on the device, without waiting for it.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.value = torch.zeros(shape, dtype=dtype, device=device)
        self.weight = torch.zeros((), dtype=torch.float64, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, new: Tensor, decay: float, finite: Tensor) -> None:
        """Average a new value in, or count it as skipped.

        Args:
            new: The value, with the shape of the average.
            decay: The weight of what was before, from 0 to below 1.
            finite: Whether `new` is finite: a scalar of bool, on the same device.
        """
        self.weight.copy_(torch.where(finite, decay * self.weight + 1 - decay, self.weight))
        share = torch.where(finite, (1 - decay) / self.weight, 0.0)
        self.value.lerp_(torch.where(finite, new, self.value).to(self.value), share.to(self.value.dtype))
        self.skipped += ~finite

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors themselves, not copies."""
        return {"value": self.value, "weight": self.weight, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy the values of another average into this one's tensors."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])
