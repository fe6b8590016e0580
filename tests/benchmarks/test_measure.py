"""What benchmarks share, and those of them that are about one process: figures are right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import bench_order, corpus, measure
from benchmarks.measure import compare, cpu_s, process, spread
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


def test_those_that_are_compared_take_turns() -> None:
    calls = []

    def run(name: str, number: int) -> dict:
        calls.append((name, number))
        return {"s": number + 1.0, "name": name}

    figures = compare(["a", "b"], 3, run, ["s"])
    assert calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert figures["b"] == {"s": spread([1.0, 2.0, 3.0]), "runs": [{"s": n + 1.0, "name": "b"} for n in range(3)]}


def test_what_is_not_known_of_the_code_is_not_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive without .git has a file that names its commit, or none; and a package may be missing."""
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.setattr(measure, "COMMIT", tmp_path / "COMMIT")
    monkeypatch.setattr(measure, "PACKAGES", ("numpy", "is-not-there"))
    here = measure.environment()
    assert here["commit"] is here["uncommitted_changes"] is here["versions"]["is-not-there"] is None
    assert here["versions"]["numpy"]
    (tmp_path / "COMMIT").write_text("abc\n")
    here = measure.environment()
    assert here["commit"] == "abc" and here["uncommitted_changes"] is None
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "COMMIT").unlink()
    assert measure.environment()["commit"] is None, "there is no git"


def test_pictures_are_drawn_alike_by_any_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []
    for cores in ({0}, {0, 1, 2}):
        monkeypatch.setattr(corpus.os, "sched_getaffinity", lambda _, cores=cores: cores)
        folders.append(corpus.drawn(tmp_path / str(len(cores)), 3, 1) / "images")
    files = [sorted(path.relative_to(folder) for path in folder.rglob("*.jpg")) for folder in folders]
    assert files[0] == files[1] and len(files[0]) == 4
    assert all((folders[0] / path).read_bytes() == (folders[1] / path).read_bytes() for path in files[0])
