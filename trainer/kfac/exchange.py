"""What ranks send each other: factors to their owners, solutions down the columns, gradients along the rows.

In flat buffers, one for each sender, and symmetric matrices as triangles. Alone, nothing is sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .assignment import Grid


class Part(NamedTuple):
    """A tensor to be sent, or to be received into. `symmetric`: its last two dimensions are symmetric matrices."""

    tensor: Tensor
    symmetric: bool = False


class Exchange:
    """Over all ranks of the default process group, in groups of its own: their order is not that of DDP's.

    `bytes_sent`: what this rank has given to collectives, by kind: "factors" (to reduce), "solutions" and "gradients"
    (to broadcast, by the sender).
    """

    def __init__(self, grid: Grid) -> None:
        self.grid, self.world_size = grid, grid.num_rows * grid.num_columns
        self.rank = dist.get_rank() if self.world_size > 1 else 0
        self.column = self.rank % grid.num_columns
        self.bytes_sent: Counter[str] = Counter()
        self._reducing: list[tuple[dist.Work, Tensor, Sequence[Part]]] = []
        self._all = self._row = self._column = None
        if self.world_size > 1:  # every rank takes part in making every group
            self._all = dist.new_group()
            rows = [dist.new_group(grid.row(first)) for first in range(0, self.world_size, grid.num_columns)]
            columns = [dist.new_group(grid.column(number)) for number in range(grid.num_columns)]
            self._row, self._column = rows[self.rank // grid.num_columns], columns[self.column]

    def start_reducing(self, parts: Sequence[Part], owner: int | None) -> None:
        """Average over all ranks, in the background, for the owner, or where there is none for all."""
        if self.world_size == 1:
            return
        flat = pack(parts) / self.world_size
        self.bytes_sent["factors"] += flat.nbytes
        if owner is None:
            work = dist.all_reduce(flat, group=self._all, async_op=True)
        else:
            work = dist.reduce(flat, owner, group=self._all, async_op=True)
        self._reducing.append((work, flat, parts))

    def finish_reducing(self) -> None:
        """The averages are then in the tensors that were given, on the ranks that they are for."""
        for work, flat, parts in self._reducing:
            work.wait()
            unpack(flat, parts)
        self._reducing.clear()

    def largest(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """Of all ranks, each."""
        if self.world_size == 1 or not numbers:
            return list(numbers)
        found = torch.tensor(numbers, device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._all)
        return found.tolist()

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
            flat = pack(parts)
            if rank == self.rank:
                self.bytes_sent[kind] += flat.nbytes
            sent.append((dist.broadcast(flat, rank, group=group, async_op=True), flat, parts, rank))
        for work, flat, parts, rank in sent:
            work.wait()
            if rank != self.rank:
                unpack(flat, parts)


def pack(parts: Sequence[Part]) -> Tensor:
    """Flat, one after the other; of symmetric matrices the upper triangles."""
    return torch.cat([
        part.tensor[(..., *_triangle(part.tensor))].reshape(-1) if part.symmetric else part.tensor.reshape(-1)
        for part in parts
    ])  # fmt: skip


def unpack(flat: Tensor, parts: Sequence[Part]) -> None:
    """The reverse of `pack`, into the parts' tensors."""
    at = 0
    for tensor, symmetric in parts:
        if symmetric:
            rows, columns = _triangle(tensor)
            shape = torch.Size((*tensor.shape[:-2], len(rows)))
            upper = flat[at : at + shape.numel()].reshape(shape)
            tensor[..., rows, columns] = upper
            tensor[..., columns, rows] = upper
            at += upper.numel()
        else:
            tensor.copy_(flat[at : at + tensor.numel()].reshape(tensor.shape))
            at += tensor.numel()


def _triangle(matrix: Tensor) -> tuple[Tensor, Tensor]:
    n = matrix.shape[-1]
    return torch.triu_indices(n, n, device=matrix.device).unbind()
