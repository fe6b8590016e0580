"""Norms that are preconditioned together: a network has thousands of units, and each of them a system of 2×2.

A kernel for each norm would take longer to launch than to run. Letters: U units of all norms of a group, k parameters
of a unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from .curvature_block import CurvatureBlock
from .solvers import precondition_units


class NormGroup:
    """The preconditioned gradients of norms with parameters of one type, and as many for each unit.

    Attributes:
        gradient_Uk: The preconditioned gradient.
        numbers: For each norm ⟨D', D⟩ and the cosine between the raw gradient D and the preconditioned one D': [2].
    """

    def __init__(self, blocks: Mapping[str, CurvatureBlock], damping: float) -> None:
        """Precondition the gradients of norms, by name, with damping λ, above 0."""
        self._gradients = [block.layer.gradients() for block in blocks.values()]
        averages = [block.averages["unit"] for block in blocks.values()]
        self._sizes = [len(average.value) for average in averages]
        columns = [torch.cat([gradient.flatten() for gradient in each]) for each in zip(*self._gradients, strict=True)]
        raw_Uk = torch.stack(columns, -1).to(averages[0].value.dtype)
        factor = torch.cat([average.value for average in averages])
        is_known_U = torch.cat([average.weight.expand(len(average.value)) for average in averages]) > 0
        self.gradient_Uk = torch.where(is_known_U[:, None], precondition_units(factor, raw_Uk, damping), raw_Uk)
        products_3U = torch.stack([raw_Uk * self.gradient_Uk, raw_Uk.square(), self.gradient_Uk.square()]).sum(-1)
        sums_M3 = torch.stack([part.sum(1) for part in torch.split(products_3U, self._sizes, 1)])
        product, raw_square, square = sums_M3.unbind(1)
        numbers_M2 = torch.stack([product, product / (raw_square * square).sqrt()], 1)
        self.numbers = dict(zip(blocks, numbers_M2.unbind(), strict=True))

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return each parameter's gradient, and what is to be written into it."""
        columns = [torch.split(column, self._sizes) for column in self.gradient_Uk.T.contiguous()]
        for targets, parts in zip(self._gradients, zip(*columns, strict=True), strict=True):
            yield from ((target, part.reshape(target.shape)) for target, part in zip(targets, parts, strict=True))


def groups_of_norms(blocks: Iterable[tuple[str, CurvatureBlock]]) -> list[dict[str, CurvatureBlock]]:
    """Return the norms among layers, in groups of which each makes a `NormGroup`."""
    groups: dict[tuple[torch.dtype, int], dict[str, CurvatureBlock]] = {}
    for name, block in blocks:
        if block.is_norm:
            groups.setdefault((block.dtype, len(block.layer.parameters())), {})[name] = block
    return [*groups.values()]
