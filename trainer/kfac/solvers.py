"""Solvers: from two factors to the preconditioned gradient. Each is a class here, and a line in SOLVERS.

With an a_factor A, a g_factor G, the damping λ and a gradient D (one row for each output), they solve for D'

    eigen       G D' A + λ D' = D                                (the damping on the product, exact)
    cholesky    (G + √λ/π I) D' (A + π √λ I) = D                 (on each factor: Martens and Grosse 2015, 6.3)

where π² is the ratio of the mean eigenvalues of A and G. So "eigen" uses the damping where it preconditions, and
"cholesky" where it inverts.

G groups, n inputs and m outputs of a group. A factor is [G, n, n], or [1, n] for a diagonal. A solution's matrices may
be kept in less precision than factors have: gradients are then multiplied in it. (Rounded eigenvectors still make a
positive definite solution; rounded inverses do so only where the damping is not too far below the largest eigenvalue.)
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from .settings import SolverName

logger = logging.getLogger(__name__)

Solution = dict[str, Tensor]
"""An inverse or an eigen-decomposition of a pair of factors. Names are those in a state_dict."""

ROUNDING = 8  # the smallest pivot of a norm's unit is at least so many units of rounding


class Solver(ABC):
    """Computes and applies solutions.

    Attributes:
        fallbacks: Number of decompositions that have failed. The solution before is then kept; at first that is the one
            which leaves the gradient as it is.
    """

    symmetric = False  # Are a solution's matrices symmetric?

    def __init__(self) -> None:
        self.fallbacks: int | Tensor = 0

    @abstractmethod
    def identity(self, a_factor: Tensor, g_factor: Tensor) -> Solution:
        """Return a solution for factors of these shapes that leaves gradients (about) as they are."""

    @abstractmethod
    def update_inverse(self, a_factor: Tensor, g_factor: Tensor, damping: float, before: Solution) -> Solution:
        """Return the solution of new factors.

        Args:
            a_factor: [G, n, n], or [1, n] for a diagonal.
            g_factor: [G, m, m].
            damping: Damping λ, above 0.
            before: The last solution, which is returned where a decomposition fails.
        """

    @abstractmethod
    def precondition(self, solution: Solution, gradient: Tensor, damping: float) -> Tensor:
        """Return the preconditioned gradient.

        Args:
            solution: Solution that `update_inverse` has returned.
            gradient: [G, m, n]; for factors of one group also [K, m, n], of which the K are treated alike.
            damping: Damping λ, above 0.

        Returns:
            A tensor with the shape and type of `gradient`.
        """


class Eigen(Solver):
    """Eigen-decompositions of both factors."""

    def identity(self, a_factor: Tensor, g_factor: Tensor) -> Solution:
        """Return the identity as eigenvectors, and eigenvalues of 1."""
        solution = {}
        for name, factor in (("a", a_factor), ("g", g_factor)):
            if factor.dim() == 2:
                solution[f"{name}_values"] = torch.ones_like(factor)
                continue
            solution[f"{name}_values"] = torch.ones_like(factor[..., 0])
            solution[f"{name}_vectors"] = _identity(factor)
        return solution

    def update_inverse(self, a_factor: Tensor, g_factor: Tensor, damping: float, before: Solution) -> Solution:
        """Return the eigenvalues and eigenvectors of both factors; the damping is not used.

        torch.linalg.eigh looks on the host whether it converged: it waits for the device, once for each factor.
        """
        solution = {}
        for name, factor in (("a", a_factor), ("g", g_factor)):
            if factor.dim() == 2:
                solution[f"{name}_values"] = factor.clone()
                continue
            decomposition = _eigh(factor)
            if decomposition is None:
                self.fallbacks = self.fallbacks + 1
                logger.warning("K-FAC: no eigenvectors of a factor %s; those before stay", tuple(factor.shape))
                return before
            solution[f"{name}_values"], solution[f"{name}_vectors"] = decomposition
        values = [tensor.isfinite().all() for name, tensor in solution.items() if name.endswith("values")]
        failed = ~torch.stack(values).all()  # stays on the device: to ask would be to wait
        self.fallbacks = self.fallbacks + failed
        return {name: torch.where(failed, before[name].to(new), new) for name, new in solution.items()}

    def precondition(self, solution: Solution, gradient: Tensor, damping: float) -> Tensor:
        """Divide the gradient by the damped eigenvalues of the product, in its eigenvectors' coordinates."""
        rotated = self.rotate(solution, gradient)
        rotated /= (solution["g_values"][:, :, None] * solution["a_values"][:, None]).add_(damping)
        return self.rotate_back(solution, rotated).to(gradient.dtype)

    @staticmethod
    def rotate(solution: Solution, gradient: Tensor) -> Tensor:
        """Return the gradient in the eigenvectors' coordinates."""
        gradient = solution["g_vectors"].mT @ gradient.to(solution["g_vectors"].dtype)
        return gradient @ solution["a_vectors"] if "a_vectors" in solution else gradient

    @staticmethod
    def rotate_back(solution: Solution, rotated: Tensor) -> Tensor:
        """Return in a layer's coordinates what is in those of the eigenvectors."""
        rotated = solution["g_vectors"] @ rotated
        return rotated @ solution["a_vectors"].mT if "a_vectors" in solution else rotated


class Cholesky(Solver):
    """Inverses of both damped factors."""

    symmetric = True

    def identity(self, a_factor: Tensor, g_factor: Tensor) -> Solution:
        """Return the identity as inverses."""
        a = _identity(a_factor) if a_factor.dim() == 3 else torch.ones_like(a_factor)
        return {"a_inverse": a, "g_inverse": _identity(g_factor)}

    def update_inverse(self, a_factor: Tensor, g_factor: Tensor, damping: float, before: Solution) -> Solution:
        """Return the inverses of both factors, damped."""
        a, g = damp_factors(a_factor, g_factor, damping)
        return {name: self._inverse(new, before[name]) for name, new in (("a_inverse", a), ("g_inverse", g))}

    def precondition(self, solution: Solution, gradient: Tensor, damping: float) -> Tensor:
        """Multiply the gradient with both inverses; the damping is in them."""
        a_inverse, g_inverse = solution["a_inverse"], solution["g_inverse"]
        product = g_inverse @ gradient.to(g_inverse.dtype)
        product = product * a_inverse[:, None] if a_inverse.dim() == 2 else product @ a_inverse
        return product.to(gradient.dtype)

    def _inverse(self, factor: Tensor, before: Tensor) -> Tensor:
        if factor.dim() == 2:
            return 1 / factor
        triangle, info = torch.linalg.cholesky_ex(factor)
        failed = (info != 0)[:, None, None]  # stays on the device: to ask would be to wait
        self.fallbacks = self.fallbacks + failed.sum()
        triangle.diagonal(dim1=1, dim2=2).masked_fill_(failed[:, 0], 1)  # cholesky_inverse raises at a zero
        return torch.where(failed, before, torch.cholesky_inverse(triangle))


SOLVERS: dict[SolverName, type[Solver]] = {"eigen": Eigen, "cholesky": Cholesky}


def damp_factors(a_factor: Tensor, g_factor: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Return A + π √λ I and G + √λ/π I, with π² = (tr A / n) / (tr G / m), for each group.

    Args:
        a_factor: [G, n, n], or [1, n] for a diagonal.
        g_factor: [G, m, m].
        damping: Damping λ, above 0.

    Returns:
        Both, with their shapes and types.
    """
    a_mean, g_mean = _mean_eigenvalue(a_factor), _mean_eigenvalue(g_factor)
    known = (a_mean > 0) & (g_mean > 0)
    pi = torch.where(known, (a_mean / torch.where(known, g_mean, 1)).sqrt(), 1)
    root = damping**0.5
    return _add_to_diagonal(a_factor, pi * root), _add_to_diagonal(g_factor, root / pi)


def _mean_eigenvalue(factor: Tensor) -> Tensor:
    return factor.mean(1) if factor.dim() == 2 else factor.diagonal(dim1=1, dim2=2).mean(1)


def _add_to_diagonal(factor: Tensor, shift_G: Tensor) -> Tensor:
    if factor.dim() == 2:
        return factor + shift_G[:, None]
    factor = factor.clone()
    factor.diagonal(dim1=1, dim2=2).add_(shift_G[:, None])
    return factor


def _identity(factor: Tensor) -> Tensor:
    return torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device).expand(factor.shape).contiguous()


def _eigh(factor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the eigenvalues (none below zero) and eigenvectors; None if it does not converge in float64 either.

    torch.linalg.eigh chooses the algorithm by type, size and device. The second attempt stays on the device: on the
    host it would take minutes for thousands of columns.
    """
    for precise in (False, True):
        try:
            values, vectors = torch.linalg.eigh(factor.double() if precise else factor)
        except torch.linalg.LinAlgError:
            continue
        if precise:
            logger.warning("K-FAC: the eigenvectors of a factor %s took float64", tuple(factor.shape))
        return values.clamp_(min=0).to(factor), vectors.to(factor)
    return None


def precondition_units(packed_factor: Tensor, gradient: Tensor, damping: float) -> Tensor:
    """Return (F + λ I)⁻¹ d for each unit of a norm.

    Args:
        packed_factor: F as packed triangles: [U, 1] or [U, 3].
        gradient: Gradient d, [U, k] with k = 1 or 2.
        damping: Damping λ, above 0.

    Returns:
        [U, k].
    """
    if gradient.shape[-1] == 1:
        return gradient / (packed_factor + damping)
    # L D Lᵀ with the larger pivot first, instead of a library call for thousands of 2×2 matrices. Without rounding, the
    # second pivot is at least λ. It is kept at that, and above what rounding makes of it, or a rounding error would
    # become a long step.
    p, q, s = packed_factor.unbind(-1)
    swapped = (p < s)[:, None]
    p, s = torch.maximum(p, s) + damping, torch.minimum(p, s) + damping
    first, second = torch.where(swapped, gradient.flip(-1), gradient).unbind(-1)
    below = q / p
    pivot = (s - q * below).clamp(min=damping).maximum(ROUNDING * torch.finfo(s.dtype).eps * s)
    last = (second - below * first) / pivot
    solution = torch.stack([first / p - below * last, last], -1)
    return torch.where(swapped, solution.flip(-1), solution)
