"""Which way to stage a data set, and what it would cost here, for a reader."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..dataset.manifest import Manifest, find_data_sets
from ..errors import ManifestError
from ..fsio import free_bytes
from ..jobgroup.network import link_speed
from ..streams import TIMEOUT_S, in_time
from .cost import Situation, compare


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
        folder: a packed data set, or the folder of its splits.
        local: a folder on the node's own disk, or one to be made there; None: where temporary files go.
        num_nodes: how many nodes need the data set, from 1.
        network_mb_per_s: what a node receives from others, in MB/s, above 0; None: as fast as the link.
        read_mb_per_s: what the filesystem of `folder` gives, in MB/s, above 0.
        master: the host to which the link leads; "": the link is that of the default route.
        is_local: whether that filesystem is as good as the node's own disk.

    Returns:
        The fields of `Situation` and of `Costs`; `local`; and `interface`, "" where its speed was not looked up. None
        where there is no packed data set.
    """
    try:
        manifests = in_time(lambda: [Manifest.read(path) for path in find_data_sets(folder)], folder, TIMEOUT_S)
    except ManifestError:
        return None
    local = Path(local or tempfile.gettempdir())
    interface, link = link_speed(master) if num_nodes > 1 and network_mb_per_s is None else ("", None)
    situation = Situation(
        data_bytes=sum(file.size_bytes for manifest in manifests for file in manifest.all_files()),
        num_nodes=num_nodes,
        read_mb_per_s=read_mb_per_s,
        network_mb_per_s=network_mb_per_s or link,
        free_bytes=free_bytes(next(path for path in (local, *local.absolute().parents) if path.exists())),
        is_local=is_local,
    )
    return {**asdict(situation), **asdict(compare(situation)), "local": str(local), "interface": interface}


def describe_costs(staging: dict[str, Any]) -> list[str]:
    """Say which mode to choose, and what each costs. Pure.

    Args:
        staging: as `assess` returns it.

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
