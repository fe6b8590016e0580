"""What a step updates: factors, from the hooks of the backward pass into the running averages; solutions; gradients.

Gradients are preconditioned by the ranks that have the solutions, sent to the others, and clipped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .communication import Communicator, LayerFactors, Message
from .curvature_block import CurvatureBlock, layer_cost
from .norm_group import NormGroup, groups_of_norms
from .running_average import update_averages
from .schedule import StaggeredSchedule
from .settings import KL_CLIP_PER_SAMPLE, KFACSettings
from .usage_checks import MORE_MICRO_BATCHES, UsageChecks


class Updates:
    """Switches the hooks on by the schedule, and has what they sum sent to the owners, averaged, solved and applied.

    Attributes:
        every: The `factor_update_steps` by which the layers of this step were chosen.
        batch_size: Samples of a step, over all ranks and micro-batches; 0 while that is not known.
        factor_schedule: Schedule of which layers update their factors in a step.
    """

    def __init__(
        self,
        blocks: dict[str, CurvatureBlock],
        communicator: Communicator,
        settings: KFACSettings,
        checks: UsageChecks,
    ) -> None:
        self._blocks, self._communicator, self._checks = blocks, communicator, checks
        self._settings = settings  # as they were at first: those that may change come with each call
        self.every, self.batch_size = settings.factor_update_steps, 0
        self._complete: set[str] = set()  # layers whose micro-batches are all there
        for name, block in blocks.items():
            block.hook.on_complete = partial(self._end_micro_batch, name)
        self.reschedule()

    def reschedule(self) -> None:
        """Make a new schedule, as more is known about what the layers cost."""
        by_owner = self._settings.local_factors and self._communicator.world_size > 1
        groups, factor_costs, inverse_costs = {}, {}, {}
        for name, block in self._blocks.items():
            groups[name] = block.assignment.owner if by_owner and not block.is_norm else -1
            factor_costs[name], inverse_costs[name] = block.factor_cost(), layer_cost(block.layer).inverse
        self.factor_schedule = StaggeredSchedule(factor_costs, groups, self._settings.stagger)
        self._inverse_schedule = StaggeredSchedule(inverse_costs, groups, self._settings.stagger)

    def state_dict(self) -> dict[str, int]:
        """Return what the next steps depend on, the same on all ranks."""
        return {"factor_update_steps": self.every, "batch_size": self.batch_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from such a state, once the layers have theirs. `begin_step` is told the interval."""
        self.batch_size = state["batch_size"]
        self.reschedule()

    def begin_step(self, step: int, every: int) -> None:
        """Switch on the hooks of the layers whose factors are updated in this step.

        Args:
            step: The number of the step, from 0.
            every: Each layer is updated once in so many steps.
        """
        self.every = every
        for name, block in self._blocks.items():
            is_here = block.is_owner or not (self._settings.local_factors and block.has_factors)
            block.hook.begin_step(is_here and self.factor_schedule.is_turn(name, step, every))
        self._complete.clear()

    def _end_micro_batch(self, name: str, num_micro_batches: int) -> None:
        """Take a layer's factors if this was the last micro-batch. The hooks call it in the backward pass."""
        block = self._blocks[name]
        if name in self._complete:
            self._checks.warn(MORE_MICRO_BATCHES, [str(self._settings.accumulation_steps)])
            block.hook.clear()
        elif num_micro_batches == self._settings.accumulation_steps:
            block.begin_update()
            self._complete.add(name)

    def average(self, factor_decay: float) -> None:
        """Average the factors of this step in, after its last backward pass.

        Only now are they sent, by all ranks in the same order, whatever layers a rank has used, and in whatever order.
        """
        active = [block for block in self._blocks.values() if block.hook.is_active]
        for name, block in self._blocks.items():
            if block.hook.is_active and name not in self._complete:  # micro-batches are missing
                block.begin_update()
        self._average_over_ranks(active)
        first_used = [block for block in active if not block.has_factors]
        if first_used:
            sizes = [max(block.hook.batch_size for block in first_used), *(block.num_rows for block in first_used)]
            size, *numbers = self._communicator.maximum(sizes, first_used[0].device)
            self.batch_size = size * self._settings.accumulation_steps * self._communicator.world_size
            for block, number in zip(first_used, numbers, strict=True):
                block.num_rows = number
            self.reschedule()  # costs depend on these
        update_averages([block.end_update() for block in active], factor_decay)
        if active:
            self._checks.warn_of_new_parameters()

    def _average_over_ranks(self, active: Iterable[CurvatureBlock]) -> None:
        sent = []
        for block in active if self._communicator.world_size > 1 else ():
            if block.is_norm or not self._settings.local_factors:
                is_used, owner = bool(block.new), None if block.is_norm else block.assignment.owner
                sent.append(LayerFactors(block.factor_messages(), owner, is_used))
        if sent:
            self._communicator.finish_sums([self._communicator.sum_factors(sent)])

    def solve(self, step: int, settings: KFACSettings) -> None:
        """Compute the solutions that are due in a step, and send them down the columns."""
        by_owner: dict[int, list[Message]] = {}
        for name, block in self._blocks.items():
            if block.is_norm or not block.has_factors:
                continue
            if block.has_solution and not self._inverse_schedule.is_turn(name, step, settings.inv_update_steps):
                continue
            block.has_solution = True
            if block.assignment.column == self._communicator.column:
                block.update_inverse(settings)
                by_owner.setdefault(block.assignment.owner, []).extend(block.solution_messages())
        self._communicator.send_solutions(by_owner)

    def precondition(
        self, blocks: Mapping[str, CurvatureBlock], settings: KFACSettings
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Replace the gradients of layers by preconditioned ones, on all ranks.

        Args:
            blocks: The layers that have a gradient and a solution (or are norms), by name.
            settings: Settings as they are now.

        Returns:
            (cosines, factor): the cosine between the raw and the preconditioned gradient of each layer, and what the
            clip has multiplied them by: scalars on the device, the latter None where there is no clip.
        """
        if not blocks:
            return {}, None
        matrices = {name: block for name, block in blocks.items() if not block.is_norm}
        raw = {name: block.layer.gradient().to(block.dtype) for name, block in matrices.items()}
        own = {n: block for n, block in matrices.items() if block.assignment.column == self._communicator.column}
        gradients = {
            name: own[name].precondition(gradient, settings.damping) if name in own else torch.empty_like(gradient)
            for name, gradient in raw.items()
        }
        # Of each layer ⟨D', D⟩ and the cosine.
        numbers = {name: gradient.new_empty(2) for name, gradient in raw.items()}
        numbers |= _compare({name: raw[name] for name in own}, gradients)
        by_column: dict[int, list[Message]] = {}
        for name, block in matrices.items():
            messages = by_column.setdefault(block.assignment.column, [])
            messages.extend((Message(gradients[name]), Message(numbers[name])))
        self._communicator.send_gradients(by_column)
        norms = [NormGroup(group, settings.damping) for group in groups_of_norms(blocks.items())]
        for group in norms:
            numbers |= group.numbers
        kl_clip = KL_CLIP_PER_SAMPLE * self.batch_size if settings.kl_clip == "auto" else settings.kl_clip
        clipped = [*gradients.values(), *(group.gradient_Uk for group in norms)]
        factor = _clip(clipped, [numbers[name][0] for name in blocks], kl_clip, settings.lr)
        parts = [part for group in norms for part in group.parts()]
        for name, block in matrices.items():
            parts += block.layer.gradient_parts(gradients[name])
        _write(parts)
        return {name: numbers[name][1] for name in blocks}, factor

    def send_raw_gradients(self, preconditioned: Collection[str]) -> None:
        """Send the gradients of all other layers, as they are, from the owners to all ranks."""
        by_column: dict[int, list[Message]] = {}
        for name, block in self._blocks.items():
            gradients = [parameter.grad for parameter in block.layer.parameters() if parameter.grad is not None]
            if gradients and not (block.is_norm or name in preconditioned):
                by_column.setdefault(block.assignment.column, []).extend(map(Message, gradients))
        self._communicator.send_gradients(by_column)


def _compare(raw: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return of each raw gradient D, and the preconditioned one D' in `new`, ⟨D', D⟩ and the cosine: [2]."""
    numbers: dict[str, Tensor] = {}
    for dtype in {gradient.dtype for gradient in raw.values()}:
        names = [name for name, gradient in raw.items() if gradient.dtype == dtype]
        products = torch.stack([torch.dot(raw[name].flatten(), new[name].flatten()) for name in names])
        lengths = [torch.stack(torch._foreach_norm([each[name] for name in names])) for each in (raw, new)]
        numbers |= zip(names, torch.stack([products, products / (lengths[0] * lengths[1])], 1), strict=True)
    return numbers


def _write(parts: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair into the first."""
    alike = [pair for pair in parts if _have_same_layout(*pair)]
    if alike:  # A kernel copies many of these. If a single other pair were among them, each would take its own.
        targets, sources = zip(*alike, strict=True)
        torch._foreach_copy_(targets, sources)
    for target, source in parts:
        if not _have_same_layout(target, source):
            target.copy_(source)


def _have_same_layout(a: Tensor, b: Tensor) -> bool:
    return all(size == 1 or s == t for size, s, t in zip(a.shape, a.stride(), b.stride(), strict=True))


def _clip(gradients: list[Tensor], products: list[Tensor], kl_clip: float | None, lr: float) -> Tensor | None:
    """Multiply preconditioned gradients D', in place, by min(1, √(kl_clip / (lr² |Σ ⟨D', D⟩|))).

    So a step is not longer than allowed in the metric of the Fisher matrix. `products` are ⟨D', D⟩ of each with its raw
    gradient D. Return the factor, a scalar on the device; None where there is no bound.
    """
    if kl_clip is None or lr == 0:
        return None
    divergence = (torch.stack(products).sum() * lr**2).abs().clamp(min=torch.finfo(torch.float32).tiny)
    factor = (kl_clip / divergence).sqrt().clamp(max=1)
    torch._foreach_mul_(gradients, factor)
    return factor
