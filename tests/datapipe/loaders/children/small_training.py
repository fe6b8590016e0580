"""What children that train a small network with a framework share: FOLDER OUT are their arguments."""

import json
import os
import sys
from pathlib import Path

import torch

from datapipe.loaders import Batch, Loader, open_loader

seen: list[tuple[int, list[int]]] = []


class Net(torch.nn.Module):
    """A network of one layer, the same on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3 * 16 * 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def open_part() -> Loader:
    """Open this rank's part of the data."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return open_loader(sys.argv[1], 8 // num_ranks, size=16, seed=4, rank=rank, world_size=num_ranks)


def loss_of(model: torch.nn.Module, batch: Batch, epoch: int) -> torch.Tensor:
    """Return a batch's loss, and note that it was seen."""
    seen.append((epoch, batch.samples.tolist()))
    return torch.nn.functional.cross_entropy(model(batch.images.flatten(1).float() / 255), batch.labels)


def finish(net: torch.nn.Module) -> None:
    """Write what was seen and learnt."""
    weights = [parameter.detach().flatten().double().sum().item() for parameter in net.parameters()]
    path = Path(sys.argv[2], f"{os.environ['RANK']}.json")
    path.write_text(json.dumps({"seen": seen, "weights": weights}))
