"""The gradients of a step: preconditioned by the ranks that have the solutions, sent to the others, and clipped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from .communication import Communicator, Message
from .curvature_block import CurvatureBlock
from .settings import KFACSettings


def precondition_gradients(
    blocks: Mapping[str, CurvatureBlock],
    communicator: Communicator,
    settings: KFACSettings,
    kl_clip: float | None,
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Replace the gradients of layers by preconditioned ones, on all ranks.

    Args:
        blocks: The layers that have a gradient and a solution (or are norms), by name.
        communicator: The ranks.
        settings: Settings with the damping and the learning rate.
        kl_clip: The bound of the step, above 0; None for no bound.

    Returns:
        (cosines, factor): the cosine between the raw and the preconditioned gradient of each layer, and what the clip
        has multiplied them by: scalars on the device, the latter None where there is no clip.
    """
    gradients: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}  # of each layer ⟨D', D⟩ and the cosine
    by_column: dict[int, list[Message]] = {}
    for name, block in blocks.items():
        raw = block.layer.gradient().to(block.dtype)
        if block.is_norm or block.assignment.column == communicator.column:
            gradients[name] = block.precondition(raw, settings.damping)
            product = torch.dot(raw.flatten(), gradients[name].flatten())
            numbers[name] = torch.stack([product, product / (raw.norm() * gradients[name].norm())])
        else:
            gradients[name], numbers[name] = torch.empty_like(raw), raw.new_empty(2)
        if not block.is_norm:
            messages = by_column.setdefault(block.assignment.column, [])
            messages.extend((Message(gradients[name]), Message(numbers[name])))
    communicator.send_gradients(by_column)
    factor = _clip(list(gradients.values()), [product for product, _ in numbers.values()], kl_clip, settings.lr)
    for name, block in blocks.items():
        block.layer.set_gradient(gradients[name])
    return {name: cosine for name, (_, cosine) in numbers.items()}, factor


def _clip(gradients: list[Tensor], products: list[Tensor], kl_clip: float | None, lr: float) -> Tensor | None:
    """Multiply preconditioned gradients D', in place, by min(1, √(kl_clip / (lr² |Σ ⟨D', D⟩|))).

    So a step is not longer than allowed in the metric of the Fisher matrix. `products` are ⟨D', D⟩ of each with its raw
    gradient D. Return the factor, a scalar on the device; None where there is no bound.
    """
    if kl_clip is None or lr == 0 or not gradients:
        return None
    divergence = (torch.stack(products).sum() * lr**2).abs().clamp(min=torch.finfo(torch.float32).tiny)
    factor = (kl_clip / divergence).sqrt().clamp(max=1)
    torch._foreach_mul_(gradients, factor)
    return factor


def send_raw_gradients(blocks: Iterable[CurvatureBlock], communicator: Communicator) -> None:
    """Send the gradients of layers that are not preconditioned, as they are, from the owners to all ranks."""
    by_column: dict[int, list[Message]] = {}
    for block in blocks:
        gradients = [parameter.grad for parameter in block.layer.parameters() if parameter.grad is not None]
        if gradients:
            by_column.setdefault(block.assignment.column, []).extend(map(Message, gradients))
    communicator.send_gradients(by_column)
