"""The benchmark of training on a GPU, as far as a processor can run it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import corpus
from benchmarks.gpu import bench_train_gpu as bench

SMALL = ["--device", "cpu", "--model", "resnet8", "--size", "24", "--batch-size", "8", "--images", "16", "--epochs"]
SMALL += ["2"]


@pytest.mark.slow
def test_a_way_that_does_not_work_is_said_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(corpus, "photographs", lambda *_: corpus.drawn(tmp_path / "drawn", 40, 20))
    monkeypatch.setattr(bench, "VAL_IMAGES", 16)
    for module in (corpus, bench):
        monkeypatch.setattr(module, "WORK", tmp_path)
    ways = {"JPEG, DALI": bench.WAYS["JPEG, DALI"], "broken": ("jpeg", ("data.backend=resident",))}
    monkeypatch.setattr(bench, "WAYS", ways)
    monkeypatch.setattr(sys, "argv", ["bench", *SMALL, "--rounds", "1"])
    assert bench.main() == 0
    said = capsys.readouterr().out
    assert "without broken: " in said and "\nJPEG, DALI " in said and "\nbroken " not in said
    assert "of MLPerf's best stack" in said


def test_operations_of_resnet50_are_those_of_its_paper() -> None:
    """torchvision's model card: 4.09 billion products. (He et al. 2016 have 3.8, with strides in other layers.)"""
    assert bench.operations("resnet50", 224) == pytest.approx(3 * 2 * 4.09e9, rel=0.01)
