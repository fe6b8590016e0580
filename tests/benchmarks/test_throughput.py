"""The comparison of images/s: each way trains for real, on few images."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import bench_throughput as bench
from benchmarks import corpus, measure, reference_training
from datapipe.packing import PackOptions, pack
from trainer.config.recipe import load_recipe

SMALL = ("train.batch_size=8", "model.name=resnet8", "data.size=24", "train.precision=off")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = corpus.drawn(tmp_path_factory.mktemp("drawn"), 24)
    (folder / "images" / "val").symlink_to(folder / "images" / "train")
    pack(folder / "images", folder / "tar", PackOptions(format="tar"))
    return folder


def test_the_reference_loop_sees_the_images_of_the_recipe(photographs: Path) -> None:
    recipe = load_recipe("imagenet-resnet50", [*bench.CASES["resnet50"].changes, *SMALL])
    images = reference_training.ImageFolder(photographs / "images" / "train", recipe)
    assert len(images) == 24 and images.num_classes == 10
    seen = torch.stack([images[number][0] for number in range(24)])
    assert seen.shape == (24, 3, 24, 24) and seen.dtype == torch.float32
    assert abs(seen.mean()) < 1 and 0.5 < seen.std() < 2
    found = reference_training.train(photographs / "images" / "train", recipe)
    assert found["images"] == 2 * 8 and found["images_per_s"] > 0 and 0 < found["loss"] < 10


def test_each_way_trains_on_as_many_images(
    photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    case = bench.CASES["resnet50"]
    case = replace(case, changes=(*case.changes, *SMALL), size=24)
    monkeypatch.setattr(bench, "CASES", {"resnet50": case})
    monkeypatch.setattr(bench.Case, "folder", lambda self, images: photographs)
    monkeypatch.setattr(bench, "WORK", tmp_path)
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench", "--rounds", "1", "--only", "resnet50", "--images", "24"])
    assert bench.main() == 0
    ways = json.loads((tmp_path / "throughput.json").read_text())["cases"]["resnet50"]["ways"]
    assert ways.keys() == {"trainer", "reference loop", "trainer, images in memory"}
    assert all(way["images_per_s"]["median"] > 0 for way in ways.values())
    assert capsys.readouterr().out.count("resnet50, ") == 3


def test_ratios_are_of_the_runs_of_a_round() -> None:
    runs = {"trainer": (100, 300, 200), "reference loop": (50, 100, 100), "trainer, images in memory": (100, 400, 250)}
    found = bench.ratios({name: [{"images_per_s": value} for value in values] for name, values in runs.items()})
    assert found["reference loop"] == {"median": 2, "min": 2, "max": 3, "goal": 1.15, "met": True}
    assert found["trainer, images in memory"] == {"median": 0.8, "min": 0.75, "max": 1, "goal": 0.97, "met": False}
