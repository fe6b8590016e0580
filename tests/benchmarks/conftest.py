"""What tests of benchmarks share: how to import them, and images that a network tells apart at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from benchmarks.optimizer_run import Run

SIDE = 10  # pixels; what a network takes for them is a sixth of what it takes for 28

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks/ is not installed


@pytest.fixture(scope="module")
def bright_or_dark() -> Iterator[None]:
    """Train on two classes that a network tells apart at once, in batches of which each has two parts."""
    from benchmarks import optimizer_run

    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(256) % 2
    images = torch.randn(256, 1, SIDE, SIDE, generator=generator) / 4 + labels[:, None, None, None] - 0.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_run, "data", lambda split: (images, labels))
        patch.setattr(optimizer_run, "PART", 16)
        patch.setattr(optimizer_run, "HELD_OUT", 128)
        patch.setattr(optimizer_run, "EVALUATED_EVERY", 64)
        yield


@pytest.fixture
def trained(bright_or_dark: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Return the trainings that benchmarks of optimizers do, from now on in this process; records are in tmp_path."""
    from benchmarks import bench_kfac_seconds, bench_optimizers, measure, optimizer_run

    runs: list[Run] = []

    def process(command: list[str], **_) -> tuple[str, dict]:
        runs.append(optimizer_run.Run(**json.loads(command[-1])))
        return json.dumps(optimizer_run.train(runs[-1])), {}

    monkeypatch.setattr(bench_optimizers, "process", process)
    for module in (bench_kfac_seconds, bench_optimizers, measure):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    return runs
