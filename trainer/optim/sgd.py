"""SGD with momentum, Nesterov's or the classical one."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from .settings import MomentumSettings

# torch's at::internal::GRAIN_SIZE: a smaller tensor is the work of one thread. The fused kernel wakes all threads for
# each tensor, which costs more than it saves where most are smaller, as in ResNet-8.
GRAIN_SIZE = 32768


class Settings(MomentumSettings):
    """Stochastic gradient descent: v = momentum * v + g; w = w - lr * v."""

    name: Literal["sgd"] = "sgd"
    """Kind of optimizer."""


def build(settings: Settings, model: nn.Module) -> torch.optim.SGD:
    """Build torch's SGD, in which a change of the learning rate acts at once on the whole step.

    Its kernel is the fused one, which reads and writes each number once, on a GPU, and on a processor where the
    network's tensors are large enough to be shared among threads.
    """
    groups = settings.parameter_groups(model, settings.vector_lr_factor)
    optimizer = torch.optim.SGD(
        groups,
        lr=settings.lr,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        fused=_fused_pays([parameter for group in groups for parameter in group["params"]]) or None,
    )
    # A checkpoint says whether the kernel is the fused one, and a resumed run may have another memory format.
    optimizer.register_step_pre_hook(_lay_out_gradients)
    optimizer.register_load_state_dict_post_hook(_lay_out_momentum)
    return optimizer


def _fused_pays(parameters: list[nn.Parameter]) -> bool:
    if all(parameter.device.type == "cuda" for parameter in parameters):
        return True
    return sum(parameter.numel() for parameter in parameters) >= GRAIN_SIZE * len(parameters)


def _lay_out_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Give each gradient the order of its parameter in memory, by which alone torch's fused kernel goes.

    On a processor it takes one of another order for one of the same, and says nothing (torch 2.13). Autograd's have
    the same; those of a preconditioner may not.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None and gradient.stride() != parameter.stride():
                parameter.grad = _laid_out(gradient, parameter)


def _lay_out_momentum(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        if state.get("momentum_buffer") is not None:
            state["momentum_buffer"] = _laid_out(state["momentum_buffer"], parameter)


def _laid_out(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return `tensor`, or a copy in the order of `parameter` in memory if it has another one."""
    strides = zip(parameter.shape, tensor.stride(), parameter.stride(), strict=True)
    if all(size == 1 or its == own for size, its, own in strides):
        return tensor
    return torch.empty_like(parameter).copy_(tensor)
