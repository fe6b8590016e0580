"""What it costs to bring a data set to the disks of several nodes, and which way is the best (pure)."""

from __future__ import annotations

from dataclasses import dataclass

SPENT = 0.9  # of a disk's free space, on a slice
LEAST = 0.05  # of the data set: with a smaller slice, hardly a read is saved


@dataclass(frozen=True)
class Situation:
    """A data set, the nodes that need it, and what is between them.

    Attributes:
        data_bytes: size of the data set.
        num_nodes: how many nodes need it, from 1.
        read_mb_per_s: what the shared filesystem gives, in MB/s (10⁶ bytes), above 0. One node measures it; it is taken
            for what all nodes together get, which is the worst case.
        network_mb_per_s: what a node can receive from others, in MB/s, above 0; None: not known, and not the limit.
        free_bytes: free on the disk of a node.
        is_local: whether the data set lies where it is read as fast as from that disk.
    """

    data_bytes: int
    num_nodes: int
    read_mb_per_s: float
    network_mb_per_s: float | None
    free_bytes: int
    is_local: bool = False


@dataclass(frozen=True)
class Costs:
    """The ways to train with a data set, and what each costs.

    Attributes:
        mode: the best way: "copy"; "exchange"; "slice", where the data set does not fit, and a good part of it does; or
            "none", where not even that does, or the data set lies well where it is.
        slice_bytes: what a node would hold of the data set, where it does not fit; else 0.
        one_node_s: time in which the shared filesystem gives the data set once: to one node that copies it; in an
            exchange, to all nodes together; in each epoch, to all nodes together that train without a copy.
        copy_bytes: read from the shared filesystem in all, where each node copies everything.
        copy_s: time of that.
        exchange_bytes: read from the shared filesystem in all, in an exchange.
        network_bytes: what each node receives from the others in an exchange.
        network_s: time of that; None where the network's speed is not known.
        exchange_s: time of an exchange, in which reading and sending overlap.
    """

    mode: str
    slice_bytes: int
    one_node_s: float
    copy_bytes: int
    copy_s: float
    exchange_bytes: int
    network_bytes: int
    network_s: float | None
    exchange_s: float


def compare(situation: Situation) -> Costs:
    """Return what each way costs.

    >>> costs = compare(Situation(150 * 10**9, 4, 1000.0, 1250.0, 10**12))
    >>> costs.mode, costs.one_node_s, costs.copy_s, costs.network_s, costs.exchange_s
    ('exchange', 150.0, 600.0, 90.0, 150.0)
    """
    data_bytes, nodes = situation.data_bytes, situation.num_nodes
    one_node_s = data_bytes / 1e6 / situation.read_mb_per_s
    network_bytes = data_bytes * (nodes - 1) // nodes
    network_s = network_bytes / 1e6 / situation.network_mb_per_s if situation.network_mb_per_s else None
    exchange_s = max(one_node_s, network_s or 0.0)
    does_not_fit = data_bytes > situation.free_bytes
    slice_bytes = int(SPENT * situation.free_bytes) if does_not_fit else 0
    if situation.is_local or (does_not_fit and slice_bytes < LEAST * data_bytes):
        mode = "none"
    elif does_not_fit:
        mode = "slice"
    else:
        mode = "exchange" if nodes > 1 and exchange_s <= nodes * one_node_s else "copy"
    return Costs(
        mode=mode,
        slice_bytes=slice_bytes,
        one_node_s=one_node_s,
        copy_bytes=nodes * data_bytes,
        copy_s=nodes * one_node_s,
        exchange_bytes=data_bytes,
        network_bytes=network_bytes,
        network_s=network_s,
        exchange_s=exchange_s,
    )
