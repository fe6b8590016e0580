"""K-FAC for any training loop and any optimizer:

    preconditioner = KFAC(model, lr=0.1, damping=0.003)
    loss.backward(); preconditioner.step(); optimizer.step()

with `preconditioner.lr` set to the optimizer's learning rate whenever that changes.
"""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .agreement import num_ranks, raise_on_all_ranks, require_same
from .assignment import Assignment, Grid, assign_layers, make_grid
from .communication import Communicator, PartialSum
from .curvature_block import CurvatureBlock, layer_cost, merge_state_dicts
from .layers import Layer
from .norms import Norm
from .registration import register_layers, unwrap
from .settings import Auto, Changeable, KFACSettings, read_arguments, takes_settings
from .solvers import SOLVERS, Solver
from .updates import Updates
from .usage_checks import INCOMPLETE, UNUSED, UsageChecks, require_connected

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
        reduced: DDP's buckets in this step, by their index: what is being reduced, or None once that is done.
    """

    # So that a misspelt setting is an AttributeError, and does not silently become a new attribute.
    __slots__ = (
        "__weakref__", "_checks", "_clip_steps", "_clipped", "_cosines", "_first_step", "_is_removed", "_settings",
        "_solver", "_updates", "blocks", "communicator", "gradients_at_owners", "model", "reduced", "steps",
        "unsupported",
    )  # fmt: skip

    damping = Changeable[float]()
    factor_update_steps = Changeable[int]()
    inv_update_steps = Changeable[int]()
    factor_decay = Changeable[float]()
    kl_clip = Changeable[float | Auto | None]()
    lr = Changeable[float]()

    @takes_settings(KFACSettings)
    def __init__(self, model: nn.Module, **settings: Any) -> None:
        """Register the layers of a model.

        The first six settings may be changed between steps, as attributes: `preconditioner.damping = 0.01`.

        Args:
            model: Any module, also in DistributedDataParallel or compiled.
            **settings: Those of `KFACSettings`.

        Raises:
            ValueError: A setting is out of range, no layer is left to precondition, layers are on several devices,
                parameters are sharded, processes are not connected, or ranks differ.
            TypeError: `model` is not a module.
        """
        self.steps = self._first_step = 0
        self.model = unwrap(model)
        self._checks = UsageChecks(self.model)
        with raise_on_all_ranks():
            self._settings = read_arguments(type(self), settings)
            require_connected(self.settings.independent)
            grid = make_grid(num_ranks(), self.settings.grad_worker_fraction)
            self._check_settings(grid)
            layers = self._find_layers()
        if self.unsupported:
            logger.warning("K-FAC leaves the gradients of these as they are: %s", ", ".join(self.unsupported))
        described = {f"layer {name}": (str(layer.weight.dtype), layer.shapes()) for name, layer in layers.items()}
        require_same(self.settings.with_range() | described)
        self._solver: Solver = SOLVERS[self.settings.solver]()
        self.communicator = Communicator(grid)
        self.blocks = self._make_blocks(layers)
        self._updates = Updates(self.blocks, self.communicator, self.settings, self._checks)
        self.gradients_at_owners = False
        self.reduced: dict[int, PartialSum | None] = {}
        self._is_removed = False
        self._cosines: dict[str, Tensor] = {}
        self._clipped: Tensor | int = 0  # on the device, once there was a clip
        self._clip_steps = 0
        self._begin_step(self.settings.factor_update_steps)

    @property
    def settings(self) -> KFACSettings:
        """The settings, as they are now."""
        return self._settings

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
        self._checks.warn(INCOMPLETE, [name for name in present if self.blocks[name].has_partial_gradient()])
        parameters = {name: block.layer.parameters() for name, block in with_gradient.items()}
        self._checks.require_new_gradients(parameters)
        self._updates.average(self.settings.factor_decay)
        unused = [name for name, block in with_gradient.items() if block.hook.is_active and not block.has_factors]
        self._checks.warn(UNUSED, unused)
        self._updates.solve(self.steps, self.settings)
        ready = {name: block for name, block in with_gradient.items() if block.is_ready()}
        self._cosines, factor = self._updates.precondition(ready, self.settings)
        if factor is not None:
            self._clipped, self._clip_steps = self._clipped + (factor < 1), self._clip_steps + 1
        if self.gradients_at_owners:
            self._updates.send_raw_gradients(ready.keys())
        self._checks.remember_gradients(parameters)
        self.steps += 1
        self._begin_step(self.settings.factor_update_steps)

    @torch.no_grad()
    def discard(self) -> None:
        """Forget the statistics since the last step. Every rank calls it.

        Call it after a backward pass that no step follows, such as that of another loss.
        """
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
        return self.settings.grad_scaler is not None and self.settings.grad_scaler.is_enabled()

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
        for block in self.blocks.values():
            block.hook.remove()
        self._is_removed, self.gradients_at_owners = True, False
        self.communicator.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a preconditioner belongs to its model: build one for the copy, and load the state_dict()")

    # --- state ---

    def state_dict(self, with_solutions: bool = True) -> dict[str, Any]:
        """Return all that the next steps depend on, except the settings, of the layers that this rank owns.

        Without solutions, two thirds of it, the first step after loading computes all of them. EKFAC's always stay.
        """
        return {
            "steps": self.steps,
            "solver": self.settings.solver,
            **self._updates.state_dict(),
            "fallbacks": self.fallbacks(),
            "layers": {name: block.state_dict(with_solutions) for name, block in self.blocks.items() if block.is_owner},
        }

    def load_state_dict(self, *states: dict[str, Any]) -> None:
        """Continue where another preconditioner of the same model was.

        Args:
            *states: The states of all its ranks, however many there were.

        Raises:
            ValueError: The states have other layers, shapes or another solver, or are of several steps. Nothing is
                changed then.
        """
        layers = merge_state_dicts(states, self.state_dict(), self.blocks)
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

    def _find_layers(self) -> dict[str, Layer]:
        layers, self.unsupported = register_layers(self.model, self.settings.skip, self.settings.spatially_uncorrelated)
        return layers

    def _make_blocks(self, layers: dict[str, Layer]) -> dict[str, CurvatureBlock]:
        costs = {name: layer_cost(layer) for name, layer in layers.items() if not isinstance(layer, Norm)}
        assignments = assign_layers(costs, self.communicator.grid, self.settings.inv_update_steps)
        rank, blocks = self.communicator.rank, {}
        for name, layer in layers.items():
            assignment = assignments.get(name, Assignment(0, 0))
            blocks[name] = self._block_type(layer)(layer, assignment, rank, self._solver, self.settings)
        return blocks

    def _block_type(self, layer: Layer) -> type[CurvatureBlock]:
        return CurvatureBlock

    def _begin_step(self, factor_update_steps: int) -> None:
        self._updates.begin_step(self.steps, factor_update_steps)
        self.reduced.clear()
