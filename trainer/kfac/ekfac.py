"""EKFAC: K-FAC whose curvature has the right diagonal in the eigenvectors of the factors (George et al. 2018).

1. K-FAC's curvature is A ⊗ G, and its eigenvectors are the products of those of the factors, V_A ⊗ V_G. In their
   coordinates, a gradient D (one row for each output) is V_Gᵀ D V_A, and the curvature is diagonal: the products of the
   factors' eigenvalues.
2. The curvature that the factors approximate is the mean over the samples of the outer products of their gradients. Its
   diagonal in these coordinates is not those products of eigenvalues, but

       S = 1/N Σ (V_Gᵀ D V_A)²   over the gradients D of the samples (the square of each element),

   which is the best diagonal that there is in this basis. EKFAC keeps a running average of S.
3. S starts as the products of eigenvalues, which count as much as one update of the average.
4. When a layer gets new eigenvectors W, the curvature stays what it was: its diagonal in their coordinates is

       S' = (W_Gᵀ V_G)² S ((W_Aᵀ V_A)²)ᵀ,

   see `change_basis`.
5. To precondition, a gradient is taken into the coordinates, divided by S + λ, and taken back.

Letters: N samples, T positions, G groups, n inputs and m outputs of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from .assignment import Grid
from .curvature_block import CurvatureBlock
from .factors import accumulating
from .layers import Convolution, Layer, Linear, RowLayer, Sums
from .preconditioner import KFAC
from .settings import KFACSettings
from .solvers import Eigen, Solution

_CHUNK_BYTES = 64 << 20  # of the samples' rows or gradients at a time


class EKFAC(KFAC):
    """EKFAC for Linear, Conv1d and Conv2d, and K-FAC for other layers. Settings are those of `KFAC`.

    Over several ranks it needs `local_factors` and one gradient worker for each layer, as only the owner has the
    eigenvectors. It raises ValueError otherwise, for another solver than "eigen", and with `spatially_uncorrelated`.
    """

    __slots__ = ()

    def _check_settings(self, grid: Grid) -> None:
        if self.settings.solver != "eigen":
            raise ValueError(f"solver: {self.settings.solver!r} has no eigenvectors; allowed with EKFAC: eigen")
        if self.settings.spatially_uncorrelated:
            raise ValueError("spatially_uncorrelated: True is out of range; allowed with EKFAC: False")
        world_size = grid.num_rows * grid.num_columns
        if world_size > 1 and not (self.settings.local_factors and grid.num_rows == 1):
            raise ValueError(
                f"local_factors: EKFAC over {world_size} ranks needs it, and grad_worker_fraction = 1/{world_size}"
            )

    def _find_layers(self) -> dict[str, Layer]:
        layers = super()._find_layers()
        return {
            name: DiagonalLayer(layer) if isinstance(layer, Linear | Convolution) else layer
            for name, layer in layers.items()
        }

    def _block_type(self, layer: Layer) -> type[CurvatureBlock]:
        return DiagonalBlock if isinstance(layer, DiagonalLayer) else super()._block_type(layer)


class DiagonalLayer(Layer):
    """A layer that also sums the squares of its samples' gradients, in the coordinates of the eigenvectors.

    Attributes:
        basis: The solution with the eigenvectors; empty as long as there are none.
    """

    once_per_pass = True  # the square of a sum over the calls is not the sum of their squares

    def __init__(self, layer: RowLayer) -> None:
        super().__init__(layer.module)
        self._layer = layer
        self.factors, self.min_dims = layer.factors | {"scale": "samples"}, layer.min_dims
        self.basis: Solution = {}

    def sums(self, x: Tensor, grad_output: Tensor) -> Sums:
        sums = self._layer.sums(x, grad_output)
        if self.basis:
            dtype = self.basis["a_values"].dtype
            a_vectors, g_vectors = (self.basis[name].to(dtype) for name in ("a_vectors", "g_vectors"))
            chunk = max(1, _CHUNK_BYTES // self._sample_bytes(grad_output, a_vectors.element_size()))
            parts = zip(torch.split(x, chunk), torch.split(grad_output, chunk), strict=True)
            squares = (sum_squares(*self._layer.rows(*part), a_vectors, g_vectors) for part in parts)
            sums.by_factor["scale"] = reduce(torch.add, squares)
        return sums

    def _sample_bytes(self, grad_output: Tensor, element_size: int) -> int:
        """Return the bytes of a sample's rows, or of its gradient, which with one position is not formed."""
        groups, m, n = self.shapes()["scale"]
        T = grad_output[0].numel() // (groups * m)
        return groups * n * (max(T, m) if T > 1 else 1) * element_size

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = self._layer.shapes()
        return shapes | {"scale": (shapes["g"][0], shapes["g"][1], shapes["a"][1])}

    def matrix(self, *tensors: Tensor) -> Tensor:
        return self._layer.matrix(*tensors)

    def parts(self, matrix: Tensor) -> Sequence[Tensor]:
        return self._layer.parts(matrix)


class DiagonalBlock(CurvatureBlock):
    """The block of a `DiagonalLayer`, whose diagonal is the running average "scale"."""

    layer: DiagonalLayer

    def update_inverse(self, settings: KFACSettings) -> None:
        fallbacks = self.solver.fallbacks
        super().update_inverse(settings)
        # To look at the device takes no long wait: torch.linalg.eigh has waited for it.
        if not self.is_owner or not (self.averages["a"].weight > 0) & (self.solver.fallbacks == fallbacks):
            return
        before, basis, diagonal = self.layer.basis, self.solution, self.averages["scale"]
        self.layer.basis = basis
        if before:  # step 4
            diagonal.value.copy_(change_basis(diagonal.value, before, basis))
        else:  # step 3
            torch.mul(basis["g_values"][:, :, None], basis["a_values"][:, None], out=diagonal.value)
            diagonal.weight.fill_(1 - settings.factor_decay)

    def precondition(self, gradient: Tensor, damping: float) -> Tensor:
        if not self.layer.basis:
            return super().precondition(gradient, damping)
        rotated = Eigen.rotate(self.solution, gradient)  # step 5
        rotated /= self.averages["scale"].value + damping
        return Eigen.rotate_back(self.solution, rotated).to(gradient.dtype)

    def state_dict(self, with_solution: bool = True) -> dict[str, Any]:
        """Return what the next steps depend on: always with the eigenvectors, in whose coordinates the diagonal is."""
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any], is_in_column: bool) -> None:
        super().load_state_dict(state, is_in_column)
        if self.is_owner:
            self.layer.basis = self.solution if self.averages["scale"].weight > 0 else {}


def change_basis(diagonal_Gmn: Tensor, before: Solution, now: Solution) -> Tensor:
    """Return the diagonal, in new eigenvectors, of what is diagonal in those before.

    Args:
        diagonal_Gmn: The diagonal in the eigenvectors of `before`.
        before: A solution of "eigen".
        now: Another one, of the same layer.

    Returns:
        [G, m, n].
    """
    a, g = (
        (now[name].mT.to(diagonal_Gmn.dtype) @ before[name].to(diagonal_Gmn.dtype)).square_()
        for name in ("a_vectors", "g_vectors")
    )
    return g @ diagonal_Gmn @ a.mT


def sum_squares(a_NTGn: Tensor, g_NTGm: Tensor, a_vectors: Tensor, g_vectors: Tensor) -> Tensor:
    """Return the sum over the samples of (V_Gᵀ (Σ_t g aᵀ) V_A)².

    With one position, the square of a product is the product of squares, and no gradient is formed. Otherwise either
    the samples' gradients are rotated or the rows that they are products of, whichever is less work.

    Args:
        a_NTGn: The rows of the inputs.
        g_NTGm: The rows of the gradients at the output.
        a_vectors: V_A, [G, n, n].
        g_vectors: V_G, [G, m, m].

    Returns:
        [G, m, n].
    """
    T, n, m = a_NTGn.shape[1], a_NTGn.shape[3], g_NTGm.shape[3]
    if T == 1:
        a_GNn, g_GNm = accumulating(a_NTGn[:, 0]).transpose(0, 1), accumulating(g_NTGm[:, 0]).transpose(0, 1)
        return (g_GNm @ g_vectors).square_().mT @ (a_GNn @ a_vectors).square_()
    a_NGTn, g_NGTm = accumulating(a_NTGn).transpose(1, 2), accumulating(g_NTGm).transpose(1, 2)
    rotates_rows = T * (m * m + n * n) < m * n * (m + n)
    if rotates_rows:
        a_NGTn, g_NGTm = a_NGTn @ a_vectors, g_NGTm @ g_vectors
    gradients = g_NGTm.mT @ a_NGTn
    if not rotates_rows:
        gradients = g_vectors.mT @ gradients @ a_vectors
    return gradients.square_().sum(0)
