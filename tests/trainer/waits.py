"""What makes the host wait for a device, seen on a processor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = (Tensor.tolist, Tensor.numpy, Tensor.cpu)


class _Numbers(TorchDispatchMode):
    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            self._waits.append(str(function))
        return function(*arguments, **(options or {}))


class _Copies(TorchFunctionMode):
    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, function, types, arguments=(), options=None):
        if function in COPIES:
            self._waits.append(function.__name__)
        return function(*arguments, **(options or {}))


@contextmanager
def waits() -> Iterator[list[str]]:
    """Yield a list, to which each number or copy that is taken out of a tensor adds its name."""
    names: list[str] = []
    with _Numbers(names), _Copies(names):
        yield names
