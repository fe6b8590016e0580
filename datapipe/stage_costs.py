"""Which way to bring a data set to the disks of several nodes, what each would cost here, and how to say so."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import watched
from .dataset.manifest import Manifest, find_data_sets
from .errors import ManifestError
from .fsio import existing_folder, free_bytes
from .jobgroup.network import link_speed
from .watched import TIMEOUT_S

_SPENT = 0.9  # of a disk's free space, on a slice
_LEAST = 0.05  # of the data set: with a smaller slice, hardly a read is saved


@dataclass(frozen=True)
class Situation:
    """A data set, the nodes that need it, and what is between them.

    Attributes:
        data_bytes: Size of the data set.
        num_nodes: Number of nodes that need it, from 1.
        read_mb_per_s: Rate at which the shared filesystem gives bytes to all nodes together, in MB/s (10⁶ bytes), above
            0; in the worst case what one node measures.
        network_mb_per_s: Rate at which a node receives bytes from others, in MB/s, above 0; None: not known, and not
            the limit.
        free_bytes: Bytes that are free on the disk of a node.
        is_local: Whether the data set lies where it is read as fast as from that disk.
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
        mode: Best way: "copy"; "exchange"; "slice", if the data set does not fit, and a good part of it does; or
            "none", if not even that does, or the data set lies well where it is.
        slice_bytes: Bytes of the data set that a node would hold, if it does not fit; else 0.
        one_node_s: Time in which the shared filesystem gives the data set once: to one node that copies it; in an
            exchange, to all nodes together; in each epoch, to all nodes together that train without a copy.
        copy_bytes: Bytes that the shared filesystem gives in all, if each node copies everything.
        copy_s: Time of that.
        exchange_bytes: Bytes that the shared filesystem gives in all, in an exchange.
        network_bytes: Bytes that each node receives from the others in an exchange.
        network_s: Time of that; None if the network's speed is not known.
        exchange_s: Time of an exchange, in which reading and sending overlap.
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
    slice_bytes = int(_SPENT * situation.free_bytes) if does_not_fit else 0
    if situation.is_local or (does_not_fit and slice_bytes < _LEAST * data_bytes):
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


def assess(
    folder: Path,
    local: Path | None,
    num_nodes: int,
    network_mb_per_s: float | None,
    read_mb_per_s: float,
    master: str,
    is_local: bool,
) -> dict[str, Any] | None:
    """Find out what staging a data set would cost.

    Args:
        folder: Folder of a packed data set, or of its splits.
        local: Folder on the node's own disk, or one to be made there; None: the folder for temporary files.
        num_nodes: Number of nodes that need the data set, from 1.
        network_mb_per_s: Rate at which a node receives bytes, in MB/s, above 0; None: that of the link.
        read_mb_per_s: Rate at which the filesystem of `folder` gives bytes, in MB/s, above 0.
        master: Host to which the link leads; "": the link is that of the default route.
        is_local: Whether that filesystem is as good as the node's own disk.

    Returns:
        The fields of `Situation` and of `Costs`; `local`; and `interface`, "" if its speed was not looked up. None if
        `folder` does not contain a packed data set.
    """
    try:
        manifests = watched.call(lambda: [*map(Manifest.read, find_data_sets(folder))], TIMEOUT_S, folder)
    except ManifestError:
        return None
    local = Path(local or tempfile.gettempdir())
    interface, link = link_speed(master) if num_nodes > 1 and network_mb_per_s is None else ("", None)
    situation = Situation(
        data_bytes=sum(file.size_bytes for manifest in manifests for file in manifest.all_files()),
        num_nodes=num_nodes,
        read_mb_per_s=read_mb_per_s,
        network_mb_per_s=network_mb_per_s or link,
        free_bytes=free_bytes(existing_folder(local)),
        is_local=is_local,
    )
    return {**asdict(situation), **asdict(compare(situation)), "local": str(local), "interface": interface}


def describe_costs(staging: dict[str, Any]) -> list[str]:
    """Say which mode to choose, and what each costs. Pure.

    Args:
        staging: Result of `assess`.

    Returns:
        Lines; those that begin with a blank belong to the first.
    """
    size, nodes, once = _size(staging["data_bytes"]), staging["num_nodes"], _time(staging["one_node_s"])
    if staging["is_local"]:
        return [f"mode: none, {size} are where they are read fast"]
    why = {
        "none": f"none, {size} do not fit: {staging['local']} has {_size(staging['free_bytes'])} free",
        "slice": f"slice, {size} do not fit: {staging['local']} has {_size(staging['free_bytes'])} free",
        "copy": "copy, since the network is slower than the shared filesystem" if nodes > 1 else "copy",
        "exchange": "exchange, in which each byte leaves the shared filesystem once",
    }[staging["mode"]]
    rate = f"{staging['read_mb_per_s']:,.0f} MB/s"
    lines = [f"mode: {why}", f"  {size} at {rate}, to one node: {once}"]
    if nodes > 1:
        together = f"{_time(staging['copy_s'])}, if the filesystem gives {rate} to all together; {once}, if to each"
        network = f"{_size(staging['network_bytes'])} per node {_network(staging)}"
        lines += [
            f"  copy: {_size(staging['copy_bytes'])} to {nodes} nodes: {together}",
            f"  exchange: {size}, and {network}: {_time(staging['exchange_s'])}",
        ]
    if staging["mode"] == "slice":
        share = staging["slice_bytes"] / staging["data_bytes"]
        capacity = f"--capacity {staging['slice_bytes'] // 10**6}MB"
        lines.append(
            f"  slice: {capacity}, {share:.0%}; a node reads at most about {1 - share:.0%} of its blocks again"
        )
    return [*lines, f'  not staged, order="blocks": {size} in each epoch, at least {once}']


def _network(staging: dict[str, Any]) -> str:
    name = f" ({staging['interface']})" if staging["interface"] else ""
    if staging["network_mb_per_s"] is None:
        return f"over a network{name} whose speed is not known, and taken for faster (--network-mbps)"
    return f"over the network{name} at {staging['network_mb_per_s']:,.0f} MB/s"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


def _time(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds < 600 else f"{seconds / 60:,.0f} min"
