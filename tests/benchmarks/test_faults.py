"""The benchmark of faults: whom an output blames, what a table says, and a rank that is really killed."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import bench_faults, corpus, fault_runs, measure
from benchmarks.fault_runs import cell, find_blame, is_loadable, list_checkpoints
from benchmarks.testbed import TESTBED
from datapipe.packing import PackOptions, pack

ROOT = Path(__file__).parents[2]
OURS = "error: rank 0: the run ends, because rank 1 (node2) has given no sign of life for 20 s. This rank: forward"
TORCHRUN = """
Failures:
[1]:
  host      : {others_host}
  rank      : {other} (local_rank: 0)
----
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : {host}
  rank      : {rank} (local_rank: 0)
  exitcode  : -9 (pid: 7)  (SIGKILL)
"""


@pytest.mark.parametrize(
    ("text", "blame"),
    [
        (OURS, OURS),
        (OURS + TORCHRUN.format(others_host="node1", other=0, host="node2", rank=1), OURS),
        (
            TORCHRUN.format(others_host="node1", other=0, host="node2", rank=1),
            "host node2, rank 1 (local_rank: 0)",
        ),
        (TORCHRUN.format(others_host="node2", other=1, host="node1", rank=0), ""),
        ("[rank: 1] Child process with PID 7 terminated with code -9.",) * 2,
        ("[rank: 1] Received SIGTERM: 15", ""),
        ("[rank1]: RuntimeError: Connection closed by peer", ""),
        ("error: rank 1: the run ends, because rank 0 (node1) does not answer. This rank: forward", ""),
        ("12:00:00 rank 1 WARNING rank 1: shard 3: waiting for a batch", ""),
        ("rank 11 has left, of ranks 10 to 12", ""),
    ],
)
def test_whom_an_output_blames(text: str, blame: str) -> None:
    assert find_blame(text) == blame


def summary(*runs: dict) -> dict:
    common = {"survived": False, "usable": True, "others_gone_s": 2.0, "lost_s": 3.0, "exit_codes": [1]}
    return bench_faults.summarise([common | run for run in runs])


@pytest.mark.parametrize(
    ("its", "told"),
    [
        (summary({"gone_s": 1.0}, {"gone_s": 2.0}), "1.5 (1.0–2.0) s; exit code 1; 3.0 s lost"),
        (summary({"gone_s": 1.0, "blames_rank_1": True, "exit_codes": [1, -9]}, {"gone_s": 1.0}),
         "1.0 (1.0–1.0) s; exit code -9, 1; 3.0 s lost"),
        (summary({"gone_s": 1.0, "blames_rank_1": True, "names_its_host": True}),
         "1.0 (1.0–1.0) s; exit code 1; names rank 1 and its host; 3.0 s lost"),
        (summary({"gone_s": None, "exit_codes": [None, 1], "usable": False}),
         "2.0 (2.0–2.0) s, but rank 1 > 90 s; exit code 1; no checkpoint left"),
        (summary({"gone_s": 1.0}, {"gone_s": 1.0}, {"gone_s": None}),
         "1.0 (1.0–1.0) s, but 1 of 3 > 90 s; exit code 1; 3.0 s lost"),
        (summary({"gone_s": None, "others_gone_s": None, "exit_codes": [None]}), "> 90 s; 3.0 s lost"),
        (summary({"survived": True}, {"gone_s": 1.0}),
         "trains on in 1 of 2 runs, else ends: 1.0 (1.0–1.0) s; exit code 1; 3.0 s lost"),
        (bench_faults.summarise([{"survived": True, "usable": True}]), "trains on"),
    ],
)  # fmt: skip
def test_what_a_table_says(its: dict, told: str) -> None:
    assert cell(its, 90) == told


def test_only_checkpoints_that_can_be_loaded_count(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path) == []
    good, bad = tmp_path / "checkpoint-1.pt", tmp_path / "checkpoint.pt"
    torch.save({"model": torch.ones(9)}, good)
    bad.write_bytes(good.read_bytes()[:-100])
    os.utime(good, (1, 1))
    (tmp_path / "checkpoints" / "checkpoint_0").mkdir(parents=True)
    shutil.copy(good, tmp_path / "checkpoints" / "checkpoint_0" / "optimizer.bin")  # the rest is not there yet
    paths = [path for _, path in list_checkpoints(tmp_path)]
    assert set(paths[:2]) == {bad, tmp_path / "checkpoints" / "checkpoint_0"} and paths[2] == good
    assert [is_loadable(path) for path in paths] == [False, False, True]


def test_the_record_is_of_the_pinned_versions() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "faults.json").read_text())
    pins = (ROOT / "benchmarks" / "peers" / "constraints.txt").read_text().splitlines()
    assert [f"{name}=={version}" for name, version in record["peers"].items() if f"{name}=={version}" not in pins] == []
    assert set(record["found"]) == set(bench_faults.FAULTS)
    assert all(list(found) == list(bench_faults.SYSTEMS) for found in record["found"].values())


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.testbed
@pytest.mark.skipif(not TESTBED.exists() or os.geteuid() != 0, reason="needs root, and the testbed beside the checkout")
def test_a_rank_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever trains, all processes end, and a checkpoint is left; the table is made of the record."""
    pack(ROOT / "tests" / "data" / "fashion-mnist-sample", tmp_path / "tar", PackOptions())
    monkeypatch.setattr(corpus, "fashion_mnist", lambda _count: tmp_path)
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(bench_faults, "WORK", tmp_path)
    monkeypatch.setattr(bench_faults, "INTO_EPOCH_S", 0.5)
    monkeypatch.setattr(bench_faults, "FAULTS", {"SIGKILL to rank 1": bench_faults.FAULTS["SIGKILL to rank 1"]})
    systems = ["trainer, rank by rank", "DDP loop, torchrun"]
    monkeypatch.setattr(bench_faults, "SYSTEMS", {name: bench_faults.SYSTEMS[name] for name in systems})
    monkeypatch.setattr(sys, "argv", ["bench", "--rounds", "1", "--cap-s", "100"])
    assert bench_faults.main() == 0
    found = json.loads((tmp_path / "faults.json").read_text())["found"]["SIGKILL to rank 1"]
    assert list(found) == systems
    for system, its in found.items():
        assert 0 < its["gone_s"]["median"] < 100 and its["usable"] and its["lost_s"]["median"] < 100, system
        assert "0" not in its["exit_codes"] and its["exit_codes"], system
    assert found[systems[0]]["blames_rank_1"]
    assert not list(tmp_path.glob("faults-*"))


def test_a_process_and_its_children_are_found_and_ended(tmp_path: Path) -> None:
    """Also those whose parent has ended."""
    script = "RANK=1 sleep 300 & exit 3"
    with fault_runs.Run([fault_runs.Command(["sh", "-c", script])], tmp_path, tmp_path, {}) as run:
        assert run.wait_for(lambda: list(run.processes().values()) == [1], 30) is not None
        assert run.exit_codes() == [3]
        assert run.wait_for(lambda: False, 0.3) is None
    assert run.processes() == {}
