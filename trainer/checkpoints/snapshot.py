"""Copies of a run's state in the host's memory, which are written while training continues."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Snapshot:
    """Copies tensors, into memory that the next copy uses again.

    A GPU copies into pinned memory when its stream comes to it, and the host does not wait: `wait` does.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[Any, ...], Tensor] = {}  # by the keys that lead to a tensor
        self._copied: torch.cuda.Event | None = None

    @torch.no_grad()
    def take(self, value: Any, name: str) -> Any:
        """Copy dicts, lists and tuples, with their tensors to the CPU; all else in them stays as it is.

        Args:
            value: The state. No earlier copy of the same name may be in use.
            name: Name of the state, unlike that of others.

        Returns:
            The copy, of which tensors on a GPU are complete after `wait`.
        """
        copy = self._copy(value, (name,))
        if torch.cuda.is_initialized():
            self._copied = torch.cuda.Event()
            self._copied.record()
        return copy

    def wait(self) -> None:
        """Wait until all copies are complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, value: Any, keys: tuple[Any, ...]) -> Any:
        if isinstance(value, dict):
            return {key: self._copy(item, (*keys, key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copy(item, (*keys, number)) for number, item in enumerate(value))
        if not isinstance(value, Tensor):
            return value
        memory = self._memory.get(keys)
        if memory is None or (memory.shape, memory.dtype, memory.stride()) != _layout(value):
            memory = self._memory[keys] = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
        return memory.copy_(value, non_blocking=True)


def _layout(tensor: Tensor) -> tuple[torch.Size, torch.dtype, tuple[int, ...]]:
    like = torch.empty_like(tensor, device="meta")  # in which a view has no gaps
    return like.shape, like.dtype, like.stride()
