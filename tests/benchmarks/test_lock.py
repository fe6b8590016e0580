"""The measurement of launches beside a loader: the network is ResNet-50's, and each way answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import bench_lock, corpus, launch_times
from benchmarks.measure import ROOT
from datapipe.packing import PackOptions, pack
from trainer import models


def test_the_network_has_the_layers_of_resnet_50() -> None:
    with torch.device("meta"):
        whole = models.build("resnet50", num_classes=10)
    small = launch_times.make_network()
    for kind in (nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.Linear):
        counts = [sum(isinstance(layer, kind) for layer in network.modules()) for network in (small, whole)]
        assert counts[0] == counts[1] > 0
    assert small(torch.randn(2, 3, 1, 1)).shape == (2, 10)


def test_figures_are_those_of_all_passes() -> None:
    runs = [{"passes": [{"launch_ms": float(10 * run + i)} for i in range(10)]} for run in range(10)]
    launch = bench_lock.describe(runs)["launch_ms"]
    assert (launch["min"], launch["median"], launch["max"]) == (0.0, 49.5, 99.0)
    assert launch["tenth"] == pytest.approx(10, abs=1) and launch["nine_tenths"] == pytest.approx(90, abs=1)


@pytest.mark.slow
@pytest.mark.parametrize("beside", ["nothing", "summing", "cutting"])
def test_each_way_answers(tmp_path: Path, beside: str) -> None:
    folder = corpus.drawn(tmp_path, 300)
    pack(folder / "images", folder / "tar", PackOptions(format="tar"))
    words = [sys.executable, "-m", "benchmarks.launch_times", beside, str(folder / "tar" / "train"), "2"]
    done = subprocess.run(words, cwd=ROOT, input="2\n3\n", capture_output=True, text=True, check=True)
    answers = [json.loads(line)["passes"] for line in done.stdout.splitlines()]
    assert [len(passes) for passes in answers] == [2, 3]
    assert all(figures["launch_ms"] >= 0.9 * figures["launch_cpu_ms"] > 0 for figures in answers[1])
