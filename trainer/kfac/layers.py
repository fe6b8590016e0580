"""What K-FAC knows about each type of layer: one class for each.

Grosse and Martens, "A Kronecker-factored approximate Fisher matrix for convolution layers" (2016): for N samples and T
positions of an output, with the inputs a (a 1 at their end if there is a bias) and the gradients g of a sample's own
loss, the curvature of the weight is the Kronecker product of

    a_factor = 1/N Σ a aᵀ,   g_factor = 1/(N T) Σ g gᵀ,

sums over all samples and positions. A linear layer has one position, or those of its other dimensions.

Letters: N samples, T positions, R = N T rows, G groups, n inputs and m outputs of a group (n with the 1), K elements of
a kernel, C channels, U units of a norm (see norms.py), k parameters of a unit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import factors


class Sums(NamedTuple):
    """The sums of a forward pass of a layer, by factor, not yet divided by the number of samples or rows."""

    by_factor: dict[str, Tensor]
    num_samples: int
    num_rows: int


class Layer(ABC):
    """A layer's factors, and its gradient as K-FAC sees it."""

    # What each factor's sum is divided by, "samples" or "rows", in the order of `KFAC.factors`.
    factors: dict[str, str] = {"a": "samples", "g": "rows"}  # noqa: RUF012 - replaced by subclasses, never changed
    once_per_pass = False  # Must it not be used twice in a forward pass?
    min_dims = 2  # of an input: samples come first

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        bias = getattr(module, "bias", None)
        self.has_bias = bias is not None and bias.requires_grad

    @property
    def weight(self) -> nn.Parameter:
        """The module's weight, as it is now."""
        return self.module.weight  # type: ignore[return-value]  # registration takes no module without one

    @abstractmethod
    def sums(self, x: Tensor, grad_output: Tensor) -> Sums:
        """Return the sums of one forward pass.

        Args:
            x: The layer's input.
            grad_output: The gradient at its output. All sums except that of "a" grow with its square.
        """

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each factor."""

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that K-FAC preconditions."""
        # Not the properties, as every step asks several times for each layer. For torch, an attribute may be a module.
        module = self.module
        return [module.weight, module.bias] if self.has_bias else [module.weight]  # type: ignore[list-item]

    def num_elements(self) -> int:
        """Return the number of elements of the parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def is_trainable(self) -> bool:
        """Return whether no parameter has been frozen since registration."""
        return all(parameter.requires_grad for parameter in self.parameters())

    @abstractmethod
    def matrix(self, *tensors: Tensor) -> Tensor:
        """Return tensors with the shapes of `parameters` as [G, m, n], or for a norm as [U, k].

        The result may share their memory.
        """

    @abstractmethod
    def parts(self, matrix: Tensor) -> Sequence[Tensor]:
        """Return the parts of a matrix, as `matrix` makes it, of which each has the elements of a parameter."""

    def gradients(self) -> list[Tensor]:
        """Return the gradient of each parameter; all have one."""
        gradients = [parameter.grad for parameter in self.parameters()]
        return [gradient for gradient in gradients if gradient is not None]

    def gradient(self) -> Tensor:
        """Return the parameters' gradients as a matrix."""
        return self.matrix(*self.gradients())

    def gradient_parts(self, gradient: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each parameter's gradient, and the part of a matrix as `gradient` returns it that is to replace it."""
        pairs = zip(self.gradients(), self.parts(gradient), strict=True)
        return [(target, part.reshape(target.shape)) for target, part in pairs]


class _Matrix(Layer):
    """A weight [out, in, ...] in groups, as rows [..., in], with a bias at the end of each row."""

    groups = 1

    def matrix(self, *tensors: Tensor) -> Tensor:
        weight, *bias = tensors
        matrix = weight.movedim(1, -1).reshape(self.groups, len(weight) // self.groups, -1)
        return torch.cat([matrix, bias[0].reshape(self.groups, -1, 1)], 2) if bias else matrix

    def parts(self, matrix: Tensor) -> Sequence[Tensor]:
        bias = [matrix[:, :, -1]] if self.has_bias else []
        rows = matrix[:, :, :-1] if self.has_bias else matrix
        return [rows.reshape(self.weight.movedim(1, -1).shape).movedim(-1, 1), *bias]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        weight = self.weight
        m, n = len(weight) // self.groups, weight[0].numel() + self.has_bias
        return {"a": (self.groups, n, n), "g": (self.groups, m, m)}


class RowLayer(_Matrix, ABC):
    """A layer whose weight's gradient is a sum of products of rows, Σ g aᵀ."""

    @abstractmethod
    def rows(self, x: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """Return a and g of each position: [N, T, G, n] and [N, T, G, m]."""

    def _append_one(self, rows: Tensor) -> Tensor:
        return torch.cat([rows, torch.ones_like(rows[..., :1])], -1) if self.has_bias else rows


class Linear(RowLayer):
    """nn.Linear, with any number of dimensions between the first and the last."""

    def rows(self, x: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        a, g = (t.reshape(len(t), prod(t.shape[1:-1]), 1, t.shape[-1]) for t in (x, grad_output))
        return self._append_one(a), g

    def sums(self, x: Tensor, grad_output: Tensor) -> Sums:
        rows_R1n, rows_R1m = (t.reshape(-1, 1, t.shape[-1]) for t in (x, grad_output))
        a = factors.outer_products(rows_R1n)
        if self.has_bias:
            a = factors.append_ones(a, factors.sum_rows(rows_R1n), len(rows_R1n))
        return Sums({"a": a, "g": factors.outer_products(rows_R1m)}, len(x), len(rows_R1m))


class Convolution(RowLayer):
    """nn.Conv1d or nn.Conv2d, with any stride, padding, padding mode, dilation and groups.

    The inputs of a patch are in the order of a channels-last weight: row, column, channel. One dimension is a line of
    pixels: two dimensions of which the first has the size 1.
    """

    def __init__(self, module: nn.Conv1d | nn.Conv2d) -> None:
        super().__init__(module)
        self.groups, self.min_dims, self._padding_mode = module.groups, 2 + len(module.kernel_size), module.padding_mode
        sizes = module.kernel_size, module.stride, module.dilation
        self.kernel = factors.Kernel(*(_two_dimensions(size, 1) for size in sizes))
        if module.padding == "same":  # an odd pixel goes to the end, as in torch
            total = [d * (k - 1) for k, d in zip(self.kernel.size, self.kernel.dilation, strict=True)]
            down, along = ((t // 2, t - t // 2) for t in total)
        else:
            sides = (0, 0) if isinstance(module.padding, str) else _two_dimensions(module.padding, 0)
            down, along = ((side, side) for side in sides)
        self._padding = *along, *down
        self._is_plain_3x3 = (
            self.kernel == factors.Kernel((3, 3))
            and (self._padding, self.groups, module.padding_mode) == ((1, 1, 1, 1), 1, "zeros")
            and not self.has_bias
        )

    def rows(self, x: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        x, grad_output = self._images(x, grad_output)
        a, g = self._patches(x).flatten(1, 2).flatten(3), self._gradient_rows(grad_output)
        return self._append_one(a), g.reshape(*a.shape[:2], *g.shape[1:])

    def sums(self, x: Tensor, grad_output: Tensor) -> Sums:
        x, grad_output = self._images(x, grad_output)
        rows_RGm = self._gradient_rows(grad_output)
        return Sums({"a": self._a_sum(x), "g": factors.outer_products(rows_RGm)}, len(x), len(rows_RGm))

    def _a_sum(self, x: Tensor) -> Tensor:
        if self._is_plain_3x3:
            return factors.conv3x3_factor(x)
        return factors.patch_factor(self._patches(x), self.has_bias)

    def _images(self, x: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        return (x[:, :, None], grad_output[:, :, None]) if grad_output.dim() == 3 else (x, grad_output)

    def _padded(self, x: Tensor) -> Tensor:
        """Return the image as the convolution sees it."""
        if not any(self._padding):
            return x
        return F.pad(x, self._padding, "constant" if self._padding_mode == "zeros" else self._padding_mode)

    def _patches(self, x: Tensor) -> Tensor:
        return factors.extract_patches(self._padded(x), self.kernel, self.groups)

    def _gradient_rows(self, grad_output: Tensor) -> Tensor:
        """Return the gradient at the output as [R, G, m]."""
        return grad_output.movedim(1, -1).reshape(-1, self.groups, grad_output.shape[1] // self.groups)


def _two_dimensions(sizes: tuple[int, ...], fill: int) -> tuple[int, int]:
    """Return sizes down and along, with `fill` for the first if there is only one dimension."""
    down, along = (fill, *sizes) if len(sizes) == 1 else sizes
    return down, along


class UncorrelatedConvolution(Convolution):
    """A convolution whose inputs are assumed to be uncorrelated between the K elements of its kernel, and alike (SUA).

    The a_factor is the mean of the K blocks on the diagonal of Convolution's, and stands for each of them. Laurent et
    al. 2018, "An evaluation of Fisher approximations beyond Kronecker factorization". Without groups and bias.
    """

    @staticmethod
    def fits(layer: Layer) -> bool:
        """Return whether a layer is a convolution that this class may replace, with a gain."""
        return type(layer) is Convolution and prod(layer.kernel.size) > 1 and layer.groups == 1 and not layer.has_bias

    def _a_sum(self, x: Tensor) -> Tensor:
        return factors.sua_factor(self._padded(x), self.kernel)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        m, n = self.weight.shape[:2]
        return {"a": (1, n, n), "g": (1, m, m)}

    def matrix(self, *tensors: Tensor) -> Tensor:
        """Return the weight as [K, m, n]."""
        (weight,) = tensors
        return weight.flatten(2).movedim(2, 0)

    def parts(self, matrix: Tensor) -> Sequence[Tensor]:
        return [matrix.movedim(0, 2)]


class Embedding(_Matrix):
    """nn.Embedding. Its inputs are one-hot, so the a_factor is diagonal: [1, number of embeddings].

    Padding tokens are ignored. The g_factor is averaged over micro-batches and ranks with equal weights, regardless of
    how many tokens in each are padding.
    """

    min_dims = 1

    def __init__(self, module: nn.Embedding) -> None:
        super().__init__(module)
        self._num_embeddings, self._padding_idx = module.num_embeddings, module.padding_idx

    def sums(self, x: Tensor, grad_output: Tensor) -> Sums:
        rows_R1m, padding = grad_output.reshape(-1, 1, grad_output.shape[-1]), self._padding_idx
        num_rows = len(rows_R1m)
        if padding is not None:  # it has no gradient, whatever comes back
            is_token = x.reshape(-1, 1, 1) != padding
            rows_R1m = rows_R1m * is_token
        g = factors.outer_products(rows_R1m)
        if padding is not None:
            g = g * (num_rows / is_token.sum().clamp(min=1))  # a mean over the other rows
        # As bincount, which would wait for the GPU.
        tokens = x.reshape(-1)
        counts = g.new_zeros(self._num_embeddings).scatter_add_(0, tokens, torch.ones_like(tokens, dtype=g.dtype))
        if padding is not None:
            counts[padding] = 0
        return Sums({"a": counts[None], "g": g}, len(x), num_rows)

    def matrix(self, *tensors: Tensor) -> Tensor:
        (weight,) = tensors
        return weight.T[None]

    def parts(self, matrix: Tensor) -> Sequence[Tensor]:
        return [matrix[0].T]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        vocabulary, m = self.weight.shape
        return {"a": (1, vocabulary), "g": (1, m, m)}
