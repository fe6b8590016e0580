"""Which modules of a model K-FAC takes as layers. A supported type is one line in TYPES."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parallel import DistributedDataParallel

from .layers import Convolution, Embedding, Layer, Linear, UncorrelatedConvolution
from .norms import Norm

TYPES: dict[type[nn.Module], Callable[..., Layer]] = {
    nn.Linear: Linear,
    nn.Conv1d: Convolution,
    nn.Conv2d: Convolution,
    nn.Embedding: Embedding,
    nn.BatchNorm1d: Norm,
    nn.BatchNorm2d: Norm,
    nn.LayerNorm: Norm,
    nn.GroupNorm: Norm,
}

Pattern = str | type[object]
Skip = Pattern | Iterable[Pattern]
"""Regular expressions, which are searched for in the names of modules and of their classes; or classes."""


def make_layer(module: nn.Module, spatially_uncorrelated: bool = False) -> Layer | None:
    """Return the module as a layer; None if its type is not supported, or it has nothing to learn."""
    base = next((base for base in type(module).__mro__ if base in TYPES), None)
    weight = getattr(module, "weight", None)
    if base is None or not isinstance(weight, nn.Parameter) or not weight.requires_grad:  # or parametrized
        return None
    if not weight.is_floating_point():  # complex
        return None
    if type(module).forward is not base.forward or "forward" in vars(module):  # it may compute anything
        return None
    if isinstance(module, NonDynamicallyQuantizableLinear):  # MultiheadAttention's, which never calls it
        return None
    if isinstance(module, nn.Embedding) and (module.sparse or module.max_norm is not None or module.scale_grad_by_freq):
        return None
    layer = TYPES[base](module)
    is_uncorrelated = spatially_uncorrelated and UncorrelatedConvolution.fits(layer)
    return UncorrelatedConvolution(module) if is_uncorrelated else layer  # type: ignore[arg-type]  # fits: a convolution


def register_layers(
    model: nn.Module, skip: Skip = (), spatially_uncorrelated: bool = False
) -> tuple[dict[str, Layer], list[str]]:
    """Find the layers of a model.

    Args:
        model: Any module.
        skip: Modules to leave out, by name or class.
        spatially_uncorrelated: Take convolutions as `UncorrelatedConvolution`, where that fits.

    Returns:
        The layers by name, and the names of all other modules and parameters that learn.

    Raises:
        ValueError: There is no layer, layers are on several devices, parameters have no shape yet or are sharded, or
            `skip` is not a valid pattern.
    """
    layers: dict[str, Layer] = {}
    unsupported: list[str] = []
    patterns = _compile_patterns(skip)
    uses = Counter(parameter for module in model.modules() for parameter in set(module.parameters(recurse=False)))
    for module_name, module in model.named_modules():
        named = module.named_parameters(module_name, recurse=False)
        parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        if not parameters or _is_skipped(module_name, module, patterns):
            continue
        if any(isinstance(parameter, nn.UninitializedParameter) for parameter in parameters.values()):
            raise ValueError(f"{module_name}: its parameters have no shape yet; run the model once before")
        require_whole(module_name, parameters.values())
        layer = make_layer(module, spatially_uncorrelated)
        if layer is None or any(uses[parameter] > 1 for parameter in parameters.values()):  # or tied: it has two inputs
            if next(module.children(), None) is not None:  # the children may be supported
                unsupported += parameters
            else:
                unsupported.append(f"{module_name} ({type(module).__name__})")
            continue
        layers[module_name] = layer
        preconditioned = set(layer.parameters())
        unsupported += [name for name, parameter in parameters.items() if parameter not in preconditioned]
    if not layers:
        raise ValueError("model: it has no layer that K-FAC can precondition")
    devices = sorted({str(parameter.device) for layer in layers.values() for parameter in layer.parameters()})
    if len(devices) > 1:
        raise ValueError(f"model: its layers are on several devices: {', '.join(devices)}; allowed: one")
    return layers, unsupported


def require_whole(name: str, parameters: Iterable[nn.Parameter]) -> None:
    """Raise ValueError for parameters that FSDP2 (its DTensor), FSDP1 or DeepSpeed has sharded, or only the gradients.

    Args:
        name: The layer's name, for the message.
        parameters: The layer's parameters.
    """
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


def _is_skipped(name: str, module: nn.Module, patterns: list[re.Pattern[str] | type[object]]) -> bool:
    return any(
        isinstance(module, pattern)
        if isinstance(pattern, type)
        else pattern.search(name) or pattern.search(type(module).__name__)
        for pattern in patterns
    )


def _compile_patterns(skip: Skip) -> list[re.Pattern[str] | type[object]]:
    patterns: list[re.Pattern[str] | type[object]] = []
    for pattern in [skip] if isinstance(skip, str | type) else skip:
        try:
            patterns.append(pattern if isinstance(pattern, type) else re.compile(pattern))
        except (re.error, TypeError) as error:
            raise ValueError(f"skip: {pattern!r} is not a regular expression and not a class ({error})") from error
    return patterns


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel and torch.compile, so that names are those of the model itself.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {type(model).__name__} is not a torch.nn.Module")
    inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
    return model if inner is None else unwrap(inner)
