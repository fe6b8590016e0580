"""Train on a loader's batches, in a process of its own: `python -m benchmarks.peers.train MODULE FOLDER TASK OPTIONS`.

MODULE is a peer's, and OPTIONS (JSON, as TASK is) what its `open_epochs` is given. It answers a first line, whatever
that holds, once everything is imported. Then, for each line on standard input, an epoch's number, it trains for that
epoch and answers with a line of JSON: images, wall_s, cpu_s (of this process and its children), first_batch_s (the
batch's arrival) and waited_s (for batches, in all). The data set is opened in the first of them.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.measure import open_answers, timed
from benchmarks.peers import Epochs, Task

CLASSES = 1000


class Training:
    """A network that is real and small, so that what is measured is the loader: one step takes about 30 ms."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        layers = (nn.Conv2d(3, 16, 16, stride=16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self._network = nn.Sequential(*layers, nn.Linear(16, CLASSES))
        self._optimizer = torch.optim.SGD(self._network.parameters(), 0.1)

    def step(self, images_BCHW: Tensor, labels_B: Tensor) -> None:
        """Take one step; images are uint8[B, C, H, W]."""
        logits_BK = self._network(images_BCHW.float().div_(127.5).sub_(1))
        loss = nn.functional.cross_entropy(logits_BK, labels_B)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def epoch(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict:
        """Train on batches. Return how many images came, when the first did, and for how long it waited."""
        images, first_s, waited_s = 0, 0.0, 0.0
        began = asked = time.perf_counter()
        for images_BCHW, labels_B in batches:
            came = time.perf_counter()
            waited_s += came - asked
            first_s = first_s or came - began
            self.step(images_BCHW, labels_B.long())
            images += len(images_BCHW)
            asked = time.perf_counter()
        return {"images": images, "first_batch_s": first_s, "waited_s": waited_s}


def main() -> int:
    module, folder = importlib.import_module(f"benchmarks.peers.{sys.argv[1]}"), Path(sys.argv[2])
    task, options = Task(**json.loads(sys.argv[3])), json.loads(sys.argv[4])
    tell = open_answers()
    training = Training()
    training.step(torch.zeros(2, 3, task.size, task.size, dtype=torch.uint8), torch.zeros(2, dtype=torch.long))
    epochs: Epochs | None = None
    for line in sys.stdin:
        if not line.strip():
            answer: dict = {}
        else:
            opening_s = 0.0
            with timed() as seconds:
                if epochs is None:
                    began = time.perf_counter()
                    epochs = module.open_epochs(folder, task, **options)
                    opening_s = time.perf_counter() - began
                answer = training.epoch(epochs(int(line)))
            answer["first_batch_s"] += opening_s
            answer |= seconds
        tell(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
