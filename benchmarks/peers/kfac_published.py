"""K-FAC as Pauloski et al. (SC 2020, arXiv:2007.00784; KAISA, 2021, arXiv:2107.01739) publish it, and as kfac-pytorch
does it by default: exact eigen-decompositions, every layer's in the same step and on every rank, the divisors of their
products kept, im2col for convolutions, and a clip whose sum is formed on the host.

For its cost: the scaling of the factors is Grosse and Martens's, and costs the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PublishedKFAC:
    """Linear and Conv2d layers; other settings are those of `trainer.kfac.KFAC`."""

    def __init__(
        self, model: nn.Module, damping: float, factor_update_steps: int, inv_update_steps: int, kl_clip: float,
        lr: float, factor_decay: float = 0.95,
    ) -> None:  # fmt: skip
        self.factor_decay = factor_decay
        self.damping, self.kl_clip, self.lr = damping, kl_clip, lr
        self.factor_update_steps, self.inv_update_steps = factor_update_steps, inv_update_steps
        self.steps = 0
        self.layers = {module: {} for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)}
        for module in self.layers:
            module.register_forward_pre_hook(self._keep_input)
            module.register_full_backward_hook(self._keep_gradient)

    @torch.no_grad()
    def _keep_input(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if self.steps % self.factor_update_steps == 0 and module.training:
            rows = args[0]
            if isinstance(module, nn.Conv2d):
                columns = F.unfold(rows, module.kernel_size, module.dilation, module.padding, module.stride)
                rows = columns.transpose(1, 2).reshape(-1, columns.shape[1])
            if module.bias is not None:
                rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
            self._average(module, "a", rows.T @ rows / len(args[0]))

    @torch.no_grad()
    def _keep_gradient(self, module: nn.Module, _, grad_output: tuple[Tensor, ...]) -> None:
        if self.steps % self.factor_update_steps == 0:
            rows = grad_output[0] * len(grad_output[0])
            if rows.dim() == 4:
                rows = rows.permute(0, 2, 3, 1).reshape(-1, rows.shape[1])
            self._average(module, "g", rows.T @ rows / len(rows))

    def _average(self, module: nn.Module, name: str, new: Tensor) -> None:
        kept = self.layers[module]
        if name not in kept:
            kept[name] = torch.eye(len(new))
        kept[name].mul_(self.factor_decay).add_(new, alpha=1 - self.factor_decay)

    @torch.no_grad()
    def step(self) -> None:
        directions, divergence = {}, 0.0
        for module, kept in self.layers.items():
            if self.steps % self.inv_update_steps == 0:
                a_values, kept["a_vectors"] = torch.linalg.eigh(kept["a"])
                g_values, kept["g_vectors"] = torch.linalg.eigh(kept["g"])
                kept["divisors"] = 1 / (torch.outer(g_values.clamp(min=0), a_values.clamp(min=0)) + self.damping)
            gradient = module.weight.grad.reshape(len(module.weight), -1)
            if module.bias is not None:
                gradient = torch.cat([gradient, module.bias.grad[:, None]], 1)
            rotated = kept["g_vectors"].T @ gradient @ kept["a_vectors"] * kept["divisors"]
            directions[module] = kept["g_vectors"] @ rotated @ kept["a_vectors"].T
            divergence += (directions[module] * gradient).sum().item() * self.lr**2
        scale = min(1.0, (self.kl_clip / abs(divergence)) ** 0.5)
        for module, gradient in directions.items():
            if module.bias is not None:
                module.bias.grad.copy_(gradient[:, -1] * scale)
                gradient = gradient[:, :-1]
            module.weight.grad.copy_(gradient.reshape(module.weight.shape) * scale)
        self.steps += 1
