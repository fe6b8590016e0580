"""What ranks send each other: factors to their owners, solutions down the columns, gradients along the rows.

In flat buffers, one for each sender or owner, and symmetric matrices as triangles. Alone, nothing is sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .assignment import Grid
from .symmetric import fold, folded_shape, unfold

BUCKET_BYTES = 4 << 20  # factors for one owner that are sent at once


class Part(NamedTuple):
    """A tensor to be sent, or to be received into. `symmetric`: its last two dimensions are symmetric matrices."""

    tensor: Tensor
    symmetric: bool = False


@dataclass
class _Bucket:
    """Factors of several layers for one owner; each layer's are followed by a 1, or by a 0 where they are none."""

    flats: list[Tensor] = field(default_factory=list)
    parts: list[Sequence[Part]] = field(default_factory=list)


class Exchange:
    """Over all ranks of the default process group, in groups of its own: their order is not that of DDP's. Every rank
    must make the same calls in the same order.

    `bytes_sent`: what this rank has given to collectives, by kind: "factors" (to reduce), "solutions" and "gradients"
    (to broadcast, by the sender), and "reduced" (gradients, by `reduce_to_owners`).
    """

    def __init__(self, grid: Grid) -> None:
        self.grid, self.world_size = grid, grid.num_rows * grid.num_columns
        self.rank = dist.get_rank() if self.world_size > 1 else 0
        self.column = self.rank % grid.num_columns
        self.bytes_sent: Counter[str] = Counter()
        self._buckets: dict[int | None, _Bucket] = {}
        self._reducing: list[tuple[dist.Work, Tensor, list[Sequence[Part]]]] = []
        self._all = self._row = self._column = None
        if self.world_size > 1:
            self._all = self._row = self._column = dist.new_group()
            if min(grid) > 1:  # every rank takes part in making every group
                rows = [dist.new_group(grid.row(first)) for first in range(0, self.world_size, grid.num_columns)]
                columns = [dist.new_group(grid.column(number)) for number in range(grid.num_columns)]
                self._row, self._column = rows[self.rank // grid.num_columns], columns[self.column]

    def start_reducing(self, parts: Sequence[Part], owner: int | None, is_known: bool) -> None:
        """Average over the ranks that know the parts, in the background, for the owner, or where there is none for all.
        They are sent with the next ones of that owner, as soon as there are enough.
        """
        bucket = self._buckets.setdefault(owner, _Bucket())
        flat = pack(parts)
        bucket.flats += [flat, flat.new_full((1,), float(is_known))]
        bucket.parts.append(parts)
        if sum(flat.nbytes for flat in bucket.flats) >= BUCKET_BYTES:
            self._reduce(owner)

    def _reduce(self, owner: int | None) -> None:
        bucket = self._buckets.pop(owner)
        flat = torch.cat(bucket.flats)
        self.bytes_sent["factors"] += flat.nbytes
        if owner is None:
            work = dist.all_reduce(flat, group=self._all, async_op=True)
        else:
            work = dist.reduce(flat, owner, group=self._all, async_op=True)
        self._reducing.append((work, flat, bucket.parts if owner in (None, self.rank) else []))

    def finish_reducing(self) -> None:
        """The averages are then in the tensors that were given, on the ranks that they are for; not a number where no
        rank knew the parts.
        """
        for owner in list(self._buckets):
            self._reduce(owner)
        for work, flat, layers in self._reducing:
            work.wait()
            for parts in layers:
                size = sum(map(_size, parts))
                unpack(flat[:size] / flat[size], parts)
                flat = flat[size + 1 :]
        self._reducing.clear()

    def largest(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """Of all ranks, each."""
        if self.world_size == 1:
            return list(numbers)
        found = torch.tensor(numbers, device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._all)
        return found.tolist()

    def close(self) -> None:
        """Give the groups back, in the same order on every rank."""
        for group in dict.fromkeys(of for of in (self._all, self._row, self._column) if of is not None):
            dist.destroy_process_group(group)
        self._all = self._row = self._column = None

    def send_solutions(self, by_owner: Mapping[int, Sequence[Part]]) -> None:
        """Each owner's parts to its column, in place. Given only those of this rank's column."""
        self._broadcast(by_owner, self._column, "solutions", self.grid.num_rows)

    def send_gradients(self, by_column: Mapping[int, Sequence[Part]]) -> None:
        """Each column's parts from its rank in this row to the row, in place."""
        first = self.rank - self.column
        by_rank = {first + column: parts for column, parts in by_column.items()}
        self._broadcast(by_rank, self._row, "gradients", self.grid.num_columns)

    def _broadcast(self, by_rank: Mapping[int, Sequence[Part]], group, kind: str, size: int) -> None:
        if size == 1:
            return
        sent = []
        for rank, parts in sorted(by_rank.items()):
            for dtype in dict.fromkeys(part.tensor.dtype for part in parts):
                of_dtype = [part for part in parts if part.tensor.dtype == dtype]
                flat = pack(of_dtype)
                if rank == self.rank:
                    self.bytes_sent[kind] += flat.nbytes
                sent.append((dist.broadcast(flat, rank, group=group, async_op=True), flat, of_dtype, rank))
        for work, flat, parts, rank in sent:
            work.wait()
            if rank != self.rank:
                unpack(flat, parts)


@contextmanager
def agreed() -> Iterator[None]:
    """What one rank refuses in the block, with a ValueError or TypeError, all refuse: they would wait for it."""
    error = None
    try:
        yield
    except (TypeError, ValueError) as caught:
        error = caught
    messages = _of_ranks(None if error is None else str(error))
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise ValueError(f"rank {rank}: {message}")


def num_ranks() -> int:
    """1 where torch.distributed is not in use."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _of_ranks(value: object) -> list:
    if num_ranks() == 1:
        return [value]
    found = [None] * num_ranks()
    dist.all_gather_object(found, value)
    return found


def require_same(values: Mapping[str, object]) -> None:
    """Raises ValueError on every rank where they are not the same on all."""
    of_ranks = _of_ranks(dict(values))
    for rank, others in enumerate(of_ranks):
        for name in of_ranks[0] | others:
            first, other = of_ranks[0].get(name), others.get(name)
            if first != other:
                raise ValueError(f"{name}: {first} on rank 0, and {other} on rank {rank}; ranks must have the same")


def pack(parts: Sequence[Part]) -> Tensor:
    """Flat, one after the other; of symmetric matrices the upper triangles."""
    return torch.cat([(fold(tensor) if symmetric else tensor).reshape(-1) for tensor, symmetric in parts])


def unpack(flat: Tensor, parts: Sequence[Part]) -> None:
    """The reverse of `pack`, into the parts' tensors; `flat` may go on behind them."""
    for part in parts:
        tensor, symmetric = part
        sent, flat = flat[: _size(part)], flat[_size(part) :]
        if symmetric:
            tensor.copy_(unfold(sent.reshape(folded_shape(tensor.shape)), tensor.shape[-1]))
        else:
            tensor.copy_(sent.reshape(tensor.shape))


def _size(part: Part) -> int:
    """Elements that are sent."""
    return prod(folded_shape(part.tensor.shape) if part.symmetric else part.tensor.shape)
