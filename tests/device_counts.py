"""What a step costs a device, counted without one: on fake tensors, which have shapes and no content.

An operator counts as the kernels that it launches on CUDA, as far as its schema tells (a view launches none, and a
`_foreach_` operator one for so many tensors and blocks as `multi_tensor_apply` takes at once), and each kernel as the
bytes of all that it reads and writes. A compiler would fuse some of them. Backward passes are not possible on fake
CUDA tensors where torch was built without CUDA: count them on those of the processor, of the same dtypes.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NO_KERNEL = {  # and no view, by their schema
    "_local_scalar_dense", "_reshape_alias", "_unsafe_view", "device", "empty", "empty_like", "empty_strided",
    "is_same_size", "lift_fresh", "new_empty", "new_empty_strided", "record_stream", "resize_", "set_", "sym_size",
}  # fmt: skip
# Of the host for the device. eigh looks at once whether it converged.
WAITS = {"_local_scalar_dense", "masked_select", "nonzero", "is_nonzero", "_unique2", "_linalg_eigh"}
FILLS = {  # operators that write, and read nothing of what they are given
    "fill_", "full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zero_", "zeros_like",
}  # fmt: skip
LISTS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}  # tensors that multi_tensor_apply takes at once, by the number of lists
CHUNK, BLOCKS = 65_536, 320  # elements for a block, and blocks of a kernel, there
CAT = 128  # tensors that a kernel joins


class DeviceCounts(TorchDispatchMode):
    """Counts in a block, by `phase`, which the caller sets.

    Attributes:
        launches: Kernels.
        bytes: Bytes that kernels read and write.
        waits: Times that the host waits for the device.
        peak: Largest number of live bytes, of tensors that were made in the block or given to `track`.
        operators: Launches by (phase, operator).
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.launches: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.operators: Counter[tuple[str, str]] = Counter()
        self.live = 0
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def clear(self) -> None:
        """Begin counting again; what lives stays."""
        for counter in (self.launches, self.bytes, self.waits, self.peak, self.operators):
            counter.clear()

    def track(self, *tensors: Tensor) -> None:
        """Count the memory of tensors as live until they are freed."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage not in self._seen:
                self._seen[storage] = storage.nbytes()
                self.live += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, num_bytes: int) -> None:
        self.live -= num_bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        self.waits[self.phase] += name in WAITS or _copies_with_wait(name, args, kwargs)
        if name == "_local_scalar_dense":
            return 1.0
        result = func(*args, **kwargs)
        read = () if name in FILLS else (args[1:] if name == "copy_" else args, kwargs)
        given = [leaf for leaf in tree_leaves(read) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.track(*made)
        self.peak[self.phase] = max(self.peak[self.phase], self.live)
        if not (func.is_view or name in NO_KERNEL):
            count = _kernels(name, args)
            self.launches[self.phase] += count
            self.operators[self.phase, name] += count
            self.bytes[self.phase] += sum(tensor.nbytes for tensor in (*given, *made))
        return result


def _kernels(name: str, args: tuple[Any, ...]) -> int:
    if name.startswith("_foreach"):
        lists = [arg for arg in args if isinstance(arg, list | tuple) and arg and isinstance(arg[0], Tensor)]
        if not all(map(_are_alike, *lists)):
            return len(lists[0])  # one by one
        blocks = sum(math.ceil(tensor.numel() / CHUNK) for tensor in lists[0])
        depth = len(lists) + (not name.endswith("_"))
        return max(math.ceil(len(lists[0]) / LISTS[depth]), math.ceil(blocks / BLOCKS)) + (name == "_foreach_norm")
    if name in ("cat", "stack"):
        return math.ceil(len(args[0]) / CAT)
    return 2 if name == "dot" else 1  # cuBLAS adds the sums of blocks in a second kernel


def _are_alike(*tensors: Tensor) -> bool:
    """Return whether tensors are dense, and elements at the same place in memory belong together."""
    # A stride along one element does not count.
    strides = {tuple(s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1) for t in tensors}
    is_dense = all(1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) == t.numel() for t in tensors)
    return is_dense and len({tensor.shape for tensor in tensors}) == len(strides) == 1


def _copies_with_wait(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether it copies between the host and the device, and waits for it."""
    if name == "_to_copy":
        source, target, is_async = args[0].device, kwargs.get("device"), kwargs.get("non_blocking")
    elif name == "copy_":
        source, target = args[1].device, args[0].device
        is_async = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
    else:
        return False
    return target is not None and source.type != torch.device(target).type and not is_async


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Make all tensors in the block fake; networks can be built and initialised in it."""
    with (
        mock.patch("torch.Tensor.uniform_", lambda tensor, *_, **__: tensor),
        mock.patch("torch.Tensor.normal_", lambda tensor, *_, **__: tensor),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
    ):
        yield mode


def to_channels_last(network: nn.Module) -> None:
    """Move a network's kernels to channels-last memory, which `Module.to` cannot with fake tensors."""
    for module in network.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.dim() == 4:
                data = parameter.detach().to(memory_format=torch.channels_last)
                module._parameters[name] = nn.Parameter(data)
