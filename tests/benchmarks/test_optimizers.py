"""The comparison of optimizers: trials, seeds, and what is said of them."""

from __future__ import annotations

import json
import math
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from optuna.samplers import GPSampler

from benchmarks import bench_optimizers as bench
from benchmarks import measure
from benchmarks.bench_optimizers import FIRST_ORDER, OPTIMIZERS, interval, next_trial, share, to_target
from benchmarks.optimizer_run import Run, averaged, train

TRIAL = Run("resnet8", 4096, 5, {}, tuning=True)
RECORD = "optimizers-resnet8-32.json"


@pytest.mark.slow
def test_every_optimizer_of_the_comparison_trains(bright_or_dark: None) -> None:
    for name in OPTIMIZERS:
        run = next_trial(OPTIMIZERS[name], [], Run("resnet8", 32, 4, {}))
        lines = train(run)
        near = [line["accuracy"] >= 0.88 for line in lines]
        steps = [0] + [line["step"] for line in lines]
        assert [b - a for a, b in pairwise(steps)][1:-1] == [2 if is_near else 6 for is_near in near[:-2]]
        assert lines[-1]["accuracy"] >= 0.92 or lines[-1]["step"] == 32
        assert lines[-1]["wall_s"] >= lines[0]["wall_s"] > 0
        assert ("cosine" in lines[0]) == (name in ("K-FAC", "EKFAC"))


@pytest.fixture
def record_path(bright_or_dark: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the benchmark compare two optimizers with few and short trainings; return where it writes its record."""
    shrink(monkeypatch, tmp_path)
    return tmp_path / RECORD


@pytest.fixture(scope="module")
def record(bright_or_dark: None, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Return the record of that comparison."""
    folder = tmp_path_factory.mktemp("record")
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch, folder)
        assert bench.main() == 0
    return json.loads((folder / RECORD).read_text())


def shrink(patch: pytest.MonkeyPatch, results: Path) -> None:
    alone = threading.Lock()  # random numbers come from one generator

    def process(command: list[str], **_) -> tuple[str, dict]:
        with alone:
            return json.dumps(train(Run(**json.loads(command[-1])))), {}

    patch.setattr(bench, "process", process)
    patch.setattr(measure, "RESULTS", results)
    patch.setattr(bench, "RESULTS", results)
    patch.setattr(bench, "OPTIMIZERS", {name: OPTIMIZERS[name] for name in ("LARS", "K-FAC")})
    patch.setattr(bench, "FIRST_ORDER", ("LARS",))
    arguments = ["--batch-size", "32", "--trials", "2", "--seeds", "2", "--epochs", "2", "--precision", "off"]
    patch.setattr(sys, "argv", ["bench", *arguments])


@pytest.mark.slow
def test_the_record_of_a_comparison(record: dict) -> None:
    assert record["shares"].keys() == {"0.90", "0.91", "0.92"}
    assert len(record["runs"]) == 2 * (2 + 2) and len(record["environments"]) == 1
    for name, result in record["found"].items():
        kind, setting = {"LARS": ("optimizer", "lr"), "K-FAC": ("kfac", "damping")}[name]
        box = OPTIMIZERS[name][kind == "kfac"][setting].box(0)
        assert len(result["trials"]) == 2
        assert all(box.low <= trial[kind][setting] <= box.high for trial in result["trials"])
        best = max(result["trials"], key=lambda trial: trial["accuracy"])
        assert best | result["best"] == best
        assert result["targets"]["0.90"]["runs"] == 2


@pytest.mark.slow
def test_a_comparison_that_is_broken_off_loses_nothing(
    record: dict, record_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_path.write_text(json.dumps(record | {"runs": record["runs"][:-1]}))
    monkeypatch.setattr(bench, "process", lambda command, **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.main()
    assert json.loads(record_path.read_text())["found"] == record["found"]


@pytest.mark.slow
def test_a_comparison_trains_nothing_twice(record: dict, record_path: Path, capsys: pytest.CaptureFixture) -> None:
    *before, last = record["runs"]
    record_path.write_text(json.dumps(record | {"runs": before}))
    assert bench.main() == 0
    *runs, repeated = json.loads(record_path.read_text())["runs"]
    assert runs == before and repeated["run"] == last["run"]
    assert [line["accuracy"] for line in repeated["found"]] == [line["accuracy"] for line in last["found"]]
    assert [run["environment"] for run in (*runs, repeated)] == [0] * len(before) + [1]
    output = capsys.readouterr().out
    assert "92% steps" in output and "90% wall_s" in output


@pytest.mark.slow
def test_a_seed_on_two_kinds_of_machine_does_not_count(record: dict, record_path: Path) -> None:
    runs = json.loads(json.dumps(record["runs"]))
    last = max(number for number, run in enumerate(runs) if run["run"]["seed"] == 2)
    runs[last]["environment"] = 1
    environments = [*record["environments"], record["environments"][0] | {"cpu": "another"}]
    record_path.write_text(json.dumps(record | {"runs": runs, "environments": environments}))
    assert bench.main() == 0
    assert json.loads(record_path.read_text())["found"]["LARS"]["targets"]["0.90"]["runs"] == 1


@pytest.mark.slow
def test_boxes_near_the_best_settings_of_a_record(record: dict, record_path: Path) -> None:
    near_path = record_path.with_name("near.json")
    near_path.write_text(json.dumps(record))
    near, best = bench.near(near_path.stem)["K-FAC"], record["found"]["K-FAC"]["best"]["kfac"]
    before = []
    for _ in range(6):
        trial = next_trial(near, before, TRIAL)
        decades = max(abs(math.log10(trial.kfac[key] / best[key])) for key in ("damping", "kl_clip"))
        assert decades <= (0.5 if len(before) < 4 else 1) + 1e-9
        before.append((trial, 0.5 - 0.1 * math.log10(trial.kfac["damping"])))
    assert min(trial.kfac["damping"] for trial, _ in before) < best["damping"] / 10**0.5


def test_trials_go_where_the_best_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accuracy that falls with the square of the distance from a place away from the box's centre."""

    def accuracy(run: Run) -> float:
        decades = math.hypot(math.log10(run.kfac["kl_clip"] / 6e-3), math.log10(run.kfac["damping"] / 4e-4))
        return max(0.1, 0.9 - 0.1 * decades**2)

    boxes = {key: around.box(0) for key, around in OPTIMIZERS["K-FAC"][1].items()}
    before = []
    for _ in range(10):
        run = next_trial(OPTIMIZERS["K-FAC"], before, TRIAL)
        assert all(box.low <= run.kfac[key] <= box.high for key, box in boxes.items())
        before.append((run, accuracy(run)))
    accuracies = [value for _, value in before]
    assert max(accuracies) > 0.895 > max(accuracies[:4])
    assert next_trial(OPTIMIZERS["K-FAC"], before[:-1], TRIAL) == before[-1][0]
    monkeypatch.setattr(GPSampler, "sample_relative", lambda *_: {key: before[5][0].kfac[key] for key in boxes})
    assert next_trial(OPTIMIZERS["K-FAC"], before, TRIAL) not in [run for run, _ in before]  # nothing twice


def test_the_box_of_later_trials_is_wider() -> None:
    """With the best at the edge of the first."""
    box, before = OPTIMIZERS["LAMB"][0]["lr"].box(0), []
    for _ in range(12):
        run = next_trial(OPTIMIZERS["LAMB"], before, TRIAL)
        before.append((run, 0.5 + 0.1 * math.log10(run.optimizer["lr"] / box.low)))
    assert all(run.optimizer["lr"] <= box.high for run, _ in before[:10])
    assert max(run.optimizer["lr"] for run, _ in before[10:]) > box.high


def test_steps_to_a_target() -> None:
    line = {"epoch": 1.0, "wall_s": 1.0, "cpu_s": 1.0}
    runs = [[{"step": 5, "accuracy": 0.8, **line}, {"step": step, "accuracy": 0.9, **line}] for step in (10, 12, 14)]
    result = to_target([*runs, runs[0][:1]], 0.9)
    assert (result["reached"], result["runs"], result["step"]["mean"]) == (3, 4, 12)
    assert result["step"]["half_width"] == pytest.approx(4.303 * 2 / 3**0.5, rel=1e-3)  # Student's t, two degrees
    assert to_target(runs, 0.95) == {"reached": 0, "runs": 3}
    assert interval([1.0])["mean"] == 1.0


def runs_to(*steps: int, top: float = 0.9, cpu_s: float = 2.0) -> list[list[dict]]:
    """Return what runs found that end at these steps, with an accuracy of `top`."""
    return [[{"step": step, "accuracy": top, "wall_s": step, "cpu_s": cpu_s * step}] for step in steps]


RUNS = dict.fromkeys(FIRST_ORDER, runs_to(100, 140)) | {"LARS": runs_to(80, 100, cpu_s=4.0), "K-FAC": runs_to(40, 50)}
HALF = {"share": pytest.approx(0.5), "interval": pytest.approx([0.5, 0.5]), "of": "LARS", "at_most": False, "met": True}


def test_the_share_of_steps() -> None:
    """Against the best of the first order, in steps and in seconds."""
    assert share(RUNS, 0.9, "step") == HALF == share(RUNS, 0.9, "wall_s")
    sgd = share(RUNS, 0.9, "cpu_s")  # shares of 0.4 and 0.357
    assert (sgd["of"], sgd["share"]) == ("SGD, Nesterov", pytest.approx((0.4 * 5 / 14) ** 0.5))
    standard_error = math.log(0.4 / (5 / 14)) / 2  # of two: half their difference
    low, high = sgd["interval"]
    assert math.log(high / sgd["share"]) == pytest.approx(12.706 * standard_error, rel=1e-3)
    assert low * high == pytest.approx(sgd["share"] ** 2)
    assert sgd["share"] < 0.75 < high and not sgd["met"]  # too uncertain
    assert not share(RUNS | {"K-FAC": runs_to(56, 70)}, 0.9, "step")["met"]  # 0.7
    single = share({name: runs[:1] for name, runs in RUNS.items()}, 0.9, "step")
    assert single == HALF | {"interval": None, "met": False}


def test_the_share_of_steps_where_a_run_misses_the_target() -> None:
    """It counts with all of its steps, and the share is a bound; there is none where K-FAC misses it."""
    kfac = {"K-FAC": runs_to(30, 30)}
    missed = share(dict.fromkeys(FIRST_ORDER, runs_to(60, 60, top=0.8)) | kfac, 0.9, "step")
    assert missed == HALF | {"of": "SGD, Nesterov", "at_most": True}
    partly = share(dict.fromkeys(FIRST_ORDER, runs_to(30) + runs_to(90, top=0.8)) | kfac, 0.9, "step")
    assert partly["at_most"] and partly["share"] == pytest.approx(3**-0.5)
    assert share(RUNS | {"K-FAC": runs_to(40) + runs_to(50, top=0.8)}, 0.9, "step") is None


def test_the_average_of_the_weights() -> None:
    """The weight of a step falls as a polynomial of degree 8 towards the first."""
    steps = torch.eye(40, dtype=torch.float64)
    average = steps[0]
    for number in range(1, 40):
        average = averaged(average, steps[number], torch.tensor(number))
    weights = torch.tensor([math.prod(range(t, t + 8)) for t in range(1, 41)], dtype=torch.float64)
    torch.testing.assert_close(average, weights / weights.sum())
