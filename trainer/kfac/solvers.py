"""Solvers: from two factors to the preconditioned gradient. One class each; a new one is a line in SOLVERS.

With a_factor A, g_factor G, damping λ and a gradient D (one row an output), the solution D' of

    eigen       G D' A + λ D' = D                                (the damping on the product, exact)
    cholesky    (G + √λ/π I) D' (A + π √λ I) = D                 (on each factor: Martens and Grosse 2015, 6.3)
    newton      the same, its inverses by Newton's iteration from the ones before

where π² is the ratio of the mean eigenvalues of A and G. G groups, n inputs and m outputs of a group
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

State = dict[str, Tensor]  # named as in a state_dict
NEWTON_STEPS = 12
NEWTON_RESIDUAL = 1e-3  # of I - M X, in the largest element: a solution beyond is not used


class Solver(ABC):
    """What is kept of a pair of factors between refreshes."""

    fallbacks = 0  # decompositions that did not converge, since when what was there before is used

    @abstractmethod
    def refresh(self, a_factor: Tensor, g_factor: Tensor, damping: float, before: State | None) -> State | None:
        """Of [G, n, n], or [1, n] for a diagonal, and [G, m, m]; None when it fails."""

    @abstractmethod
    def precondition(self, state: State, gradient: Tensor, damping: float) -> Tensor:
        """[G, m, n] to the same."""


class Eigen(Solver):
    def refresh(self, a_factor: Tensor, g_factor: Tensor, damping: float, before: State | None) -> State | None:
        g = _eigh(g_factor)
        if a_factor.dim() == 2:
            return None if g is None else {"a_values": a_factor.clone(), "g_values": g[0], "g_vectors": g[1]}
        a = _eigh(a_factor)
        if a is None or g is None:
            return None
        return {"a_values": a[0], "a_vectors": a[1], "g_values": g[0], "g_vectors": g[1]}

    def precondition(self, state: State, gradient: Tensor, damping: float) -> Tensor:
        rotated = self.rotate(state, gradient)
        rotated = rotated / (state["g_values"][:, :, None] * state["a_values"][:, None] + damping)
        return self.rotate_back(state, rotated)

    @staticmethod
    def rotate(state: State, gradient: Tensor) -> Tensor:
        """Into the eigenvectors' coordinates."""
        gradient = state["g_vectors"].mT @ gradient
        return gradient @ state["a_vectors"] if "a_vectors" in state else gradient

    @staticmethod
    def rotate_back(state: State, rotated: Tensor) -> Tensor:
        rotated = state["g_vectors"] @ rotated
        return rotated @ state["a_vectors"].mT if "a_vectors" in state else rotated


class Cholesky(Solver):
    def refresh(self, a_factor: Tensor, g_factor: Tensor, damping: float, before: State | None) -> State | None:
        a, g = damped(a_factor, g_factor, damping)
        a_inverse, g_inverse = self._inverse(a, before and before["a_inverse"]), self._inverse(
            g, before and before["g_inverse"]
        )
        return None if a_inverse is None or g_inverse is None else {"a_inverse": a_inverse, "g_inverse": g_inverse}

    def precondition(self, state: State, gradient: Tensor, damping: float) -> Tensor:
        gradient = state["g_inverse"] @ gradient
        if state["a_inverse"].dim() == 2:
            return gradient * state["a_inverse"][:, None]
        return gradient @ state["a_inverse"]

    def _inverse(self, factor: Tensor, before: Tensor | None) -> Tensor | None:
        if factor.dim() == 2:
            return 1 / factor
        triangle, info = torch.linalg.cholesky_ex(factor)
        if not factor.is_cuda and info.any():  # on a GPU, to ask would be to wait
            return None
        return torch.cholesky_inverse(triangle)


class Newton(Cholesky):
    """X ← X (2 I - M X), which converges where the spectral norm of I - M X is below 1; else Cholesky's inverse."""

    def _inverse(self, factor: Tensor, before: Tensor | None) -> Tensor | None:
        if factor.dim() == 2 or before is None:
            return super()._inverse(factor, before)
        identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
        inverse = before
        for _ in range(NEWTON_STEPS):
            residual = identity - factor @ inverse
            size = torch.linalg.matrix_norm(residual)
            if not (size < 1).all():  # NaN, too
                break
            inverse = inverse + inverse @ residual
            if (residual.abs().amax() < NEWTON_RESIDUAL).item():
                return (inverse + inverse.mT) / 2
        return super()._inverse(factor, before)


SOLVERS: dict[str, type[Solver]] = {"eigen": Eigen, "cholesky": Cholesky, "newton": Newton}


def damped(a_factor: Tensor, g_factor: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """A + π √λ I and G + √λ/π I, with π² = (tr A / n) / (tr G / m), for each group."""
    a_mean, g_mean = _mean_eigenvalue(a_factor), _mean_eigenvalue(g_factor)
    known = (a_mean > 0) & (g_mean > 0)
    pi = torch.where(known, (a_mean / torch.where(known, g_mean, 1)).sqrt(), 1)
    root = damping**0.5
    return _plus(a_factor, pi * root), _plus(g_factor, root / pi)


def _mean_eigenvalue(factor: Tensor) -> Tensor:
    return factor.mean(1) if factor.dim() == 2 else factor.diagonal(dim1=1, dim2=2).mean(1)


def _plus(factor: Tensor, shift_G: Tensor) -> Tensor:
    if factor.dim() == 2:
        return factor + shift_G[:, None]
    factor = factor.clone()
    factor.diagonal(dim1=1, dim2=2).add_(shift_G[:, None])
    return factor


def _eigh(factor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Eigenvalues (none below zero) and eigenvectors; None where no way converges."""
    for matrix in (factor, factor.double().cpu()):
        try:
            values, vectors = torch.linalg.eigh(matrix)
        except torch.linalg.LinAlgError:
            continue
        if values.isfinite().all():
            return values.clamp_(min=0).to(factor), vectors.to(factor)
    return None


def unit_solution(unit_factor: Tensor, gradient: Tensor, damping: float) -> Tensor:
    """(F + λ I)⁻¹ d for each unit of a norm: [U, k, k] and [U, k] to [U, k]."""
    identity = torch.eye(unit_factor.shape[-1], dtype=unit_factor.dtype, device=unit_factor.device)
    matrix = unit_factor + damping * identity
    if matrix.shape[-1] == 1:
        return gradient / matrix[:, 0]
    # Cramer's rule: no library call for thousands of 2×2 matrices, and nothing that can fail.
    (p, q), (_, s) = (matrix[:, i].unbind(-1) for i in range(2))
    first, second = gradient.unbind(-1)
    return torch.stack([s * first - q * second, p * second - q * first], -1) / (p * s - q * q)[:, None]
