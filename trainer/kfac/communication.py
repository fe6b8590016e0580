"""What ranks send to each other: factors to their owners, solutions down the columns, gradients along the rows.

Tensors travel in flat buffers, one for each sender or owner, and symmetric matrices as triangles. With one rank,
nothing is sent. See assignment.py for rows, columns and owners.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .assignment import Grid
from .symmetric import pack_triangle, packed_shape, unpack_triangle

BUCKET_BYTES = 4 << 20  # factors for one owner that are sent at once


class Message(NamedTuple):
    """A tensor to send, or to receive into. `symmetric`: its last two dimensions are symmetric matrices."""

    tensor: Tensor
    symmetric: bool = False


class Communicator:
    """The collectives of K-FAC, over all ranks of the default process group.

    They run in process groups of their own: in one group all ranks must issue collectives in the same order, and DDP
    issues its own in between. Every rank must make the same calls in the same order.

    Attributes:
        bytes_sent: Bytes that this rank has given to collectives, by kind: "factors" (to reduce), "solutions" and
            "gradients" (to broadcast, counted by the sender), and "reduced" (gradients, by `reduce_to_owners`).
    """

    def __init__(self, grid: Grid) -> None:
        self.grid, self.world_size = grid, grid.num_rows * grid.num_columns
        self.rank = dist.get_rank() if self.world_size > 1 else 0
        self.column = self.rank % grid.num_columns
        self.bytes_sent: Counter[str] = Counter()
        self._buckets: dict[int | None, list[tuple[Tensor, Sequence[Message]]]] = {}  # to send, by owner
        self._reducing: list[tuple[dist.Work, Tensor, list[Sequence[Message]]]] = []
        self._all: dist.ProcessGroup | None = None
        self._row: dist.ProcessGroup | None = None
        self._column: dist.ProcessGroup | None = None
        if self.world_size > 1:
            timeout = _timeout_of_default_group()
            self._all = self._row = self._column = dist.new_group(timeout=timeout)
            if min(grid) > 1:  # every rank takes part in making every group
                firsts = range(0, self.world_size, grid.num_columns)
                rows = [dist.new_group(grid.grad_receivers(first), timeout) for first in firsts]
                columns = [dist.new_group(grid.grad_workers(column), timeout) for column in range(grid.num_columns)]
                self._row, self._column = rows[self.rank // grid.num_columns], columns[self.column]

    def start_reducing(self, messages: Sequence[Message], owner: int | None, is_used: bool) -> None:
        """Start to average a layer's factors, in the background, over the ranks that have used the layer.

        They are sent together with the next ones for the same owner, as soon as there are enough.

        Args:
            messages: The factors, with the same shapes on all ranks.
            owner: The rank that gets the averages; None for all ranks.
            is_used: Whether this rank has used the layer. If not, its factors do not count.
        """
        # They are followed by a 1, or by a 0 if they do not count.
        number = Message(messages[0].tensor.new_full((1,), float(is_used)))
        bucket = self._buckets.setdefault(owner, [])
        bucket.append((flatten_messages([*messages, number]), messages))
        if sum(flat.nbytes for flat, _ in bucket) >= BUCKET_BYTES:
            self._reduce(owner)

    def _reduce(self, owner: int | None) -> None:
        bucket = self._buckets.pop(owner)
        flat, layers = torch.cat([flat for flat, _ in bucket]), [messages for _, messages in bucket]
        self.bytes_sent["factors"] += flat.nbytes
        if owner is None:
            work = dist.all_reduce(flat, group=self._all, async_op=True)
        else:
            work = dist.reduce(flat, owner, group=self._all, async_op=True)
        self._reducing.append((work, flat, layers if owner in (None, self.rank) else []))

    def finish_reducing(self) -> None:
        """Wait for the averages, which are then in the tensors of the messages, on the ranks that they are for.

        They are not a number where no rank has used the layer.
        """
        for owner in list(self._buckets):
            self._reduce(owner)
        for work, flat, layers in self._reducing:
            work.wait()
            for messages in layers:
                size = sum(map(_num_elements, messages))
                unflatten_messages(flat[:size] / flat[size], messages)
                flat = flat[size + 1 :]
        self._reducing.clear()

    def maximum(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """Return the element-wise maximum over all ranks."""
        if self.world_size == 1:
            return list(numbers)
        largest = torch.tensor(numbers, device=device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._all)
        return [int(number) for number in largest.tolist()]

    def close(self) -> None:
        """Give the process groups back, in the same order on every rank."""
        groups = [group for group in (self._all, self._row, self._column) if group is not None]
        for group in dict.fromkeys(groups):
            dist.destroy_process_group(group)
        self._all = self._row = self._column = None

    def send_solutions(self, by_owner: Mapping[int, Sequence[Message]]) -> None:
        """Send each owner's solutions to the ranks of its column, in place; all owners are of this rank's column."""
        self._broadcast(by_owner, self._column, "solutions", self.grid.num_rows)

    def send_gradients(self, by_column: Mapping[int, Sequence[Message]]) -> None:
        """Send the gradients of each column, from its rank in this row to the others of the row, in place."""
        first = self.rank - self.column
        by_rank = {first + column: messages for column, messages in by_column.items()}
        self._broadcast(by_rank, self._row, "gradients", self.grid.num_columns)

    def _broadcast(
        self, by_rank: Mapping[int, Sequence[Message]], group: dist.ProcessGroup | None, kind: str, group_size: int
    ) -> None:
        if group_size == 1:
            return
        sent = []
        for rank, messages in sorted(by_rank.items()):
            for dtype in dict.fromkeys(message.tensor.dtype for message in messages):
                same_dtype = [message for message in messages if message.tensor.dtype == dtype]
                flat = flatten_messages(same_dtype)
                if rank == self.rank:
                    self.bytes_sent[kind] += flat.nbytes
                sent.append((dist.broadcast(flat, rank, group=group, async_op=True), flat, same_dtype, rank))
        for work, flat, messages, rank in sent:
            work.wait()
            if rank != self.rank:
                unflatten_messages(flat, messages)


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise on all ranks what one rank raises in the block, ValueError or TypeError: the others would wait for it."""
    error = None
    try:
        yield
    except (TypeError, ValueError) as caught:
        error = caught
    messages = _gather(None if error is None else str(error))
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise ValueError(f"rank {rank}: {message}")


def num_ranks() -> int:
    """Return the number of ranks: 1 where torch.distributed is not in use."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _timeout_of_default_group() -> timedelta | None:
    """Return how long collectives of the default process group may take; None where its backend does not tell."""
    group = dist.group.WORLD
    assert group is not None
    with suppress(AttributeError, RuntimeError):
        return group._get_backend(group._device_types[0]).options._timeout
    return None


def _gather(value: object) -> list[Any]:
    """Return the values of all ranks, which JSON can hold."""
    if num_ranks() == 1:
        return [value]
    # As all_gather_object does, which would unpickle what others send: that may run code.
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(num_ranks())]
    dist.all_gather(sizes, torch.tensor([len(own)], device=device))
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8, device=device)
    padded[: len(own)] = own
    everyones = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyones, padded)
    return [json.loads(bytes(its[: int(size)].cpu().numpy())) for its, size in zip(everyones, sizes, strict=True)]


def require_same(values: Mapping[str, object]) -> None:
    """Raise ValueError on every rank where the values are not the same on all ranks."""
    by_rank = _gather({name: str(value) for name, value in values.items()})
    for rank, others in enumerate(by_rank):
        for name in by_rank[0] | others:
            first, other = by_rank[0].get(name), others.get(name)
            if first != other:
                raise ValueError(f"{name}: {first} on rank 0, and {other} on rank {rank}; ranks must have the same")


def flatten_messages(messages: Sequence[Message]) -> Tensor:
    """Return the tensors one after the other, flat; the upper triangles of symmetric matrices."""
    return torch.cat([(pack_triangle(tensor) if symmetric else tensor).reshape(-1) for tensor, symmetric in messages])


def unflatten_messages(flat: Tensor, messages: Sequence[Message]) -> None:
    """Copy what `flatten_messages` has returned into the tensors of messages; `flat` may be longer."""
    for message in messages:
        tensor, symmetric = message
        received, flat = flat[: _num_elements(message)], flat[_num_elements(message) :]
        if symmetric:
            tensor.copy_(unpack_triangle(received.reshape(packed_shape(tensor.shape)), tensor.shape[-1]))
        else:
            tensor.copy_(received.reshape(tensor.shape))


def _num_elements(message: Message) -> int:
    """Return the number of elements that are sent."""
    return prod(packed_shape(message.tensor.shape) if message.symmetric else message.tensor.shape)
