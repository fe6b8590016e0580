"""Which of a model's modules K-FAC takes: one line in `TYPES` a type."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parallel import DistributedDataParallel

from .layers import Convolution, Embedding, Layer, Linear, Norm, UncorrelatedConvolution

TYPES: dict[type[nn.Module], type[Layer]] = {
    nn.Linear: Linear,
    nn.Conv1d: Convolution,
    nn.Conv2d: Convolution,
    nn.Embedding: Embedding,
    nn.BatchNorm1d: Norm,
    nn.BatchNorm2d: Norm,
    nn.LayerNorm: Norm,
    nn.GroupNorm: Norm,
}


Skip = str | type | Iterable[str | type]
"""Regular expressions, which are searched for in names and names of classes; or classes."""


def layer_of(module: nn.Module, spatially_uncorrelated: bool = False) -> Layer | None:
    """The module as a layer; None for a type that is not supported, or where there is nothing to learn."""
    base = next((base for base in type(module).__mro__ if base in TYPES), None)
    weight = getattr(module, "weight", None)
    if base is None or not isinstance(weight, nn.Parameter) or not weight.requires_grad:  # or parametrized
        return None
    if not weight.is_floating_point():  # complex
        return None
    if type(module).forward is not base.forward or "forward" in vars(module):  # who knows what it does
        return None
    if isinstance(module, NonDynamicallyQuantizableLinear):  # MultiheadAttention's, which never calls it
        return None
    if isinstance(module, nn.Embedding) and (module.sparse or module.max_norm is not None or module.scale_grad_by_freq):
        return None
    layer = TYPES[base](module)
    uncorrelated = spatially_uncorrelated and UncorrelatedConvolution.fits(layer)
    return UncorrelatedConvolution(module) if uncorrelated else layer


def find(model: nn.Module, skip: Skip = (), spatially_uncorrelated: bool = False) -> tuple[dict[str, Layer], list[str]]:
    """The layers of a model, by name, without those whose name or class is in `skip`; and, as text, the modules and
    parameters that learn besides. Raises ValueError for parameters that are not there, or not whole, and for a pattern
    that is none.
    """
    layers, unsupported, patterns = {}, [], _patterns(skip)
    uses = Counter(of for module in model.modules() for of in set(module.parameters(recurse=False)))
    for name, module in model.named_modules():
        own = {of: parameter for of, parameter in module.named_parameters(recurse=False) if parameter.requires_grad}
        if not own or _is_skipped(name, module, patterns):
            continue
        if any(isinstance(parameter, nn.UninitializedParameter) for parameter in own.values()):
            raise ValueError(f"{name}: its parameters have no shape yet; run the model once before")
        require_whole(name, own.values())
        layer = layer_of(module, spatially_uncorrelated)
        if layer is None or any(uses[parameter] > 1 for parameter in own.values()):  # or tied: there is no one input
            has_others = next(module.children(), None) is not None  # which may be taken
            its_own = [f"{name}.{of}".lstrip(".") for of in own]
            unsupported += its_own if has_others else [f"{name} ({type(module).__name__})"]
            continue
        layers[name] = layer
        taken = set(layer.parameters())
        unsupported += [f"{name}.{of}" for of, parameter in own.items() if parameter not in taken]
    return layers, unsupported


def require_whole(name: str, parameters: Iterable[nn.Parameter]) -> None:
    """Raises ValueError for what FSDP2 (its DTensor), FSDP1 or DeepSpeed has sharded, if only the gradients."""
    for parameter in parameters:
        if hasattr(parameter, "device_mesh") or hasattr(parameter, "_fsdp_flattened"):
            raise ValueError(f"{name}: its parameters are sharded (FSDP), and K-FAC needs whole layers; use DDP")
        # DeepSpeed's own mark of a ZeRO-3 parameter: zero/utils.py, is_zero_param.
        if hasattr(parameter, "ds_id"):
            raise ValueError(
                f"{name}: its parameters are sharded (DeepSpeed, ZeRO stage 3), and K-FAC needs whole layers; use "
                "ZeRO stage 0, or DDP"
            )
        # What ZeRO 1 and 2 and DeepSpeed's bfloat16 optimizer add (utils/mixed_precision_linkage.py). They take the
        # gradients out of the parameters in the backward pass.
        if hasattr(parameter, "_hp_mapping"):
            raise ValueError(
                f"{name}: DeepSpeed takes its gradients away (ZeRO stage 1 or 2, or bfloat16 with an optimizer of "
                "DeepSpeed's), and K-FAC needs them in the parameters; use ZeRO stage 0, or DDP"
            )


def _is_skipped(name: str, module: nn.Module, patterns: list[re.Pattern | type]) -> bool:
    return any(
        isinstance(module, of) if isinstance(of, type) else of.search(name) or of.search(type(module).__name__)
        for of in patterns
    )


def _patterns(skip: Skip) -> list[re.Pattern | type]:
    patterns = []
    for of in [skip] if isinstance(skip, str | type) else skip:
        try:
            patterns.append(of if isinstance(of, type) else re.compile(of))
        except (re.error, TypeError) as error:
            raise ValueError(f"skip: {of!r} is no regular expression and no class ({error})") from error
    return patterns


def unwrapped(model: nn.Module) -> nn.Module:
    """Out of DistributedDataParallel and torch.compile: names are those of the model itself. Raises TypeError for what
    is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {type(model).__name__} is no torch.nn.Module")
    inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
    return model if inner is None else unwrapped(inner)
