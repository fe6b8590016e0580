"""K-FAC for any training loop and any optimizer:

preconditioner = KFAC(model, damping=0.003, factor_update_steps=10, inv_update_steps=100)
loss.backward(); preconditioner.step(); optimizer.step()
"""

from __future__ import annotations

import logging
from dataclasses import asdict, fields

import torch
from torch import Tensor, nn

from .assignment import Grid, Place, grid, place
from .communication import Exchange, Part, agreed, num_ranks, require_same
from .curvature_block import Block, cost
from .factor_updates import Updates
from .hooks import Capture
from .launch import require_connected
from .layers import Layer, Norm
from .registration import Skip, find, unwrapped
from .schedule import Turns
from .settings import CHANGEABLE, KFACSettings
from .solvers import SOLVERS, Solver
from .state_dict import merged
from .usage_checks import Watch

logger = logging.getLogger(__name__)

ATTRIBUTES = "settings", "steps", "model", "exchange", "blocks", "unsupported", "gradients_at_owners", "reduced"


class KFAC:
    """Replaces the gradients of a model's layers by preconditioned ones.

    `model`: any module, also in DistributedDataParallel. Linear, Conv1d, Conv2d, Embedding and the scales and shifts of
    norms are taken, unless their name or class matches one of the patterns `skip` (regular expressions, searched for,
    or classes); the rest keeps its gradients. The loss is a mean over samples, along the first dimension of a layer's
    input.

    Settings, with defaults and ranges in settings.py: `damping` λ is added to the curvature; `factor_update_steps` and
    `inv_update_steps`: how often a layer's factors are averaged (with `factor_decay`) and its solution is computed
    anew; at first, while a network changes fast, once in steps 0, 1, 2 to 3, 4 to 7, 8 to 15 and so on. With `stagger`
    the layers take turns in such a period, so that steps take equally long; without, all do it in its first step.
    `solver`: see solvers.py. `kl_clip` bounds the step of a learning rate `lr` in the metric of the Fisher matrix: all
    are scaled by min(1, √(kl_clip / (lr² |Σ ⟨D', D⟩|))); None for no bound. These may be set as attributes between
    steps, but for `stagger` and `solver`; `factor_update_steps` counts from the step after the next one.
    `accumulation_steps`: micro-batches per step; each one's loss was divided by it, and its backward pass comes before
    the next one's forward pass (otherwise factors are wrong). `factor_fraction`: of a batch's samples, those that enter
    the factors (not norms'), for less work. `spatially_uncorrelated` (SUA): neighbouring pixels are taken to be, in
    convolutions without groups and bias; far less work and memory where they are wide.
    `inv_dtype="bfloat16"`: solutions in half the memory, faster to apply where the hardware multiplies bfloat16; with
    low damping only for "eigen". `grad_scaler`: that of mixed precision; unscale the gradients before `step`.

    Over the ranks of torch.distributed: `grad_worker_fraction` of them precondition a layer, from 1 (each all of them;
    nothing but factors and solutions is sent) to 1 / world size (each its own; least memory). `local_factors`: a
    layer's factors come from its owner's part of the batch, and are not sent; layers of several owners then have their
    turns in the same steps. Ranks must have the same model and settings, and step together; they need not use the same
    layers in a step. Processes that a launcher or Horovod started together must be connected by torch.distributed
    before (else ValueError), unless each trains a network of its own: say so with `independent`.

    `unsupported`: the modules and parameters that keep their gradients, as K-FAC does not know them. Raises ValueError
    for a setting out of range, for a model without a layer to take or with layers on several devices, and where ranks
    differ. Martens and Grosse 2015; Grosse and Martens 2016; Pauloski et al. 2021.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        skip: Skip = (),
        grad_scaler: torch.amp.GradScaler | None = None,
        independent: bool = False,
        **settings: object,
    ) -> None:
        self.steps = self._first_step = 0
        self.model, self._grad_scaler = unwrapped(model), grad_scaler
        self._watch = Watch(self.model)
        with agreed():
            require_connected(independent)
            names = [field.name for field in fields(KFACSettings)]
            unknown = sorted(settings.keys() - set(names))
            if unknown:
                raise TypeError(f"KFAC has no setting {unknown[0]!r}; it has {', '.join(names)}")
            self.settings = KFACSettings(**settings)
            ranks = grid(num_ranks(), self.settings.grad_worker_fraction)
            self._check_settings(ranks)
            layers = self._find_layers(skip)
            if not layers:
                raise ValueError("model: it has no layer that K-FAC can precondition")
            devices = sorted({str(parameter.device) for of in layers.values() for parameter in of.parameters()})
            if len(devices) > 1:
                raise ValueError(f"model: its layers are on several devices: {', '.join(devices)}; allowed: one")
        self._solver: Solver = SOLVERS[self.settings.solver]()
        if self.unsupported:
            logger.warning("K-FAC leaves the gradients of these as they are: %s", ", ".join(self.unsupported))
        of_layers = {f"layer {name}": (str(of.module.weight.dtype), of.shapes()) for name, of in layers.items()}
        require_same(asdict(self.settings) | of_layers)
        self.exchange = Exchange(ranks)
        self.blocks = self._register(layers)
        by_owner = self.settings.local_factors and self.exchange.world_size > 1
        self._turns = Turns(self.settings.stagger, by_owner, self.blocks)
        self._updates = Updates(self.blocks, self.exchange, self.settings, self._turns, self._watch)
        self.gradients_at_owners = False  # and nowhere else, until `step`: see `reduce_to_owners`
        self.reduced: set[int] = set()  # DDP's buckets that are so now
        self._removed = False
        self._cosines: dict[str, Tensor] = {}
        self._arm()

    def __getattr__(self, name: str) -> object:
        if name in KFACSettings.__dataclass_fields__:
            return getattr(self.settings, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        if name in CHANGEABLE:
            setattr(self.settings, name, value)
        elif name in KFACSettings.__dataclass_fields__:
            raise AttributeError(f"{name}: cannot be changed; build the preconditioner anew")
        elif name.startswith("_") or name in ATTRIBUTES:
            object.__setattr__(self, name, value)
        else:
            raise AttributeError(f"{name}: no setting; those that can be changed are {', '.join(CHANGEABLE)}")

    # --- what a training loop calls ---

    @torch.no_grad()
    def step(self) -> None:
        """Precondition the gradients, in place, once the micro-batches of a step are through; every rank calls it,
        with gradients of the same layers. Raises RuntimeError when no layer has a gradient, when all are as the last
        step left them, and after `remove`.
        """
        if self._removed:
            raise RuntimeError("the preconditioner has been taken away with remove()")
        present = self._watch.drop_removed({name: block.layer.module for name, block in self.blocks.items()})
        with_gradient = {name: self.blocks[name] for name in present if self.blocks[name].has_gradient()}
        self._watch.warn_of_incomplete([name for name in present if self.blocks[name].has_part_of_gradient()])
        parameters = {name: block.layer.parameters() for name, block in with_gradient.items()}
        self._watch.require_new_gradients(parameters)
        self._updates.average()
        self._warn_of_unused(with_gradient)
        self._refresh()
        ready = {name: block for name, block in with_gradient.items() if self._is_ready(block)}
        self._precondition(ready)
        if self.gradients_at_owners:
            self._send_raw([of for name, of in self.blocks.items() if not (of.is_norm or name in ready)])
        self._watch.remember_gradients(parameters)
        self.steps += 1
        self._arm()

    @torch.no_grad()
    def discard(self) -> None:
        """Forget what was captured since the last step: after a backward pass that no step follows, such as that of
        another loss. Every rank calls it.
        """
        self._updates.send_rest()
        for block in self.blocks.values():
            block.discard()
        self._arm()

    def cosines(self) -> dict[str, float]:
        """Of the last step: the cosine between the raw and the preconditioned gradient, by the layer's name.

        1 means that a layer is not preconditioned, but at most scaled; a gradient of zero has none (NaN). Waits for the
        device, once.
        """
        if not self._cosines:
            return {}
        return dict(zip(self._cosines, torch.stack([*self._cosines.values()]).tolist(), strict=True))

    def factors(self, name: str) -> tuple[Tensor, ...]:
        """A layer's current (a_factor, g_factor): [G, n, n] (an embedding's [1, n], a diagonal) and [G, m, m]; of a
        norm the one (unit_factor,), [U, k, k]; of EKFAC also the diagonal, [G, m, n]. Empty on ranks that do not own
        the layer. Raises KeyError for a name that is not in `layers()`.
        """
        return tuple(self.blocks[name].factor(factor) for factor in self.blocks[name].averages)

    def layers(self) -> dict[str, int]:
        """The layers that are preconditioned, and the rank that owns each; a norm belongs to all, noted as -1."""
        return {name: -1 if block.is_norm else block.place.owner for name, block in self.blocks.items()}

    def parameters(self, name: str) -> list[nn.Parameter]:
        """Those of a layer."""
        return self.blocks[name].layer.parameters()

    def skipped(self) -> int:
        """How many factors of a step were left out, since they were not finite (or, over several ranks, since none used
        the layer): of the layers that this rank owns, and on rank 0 of norms, so that the ranks' sum has each once.
        Waits for the device, as `fallbacks()` does.
        """
        blocks = [block for block in self.blocks.values() if self.exchange.rank == 0 or not block.is_norm]
        return sum(int(average.skipped) for block in blocks for average in block.averages.values())

    def fallbacks(self) -> int:
        """How many times no solution was found for a layer of this rank, and the one before stayed in use."""
        return int(self._solver.fallbacks)

    def memory_usage(self) -> dict[str, int]:
        """Bytes on this rank: of the factors, of the solutions, and of the factors captured since the last step (not of
        inputs that are kept until their gradients are there).
        """
        kinds = {"factors": 0, "solutions": 0, "captured": 0}
        for block in self.blocks.values():
            kinds["factors"] += sum(average.value.nbytes for average in block.averages.values())
            kinds["solutions"] += sum(tensor.nbytes for tensor in block.state.values())
            kinds["captured"] += sum(tensor.nbytes for tensor in (block.capture.moments | block.new).values())
        return kinds

    def communication(self) -> dict[str, float]:
        """Bytes a step that this rank has given to collectives, by kind, in the mean over the steps so far (since a
        state was loaded): factors, solutions, preconditioned gradients, and those that `reduce_to_owners` reduces.
        """
        sent, steps = self.exchange.bytes_sent, max(1, self.steps - self._first_step)
        return {kind: sent[kind] / steps for kind in ("factors", "solutions", "gradients", "reduced")}

    def remove(self) -> None:
        """Take the hooks away, and leave DDP's gradients to DDP: before another is built for the model. Every rank
        calls it.
        """
        self._updates.send_rest()
        for block in self.blocks.values():
            block.capture.remove()
        self._removed, self.gradients_at_owners = True, False
        self.exchange.close()

    def __reduce__(self) -> tuple:
        raise TypeError("a preconditioner belongs to its model: build one for the copy, and load the state_dict()")

    # --- state ---

    def state_dict(self) -> dict:
        """All that the next steps depend on, apart from the settings: of the layers that this rank owns."""
        return {
            "steps": self.steps,
            "solver": self.settings.solver,
            "factor_update_steps": self._updates.every,
            "fallbacks": self.fallbacks(),
            "layers": {name: block.state_dict() for name, block in self.blocks.items() if block.is_owner},
        }

    def load_state_dict(self, *states: dict) -> None:
        """Go on where another preconditioner of the same model was. `states`: of all its ranks, however many.

        Raises ValueError when they had other layers, shapes or another solver, or are of several steps; nothing is
        changed then.
        """
        layers = merged(states, self.state_dict().keys(), self.settings.solver, self.blocks)
        self.steps = self._first_step = states[0]["steps"]
        self.exchange.bytes_sent.clear()
        self._solver.fallbacks = sum(state["fallbacks"] for state in states) if self.exchange.rank == 0 else 0
        self._turns.forget()
        for name, block in self.blocks.items():
            block.load_state_dict(layers[name], block.place.column == self.exchange.column)
        self._arm(states[0]["factor_update_steps"])

    # --- registration ---

    def _register(self, layers: dict[str, Layer]) -> dict[str, Block]:
        costs = {name: cost(layer) for name, layer in layers.items() if not isinstance(layer, Norm)}
        places = place(costs, self.exchange.grid, self.settings.inv_update_steps)
        rank, blocks = self.exchange.rank, {}
        for name, layer in layers.items():
            capture = Capture(layer, self._gradient_scale, self.settings.factor_fraction)
            blocks[name] = Block(capture, places.get(name, Place(0, 0)), rank, self.settings.inv_dtype)
        return blocks

    def _check_settings(self, ranks: Grid) -> None:
        """Raise ValueError for settings that are in range, and impossible for this kind of preconditioner."""

    def _find_layers(self, skip: Skip) -> dict[str, Layer]:
        layers, self.unsupported = find(self.model, skip, self.settings.spatially_uncorrelated)
        return layers

    def scales_gradients(self) -> bool:
        """Is there a scaler of mixed precision at work?"""
        return self._grad_scaler is not None and self._grad_scaler.is_enabled()

    def _gradient_scale(self) -> float | Tensor:
        scaler = self._grad_scaler
        if not self.scales_gradients():
            return float(self.settings.accumulation_steps)
        scale = scaler._scale  # on the device; get_scale() would wait for it
        return self.settings.accumulation_steps / (scaler.get_scale() if scale is None else scale)

    # --- a step ---

    def _warn_of_unused(self, with_gradient: dict[str, Block]) -> None:
        unused = [name for name, block in with_gradient.items() if block.capture.wanted and not block.has_factors]
        self._watch.warn_of_unused(unused)

    def _refresh(self) -> None:
        due: dict[int, list[Part]] = {}
        for name, block in self.blocks.items():
            if block.is_norm or not block.has_factors:
                continue
            if block.has_solution and not self._turns.refreshes(name, self.steps, self.settings.inv_update_steps):
                continue
            block.has_solution = True
            if block.place.column == self.exchange.column:
                self._refresh_block(block)
                due.setdefault(block.place.owner, []).extend(block.solution(self._solver))
        self.exchange.send_solutions(due)

    def _refresh_block(self, block: Block) -> None:
        block.refresh(self._solver, self.settings.damping)

    def _solve(self, block: Block, gradient: Tensor) -> Tensor:
        return block.precondition(self._solver, gradient, self.settings.damping)

    def _is_ready(self, block: Block) -> bool:
        return block.has_factors if block.is_norm else block.has_solution

    def _precondition(self, blocks: dict[str, Block]) -> None:
        column = self.exchange.column
        found, numbers, sent = {}, {}, {}
        for name, block in blocks.items():
            raw = block.layer.gradient().to(block.dtype)
            if block.is_norm or block.place.column == column:
                found[name] = self._solve(block, raw)
                product = torch.dot(raw.flatten(), found[name].flatten())
                numbers[name] = torch.stack([product, product / (raw.norm() * found[name].norm())])
            else:
                found[name], numbers[name] = torch.empty_like(raw), raw.new_empty(2)
            if not block.is_norm:
                sent.setdefault(block.place.column, []).extend((Part(found[name]), Part(numbers[name])))
        self.exchange.send_gradients(sent)
        self._cosines = {name: cosine for name, (_, cosine) in numbers.items()}
        self._clip(list(found.values()), [product for product, _ in numbers.values()])
        for name, block in blocks.items():
            block.layer.set_gradient(found[name])

    def _send_raw(self, blocks: list[Block]) -> None:
        """From the owners, where only they have them."""
        sent = {}
        for block in blocks:
            parts = [Part(parameter.grad) for parameter in block.layer.parameters() if parameter.grad is not None]
            if parts:
                sent.setdefault(block.place.column, []).extend(parts)
        self.exchange.send_gradients(sent)

    def _clip(self, gradients: list[Tensor], products: list[Tensor]) -> None:
        kl_clip, lr = self.settings.kl_clip, self.settings.lr
        if kl_clip is None or lr == 0 or not gradients:
            return
        divergence = (torch.stack(products).sum() * lr**2).abs().clamp(min=torch.finfo(torch.float32).tiny)
        torch._foreach_mul_(gradients, (kl_clip / divergence).sqrt().clamp(max=1))

    def _arm(self, every: int | None = None) -> None:
        """Begin the next step. `every`: in place of the setting, which may have changed since."""
        self._updates.arm(self.steps, every or self.settings.factor_update_steps)
        self.reduced.clear()
