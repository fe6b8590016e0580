"""K-FAC's defaults against tuned settings: what is trained, and what is said of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import bench_kfac_defaults as bench
from benchmarks.optimizer_run import Run
from trainer.kfac.settings import KFACSettings

SETTINGS = {"epochs": 2, "precision": "off"}
BEST = {"optimizer": {"name": "sgd", "lr": 0.1, "preconditioner": "kfac"}, "kfac": {"damping": 1e-3, "kl_clip": 1e-3}}


def line(step: int, accuracy: float) -> dict:
    return {"step": step, "accuracy": accuracy}


def test_the_ratio_is_the_geometric_mean_of_the_seeds() -> None:
    defaults = [[line(10, 0.5), line(20, 0.95)], [line(80, 0.91)]]
    compared = bench.compare(defaults, [[line(10, 0.9)]] * 2, 0.9)
    assert compared is not None and compared["ratio"] == pytest.approx(4.0)  # of 2 and 8
    assert (compared["defaults"], compared["tuned"]) == (50, 10)
    assert bench.compare([[line(10, 0.8)]], [[line(10, 0.9)]], 0.9) is None
    assert bench.compare([[line(30, 0.9)]], [[line(20, 0.9)]], 0.9)["interval"] is None
    assert bench.compare([[line(30, 0.9)]] * 2, [[line(20, 0.9)]] * 2, 0.9)["interval"] == pytest.approx([1.5, 1.5])


@pytest.mark.slow
def test_the_defaults_are_trained_with_the_seeds_of_the_record(
    trained: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(bench, "RECORDS", (("resnet8", 32),))
    runs = [
        {"run": vars(Run("resnet8", 32, 2, BEST["optimizer"], BEST["kfac"], seed=seed)), "found": [line(5, 0.99)]}
        for seed in (1, 2)
    ]
    tuned = {"settings": SETTINGS, "found": {"K-FAC": {"best": BEST}}, "runs": runs}
    (tmp_path / "optimizers-resnet8-32.json").write_text(json.dumps(tuned))
    monkeypatch.setattr(sys, "argv", ["bench", "--seeds", "2"])
    assert bench.main() == 0
    assert [run.seed for run in trained] == [1, 2]
    assert all(run.kfac == {name: getattr(KFACSettings(), name) for name in bench.SETTINGS} for run in trained)
    record = json.loads((tmp_path / "kfac-defaults.json").read_text())
    assert record["found"]["resnet8, 32"].keys() == {"0.90", "0.91", "0.92"} and len(record["runs"]) == 2
    assert "resnet8, 32" in capsys.readouterr().out
    assert bench.main() == 0 and len(trained) == 2, "what is in the record is not trained again"
    monkeypatch.setattr(sys, "argv", ["bench", "--seeds", "2", "--float32"])
    tuned["settings"]["precision"] = "bf16"
    (tmp_path / "optimizers-resnet8-32.json").write_text(json.dumps(tuned))
    assert bench.main() == 0
    again = sorted((run.seed, run.kfac == BEST["kfac"], run.precision) for run in trained[2:])
    assert again == [(seed, is_tuned, "off") for seed in (1, 2) for is_tuned in (False, True)]
    assert (tmp_path / "kfac-defaults-float32.json").exists()
