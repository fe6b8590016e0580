"""What K-FAC knows of each type of layer: one class a type.

Grosse and Martens, "A Kronecker-factored approximate Fisher matrix for convolution layers" (2016): for N samples and T
positions of an output, with the inputs a (a 1 at their end where there is a bias) and the gradients g of a sample's own
loss, the curvature of the weight is the Kronecker product of

    a_factor = 1/N Σ a aᵀ,   g_factor = 1/(N T) Σ g gᵀ,

sums over all samples and positions. A linear layer has one position, or those of its other dimensions.

G groups, n inputs and m outputs of a group (n with the 1), U units of a norm
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import factors


class Sums(NamedTuple):
    """Of one use of a layer. Moments are not yet divided by the numbers of samples or rows."""

    moments: dict[str, Tensor]  # by factor
    num_samples: int
    num_rows: int


class Layer(ABC):
    """A layer's second moments, and its gradient as K-FAC sees it."""

    # What each factor's sum is divided by, "samples" or "rows", in the order of `KFAC.factors`.
    factors: ClassVar[dict[str, str]] = {"a": "samples", "g": "rows"}
    only_once = False  # in a forward pass
    min_dims = 2  # of an input: samples first
    whole_batch = False  # do the moments of some samples depend on the others?

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.has_bias = getattr(module, "bias", None) is not None and module.bias.requires_grad

    @abstractmethod
    def sums(self, x: Tensor, grad_output: Tensor) -> Sums:
        """Moments of all but the inputs grow with the square of `grad_output`."""

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each factor."""

    def parameters(self) -> list[nn.Parameter]:
        return [self.module.weight, self.module.bias] if self.has_bias else [self.module.weight]

    def num_elements(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def learns(self) -> bool:
        """It may have been frozen meanwhile."""
        return all(parameter.requires_grad for parameter in self.parameters())

    @abstractmethod
    def matrix(self, *tensors: Tensor) -> Tensor:
        """Tensors with the shapes of `parameters` as [G, m, n], or [U, k] of a norm. May share their memory."""

    def gradient(self) -> Tensor:
        return self.matrix(*(parameter.grad for parameter in self.parameters()))

    @abstractmethod
    def set_gradient(self, gradient: Tensor) -> None:
        """Write it back into the parameters' gradients."""


class _Matrix(Layer):
    """A weight [out, in, ...] in groups, as rows [..., in], with a bias at the end of each row."""

    groups = 1

    def matrix(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        matrix = weight.movedim(1, -1).reshape(self.groups, len(weight) // self.groups, -1)
        return matrix if bias is None else torch.cat([matrix, bias.reshape(self.groups, -1, 1)], 2)

    def _with_one(self, rows: Tensor) -> Tensor:
        return torch.cat([rows, torch.ones_like(rows[..., :1])], -1) if self.has_bias else rows

    def set_gradient(self, gradient: Tensor) -> None:
        weight = self.module.weight.grad
        if self.has_bias:
            self.module.bias.grad.copy_(gradient[:, :, -1].reshape(-1))
            gradient = gradient[:, :, :-1]
        weight = weight.movedim(1, -1)
        weight.copy_(gradient.reshape(weight.shape))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        weight = self.module.weight
        m, n = len(weight) // self.groups, weight[0].numel() + self.has_bias
        return {"a": (self.groups, n, n), "g": (self.groups, m, m)}


class Linear(_Matrix):
    def rows(self, x: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """Of each position, [N, T, G, n] and [N, T, G, m]."""
        a, g = (t.reshape(len(t), prod(t.shape[1:-1]), 1, t.shape[-1]) for t in (x, grad_output))
        return self._with_one(a), g

    def sums(self, x: Tensor, grad_output: Tensor) -> Sums:
        rows_R1n, rows_R1m = (t.reshape(-1, 1, t.shape[-1]) for t in (x, grad_output))
        a = factors.of_rows(rows_R1n)
        if self.has_bias:
            a = factors.with_ones(a, factors.sum_of_rows(rows_R1n), len(rows_R1n))
        return Sums({"a": a, "g": factors.of_rows(rows_R1m)}, len(x), len(rows_R1m))


class Convolution(_Matrix):
    """Of one dimension or two: any stride, padding, padding mode, dilation and groups. The inputs of a patch are in the
    order of a channels-last weight: row, column, channel.
    """

    def __init__(self, module: nn.Conv1d | nn.Conv2d) -> None:
        super().__init__(module)
        self.groups, self.min_dims = module.groups, 2 + len(module.kernel_size)
        two = lambda pair, fill: (fill, *pair) if len(pair) == 1 else tuple(pair)  # noqa: E731
        self._kernel, self._stride, self._dilation = (
            two(getattr(module, name), 1) for name in ("kernel_size", "stride", "dilation")
        )
        if module.padding == "same":  # an odd pixel goes to the end, as torch has it
            total = [d * (k - 1) for d, k in zip(self._dilation, self._kernel, strict=True)]
            down, along = ((t // 2, t - t // 2) for t in total)
        else:
            sides = (0, 0) if module.padding == "valid" else two(module.padding, 0)
            down, along = ((side, side) for side in sides)
        self._padding = *along, *down
        self._by_offsets = (
            (self._kernel, self._stride, self._dilation) == ((3, 3), (1, 1), (1, 1))
            and (self._padding, self.groups, module.padding_mode) == ((1, 1, 1, 1), 1, "zeros")
            and not self.has_bias
        )

    def rows(self, x: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """Of each position, [N, T, G, n] and [N, T, G, m]."""
        x, grad_output = self._pixels(x, grad_output)
        a, g = self._patches(x).flatten(1, 2).flatten(3), self._gradient_rows(grad_output)
        return self._with_one(a), g.reshape(*a.shape[:2], *g.shape[1:])

    def sums(self, x: Tensor, grad_output: Tensor) -> Sums:
        x, grad_output = self._pixels(x, grad_output)
        rows_RGm = self._gradient_rows(grad_output)
        return Sums({"a": self._of_inputs(x), "g": factors.of_rows(rows_RGm)}, len(x), len(rows_RGm))

    def _of_inputs(self, x: Tensor) -> Tensor:
        return factors.of_3x3(x) if self._by_offsets else factors.of_patches(self._patches(x), self.has_bias)

    def _pixels(self, x: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """In two dimensions: one is a line of pixels."""
        return (x[:, :, None], grad_output[:, :, None]) if grad_output.dim() == 3 else (x, grad_output)

    def _padded(self, x: Tensor) -> Tensor:
        return factors.padded(x, self._padding, self.module.padding_mode)

    def _patches(self, x: Tensor) -> Tensor:
        return factors.patches(self._padded(x), self._kernel, self._stride, self._dilation, self.groups)

    def _gradient_rows(self, grad_output: Tensor) -> Tensor:
        """[R, G, m]"""
        return grad_output.movedim(1, -1).reshape(-1, self.groups, grad_output.shape[1] // self.groups)


class UncorrelatedConvolution(Convolution):
    """One whose inputs are taken as uncorrelated between the K taps of its kernel, and alike: the a_factor is the mean
    of the K blocks on the diagonal of Convolution's, and stands for each of them. Laurent et al. 2018, "An evaluation
    of Fisher approximations beyond Kronecker factorization". Without groups and bias.
    """

    @staticmethod
    def fits(layer: Layer) -> bool:
        return type(layer) is Convolution and prod(layer._kernel) > 1 and layer.groups == 1 and not layer.has_bias

    def _of_inputs(self, x: Tensor) -> Tensor:
        return factors.of_taps(self._padded(x), self._kernel, self._stride, self._dilation)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        m, n = self.module.weight.shape[:2]
        return {"a": (1, n, n), "g": (1, m, m)}

    def matrix(self, weight: Tensor) -> Tensor:
        """[K, m, n]"""
        return weight.flatten(2).movedim(2, 0)

    def set_gradient(self, gradient: Tensor) -> None:
        weight = self.module.weight.grad
        weight.copy_(gradient.movedim(0, 2).reshape(weight.shape))


class Embedding(_Matrix):
    """Its inputs are one-hot, so that the a_factor is diagonal: [1, number of embeddings]. Padding counts for nothing;
    in the g_factor's mean over the rest, parts of a batch (micro-batches, ranks) count alike, however much each has.
    """

    min_dims = 1

    def sums(self, x: Tensor, grad_output: Tensor) -> Sums:
        rows_R1m, padding = grad_output.reshape(-1, 1, grad_output.shape[-1]), self.module.padding_idx
        num_rows = len(rows_R1m)
        if padding is not None:  # has no gradient, whatever comes back
            is_real = x.reshape(-1, 1, 1) != padding
            rows_R1m = rows_R1m * is_real
        g = factors.of_rows(rows_R1m)
        if padding is not None:
            g = g * (num_rows / is_real.sum().clamp(min=1))  # a mean over the others
        # Like bincount, which would wait for the GPU.
        places = x.reshape(-1)
        counts = g.new_zeros(self.module.num_embeddings).scatter_add_(0, places, torch.ones_like(places, dtype=g.dtype))
        if padding is not None:
            counts[padding] = 0
        return Sums({"a": counts[None], "g": g}, len(x), num_rows)

    def matrix(self, weight: Tensor) -> Tensor:
        return weight.T[None]

    def set_gradient(self, gradient: Tensor) -> None:
        self.module.weight.grad.copy_(gradient[0].T)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        vocabulary, m = self.module.weight.shape
        return {"a": (1, vocabulary), "g": (1, m, m)}


class Norm(Layer):
    """Scale and shift of a norm: the exact Fisher matrix of each unit, [U, k, k] with k = 2, or 1 without a shift."""

    factors: ClassVar[dict[str, str]] = {"unit": "samples"}
    whole_batch = True  # where it normalises over it, and it costs little

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        if isinstance(module, nn.LayerNorm):
            self.min_dims = 1 + len(module.normalized_shape)

    def sums(self, x: Tensor, grad_output: Tensor) -> Sums:
        x, grad_output = factors.accumulating(x), factors.accumulating(grad_output)
        normalised = self._normalised(x)
        parts = [normalised * grad_output, grad_output] if self.has_bias else [normalised * grad_output]
        gradients_NUk = torch.stack([self._per_sample(part) for part in parts], -1)
        moment = torch.einsum("nuj,nuk->ujk", gradients_NUk, gradients_NUk)
        return Sums({"unit": moment}, len(x), len(x))

    def _normalised(self, x: Tensor) -> Tensor:
        """What the scale is multiplied with."""
        module = self.module
        if isinstance(module, nn.LayerNorm):
            return F.layer_norm(x, module.normalized_shape, eps=module.eps)
        if isinstance(module, nn.GroupNorm):
            return F.group_norm(x, module.num_groups, eps=module.eps)
        return F.batch_norm(x, None, None, training=True, eps=module.eps)

    def _per_sample(self, gradient: Tensor) -> Tensor:
        """[N, U]: summed over what shares a unit."""
        if isinstance(self.module, nn.LayerNorm):
            units = self.module.weight.numel()
            return gradient.reshape(len(gradient), -1, units).sum(1)
        return gradient.reshape(*gradient.shape[:2], -1).sum(2)

    def matrix(self, *vectors: Tensor) -> Tensor:
        return torch.stack([vector.reshape(-1) for vector in vectors], -1)

    def set_gradient(self, gradient: Tensor) -> None:
        for i, parameter in enumerate(self.parameters()):
            parameter.grad.copy_(gradient[:, i].reshape(parameter.shape))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        k = len(self.parameters())
        return {"unit": (self.module.weight.numel(), k, k)}
