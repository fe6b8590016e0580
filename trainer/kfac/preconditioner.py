"""K-FAC for any training loop and any optimizer:

    preconditioner = KFAC(model, lr=0.1, damping=0.003)
    loss.backward(); preconditioner.step(); optimizer.step()

with `preconditioner.lr` set to the optimizer's learning rate whenever that changes.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .assignment import Assignment, Grid, assign_layers, make_grid
from .communication import Communicator, Message, num_ranks, raise_on_all_ranks, require_same
from .curvature_block import CurvatureBlock, layer_cost
from .factor_updates import FactorUpdates
from .gradients import precondition_gradients, send_raw_gradients
from .hooks import StatisticsHook
from .layers import Layer, Norm
from .registration import Skip, register_layers, unwrap
from .settings import Auto, InverseDtype, KFACSettings, SolverName
from .solvers import SOLVERS, Solver
from .state_dict import merge_state_dicts
from .usage_checks import UsageChecks, require_connected

logger = logging.getLogger(__name__)


class KFAC:
    """Replaces the gradients of a model's layers by preconditioned ones.

    Layers are Linear, Conv1d, Conv2d, Embedding, and the scales and shifts of norms; all other parameters keep their
    gradients. The loss must be a mean over samples, which are the first dimension of a layer's input.

    Over the ranks of torch.distributed, all must have the same model and settings, and call `step` together; they need
    not use the same layers in a step. Martens and Grosse 2015; Grosse and Martens 2016; Pauloski et al. 2021.

    Attributes:
        steps: Number of times that `step` has been called.
        unsupported: Names of the modules and parameters that keep their gradients, as K-FAC does not know them.
        model: The model, without DistributedDataParallel.
        communicator: The ranks, and what this one has sent.
        blocks: The layers' factors and solutions, by name.
        gradients_at_owners: Whether `reduce_to_owners` is active: between backward() and `step` only a layer's owner
            has its whole gradient.
        reduced: Indices of the DDP buckets that have been reduced to owners in this step.
    """

    # So that a misspelt setting is an AttributeError, and does not silently become a new attribute.
    __slots__ = (
        "__weakref__", "_checks", "_clip_steps", "_clipped", "_cosines", "_first_step", "_grad_scaler", "_is_removed",
        "_settings", "_solver", "_updates", "blocks", "communicator", "gradients_at_owners", "model", "reduced",
        "steps", "unsupported",
    )  # fmt: skip

    def __init__(
        self,
        model: nn.Module,
        *,
        damping: float = KFACSettings.damping,
        factor_update_steps: int = KFACSettings.factor_update_steps,
        inv_update_steps: int = KFACSettings.inv_update_steps,
        factor_decay: float = KFACSettings.factor_decay,
        kl_clip: float | Auto | None = KFACSettings.kl_clip,
        lr: float = KFACSettings.lr,
        accumulation_steps: int = KFACSettings.accumulation_steps,
        factor_fraction: float = KFACSettings.factor_fraction,
        solver: SolverName = KFACSettings.solver,
        stagger: bool = KFACSettings.stagger,
        spatially_uncorrelated: bool = KFACSettings.spatially_uncorrelated,
        inv_dtype: InverseDtype | None = KFACSettings.inv_dtype,
        grad_worker_fraction: float = KFACSettings.grad_worker_fraction,
        local_factors: bool = KFACSettings.local_factors,
        skip: Skip = (),
        grad_scaler: torch.amp.GradScaler | None = None,
        independent: bool = False,
    ) -> None:
        """Register the layers of a model.

        The first six settings may be changed between steps, as attributes: `preconditioner.damping = 0.01`.

        Args:
            model: Any module, also in DistributedDataParallel or compiled.
            damping: Damping λ, which is added to the curvature; above 0.
            factor_update_steps: A layer's factors are averaged once in so many steps. In the first ones, while a
                network changes fast, once in step 0, 1, 2 to 3, 4 to 7, 8 to 15 and so on. A changed value takes effect
                one step late: the layers of the next step are already chosen.
            inv_update_steps: A layer's solution is computed once in so many steps; at first more often, as factors are.
            factor_decay: The weight of what was before in the factors' running averages; from 0 to below 1.
            kl_clip: Bounds the length of the optimizer's step, as if it were `lr` times the gradient, in the metric of
                the Fisher matrix: gradients are scaled by min(1, √(kl_clip / (lr² |Σ ⟨D', D⟩|))). "auto": 3e-7 times
                the samples of a step, over all ranks and micro-batches. None for no bound.
            lr: The optimizer's learning rate, for `kl_clip`. Set it to that of each step if it changes.
            accumulation_steps: Micro-batches in a step. The loss of each was divided by this number, and its backward
                pass comes before the next one's forward pass. Otherwise factors are wrong.
            factor_fraction: The share of a batch's samples that enters the factors, for less work; above 0 to 1. For
                a batch norm's factors these samples are the batch.
            solver: "eigen", with the damping on the product of the factors, or "cholesky", with the damping on each
                factor; see solvers.py.
            stagger: Layers take turns in updating their factors and solutions, so that all steps take about equally
                long. Without, all layers do it in the same step.
            spatially_uncorrelated: Assume that neighbouring pixels are uncorrelated (SUA, Laurent et al. 2018), so that
                one factor serves all elements of a kernel. Applies to convolutions without groups and bias, and saves
                most work and memory in wide layers.
            inv_dtype: "bfloat16" keeps solutions in half the memory, which are faster to apply where the hardware
                multiplies bfloat16; with low damping only for solver "eigen". None: the type of the factors.
            grad_worker_fraction: The share of the ranks that preconditions each layer, from 1 (all of them: nothing
                except factors and solutions is sent) to 1 / world size (one rank for each layer: least memory).
            local_factors: A layer's factors come from its owner's part of the batch, and are not sent. Layers of
                several owners then have their turns in the same steps.
            skip: Regular expressions, which are searched for in the names of modules and their classes, or classes:
                what matches keeps its gradients.
            grad_scaler: The scaler of mixed precision, if there is one; unscale the gradients before `step`.
            independent: This process trains a network of its own. Otherwise, processes that a launcher or Horovod has
                started together must be connected by torch.distributed before.

        Raises:
            ValueError: A setting is out of range, no layer is left to precondition, layers are on several devices,
                parameters are sharded, processes are not connected, or ranks differ.
            TypeError: `model` is not a module.
        """
        self.steps = self._first_step = 0
        self.model = unwrap(model)
        self._grad_scaler = grad_scaler if grad_scaler is not None and grad_scaler.is_enabled() else None
        self._checks = UsageChecks(self.model)
        with raise_on_all_ranks():
            require_connected(independent)
            self._settings = KFACSettings(
                damping=damping,
                factor_update_steps=factor_update_steps,
                inv_update_steps=inv_update_steps,
                factor_decay=factor_decay,
                kl_clip=kl_clip,
                lr=lr,
                accumulation_steps=accumulation_steps,
                factor_fraction=factor_fraction,
                solver=solver,
                stagger=stagger,
                spatially_uncorrelated=spatially_uncorrelated,
                inv_dtype=inv_dtype,
                grad_worker_fraction=grad_worker_fraction,
                local_factors=local_factors,
            )
            grid = make_grid(num_ranks(), self.settings.grad_worker_fraction)
            self._check_settings(grid)
            layers = self._find_layers(skip)
        if self.unsupported:
            logger.warning("K-FAC leaves the gradients of these as they are: %s", ", ".join(self.unsupported))
        described = {f"layer {name}": (str(layer.weight.dtype), layer.shapes()) for name, layer in layers.items()}
        require_same(asdict(self.settings) | described)
        self._solver: Solver = SOLVERS[self.settings.solver]()
        self.communicator = Communicator(grid)
        self.blocks = self._make_blocks(layers)
        self._updates = FactorUpdates(self.blocks, self.communicator, self.settings, self._checks)
        self.gradients_at_owners = False
        self.reduced: set[int] = set()
        self._is_removed = False
        self._cosines: dict[str, Tensor] = {}
        self._clipped: Tensor | int = 0  # on the device, once there was a clip
        self._clip_steps = 0
        self._begin_step(self.settings.factor_update_steps)

    # --- settings, and those of them that may be changed between steps ---

    @property
    def settings(self) -> KFACSettings:
        """The settings, as they are now."""
        return self._settings

    @property
    def damping(self) -> float:
        """λ, which is added to the curvature."""
        return self.settings.damping

    @damping.setter
    def damping(self, value: float) -> None:
        self._settings = replace(self._settings, damping=value)

    @property
    def factor_update_steps(self) -> int:
        """Steps in which each layer's factors are averaged once."""
        return self.settings.factor_update_steps

    @factor_update_steps.setter
    def factor_update_steps(self, value: int) -> None:
        self._settings = replace(self._settings, factor_update_steps=value)

    @property
    def inv_update_steps(self) -> int:
        """Steps in which each layer's solution is computed once."""
        return self.settings.inv_update_steps

    @inv_update_steps.setter
    def inv_update_steps(self, value: int) -> None:
        self._settings = replace(self._settings, inv_update_steps=value)

    @property
    def factor_decay(self) -> float:
        """The weight of what was before in the running averages."""
        return self.settings.factor_decay

    @factor_decay.setter
    def factor_decay(self, value: float) -> None:
        self._settings = replace(self._settings, factor_decay=value)

    @property
    def kl_clip(self) -> float | Auto | None:
        """The bound of the step, "auto", or None."""
        return self.settings.kl_clip

    @kl_clip.setter
    def kl_clip(self, value: float | Auto | None) -> None:
        self._settings = replace(self._settings, kl_clip=value)

    @property
    def lr(self) -> float:
        """The optimizer's learning rate, for `kl_clip`."""
        return self.settings.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._settings = replace(self._settings, lr=value)

    # --- what a training loop calls ---

    @torch.no_grad()
    def step(self) -> None:
        """Precondition the gradients, in place, after the last micro-batch of a step.

        Every rank calls it, with gradients of the same layers.

        Raises:
            RuntimeError: No layer has a gradient, all gradients are as the last step left them, or `remove` has been
                called.
        """
        if self._is_removed:
            raise RuntimeError("the preconditioner has been taken away with remove()")
        present = self._checks.drop_removed({name: block.layer.module for name, block in self.blocks.items()})
        with_gradient = {name: self.blocks[name] for name in present if self.blocks[name].has_gradient()}
        self._checks.warn_of_incomplete([name for name in present if self.blocks[name].has_partial_gradient()])
        parameters = {name: block.layer.parameters() for name, block in with_gradient.items()}
        self._checks.require_new_gradients(parameters)
        self._updates.average(self.settings.factor_decay)
        self._checks.warn_of_unused(
            [name for name, block in with_gradient.items() if block.hook.is_active and not block.has_factors]
        )
        self._update_inverses()
        ready = {name: block for name, block in with_gradient.items() if block.is_ready()}
        self._cosines, factor = precondition_gradients(
            ready, self.communicator, self._solve, self._updates.kl_clip(self.settings.kl_clip), self.settings.lr
        )
        if factor is not None:
            self._clipped, self._clip_steps = self._clipped + (factor < 1), self._clip_steps + 1
        if self.gradients_at_owners:
            others = [block for name, block in self.blocks.items() if not (block.is_norm or name in ready)]
            send_raw_gradients(others, self.communicator)
        self._checks.remember_gradients(parameters)
        self.steps += 1
        self._begin_step(self.settings.factor_update_steps)

    @torch.no_grad()
    def discard(self) -> None:
        """Forget the statistics since the last step. Every rank calls it.

        Call it after a backward pass that no step follows, such as that of another loss.
        """
        self._updates.send_rest()
        for block in self.blocks.values():
            block.discard()
        self._begin_step(self.settings.factor_update_steps)

    def cosines(self) -> dict[str, float]:
        """Return the cosine between the raw and the preconditioned gradient of each layer, in the last step.

        1 means that a layer's gradient is at most scaled. A gradient of zero has no cosine: NaN. Waits for the device,
        once.
        """
        if not self._cosines:
            return {}
        return dict(zip(self._cosines, torch.stack([*self._cosines.values()]).tolist(), strict=True))

    def clipped(self) -> tuple[int, int]:
        """Return how many steps `kl_clip` has made shorter, and how many had a clip, since this was built.

        Where it is nearly all of them, `kl_clip` decides how long steps are, and the learning rate does not. Waits for
        the device.
        """
        return int(self._clipped), self._clip_steps

    def factors(self, name: str) -> tuple[Tensor, ...]:
        """Return the factors of a layer: none on ranks that do not own it.

        Returns:
            (a_factor, g_factor): [G, n, n] (for an embedding [1, n], a diagonal) and [G, m, m]; for a norm
            (unit_factor,): [U, k, k]; with EKFAC for other layers also the diagonal, [G, m, n].

        Raises:
            KeyError: The name is not in `layers()`.
        """
        return tuple(self.blocks[name].factor(factor) for factor in self.blocks[name].averages)

    def layers(self) -> dict[str, int]:
        """Return the layers that are preconditioned, and the rank that owns each; -1 for norms, which all ranks own."""
        return {name: -1 if block.is_norm else block.assignment.owner for name, block in self.blocks.items()}

    def parameters(self, name: str) -> list[nn.Parameter]:
        """Return the parameters of a layer."""
        return self.blocks[name].layer.parameters()

    def scales_gradients(self) -> bool:
        """Return whether there is a scaler of mixed precision, and it is enabled."""
        return self._grad_scaler is not None

    def skipped(self) -> int:
        """Return how many factors of a step were left out, as they were not finite.

        Over several ranks, those of layers that no rank has used count as well. Each rank counts the layers that it
        owns, and rank 0 the norms, so that the sum over the ranks has each once. Waits for the device.
        """
        blocks = [block for block in self.blocks.values() if self.communicator.rank == 0 or not block.is_norm]
        return sum(int(average.skipped) for block in blocks for average in block.averages.values())

    def fallbacks(self) -> int:
        """Return how often a solution of this rank failed, and the one before stayed in use. Waits for the device."""
        return int(self._solver.fallbacks)

    def memory_usage(self) -> dict[str, int]:
        """Return the bytes on this rank of "factors", "solutions" and factors "captured" since the last step.

        They do not include inputs that are kept until their gradients are there.
        """
        usage = {"factors": 0, "solutions": 0, "captured": 0}
        for block in self.blocks.values():
            usage["factors"] += sum(average.value.nbytes for average in block.averages.values())
            usage["solutions"] += sum(tensor.nbytes for tensor in block.solution.values())
            usage["captured"] += sum(tensor.nbytes for tensor in (block.hook.sums | block.new).values())
        return usage

    def communication(self) -> dict[str, float]:
        """Return the bytes that this rank has given to collectives, by kind, in the mean over the steps so far.

        The kinds are "factors", "solutions", "gradients" (preconditioned ones) and "reduced" (those that
        `reduce_to_owners` reduces). Steps count since the preconditioner was built or has loaded a state.
        """
        sent, steps = self.communicator.bytes_sent, max(1, self.steps - self._first_step)
        return {kind: sent[kind] / steps for kind in ("factors", "solutions", "gradients", "reduced")}

    def remove(self) -> None:
        """Take the hooks away, and leave the reduction of gradients to DDP. Every rank calls it.

        Call it before another preconditioner is built for the model.
        """
        self._updates.send_rest()
        for block in self.blocks.values():
            block.hook.remove()
        self._is_removed, self.gradients_at_owners = True, False
        self.communicator.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a preconditioner belongs to its model: build one for the copy, and load the state_dict()")

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next steps depend on, except the settings, of the layers that this rank owns."""
        return {
            "steps": self.steps,
            "solver": self.settings.solver,
            **self._updates.state_dict(),
            "fallbacks": self.fallbacks(),
            "layers": {name: block.state_dict() for name, block in self.blocks.items() if block.is_owner},
        }

    def load_state_dict(self, *states: dict[str, Any]) -> None:
        """Continue where another preconditioner of the same model was.

        Args:
            *states: The states of all its ranks, however many there were.

        Raises:
            ValueError: The states have other layers, shapes or another solver, or are of several steps. Nothing is
                changed then.
        """
        layers = merge_state_dicts(states, {*self.state_dict()}, self.settings.solver, self.blocks)
        self.steps = self._first_step = states[0]["steps"]
        self.communicator.bytes_sent.clear()
        self._solver.fallbacks = sum(state["fallbacks"] for state in states) if self.communicator.rank == 0 else 0
        for name, block in self.blocks.items():
            block.load_state_dict(layers[name], block.assignment.column == self.communicator.column)
        self._updates.load_state_dict(states[0])
        self._begin_step(states[0]["factor_update_steps"])

    # --- registration ---

    def _check_settings(self, grid: Grid) -> None:
        """Raise ValueError for settings that are in range, and impossible for this kind of preconditioner."""

    def _find_layers(self, skip: Skip) -> dict[str, Layer]:
        layers, self.unsupported = register_layers(self.model, skip, self.settings.spatially_uncorrelated)
        if not layers:
            raise ValueError("model: it has no layer that K-FAC can precondition")
        devices = sorted({str(parameter.device) for layer in layers.values() for parameter in layer.parameters()})
        if len(devices) > 1:
            raise ValueError(f"model: its layers are on several devices: {', '.join(devices)}; allowed: one")
        return layers

    def _make_blocks(self, layers: dict[str, Layer]) -> dict[str, CurvatureBlock]:
        costs = {name: layer_cost(layer) for name, layer in layers.items() if not isinstance(layer, Norm)}
        assignments = assign_layers(costs, self.communicator.grid, self.settings.inv_update_steps)
        rank, blocks = self.communicator.rank, {}
        for name, layer in layers.items():
            hook = StatisticsHook(layer, self._gradient_scale, self.settings.factor_fraction)
            assignment = assignments.get(name, Assignment(0, 0))
            blocks[name] = CurvatureBlock(hook, assignment, rank, self.settings.inv_dtype)
        return blocks

    def _gradient_scale(self) -> float | Tensor:
        scaler = self._grad_scaler
        if scaler is None:
            return float(self.settings.accumulation_steps)
        scale = scaler._scale  # on the device; get_scale() would wait for it
        return self.settings.accumulation_steps / (scaler.get_scale() if scale is None else scale)

    # --- a step ---

    def _begin_step(self, factor_update_steps: int) -> None:
        self._updates.begin_step(self.steps, factor_update_steps)
        self.reduced.clear()

    def _update_inverses(self) -> None:
        by_owner: dict[int, list[Message]] = {}
        schedule = self._updates.schedule
        for name, block in self.blocks.items():
            if block.is_norm or not block.has_factors:
                continue
            if block.has_solution and not schedule.updates_inverse(name, self.steps, self.settings.inv_update_steps):
                continue
            block.has_solution = True
            if block.assignment.column == self.communicator.column:
                self._update_inverse(block)
                by_owner.setdefault(block.assignment.owner, []).extend(block.solution_messages(self._solver))
        self.communicator.send_solutions(by_owner)

    def _update_inverse(self, block: CurvatureBlock) -> None:
        block.update_inverse(self._solver, self.settings.damping)

    def _solve(self, block: CurvatureBlock, gradient: Tensor) -> Tensor:
        return block.precondition(self._solver, gradient, self.settings.damping)
