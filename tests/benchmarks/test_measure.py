"""What benchmarks share, and those of them that are about one process: figures are right."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import bench_order, bench_slice, bench_spinning, corpus, measure
from benchmarks.measure import compare, cpu_s, process, spread
from datapipe.packing import PackOptions, pack
from tests.waiting import limit_s, read_until

SPIN = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"


def test_process_is_measured_with_its_children() -> None:
    child = "import time\nwhile time.process_time() < 0.2: pass"
    output, usage = process(
        [sys.executable, "-c", f"import subprocess, sys; print(7); {_run(child)}; sys.exit(3)"], (3,)
    )
    assert output == "7\n"
    assert usage["process_cpu_s"] > 0.2 < usage["process_wall_s"] and usage["process_peak_bytes"] > 1 << 20
    with pytest.raises(ChildProcessError, match="exit code 3"):
        process([sys.executable, "-c", "raise SystemExit(3)"])


def _run(code: str) -> str:
    return f"subprocess.run([sys.executable, '-c', {code!r}])"


def test_cpu_seconds_count_children_that_still_run() -> None:
    before = cpu_s()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SPIN], **pipes) as child:
        read_until("", child.stdout, child)
        while_running = cpu_s() - before
        child.communicate("\n", timeout=limit_s())
    assert while_running > 0.25
    assert cpu_s() - before == pytest.approx(while_running, abs=0.15)


def test_spread() -> None:
    assert spread([3.0, 1.0, 8.0]) == {"median": 3.0, "min": 1.0, "max": 8.0}


def test_first_items_of_an_idx_file() -> None:
    idx = b"\0\0\x08\3" + b"\0\0\0\5" + b"\0\0\0\2" * 2 + bytes(range(20))
    assert corpus.first_items(idx, 3) == b"\0\0\x08\3" + b"\0\0\0\3" + b"\0\0\0\2" * 2 + bytes(range(12))


@pytest.mark.slow
def test_orders_are_measured(tmp_path: Path) -> None:
    figures = bench_order.measure(tmp_path, 100_000, rounds=1)
    assert list(figures) == ["full", "blocks"]
    for row in figures.values():
        assert 0 < row["peak_bytes"]["median"] < 100_000 * 200 and 0 < row["batch_s"]["median"] < 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_ways_to_evict_are_compared(tmp_path: Path, encoded) -> None:
    """By simulation and by a loader: with half of the room, a single node reads at least half."""
    shares = bench_slice.simulate(1, num_samples=4_000)
    assert shares["0.5"]["datapipe"] == pytest.approx(shares["0.5"]["first come"], abs=0.01)
    assert abs(shares["0.5"]["datapipe"] - 0.5) < 0.01 < shares["0.5"]["random"] - 0.5
    assert shares["0.5"]["random"] < shares["0.5"]["LRU"]
    two = bench_slice.simulate(2, num_samples=4_000)["0.5"]
    assert two["datapipe"] < 0.75 * min(two["first come"], two["random"], two["LRU"])
    folder = tmp_path / "raw" / "train" / "0"
    folder.mkdir(parents=True)
    for i in range(60):
        pixels = np.random.default_rng(i).integers(0, 256, (256, 256, 3), np.uint8)
        (folder / f"{i}.png").write_bytes(encoded(pixels, "PNG"))
    pack(tmp_path / "raw", tmp_path / "packed", PackOptions())
    runs = bench_slice.measure(tmp_path, tmp_path / "packed" / "train", rounds=1)
    assert runs["nothing"]["read_share"]["median"] > 0.8
    assert all(run["read_share"]["median"] <= 1 for run in runs.values())


@pytest.mark.slow
def test_threads_that_sleep_are_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Whether the setting comes in time is a test of the trainer's."""
    sample = Path(__file__).parents[1] / "data" / "fashion-mnist-sample"
    (tmp_path / "raw").mkdir()
    for path in sample.glob("*-ubyte.gz"):
        (tmp_path / "raw" / path.stem).write_bytes(corpus.first_items(gzip.decompress(path.read_bytes()), 256))
    pack(tmp_path / "raw", tmp_path / "tar", PackOptions())
    monkeypatch.setattr(corpus, "fashion_mnist", lambda _: tmp_path)
    monkeypatch.setattr(corpus, "describe", lambda folder: {"name": folder.name})
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(bench_spinning, "WORK", tmp_path)
    monkeypatch.setattr(bench_spinning, "CORES", sorted(os.sched_getaffinity(0))[:2])
    monkeypatch.setattr(bench_spinning, "BUSY", "import signal; signal.pause()")
    monkeypatch.setattr(bench_spinning, "STATES", bench_spinning.STATES[:1])
    monkeypatch.setattr(sys, "argv", ["bench", "--rounds", "1"])
    assert bench_spinning.main() == 0
    record = json.loads((tmp_path / "spinning.json").read_text())
    assert len(record["ways"]) == 2 and all(way["images_per_s"]["min"] > 0 for way in record["ways"].values())
    spinning = record["ways"]["one core taken, threads spin"]["images_per_s"]["median"]
    sleeping = record["ways"]["one core taken, threads sleep"]["images_per_s"]["median"]
    assert record["ratios"]["one core taken"] == [pytest.approx(sleeping / spinning)]
    assert "× the images/s with threads that sleep" in capsys.readouterr().out


def test_those_that_are_compared_take_turns() -> None:
    calls = []

    def run(name: str, number: int) -> dict:
        calls.append((name, number))
        return {"s": number + 1.0, "name": name}

    figures = compare(["a", "b"], 3, run, ["s"])
    assert calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert figures["b"] == {"s": spread([1.0, 2.0, 3.0]), "runs": [{"s": n + 1.0, "name": "b"} for n in range(3)]}
