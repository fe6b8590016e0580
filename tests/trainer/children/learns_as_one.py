"""A rank that trains a network without BN, evaluates it and saves both.

Arguments: packed data set, global batch size, file to write.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from datapipe.cluster import rank_placement
from datapipe.loaders import normalise, open_loader
from trainer.ranks.connection import connected, leave
from trainer.ranks.world import wrap
from trainer.run.evaluate import evaluate
from trainer.step.precision import choose_precision


def main(data: Path, global_batch_size: int, out: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 4))
    model = wrap(module, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    place: dict[str, Any] = {"size": 16, "rank": world.rank, "world_size": world.world_size, "threads": 1}
    module.register_forward_pre_hook(lambda _, inputs: normalise(inputs[0], (0.3,), (0.3,)))
    batch_size = world.batch_size(global_batch_size)
    with open_loader(data / "train", batch_size, **place) as loader:
        for batch in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(batch.images), batch.labels).backward()
            optimizer.step()
    with open_loader(data / "val", batch_size, train=False, **place) as loader:
        result = evaluate(
            module,
            loader,
            num_samples=loader.num_samples,
            world=world,
            precision=choose_precision("off", world.device),
        )
    assert result is not None
    if world.is_main:
        torch.save(module.state_dict(), out)
        out.with_suffix(".json").write_text(json.dumps([result.accuracy, result.loss]))


with connected(rank_placement(os.environ)) as world:
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
leave(0)
