"""What ranks send to each other: factors to their owners, solutions down the columns, gradients along the rows.

Tensors travel in flat buffers, one for each sender or owner, and symmetric matrices as triangles. With one rank,
nothing is sent. See assignment.py for rows, columns and owners.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate, chain, pairwise
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .assignment import Grid
from .symmetric import pack_triangle, packed_shape, unpack_triangle

# As torch 2.13 calls it, which warns of the other name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Deliver = Callable[[Tensor, Tensor], None]  # takes, of a sum, what is this rank's and what is for all ranks


class Message(NamedTuple):
    """A tensor to send, or to receive into. `symmetric`: its last two dimensions are symmetric matrices."""

    tensor: Tensor
    symmetric: bool = False


class LayerFactors(NamedTuple):
    """A layer's factors, with the same shapes on all ranks.

    Attributes:
        messages: The factors, which become averages on the ranks that they are for.
        owner: The rank that gets the averages; None for all ranks.
        is_used: Whether this rank has used the layer. If not, its factors do not count.
    """

    messages: Sequence[Message]
    owner: int | None
    is_used: bool


class PartialSum(NamedTuple):
    """A sum over the ranks, of which each has an equal piece.

    It is added up in float64, in the order of the ranks: whatever the network between them, the bits are the same.

    Attributes:
        pieces: This rank's piece, by each rank: [ranks, elements].
        sizes: Elements for each rank, one behind the other, and last those for all ranks.
        deliver: Function that takes them.
        work: The collective that brings them.
        flat: All pieces of this rank's own tensors, which it reads.
    """

    pieces: Tensor
    sizes: list[int]
    deliver: Deliver
    work: dist.Work
    flat: Tensor


class Communicator:
    """The collectives of K-FAC, over all ranks of the default process group.

    They run in process groups of their own. All are begun in `KFAC.step`, when DDP's are over, in the same order on
    every rank, whatever layers it has used: of NCCL's, two that ranks begin in different orders wait for each other.

    Layers' tensors are of unequal size, and so are those of ranks. Collectives take equal pieces, of which each rank
    handles one: sums come in pieces, which then go to the owners, and what owners have for others goes in pieces to
    one rank each, and then to all. That makes two collectives for any number of layers.

    Attributes:
        bytes_sent: Bytes that this rank has given to collectives, by kind: "factors" (to reduce), "solutions" and
            "gradients" (to broadcast, counted by the sender), and "reduced" (gradients, by `reduce_to_owners`).
    """

    def __init__(self, grid: Grid) -> None:
        self.grid, self.world_size = grid, grid.num_rows * grid.num_columns
        self.rank = dist.get_rank() if self.world_size > 1 else 0
        self.column = self.rank % grid.num_columns
        self.bytes_sent: Counter[str] = Counter()
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

    def begin_sum(
        self, parts: Mapping[int | None, Sequence[Tensor]], deliver: Deliver, group: dist.ProcessGroup | None = None
    ) -> PartialSum:
        """Begin to add tensors up over the ranks. Each rank gets an equal piece of all, by one collective.

        Args:
            parts: Tensors by the rank that is to have their sums, or None for all ranks; of the same shapes on all.
            deliver: Function that `finish_sums` calls.
            group: Process group of all ranks.

        Returns:
            The pieces, for `finish_sums`.
        """
        order = [*range(self.world_size), None]
        tensors = [tensor.reshape(-1) for rank in order for tensor in parts.get(rank, ())]
        sizes = [sum(tensor.numel() for tensor in parts.get(rank, ())) for rank in order]
        length = -(-sum(sizes) // self.world_size)
        flat = torch.cat([*tensors, tensors[0].new_zeros(length * self.world_size - sum(sizes))])
        pieces = torch.empty_like(flat)
        work = dist.all_to_all_single(pieces, flat, group=group or self._all, async_op=True)
        return PartialSum(pieces.view(self.world_size, length), sizes, deliver, work, flat)

    def finish_sums(self, sums: Sequence[PartialSum]) -> None:
        """Send the pieces of sums to the ranks that are to have them, by one collective for all sums of a type.

        Each sum's `deliver` gets what is this rank's, and what is for all, as flat as it was laid out.
        """
        for dtype in dict.fromkeys(some.pieces.dtype for some in sums):
            self._finish_sums([some for some in sums if some.pieces.dtype == dtype])

    def _finish_sums(self, sums: list[PartialSum]) -> None:
        ranks, outgoing, incoming = range(self.world_size), [], []
        for some in sums:
            some.work.wait()  # on a GPU the stream waits, not the host
            piece = some.pieces.sum(0, dtype=torch.float64).to(some.pieces.dtype)
            length = len(piece)
            in_piece = cut_range(some.sizes, self.rank * length, (self.rank + 1) * length)
            outgoing.append([[piece[in_piece[rank]], piece[in_piece[-1]]] for rank in ranks])
            ends = [*accumulate(some.sizes, initial=0)]
            places = (ends[self.rank], ends[self.rank + 1]), (ends[-2], ends[-1])
            incoming += [cut_range([length] * self.world_size, *place) for place in places]
        sent = [[part for some in outgoing for part in some[rank]] for rank in ranks]
        sizes = [[_length(parts[rank]) for parts in incoming] for rank in ranks]
        received = sums[0].pieces.new_empty(sum(map(sum, sizes)))
        given = [sum(map(len, parts)) for parts in sent]
        dist.all_to_all_single(received, torch.cat([*chain(*sent)]), [*map(sum, sizes)], given, group=self._all)
        parts = received.split([*chain(*sizes)])  # type: ignore[no-untyped-call]
        columns = [torch.cat(parts[number :: 2 * len(sums)]) for number in range(2 * len(sums))]
        for number, some in enumerate(sums):
            some.deliver(columns[2 * number], columns[2 * number + 1])

    def sum_factors(self, layers: Sequence[LayerFactors]) -> PartialSum:
        """Begin to average factors of layers over the ranks that have used them. `finish_sums` finishes it.

        They are not a number where no rank has used the layer.
        """
        by_owner: dict[int | None, list[Sequence[Message]]] = {}
        parts: dict[int | None, list[Tensor]] = {}
        for layer in layers:
            # They are followed by a 1, or by a 0 if they do not count.
            number = Message(layer.messages[0].tensor.new_full((1,), float(layer.is_used)))
            by_owner.setdefault(layer.owner, []).append(layer.messages)
            parts.setdefault(layer.owner, []).append(flatten_messages([*layer.messages, number]))

        def deliver(own: Tensor, shared: Tensor) -> None:
            for owner, flat in ((self.rank, own), (None, shared)):
                for messages in by_owner.get(owner, ()):
                    size = sum(map(_num_elements, messages))
                    unflatten_messages(flat[:size] / flat[size], messages)
                    flat = flat[size + 1 :]

        self.bytes_sent["factors"] += sum(flat.nbytes for flats in parts.values() for flat in flats)
        return self.begin_sum(parts, deliver)

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
        self._spread(by_owner, self.grid.grad_workers(self.column), self._column, "solutions")

    def send_gradients(self, by_column: Mapping[int, Sequence[Message]]) -> None:
        """Send the gradients of each column, from its rank in this row to the others of the row, in place."""
        first = self.rank - self.column
        by_rank = {first + column: messages for column, messages in by_column.items()}
        self._spread(by_rank, self.grid.grad_receivers(self.rank), self._row, "gradients")

    def _spread(
        self, by_rank: Mapping[int, Sequence[Message]], members: list[int], group: dist.ProcessGroup | None, kind: str
    ) -> None:
        """Send what each member of a group has to all others: first in equal pieces to one each, then from all to all.

        So each rank sends as much as any other, and there are two collectives, whatever the layers' sizes.
        """
        everything = [message for rank in members for message in by_rank.get(rank, ())]
        if len(members) == 1:
            return
        for dtype in dict.fromkeys(message.tensor.dtype for message in everything):
            of_members = [[m for m in by_rank.get(rank, ()) if m.tensor.dtype == dtype] for rank in members]
            sizes, own = [sum(map(_num_elements, messages)) for messages in of_members], members.index(self.rank)
            length = -(-sum(sizes) // len(members))
            flat = next(m.tensor for m in everything if m.tensor.dtype == dtype).new_empty(length * len(members))
            piece, mine = torch.empty_like(flat[:length]), flatten_messages(of_members[own]) if sizes[own] else flat[:0]
            self.bytes_sent[kind] += mine.nbytes
            received = [*map(_length, cut_range(sizes, own * length, (own + 1) * length))]
            start = sum(sizes[:own])
            given = [*map(_length, cut_range([length] * len(members), start, start + sizes[own]))]
            dist.all_to_all_single(piece[: sum(received)], mine, received, given, group=group)
            _all_gather(flat, piece, group=group)
            parts = flat.split([*sizes, len(flat) - sum(sizes)])  # type: ignore[no-untyped-call]
            for rank, messages, part in zip(members, of_members, parts, strict=False):
                if rank != self.rank:
                    unflatten_messages(part, messages)


def cut_range(sizes: Sequence[int], start: int, stop: int) -> list[slice]:
    """Return which part of a range lies in each of some sections that follow each other from 0 on.

    Args:
        sizes: Elements of each section.
        start: First element of the range.
        stop: The element behind its last.

    Returns:
        The part in each section, counted from `start`. Of ten elements, 3 to 6 lie in two of three sections:

        >>> cut_range([4, 4, 2], 3, 7)
        [slice(0, 1, None), slice(1, 4, None), slice(4, 4, None)]
    """
    ends = [min(max(end, start), stop) - start for end in accumulate(sizes, initial=0)]
    return [slice(*pair) for pair in pairwise(ends)]


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _timeout_of_default_group() -> timedelta | None:
    """Return how long collectives of the default process group may take; None where its backend does not tell."""
    group = dist.group.WORLD
    assert group is not None
    with suppress(AttributeError, RuntimeError):
        return group._get_backend(group._device_types[0]).options._timeout
    return None


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
