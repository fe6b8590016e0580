"""The speedrun's benchmark: which trial is taken, what is compared with what, and what becomes of the record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_speedrun as bench
from benchmarks import measure


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[str, ...], int]]:
    """Return the trainings, which take ten seconds per epoch, with shifted images twenty; no rate but 0.4 helps."""
    runs = []

    def train(_self: bench.Runs, recipe: str, changes: tuple[str, ...], seed: int) -> dict:
        runs.append((recipe, changes, seed))
        epochs = int(changes[-1].rpartition("=")[2])
        takes_s = epochs * (20.0 if "data.crop=pad" in changes else 10.0) + (seed if seed < 1000 else 0)
        is_reached = "optimizer.lr=0.4" in changes and epochs > 3 and "data.flip=false" not in changes
        result = {"time_to_target_s": takes_s if is_reached else None, "best_accuracy": 0.9 + epochs / 1000}
        return result | {"trained_epochs": epochs, "process_cpu_s": 2 * takes_s}

    monkeypatch.setattr(bench.Runs, "_train", train)
    monkeypatch.setattr(bench.corpus, "fashion_mnist", lambda: tmp_path)
    for module in (bench, measure):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    return runs


def test_a_variant_joins_the_record_and_is_compared_with_the_plain_recipe(trained, tmp_path, capsys) -> None:
    assert bench.main(["--seeds", "2", "--only", "speedrun"]) == 0
    count = len(trained)
    assert bench.main(["--seeds", "2", "--only", "shifted by up to a pixel", "no flips"]) == 0
    assert not any(recipe == bench.PLAIN for recipe, *_ in trained[count:])
    text = (tmp_path / "speedrun.json").read_text()
    summary = json.loads(text, parse_constant=pytest.fail)["summary"]
    assert [*summary] == [bench.BASE, "speedrun", "shifted by up to a pixel", "no flips"]
    assert summary["speedrun"]["changes"] == ["optimizer.lr=0.4", "train.epochs=4"]  # the fastest that reached it
    assert summary["speedrun"]["ratio"]["value"] == pytest.approx(1)
    assert summary["shifted by up to a pixel"]["ratio"]["value"] == pytest.approx(((80 * 81) / (40 * 41)) ** 0.5)
    assert summary["no flips"]["reached"] == 0 and summary["no flips"]["time_to_target_s"]["mean"] is None
    assert summary["no flips"]["changes"][-1] == "train.epochs=5"  # the most accurate
    last = capsys.readouterr().out
    assert "no flips" in last and "nan" not in last and "0 of 2" in last


def test_another_machine_has_a_record_of_its_own(trained, tmp_path, capsys) -> None:
    words = ["--seeds", "2", "--record", "speedrun-other"]
    assert bench.main([*words, "--over", "speedrun", "--only", "shifted by up to a pixel"]) == 0
    assert not any(recipe == bench.PLAIN for recipe, *_ in trained)
    assert [path.name for path in tmp_path.glob("*.json")] == ["speedrun-other.json"]
    summary = json.loads((tmp_path / "speedrun-other.json").read_text())["summary"]
    assert summary["shifted by up to a pixel"]["ratio"]["value"] == pytest.approx(((80 * 81) / (40 * 41)) ** 0.5)
    with pytest.raises(SystemExit):
        bench.main([*words, "--only", "no flips"])
    assert "speedrun-other.json is over speedrun" in capsys.readouterr().err
    record = json.loads((tmp_path / "speedrun-other.json").read_text())
    record["recipes"][bench.SPEEDRUN]["train"]["epochs"] += 1
    (tmp_path / "speedrun-other.json").write_text(json.dumps(record))
    with pytest.raises(SystemExit):
        bench.main([*words, "--over", "speedrun"])
    assert "is of another machine, or of other versions or recipes" in capsys.readouterr().err


def test_a_run_that_joins_later_has_its_own_commit(trained, tmp_path, monkeypatch, capsys) -> None:
    assert bench.main(["--seeds", "1", "--only", "speedrun"]) == 0
    here = bench.environment()
    monkeypatch.setattr(bench, "environment", lambda: here | {"commit": "later"})
    assert bench.main(["--seeds", "1", "--only", "no flips"]) == 0
    record = json.loads((tmp_path / "speedrun.json").read_text())
    joined = {run["commit"] == "later" for run in record["runs"] if "data.flip=false" in run["changes"]}
    assert record["environment"]["commit"] == here["commit"] and joined == {True}
    assert sum(run["commit"] == "later" for run in record["runs"]) == 4  # three trials and a seed
    monkeypatch.setattr(bench, "environment", lambda: here | {"versions": {}})
    with pytest.raises(SystemExit):
        bench.main(["--seeds", "1", "--only", "no flips"])
    assert "of other versions" in capsys.readouterr().err


def test_a_training_that_fails_is_no_missed_target(tmp_path, monkeypatch) -> None:
    def process(command: list[str], _codes: tuple[int, ...]) -> tuple[str, dict]:
        out = Path(command[command.index("--out") + 1])
        out.mkdir(parents=True)
        (out / "metrics.jsonl").write_text('{"event": "end", "status": "failed"}\n')
        return "", {}

    monkeypatch.setattr(bench, "process", process)
    monkeypatch.setattr(bench, "WORK", tmp_path)
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    with pytest.raises(ChildProcessError, match=f"^{bench.SPEEDRUN}: failed, see .*metrics.jsonl"):
        bench.Runs("speedrun", tmp_path).train(bench.SPEEDRUN, (), 0)
    assert not [*tmp_path.glob("*.json")]
