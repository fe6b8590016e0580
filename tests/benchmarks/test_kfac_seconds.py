"""K-FAC's seconds against those of Muon and SOAP: what is trained, and what is said of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import bench_kfac_seconds as bench
from benchmarks.optimizer_run import Run

SETTINGS = {"epochs": 2, "precision": "off"}
BEST = {
    "K-FAC": {"optimizer": {"name": "sgd", "lr": 0.1, "preconditioner": "kfac"}, "kfac": {"damping": 1e-3}},
    "Muon": {"optimizer": {"name": "muon", "lr": 0.1}, "kfac": {}},
    "SOAP": {"optimizer": {"name": "soap", "lr": 0.01}, "kfac": {}},
}


def line(step: int, accuracy: float) -> dict:
    return {"step": step, "accuracy": accuracy, "wall_s": 2.0 * step, "cpu_s": 1.0 * step}


def test_the_ratio_is_the_geometric_mean_of_the_seeds() -> None:
    kfac = [[line(10, 0.5), line(20, 0.95)], [line(10, 0.91)]]
    other = [[line(40, 0.9)], [line(80, 0.93)]]
    compared = bench.ratios(kfac, other, 0.9)
    assert compared is not None and not compared["at_most"]
    assert compared["step"]["ratio"] == pytest.approx(0.25)  # of 1/2 and 1/8
    low, high = compared["cpu_s"]["interval"]
    assert low * high == pytest.approx(compared["cpu_s"]["ratio"] ** 2)
    other[0][0]["cpu_s"], other[1][0]["cpu_s"] = 4000.0, 240.0  # another program beside one run
    compared = bench.ratios(kfac, other, 0.9)
    assert compared is not None and compared["cpu_s"]["ratio"] < 0.05
    assert compared["median_cpu_s"]["ratio"] == pytest.approx(0.25 / 51.5)  # the median of 100 and 3 seconds a step


def test_a_target_that_the_other_misses_is_a_bound_and_one_that_kfac_misses_no_ratio() -> None:
    compared = bench.ratios([[line(10, 0.92)]], [[line(40, 0.9)]], 0.92)
    assert compared is not None and compared["at_most"] and compared["step"] == {"ratio": 0.25, "interval": None}
    assert bench.ratios([[line(40, 0.9)]], [[line(10, 0.92)]], 0.92) is None


@pytest.mark.slow
def test_the_record_compares_with_the_tuned_settings(
    trained: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(bench, "GOALS", {32: 1.0})
    tuned = {"settings": SETTINGS, "found": {name: {"best": best} for name, best in BEST.items()}}
    (tmp_path / "optimizers-resnet8-32.json").write_text(json.dumps(tuned))
    command = ["bench", "--batch-size", "32", "--seeds", "2", "--kfac", "factor_fraction=0.5", "--sgd", "momentum=0.8"]
    monkeypatch.setattr(sys, "argv", command)
    assert bench.main() == 0
    assert len(trained) == 6 and {run.seed for run in trained} == {1, 2}
    assert all(run.kfac == {"damping": 1e-3, "factor_fraction": 0.5} for run in trained if run.kfac)
    assert sum(bool(run.kfac) for run in trained) == 2
    assert all((run.optimizer.get("momentum") == 0.8) == bool(run.kfac) for run in trained)
    record = json.loads((tmp_path / "kfac-seconds-resnet8-32.json").read_text())
    assert record["shares"]["0.90"].keys() == {"Muon", "SOAP"} and len(record["runs"]) == 6
    assert "≤ 1" in capsys.readouterr().out
    assert bench.main() == 0 and len(trained) == 6, "what is in the record is not trained again"
    monkeypatch.setattr(sys, "argv", [*command, "--float32", "--others", "Muon"])
    assert bench.main() == 0
    record = json.loads((tmp_path / "kfac-seconds-resnet8-32-float32.json").read_text())
    assert record["shares"]["0.90"].keys() == {"Muon"} and len(record["runs"]) == 4
