"""The scales and shifts of norms, of which K-FAC knows the exact Fisher matrix: one small matrix for each unit.

A norm multiplies its normalised input x̂ with the scale and adds the shift. So a sample's gradients of a unit's scale
and shift are, with the gradients g of the sample's own loss at the T positions that share the unit,

    Σ_t x̂ g   and   Σ_t g.

1. A norm over a batch or a group has one mean μ and one deviation σ for all positions of a sample's unit, so that

       Σ_t x̂ g = (Σ_t x g - μ Σ_t g) / σ,

   and no normalised copy of the input is needed: half-precision tensors are read, and one float32 tensor of products
   is written.
2. The difference loses digits where μ is much larger than σ: the result is off by about the rounding of float32 times
   μ / σ. The input itself was rounded when it was computed, at least that coarsely, and was off by as much.
3. A layer norm has a mean and a deviation for each position, and needs the normalised input.

Letters: N samples, T positions, U units, k parameters of a unit (2, or 1 without a shift).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import factors
from .layers import Layer, Sums


class Norm(Layer):
    """The scale and shift of a norm: the exact Fisher matrix of each unit, [U, k, k]."""

    factors = {"unit": "samples"}  # noqa: RUF012 - as in Layer

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        if isinstance(module, nn.LayerNorm):
            self.min_dims = 1 + len(module.normalized_shape)

    def sums(self, x: Tensor, grad_output: Tensor) -> Sums:
        """Return the sums of one forward pass; for a batch norm, these samples are the batch."""
        grad_NTU = self._by_unit(grad_output)
        shift_NU = factors.sum_rows(grad_NTU, 1)
        if isinstance(self.module, nn.LayerNorm):
            normalised = F.layer_norm(factors.accumulating(x), self.module.normalized_shape, eps=self.module.eps)
            scale_NU = factors.sum_products(self._by_unit(normalised), grad_NTU)
        else:
            mean, deviation = self._moments(x)
            products_NU = factors.sum_products(self._by_unit(x), grad_NTU)
            scale_NU = (products_NU - mean * shift_NU) / deviation
        gradients_NUk = torch.stack([scale_NU, shift_NU][: len(self.parameters())], -1)
        unit = torch.einsum("nuj,nuk->ujk", gradients_NUk, gradients_NUk)
        return Sums({"unit": unit}, len(x), grad_NTU.shape[0] * grad_NTU.shape[1])

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean of each unit's input and its deviation, as the module divides by it: [U] or [N, U]."""
        module = self.module
        if isinstance(module, nn.GroupNorm):
            groups_NG = factors.accumulating(x).reshape(len(x), module.num_groups, -1)
            variance, mean = (
                moment.repeat_interleave(x.shape[1] // module.num_groups, 1)
                for moment in torch.var_mean(groups_NG, 2, correction=0)
            )
        else:
            assert isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)
            mean, variance = factors.mean_and_variance(self._by_unit(x))
        return mean, (variance + module.eps).sqrt()

    def _by_unit(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the shape of the input as [N, T, U], with all positions that share a unit."""
        if isinstance(self.module, nn.LayerNorm):
            return tensor.reshape(len(tensor), -1, self.module.weight.numel())
        return tensor.movedim(1, -1).reshape(len(tensor), -1, tensor.shape[1])

    def matrix(self, *tensors: Tensor) -> Tensor:
        return torch.stack([tensor.reshape(-1) for tensor in tensors], -1)

    def parts(self, matrix: Tensor) -> Sequence[Tensor]:
        return matrix.unbind(-1)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        k = len(self.parameters())
        return {"unit": (self.weight.numel(), k, k)}
