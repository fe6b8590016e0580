"""The benchmarks of staging, and of training from a slow shared filesystem, measure, and their records become plots."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import bench_sharedfs, bench_stage, corpus, figures, measure, stage_plans, tables
from benchmarks.testbed import TESTBED
from datapipe.packing import PackOptions, pack

needs_testbed = [
    pytest.mark.testbed,
    pytest.mark.skipif(not TESTBED.exists(), reason="there is no testbed beside the checkout"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount"),
    pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="the kernel has no FUSE"),
]


def with_marks(*marks: pytest.MarkDecorator):
    """Return a decorator that gives a test several markers."""

    def decorate(function):
        for mark in marks:
            function = mark(function)
        return function

    return decorate


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus.drawn(tmp_path_factory.mktemp("corpus"), 40)


@pytest.fixture
def results(tmp_path: Path, photographs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder where a benchmark that a test runs writes its record, of a small corpus."""
    monkeypatch.setattr(corpus, "photographs", lambda _count: photographs)
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


@with_marks(pytest.mark.slow, *needs_testbed)
def test_training_from_a_slow_filesystem(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each way reads is what its kind must read."""
    kinds = ("STAGED", "BACKGROUND", "BLOCKS", "LOCAL")
    names = ("ImageFolder + Pillow", *(getattr(bench_sharedfs, kind) for kind in kinds))
    ways = {name: replace(bench_sharedfs.WAYS[name], workers=2) for name in names}
    monkeypatch.setattr(bench_sharedfs, "WAYS", ways)
    monkeypatch.setattr(bench_sharedfs, "TASK", replace(bench_sharedfs.TASK, size=32, batch_size=8))
    knobs = ["--meta-ms", "1", "--mbps", "500"]
    monkeypatch.setattr(sys, "argv", ["bench", "--rounds", "1", "--epochs", "2", "--out", str(results), *knobs])
    assert bench_sharedfs.main() == 0
    record = json.loads((results / "sharedfs.json").read_text())
    measured, size = record["ways"], 40 * record["corpus"]["mean_bytes"]
    assert set(measured) == set(ways)
    for name, its in measured.items():
        assert its["images"]["min"] == 40, name
        assert 0 < its["epoch_1_first_batch_s"]["median"] < its["epoch_1_wall_s"]["median"], name
        for epoch in (1, 2):
            share = its[f"epoch_{epoch}_read_bytes"]["median"] / size
            low, high = (0, 0.05) if ways[name].local or ways[name].stage == "before" else (0, 1.5)
            low = 0.98 if not ways[name].local and not ways[name].stage else low
            assert low <= share <= high, (name, epoch)
    assert measured["ImageFolder + Pillow"]["epoch_2_metadata_calls"]["median"] >= 2 * 40
    for name in (bench_sharedfs.STAGED, bench_sharedfs.BACKGROUND):
        first, last = bench_sharedfs.first_and_last(measured[name], "read_bytes", 2)
        assert 0.9 < first / size < 2.5 and last < size, name
    assert record["prepared"]["datapipe pack"]["metadata_calls"] >= 2 * 40
    assert record["ratios"][bench_sharedfs.BLOCKS].keys() == {"first", "later"}
    assert ">datapipe, staged<" in figures.draw(figures.sharedfs(), "light")
    assert "| datapipe, staged |" in "\n".join(tables.sharedfs(record))


@pytest.mark.slow
@pytest.mark.parametrize("name", bench_stage.COPIERS)
def test_copiers_copy(name: str, photographs: Path, tmp_path: Path) -> None:
    command = bench_stage.COPIERS[name]
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not installed")
    pack(photographs / "images", tmp_path / "packed", PackOptions())
    source, target = tmp_path / "packed" / "train", tmp_path / "copy"
    run = bench_stage.copy_locally(command, source, target)
    assert all((target / path.name).read_bytes() == path.read_bytes() for path in source.iterdir())
    assert 0 < run["wall_s"] <= run["process_wall_s"] and run["cpu_s"] > 0


@pytest.mark.slow
def test_who_does_not_check_does_not_notice(photographs: Path, tmp_path: Path) -> None:
    """What is measured as "not checked" copies a damaged shard, and what is measured beside it does not."""
    pack(photographs / "images", tmp_path / "packed", PackOptions())
    source = tmp_path / "packed" / "train"
    (shard,) = source.glob("*.tar")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    bench_stage.copy_locally(bench_stage.COPIERS[f"{bench_stage.OURS}, not checked"], source, tmp_path / "unchecked")
    assert (tmp_path / "unchecked" / shard.name).read_bytes() == content
    with pytest.raises(SystemExit, match="xxh3-128"):
        bench_stage.copy_locally(bench_stage.COPIERS[bench_stage.OURS], source, tmp_path / "checked")


@pytest.mark.parametrize("way", stage_plans.WAYS)
def test_plans_for_many_nodes(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte that a node writes is read or received, and a part that is multiplied up is close to the whole."""
    samples, nodes = 300_000, 16
    whole = stage_plans.plan(samples, nodes, way)
    assert whole["planned_share"] == 1
    size = samples * stage_plans.IMAGE_BYTES
    assert whole["data_bytes"] == size
    if way != stage_plans.UNSTAGED:
        assert whole["read_bytes"] + whole["received_bytes"] == pytest.approx(whole["written_bytes"]) == size
    assert whole["shared_bytes"] == pytest.approx(nodes * size if way == stage_plans.COPY else size)
    monkeypatch.setattr(stage_plans, "MOST_CHUNKS", 1000)
    monkeypatch.setattr(stage_plans, "MOST_SAMPLES", 100_000)
    part = stage_plans.plan(samples, nodes, way)
    assert part["planned_share"] < 0.5
    for key in ("shared_bytes", "read_bytes", "received_bytes", "sent_bytes", "requests"):
        assert part[key] == pytest.approx(whole[key], rel=0.05, abs=1), key


@with_marks(pytest.mark.slow, *needs_testbed)
def test_staging_benchmark(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sections, with Slurm where that is installed."""
    monkeypatch.setattr(sys, "argv", ["bench", "--rounds", "1", "--times", "4", "--mbps", "50"])
    monkeypatch.setattr(bench_stage, "SCALE_SAMPLES", (100_000,))
    assert bench_stage.main() == 0
    record = json.loads((results / "stage.json").read_text())
    ways, size = record["nodes"]["ways"], record["nodes"]["settings"]["bytes"]
    assert set(ways) | set(record["nodes"]["absent"]) == set(bench_stage.ON_NODES)
    for name, its in ways.items():
        reads = {"datapipe stage, copy": 4, bench_stage.CP: 4}.get(name, 1)
        assert its["read_bytes"]["median"] <= reads * 1.1 * size, name
        if "wall_s" in its:
            assert 0 < its["own_s"]["median"] <= its["wall_s"]["median"] < its["first_batch_s"]["median"], name
    assert len(record["scale"]["rows"]) == len(stage_plans.WAYS)
    for plot in (figures.stage_local(), figures.stage_nodes()):
        assert "datapipe stage" in figures.draw(plot, "dark")
    assert "| 100,000 | exchange |" in "\n".join(tables.stage_scale(record))
    assert "| cp -r on each |" in "\n".join(tables.stage_nodes(record))
