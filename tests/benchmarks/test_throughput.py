"""The comparison of images/s: each way trains for real, on few images."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import bench_throughput as bench
from benchmarks import corpus, measure, reference_training
from datapipe.images.recode import RecodeOptions
from datapipe.packing import PackOptions, pack
from trainer.config.recipe import load_recipe

SMALL = ("train.batch_size=8", "model.name=resnet8", "data.size=24", "train.precision=off")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = corpus.drawn(tmp_path_factory.mktemp("drawn"), 24, 24)
    pack(folder / "images", folder / "tar", PackOptions(format="tar"))
    small = RecodeOptions(resize="short=160", quality=95, restart=8)
    pack(folder / "images", folder / "short160", PackOptions(format="tar", recode=small))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_reference_loop_sees_the_images_of_the_recipe(photographs: Path, memory_format) -> None:
    recipe = load_recipe("imagenet-resnet50", [*bench.CASES["resnet50"].changes, *SMALL])
    images = reference_training.ImageFolder(photographs / "images" / "train", recipe)
    assert len(images) == 24 and images.num_classes == 10
    seen = torch.stack([images[number][0] for number in range(24)])
    assert seen.shape == (24, 3, 24, 24) and seen.dtype == torch.float32
    assert abs(seen.mean()) < 1 and 0.5 < seen.std() < 2
    for in_memory in (False, True):
        loop = reference_training.Reference(photographs / "images" / "train", recipe, memory_format, in_memory)
        before = [parameter.clone() for parameter in loop._network.parameters()]
        found = loop.train()
        assert found["images"] == 3 * 8 and 0 < found["loss"] < 10 and 0 <= found["top1"] <= found["top5"] <= 100
        assert not any(torch.equal(*pair) for pair in zip(before, loop._network.parameters(), strict=True))


@pytest.mark.slow
def test_each_way_trains_on_as_many_images(
    photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    case = bench.CASES["resnet50"]
    monkeypatch.setattr(bench, "CASES", {"resnet50": replace(case, changes=(*case.changes, *SMALL))})
    monkeypatch.setattr(bench.Case, "folder", lambda self, images: photographs)
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    answers = []
    ask = measure.Child.ask

    def remember(child: measure.Child, line: object) -> dict:
        answers.append((child.name, line, ask(child, line)))
        return answers[-1][2]

    monkeypatch.setattr(measure.Child, "ask", remember)
    assert bench.main(["--rounds", "1", "--only", "resnet50", "--images", "24", "--threads", "1"]) == 0
    assert {(way, line): its["images"] for way, line, its in answers} == {
        **{(way, epoch): 24 for way in bench.ALL for epoch in (0, 1)},
        (bench.OURS, "evaluate"): 24,
    }
    found = json.loads((tmp_path / "throughput.json").read_text())["cases"]["resnet50"]
    assert found["ways"].keys() == {*bench.ALL}
    assert found["precision"] in ("bf16", "off")
    assert all(way[figure]["median"] > 0 for way in found["ways"].values() for figure in bench.FIGURES)
    assert found["evaluation_share"]["time"]["median"] > 0
    assert capsys.readouterr().out.count("resnet50, ") == len(bench.ALL)


def test_each_case_needs_its_number_of_images(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--images", "24"])
    assert "--images: 1 numbers for 2 cases" in capsys.readouterr().err


def test_ratios_are_of_the_runs_of_a_round() -> None:
    wall = {bench.OURS: (100, 300, 200), bench.REFERENCE: (50, 100, 100), bench.OURS_IN_MEMORY: (100, 400, 250)}
    runs = {
        way: [{"images_per_s": value, "images_per_cpu_s": 2 * value} for value in values]
        for way, values in wall.items()
    }
    found = bench.ratios(runs)
    its = {"median": 2, "min": 2, "max": 3}
    assert found[bench.REFERENCE] == {**its, "of_cpu": its, "goal": 1.15, "met": True}
    its = {"median": 0.8, "min": 0.75, "max": 1}
    assert found[bench.OURS_IN_MEMORY] == {**its, "of_cpu": its, "goal": 0.97, "met": False}


def test_the_share_of_an_evaluation_is_of_an_epoch_of_the_whole_data_set() -> None:
    """60,000 images at 100/s take 600 s, and 10,000 at 500/s take 20 s."""
    training = {"images_per_s": 100, "images_per_cpu_s": 50}
    evaluation = {"images_per_s": 500, "images_per_cpu_s": 500}
    found = bench.evaluation_shares(training, evaluation, (60_000, 10_000))
    assert found == {"evaluation_time": pytest.approx(20 / 600), "evaluation_cpu_time": pytest.approx(20 / 1200)}
