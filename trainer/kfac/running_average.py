"""Running averages of factors, that what is not finite never enters."""

from __future__ import annotations

import torch
from torch import Tensor


class RunningAverage:
    """f ← (decay · w · f + (1 - decay) · new) / w', w' = decay · w + 1 - decay: bias-corrected, so that it begins with
    the first value and not with the identity. All on the device, without waiting for it.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.value = torch.zeros(shape, dtype=dtype, device=device)
        self.weight = torch.zeros((), dtype=torch.float64, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, new: Tensor, decay: float, finite: Tensor) -> None:
        """Take `new` in if `finite`, or count it as skipped."""
        self.weight.copy_(torch.where(finite, decay * self.weight + 1 - decay, self.weight))
        share = torch.where(finite, (1 - decay) / self.weight, 0.0)
        self.value.lerp_(torch.where(finite, new, self.value).to(self.value), share.to(self.value.dtype))
        self.skipped += ~finite

    def state_dict(self) -> dict[str, Tensor]:
        return {"value": self.value, "weight": self.weight, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, mine in self.state_dict().items():
            mine.copy_(state[name])
