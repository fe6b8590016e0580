"""Who trains in bench_faults.py, and how each is started on one host and on two."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fault_runs import Command

BATCH_SIZE, EPOCHS = 64, 1000  # more epochs than it ever trains
RANK_TIMEOUT_S = 20
OURS = {
    "train.batch_size": BATCH_SIZE, "train.epochs": EPOCHS, "train.target_accuracy": "none", "data.threads": 1,
    "train.evaluate_every": EPOCHS, "train.precision": "off", "data.backend": "cpu",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where a run is: its data set, what it writes, the port where its ranks meet, and the network of two hosts."""

    data: Path
    out: Path
    port: int
    network: str

    def on_each_host(self, words: Callable[[int], list[str]], **variables: str) -> list[Command]:
        """Return a command for each host, with its words by the host's number from 0."""
        return [Command(words(number), variables, number + 1, self.network) for number in range(self.num_hosts)]

    @property
    def num_hosts(self) -> int:
        return 2 if self.network else 1

    @property
    def master(self) -> str:
        return "node1" if self.network else "127.0.0.1"


def by_torchrun(place: Place, words: list[str]) -> list[Command]:
    def launch(number: int) -> list[str]:
        options = {"nnodes": place.num_hosts, "node-rank": number, "nproc-per-node": 2 // place.num_hosts,
                   "master-addr": place.master, "master-port": place.port}  # fmt: skip
        return [sys.executable, "-m", "torch.distributed.run", *as_options(options), "-m", *words]

    return place.on_each_host(launch)


def as_options(options: dict[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items()]


def our_words(place: Place) -> list[str]:
    options = {"data": place.data, "out": place.out, "device": "cpu", "rank-timeout": RANK_TIMEOUT_S}
    changes = [f"--set={key}={value}" for key, value in OURS.items()]
    return ["trainer", "train", "fashion-mnist-resnet8", *as_options(options), *changes]


def peer_words(module: str, place: Place) -> list[str]:
    options = {"data": place.data / "train", "out": place.out, "epochs": EPOCHS, "batch-size": BATCH_SIZE // 2}
    return [f"benchmarks.peers.{module}", *as_options(options)]


def rank_by_rank(place: Place) -> list[Command]:
    """Start each rank by itself, with the variables that a scheduler gives it."""
    per_host = 2 // place.num_hosts
    common = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": per_host, "MASTER_ADDR": place.master, "MASTER_PORT": place.port}
    return [
        Command(
            [sys.executable, "-m", *our_words(place)],
            {name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank % per_host}.items()},
            rank // per_host + 1,
            place.network,
        )
        for rank in range(2)
    ]


def by_lightning(place: Place) -> list[Command]:
    """Start Lightning, which starts the other ranks of its host."""
    words = [sys.executable, "-m", *peer_words("fault_lightning", place)]
    words += as_options({"nodes": place.num_hosts, "ranks-per-node": 2 // place.num_hosts})
    variables = {"MASTER_ADDR": place.master, "MASTER_PORT": str(place.port)}
    commands = place.on_each_host(lambda _: words)
    return [Command(words, {**variables, "NODE_RANK": str(i)}, its.host, its.network) for i, its in enumerate(commands)]


SYSTEMS: dict[str, Callable[[Place], list[Command]]] = {
    "trainer, torchrun": lambda place: by_torchrun(place, our_words(place)),
    "trainer, rank by rank": rank_by_rank,
    "DDP loop, torchrun": lambda place: by_torchrun(place, peer_words("fault_ddp", place)),
    "Lightning": by_lightning,
    "accelerate, torchrun": lambda place: by_torchrun(place, peer_words("fault_accelerate", place)),
}
NEEDS = {"Lightning": "lightning", "accelerate, torchrun": "accelerate"}
