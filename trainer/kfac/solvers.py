"""Solvers: from two factors to the preconditioned gradient. One class each; a new one is a line in SOLVERS.

With a_factor A, g_factor G, damping λ and a gradient D (one row an output), the solution D' of

    eigen       G D' A + λ D' = D                                (the damping on the product, exact)
    cholesky    (G + √λ/π I) D' (A + π √λ I) = D                 (on each factor: Martens and Grosse 2015, 6.3)

where π² is the ratio of the mean eigenvalues of A and G.

G groups, n inputs and m outputs of a group. A factor is [G, n, n], or [1, n] for a diagonal. A state's matrices may be
kept in less precision than factors have: gradients are then multiplied in it. (Rounded eigenvectors still make a
positive definite solution; rounded inverses only where the damping is not too far below the largest eigenvalue.)
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

State = dict[str, Tensor]  # what is kept of a pair of factors between refreshes, named as in a state_dict
ROUNDING = 8  # of the smallest pivot, at least, in parts of what is rounded


class Solver(ABC):
    """`fallbacks`: how many decompositions have failed. What was there before is then kept; at first, that leaves the
    gradient as it is.
    """

    symmetric = False  # are the matrices of a state?

    def __init__(self) -> None:
        self.fallbacks: int | Tensor = 0

    @abstractmethod
    def empty(self, a_factor: Tensor, g_factor: Tensor) -> State:
        """A state for factors of these shapes that leaves gradients (about) as they are."""

    @abstractmethod
    def refresh(self, a_factor: Tensor, g_factor: Tensor, damping: float, before: State) -> State:
        """The state of new factors."""

    @abstractmethod
    def precondition(self, state: State, gradient: Tensor, damping: float) -> Tensor:
        """[G, m, n] to the same; for factors of one group also [K, m, n], each of the K alike."""


class Eigen(Solver):
    def empty(self, a_factor: Tensor, g_factor: Tensor) -> State:
        state = {}
        for name, factor in (("a", a_factor), ("g", g_factor)):
            state[f"{name}_values"] = torch.ones_like(factor[..., 0]) if factor.dim() == 3 else torch.ones_like(factor)
            if factor.dim() == 3:
                state[f"{name}_vectors"] = _identity(factor)
        return state

    def refresh(self, a_factor: Tensor, g_factor: Tensor, damping: float, before: State) -> State:
        state = {}
        for name, factor in (("a", a_factor), ("g", g_factor)):
            if factor.dim() == 2:
                state[f"{name}_values"] = factor.clone()
                continue
            found = _eigh(factor)
            if found is None:
                self.fallbacks += 1
                logger.warning("K-FAC: no eigenvectors of a factor %s; those before stay", tuple(factor.shape))
                return before
            state[f"{name}_values"], state[f"{name}_vectors"] = found
        return state

    def precondition(self, state: State, gradient: Tensor, damping: float) -> Tensor:
        rotated = self.rotate(state, gradient)
        rotated /= (state["g_values"][:, :, None] * state["a_values"][:, None]).add_(damping)
        return self.rotate_back(state, rotated).to(gradient.dtype)

    @staticmethod
    def rotate(state: State, gradient: Tensor) -> Tensor:
        """Into the eigenvectors' coordinates."""
        gradient = state["g_vectors"].mT @ gradient.to(state["g_vectors"].dtype)
        return gradient @ state["a_vectors"] if "a_vectors" in state else gradient

    @staticmethod
    def rotate_back(state: State, rotated: Tensor) -> Tensor:
        rotated = state["g_vectors"] @ rotated
        return rotated @ state["a_vectors"].mT if "a_vectors" in state else rotated


class Cholesky(Solver):
    symmetric = True

    def empty(self, a_factor: Tensor, g_factor: Tensor) -> State:
        a = _identity(a_factor) if a_factor.dim() == 3 else torch.ones_like(a_factor)
        return {"a_inverse": a, "g_inverse": _identity(g_factor)}

    def refresh(self, a_factor: Tensor, g_factor: Tensor, damping: float, before: State) -> State:
        a, g = damped(a_factor, g_factor, damping)
        return {name: self._inverse(new, before[name]) for name, new in (("a_inverse", a), ("g_inverse", g))}

    def precondition(self, state: State, gradient: Tensor, damping: float) -> Tensor:
        a_inverse, g_inverse = state["a_inverse"], state["g_inverse"]
        found = g_inverse @ gradient.to(g_inverse.dtype)
        found = found * a_inverse[:, None] if a_inverse.dim() == 2 else found @ a_inverse
        return found.to(gradient.dtype)

    def _inverse(self, factor: Tensor, before: Tensor) -> Tensor:
        if factor.dim() == 2:
            return 1 / factor
        triangle, info = torch.linalg.cholesky_ex(factor)
        failed = (info != 0)[:, None, None]  # stays on the device: to ask would be to wait
        self.fallbacks = self.fallbacks + failed.sum()
        triangle.diagonal(dim1=1, dim2=2).masked_fill_(failed[:, 0], 1)  # cholesky_inverse raises at a zero
        return torch.where(failed, before, torch.cholesky_inverse(triangle))


SOLVERS: dict[str, type[Solver]] = {"eigen": Eigen, "cholesky": Cholesky}


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


def _identity(factor: Tensor) -> Tensor:
    return torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device).expand(factor.shape).contiguous()


def _eigh(factor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Eigenvalues (none below zero) and eigenvectors; None where no way converges."""
    for precise in (False, True):
        try:
            values, vectors = torch.linalg.eigh(factor.double().cpu() if precise else factor)
        except torch.linalg.LinAlgError:
            continue
        if values.isfinite().all():
            if precise:
                logger.warning("K-FAC: the eigenvectors of a factor %s took float64", tuple(factor.shape))
            return values.clamp_(min=0).to(factor), vectors.to(factor)
    return None


def unit_solution(unit_factor: Tensor, gradient: Tensor, damping: float) -> Tensor:
    """(F + λ I)⁻¹ d for each unit of a norm: F folded, [U, 1] or [U, 3], and [U, k] to [U, k] with k = 1 or 2."""
    if gradient.shape[-1] == 1:
        return gradient / (unit_factor + damping)
    # L D Lᵀ, the larger pivot first: no library call for thousands of 2×2 matrices. But for rounding, which must not
    # become a step, the second pivot is λ or more.
    p, q, s = unit_factor.unbind(-1)
    swapped = (p < s)[:, None]
    p, s = torch.maximum(p, s) + damping, torch.minimum(p, s) + damping
    first, second = torch.where(swapped, gradient.flip(-1), gradient).unbind(-1)
    below = q / p
    pivot = (s - q * below).clamp(min=damping).maximum(ROUNDING * torch.finfo(s.dtype).eps * s)
    last = (second - below * first) / pivot
    found = torch.stack([first / p - below * last, last], -1)
    return torch.where(swapped, found.flip(-1), found)
