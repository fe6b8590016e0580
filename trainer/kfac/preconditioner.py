"""K-FAC for any training loop and any optimizer:

    preconditioner = KFAC(model, damping=0.003, factor_update_steps=10, inv_update_steps=100)
    loss.backward(); preconditioner.step(); optimizer.step()
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from numbers import Integral, Real

import torch
from torch import Tensor, nn

from .assignment import spread
from .averages import RunningAverage
from .capture import Capture
from .layers import Layer, Norm, layer_of
from .solvers import SOLVERS, Solver, State, unit_solution

logger = logging.getLogger(__name__)


@dataclass
class KFACSettings:
    """The settings of `KFAC`; they may be changed between steps, apart from `solver` and `stagger`."""

    damping: float = 0.003
    factor_update_steps: int = 10
    inv_update_steps: int = 100
    factor_decay: float = 0.95
    kl_clip: float | None = 0.001
    lr: float = 0.1
    accumulation_steps: int = 1
    solver: str = "eigen"
    stagger: bool = True

    def __setattr__(self, name: str, value: object) -> None:
        _check(name, value)
        object.__setattr__(self, name, value)


ALLOWED = {
    "damping": (Real, lambda v: 0 < v < math.inf, "above 0"),
    "factor_update_steps": (Integral, lambda v: v >= 1, "whole numbers from 1"),
    "inv_update_steps": (Integral, lambda v: v >= 1, "whole numbers from 1"),
    "factor_decay": (Real, lambda v: 0 <= v < 1, "from 0 to below 1"),
    "kl_clip": (Real, lambda v: 0 < v < math.inf, "above 0, or None"),
    "lr": (Real, lambda v: 0 <= v < math.inf, "from 0"),
    "accumulation_steps": (Integral, lambda v: v >= 1, "whole numbers from 1"),
    "solver": (str, lambda v: v in SOLVERS, ", ".join(SOLVERS)),
    "stagger": (bool, lambda v: True, "True or False"),
}


def _check(name: str, value: object) -> None:
    kind, fits, allowed = ALLOWED[name]
    if value is None and name == "kl_clip":
        return
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool) or not fits(value):
        raise ValueError(f"{name}: {value!r} is out of range; allowed: {allowed}")


class KFAC:
    """Replaces the gradients of a model's layers by preconditioned ones.

    `model`: any module, also in DistributedDataParallel. Linear, Conv1d, Conv2d, Embedding and the scales and shifts of
    norms are taken, unless their name or class matches one of the patterns `skip` (regular expressions, searched for);
    the rest keeps its gradients. The loss is a mean over samples, along the first dimension of a layer's input.

    `damping` λ is added to the curvature; `factor_update_steps` and `inv_update_steps`: how often a layer's factors are
    averaged (with `factor_decay`) and its solution is computed anew. With `stagger` the layers take turns, so that
    steps take equally long; without, all do it in the same step. `solver`: see solvers.py. `kl_clip` bounds the
    step of a learning rate `lr` in the metric of the Fisher matrix: all are scaled by
    min(1, √(kl_clip / (lr² Σ ⟨D', D⟩))); None for no bound. `accumulation_steps`: micro-batches a step; each one's loss
    was divided by it. `grad_scaler`: that of mixed precision; unscale the gradients before `step`.

    Each of KFACSettings is an attribute that may be set between steps. Raises ValueError for a setting out of range and
    for a model without a layer to take. Martens and Grosse 2015; Grosse and Martens 2016.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        skip: Iterable[str] = (),
        grad_scaler: torch.amp.GradScaler | None = None,
        **settings: object,
    ) -> None:
        names = [field.name for field in fields(KFACSettings)]
        unknown = sorted(settings.keys() - set(names))
        if unknown:
            raise TypeError(f"KFAC has no setting {unknown[0]!r}; it has {', '.join(names)}")
        self.__dict__["settings"] = KFACSettings(**settings)
        self.steps = 0
        self._model, self._grad_scaler = model, grad_scaler
        self._solver: Solver = SOLVERS[self.settings.solver]()
        self._blocks: dict[str, _Block] = {}
        self._register([re.compile(pattern) for pattern in skip])
        self._turns: dict[int, tuple[dict[str, int], dict[str, int]]] = {}
        self._cosines: dict[str, Tensor] = {}
        self._arm()

    def __getattr__(self, name: str) -> object:
        if name in KFACSettings.__dataclass_fields__:
            return getattr(self.__dict__["settings"], name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        if name not in KFACSettings.__dataclass_fields__:
            object.__setattr__(self, name, value)
        elif name in ("solver", "stagger"):
            raise AttributeError(f"{name}: cannot be changed; build the preconditioner anew")
        else:
            setattr(self.settings, name, value)

    # --- what a training loop calls ---

    @torch.no_grad()
    def step(self) -> None:
        """Precondition the gradients, in place. Raises RuntimeError when no layer has any."""
        with_gradient = {name: block for name, block in self._blocks.items() if block.has_gradient()}
        if not with_gradient:
            raise RuntimeError("no layer has a gradient: call loss.backward() before step()")
        self._update_factors()
        self._refresh()
        self._precondition({name: block for name, block in with_gradient.items() if block.is_ready()})
        self.steps += 1
        self._arm()

    def cosines(self) -> dict[str, float]:
        """Of the last step: the cosine between the raw and the preconditioned gradient, by the layer's name.

        1 means that a layer is not preconditioned, but at most scaled.
        """
        return {name: cosine.item() for name, cosine in self._cosines.items()}

    def factors(self, name: str) -> tuple[Tensor, ...]:
        """A layer's current (a_factor, g_factor): [G, n, n] (an embedding's [1, n], a diagonal) and [G, m, m]; of a
        norm the one (unit_factor,), [U, k, k].
        """
        return tuple(average.value for average in self._blocks[name].averages.values())

    def skipped(self) -> int:
        """How many factors of a step were left out, since they were not finite."""
        return sum(int(average.skipped) for block in self._blocks.values() for average in block.averages.values())

    def fallbacks(self) -> int:
        """How many times no solution was found, and the one before stayed in use."""
        return self._solver.fallbacks

    def memory_usage(self) -> dict[str, int]:
        """Bytes on this rank: of the factors, of the solutions, and of what was captured since the last step."""
        kinds = {"factors": 0, "solutions": 0, "captured": 0}
        for block in self._blocks.values():
            kinds["factors"] += sum(average.value.nbytes for average in block.averages.values())
            kinds["solutions"] += sum(tensor.nbytes for tensor in (block.state or {}).values())
            kinds["captured"] += sum(tensor.nbytes for tensor in block.capture.moments.values())
        return kinds

    def state_dict(self) -> dict:
        """All that the next steps depend on, apart from the settings; tensors, numbers and text."""
        return {
            "steps": self.steps,
            "solver": self.settings.solver,
            "layers": {name: block.state_dict() for name, block in self._blocks.items()},
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on as the preconditioner whose state it is.

        Raises ValueError when that had other layers, shapes or another solver; nothing is changed then.
        """
        if state["solver"] != self.settings.solver:
            raise ValueError(f"solver: the state is of {state['solver']!r}, this preconditioner has {self.solver!r}")
        missing, unknown = self._blocks.keys() - state["layers"].keys(), state["layers"].keys() - self._blocks.keys()
        if missing or unknown:
            raise ValueError(f"layers: the state lacks {sorted(missing)}, and has {sorted(unknown)} besides")
        for name, block in self._blocks.items():
            averages, mine = state["layers"][name]["averages"], block.layer.shapes()
            saved = {factor: tuple(average["value"].shape) for factor, average in averages.items()}
            if saved != mine:
                raise ValueError(f"layer {name}: the state's factors are {saved}, the model's {mine}")
        self.steps = state["steps"]
        self._turns.clear()
        for name, block in self._blocks.items():
            block.load_state_dict(state["layers"][name])
        self._arm()

    def layers(self) -> list[str]:
        """The names of the layers that are preconditioned."""
        return list(self._blocks)

    def remove(self) -> None:
        """Take the hooks away."""
        for block in self._blocks.values():
            block.capture.remove()

    # --- registration ---

    def _register(self, skip: list[re.Pattern]) -> None:
        unsupported, seen = [], set()
        for name, module in self._model.named_modules():
            own = list(module.parameters(recurse=False))
            if not any(parameter.requires_grad for parameter in own):
                continue
            if any(pattern.search(name) or pattern.search(type(module).__name__) for pattern in skip):
                continue
            if any(isinstance(parameter, nn.UninitializedParameter) for parameter in own):
                raise ValueError(f"{name}: its parameters have no shape yet; run the model once before")
            layer = layer_of(module)
            if layer is None:
                unsupported.append(f"{name} ({type(module).__name__})")
            elif seen.isdisjoint(map(id, layer.parameters())):  # of tied weights, the first layer
                seen.update(map(id, layer.parameters()))
                self._blocks[name] = _Block(layer, self._gradient_scale)
        if not self._blocks:
            raise ValueError("model: it has no layer that K-FAC can precondition")
        if unsupported:
            logger.info("K-FAC leaves the gradients of these as they are: %s", ", ".join(unsupported))
        self._num_modules = sum(1 for _ in self._model.modules())

    def _gradient_scale(self) -> float | Tensor:
        """What makes of a scaled mean's gradient those of each sample's own loss, for one sample."""
        scaler = self._grad_scaler
        if scaler is None or not scaler.is_enabled():
            return float(self.accumulation_steps)
        scale = scaler._scale  # on the device; get_scale() would wait for it
        return self.accumulation_steps / (scaler.get_scale() if scale is None else scale)

    # --- a step ---

    def _update_factors(self) -> None:
        if any(block.capture.moments for block in self._blocks.values()):
            self._look_for_new_modules()
        for block in self._blocks.values():
            if block.capture.moments:
                block.num_rows = block.capture.num_rows
                for name, new in block.capture.factors().items():
                    block.averages[name].update(new, self.factor_decay)
                block.updated = True
            block.capture.clear()

    def _refresh(self) -> None:
        for name, block in self._blocks.items():
            if isinstance(block.layer, Norm) or not block.updated:
                continue
            if block.state is None or self._is_turn(name, "refresh", self.steps):
                a, g = (average.value for average in block.averages.values())
                found = self._solver.refresh(a, g, self.damping, block.state)
                if found is None:
                    self._solver.fallbacks += 1
                    kept = "keeps the one before" if block.state else "keeps its raw gradient"
                    logger.warning("K-FAC: no solution for layer %s at step %d; it %s", name, self.steps, kept)
                else:
                    block.state = found

    def _precondition(self, blocks: dict[str, _Block]) -> None:
        raw, found = {}, {}
        for name, block in blocks.items():
            raw[name] = block.layer.gradient().to(block.dtype)
            found[name] = self._solution(block, raw[name])
        products = torch.stack([(raw[name] * found[name]).sum(dtype=torch.float32) for name in blocks])
        sizes = torch.stack([raw[name].norm() * found[name].norm() for name in blocks]).to(products)
        self._cosines = dict(zip(blocks, (products / sizes).unbind(), strict=True))
        if self.kl_clip is not None and self.lr > 0:
            divergence = (products.sum() * self.lr**2).clamp(min=torch.finfo(products.dtype).tiny)
            scale = (self.kl_clip / divergence).sqrt().clamp(max=1)
            torch._foreach_mul_(list(found.values()), scale)
        for name, block in blocks.items():
            block.layer.set_gradient(found[name])

    def _solution(self, block: _Block, gradient: Tensor) -> Tensor:
        if isinstance(block.layer, Norm):
            (average,) = block.averages.values()
            return unit_solution(average.value, gradient, self.damping)
        return self._solver.precondition(block.state, gradient, self.damping)

    # --- whose turn it is ---

    def _arm(self) -> None:
        """Have those layers captured whose factors the next step updates."""
        for name, block in self._blocks.items():
            block.capture.wanted = not block.updated or self._is_turn(name, "update", self.steps)

    def _is_turn(self, name: str, work: str, step: int) -> bool:
        every = self.factor_update_steps if work == "update" else self.inv_update_steps
        return step % every == self._turn(work, every).get(name, 0)

    def _turn(self, work: str, every: int) -> dict[str, int]:
        """In which step of `every` each layer works; the first step, in which all do, has told what that costs."""
        if not self.stagger or every == 1 or self.steps == 0:
            return {}
        if (work, every) not in self._turns:
            costs = {name: block.cost(work) for name, block in self._blocks.items()}
            self._turns[work, every] = spread(costs, every)
        return self._turns[work, every]

    def _look_for_new_modules(self) -> None:
        number = sum(1 for _ in self._model.modules())
        if number != self._num_modules:
            logger.warning(
                "K-FAC was built for %d modules, and the model now has %d: what is new keeps its raw gradients; "
                "build the preconditioner anew", self._num_modules, number,
            )  # fmt: skip
            self._num_modules = number


class _Block:
    """A layer and what is known of it."""

    def __init__(self, layer: Layer, gradient_scale) -> None:
        self.layer = layer
        self.capture = Capture(layer, gradient_scale)
        weight = layer.module.weight
        self.dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.averages = {
            name: RunningAverage(shape, self.dtype, weight.device) for name, shape in layer.shapes().items()
        }
        self.state: State | None = None
        self.updated = False
        self.num_rows = 0

    def state_dict(self) -> dict:
        averages = {name: average.state_dict() for name, average in self.averages.items()}
        return {"averages": averages, "solution": self.state, "updated": self.updated, "num_rows": self.num_rows}

    def load_state_dict(self, state: dict) -> None:
        for name, average in self.averages.items():
            average.load_state_dict(state["averages"][name])
        device, solution = self.layer.module.weight.device, state["solution"]
        self.state = solution and {name: tensor.to(device, copy=True) for name, tensor in solution.items()}
        self.updated, self.num_rows = state["updated"], state["num_rows"]
        self.capture.clear()

    def has_gradient(self) -> bool:
        return all(parameter.grad is not None for parameter in self.layer.parameters())

    def is_ready(self) -> bool:
        return self.updated if isinstance(self.layer, Norm) else self.state is not None

    def cost(self, work: str) -> float:
        """Floating-point operations, up to a factor."""
        shapes = [shape for shape in self.layer.shapes().values() if len(shape) == 3]
        if work == "refresh":
            return float(sum(groups * n**3 for groups, n, _ in shapes))
        return float(sum(groups * n * n * self.num_rows for groups, n, _ in shapes))
