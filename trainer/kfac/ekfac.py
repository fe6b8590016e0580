"""EKFAC: K-FAC whose curvature has the right diagonal in the eigenvectors of the factors.

George et al. 2018, arXiv:1806.03884: with the eigenvectors V_A and V_G, the products of eigenvalues are replaced by

    S = 1/N Σ (V_Gᵀ D V_A)²   over the gradients D of the samples,

which is the best diagonal there is in that basis. It starts as the products, which count as much as one update of the
average. Where the eigenvectors are new, it becomes the diagonal in them of the curvature that it was before.

N samples, T positions, G groups, n inputs and m outputs of a group
"""

from __future__ import annotations

import torch
from torch import Tensor

from .assignment import Grid
from .curvature_block import Block
from .factors import accumulating
from .layers import Convolution, Layer, Linear, Sums
from .preconditioner import KFAC
from .registration import Skip
from .solvers import Eigen, State

CHUNK_BYTES = 64 << 20  # of samples' rows or gradients at a time


class EKFAC(KFAC):
    """For Linear, Conv1d and Conv2d; other layers are K-FAC's. Settings are those of `KFAC`.

    Over several ranks it needs `local_factors` and one worker for each layer: only the owner has the eigenvectors.
    Raises ValueError otherwise, for another solver than "eigen", and with `spatially_uncorrelated`.
    """

    def _check_settings(self, ranks: Grid) -> None:
        if self.settings.solver != "eigen":
            raise ValueError(f"solver: {self.settings.solver!r} has no eigenvectors; allowed with EKFAC: eigen")
        if self.settings.spatially_uncorrelated:
            raise ValueError("spatially_uncorrelated: True is out of range; allowed with EKFAC: False")
        world_size = ranks.num_rows * ranks.num_columns
        if world_size > 1 and not (self.settings.local_factors and ranks.num_rows == 1):
            raise ValueError(
                f"local_factors: EKFAC over {world_size} ranks needs it, and grad_worker_fraction = 1/{world_size}"
            )

    def _find_layers(self, skip: Skip) -> dict[str, Layer]:
        found = super()._find_layers(skip)
        return {n: _Projected(of) if isinstance(of, Linear | Convolution) else of for n, of in found.items()}

    def _refresh_block(self, block: Block) -> None:
        if not (isinstance(block.layer, _Projected) and block.is_owner):
            super()._refresh_block(block)
            return
        failed = self._solver.fallbacks
        super()._refresh_block(block)
        if not block.is_known() or self._solver.fallbacks > failed:
            return
        before, scale = block.layer.state, block.averages["scale"]
        block.layer.state = block.state
        if before:
            scale.value.copy_(turned(scale.value, before, block.state))
        else:
            torch.mul(block.state["g_values"][:, :, None], block.state["a_values"][:, None], out=scale.value)
            scale.weight.fill_(1 - self.settings.factor_decay)

    def _solve(self, block: Block, gradient: Tensor) -> Tensor:
        if not (isinstance(block.layer, _Projected) and block.layer.state):
            return super()._solve(block, gradient)
        rotated = Eigen.rotate(block.state, gradient)
        rotated /= block.averages["scale"].value + self.settings.damping
        return Eigen.rotate_back(block.state, rotated).to(gradient.dtype)

    def load_state_dict(self, *states: dict) -> None:
        super().load_state_dict(*states)
        for block in self.blocks.values():
            if isinstance(block.layer, _Projected) and block.is_owner:
                block.layer.state = block.state if block.averages["scale"].weight > 0 else {}


class _Projected(Layer):
    """A layer that also sums the squares of its samples' gradients, in the eigenvectors' coordinates."""

    only_once = True  # the square of a sum over the uses is not the sum of their squares

    def __init__(self, layer: Linear | Convolution) -> None:
        super().__init__(layer.module)
        self._layer = layer
        self.factors, self.min_dims = layer.factors | {"scale": "samples"}, layer.min_dims
        self.state: State = {}  # the eigenvectors, as soon as there are any

    def sums(self, x: Tensor, grad_output: Tensor) -> Sums:
        sums = self._layer.sums(x, grad_output)
        if self.state:
            vectors = [self.state[name].to(self.state["a_values"].dtype) for name in ("a_vectors", "g_vectors")]
            chunk = max(1, CHUNK_BYTES // self._sample_bytes(grad_output, vectors[0].element_size()))
            parts = zip(x.split(chunk), grad_output.split(chunk), strict=True)
            sums.moments["scale"] = sum(squares(*self._layer.rows(*part), *vectors) for part in parts)
        return sums

    def _sample_bytes(self, grad_output: Tensor, element_size: int) -> int:
        """Of its rows, or of its gradient, which with one position is not formed."""
        groups, m, n = self.shapes()["scale"]
        T = grad_output[0].numel() // (groups * m)
        return groups * n * (max(T, m) if T > 1 else 1) * element_size

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = self._layer.shapes()
        return shapes | {"scale": (shapes["g"][0], shapes["g"][1], shapes["a"][1])}

    def matrix(self, *tensors: Tensor) -> Tensor:
        return self._layer.matrix(*tensors)

    def set_gradient(self, gradient: Tensor) -> None:
        self._layer.set_gradient(gradient)


def turned(scale_Gmn: Tensor, before: State, now: State) -> Tensor:
    """The diagonal, in the eigenvectors `now`, of what is diagonal in those `before`: [G, m, n]."""
    a, g = (
        (now[name].mT.to(scale_Gmn.dtype) @ before[name].to(scale_Gmn.dtype)).square_()
        for name in ("a_vectors", "g_vectors")
    )
    return g @ scale_Gmn @ a.mT


def squares(a_NTGn: Tensor, g_NTGm: Tensor, a_vectors: Tensor, g_vectors: Tensor) -> Tensor:
    """Sum over the samples of (V_Gᵀ (Σ_t g aᵀ) V_A)²: [G, m, n]. What is rotated are the samples' gradients or, where
    that is less work, the rows of which they are products. With one position, the square of a product is the product of
    squares.
    """
    T, n, m = a_NTGn.shape[1], a_NTGn.shape[3], g_NTGm.shape[3]
    if T == 1:
        a_GNn, g_GNm = accumulating(a_NTGn[:, 0]).transpose(0, 1), accumulating(g_NTGm[:, 0]).transpose(0, 1)
        return (g_GNm @ g_vectors).square_().mT @ (a_GNn @ a_vectors).square_()
    a_NGTn, g_NGTm = accumulating(a_NTGn).transpose(1, 2), accumulating(g_NTGm).transpose(1, 2)
    rotate_rows = T * (m * m + n * n) < m * n * (m + n)
    if rotate_rows:
        a_NGTn, g_NGTm = a_NGTn @ a_vectors, g_NGTm @ g_vectors
    gradients = g_NGTm.mT @ a_NGTn
    if not rotate_rows:
        gradients = g_vectors.mT @ gradients @ a_vectors
    return gradients.square_().sum(0)
