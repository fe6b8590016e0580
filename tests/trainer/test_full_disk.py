"""Disks that are full, really: a run on a small tmpfs that only its own processes see."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.processes import skip_report
from tests.trainer.conftest import each_rank
from tests.trainer.runs import finish, setting
from trainer.checkpoints.file import load_checkpoint
from trainer.config.recipe import load_recipe
from trainer.run.run import run

SMALL_DISK = Path(__file__).parent / "children" / "small_disk.py"
SMALL = ["train.batch_size=10", "train.log_every=1"]  # an epoch's lines take more than a page


@pytest.fixture(scope="module", autouse=True)
def _may_mount():
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root, and unshare, to mount")
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces are not allowed here")


@pytest.fixture
def train(start, packed, recipe_file, tmp_path):
    """train("train.epochs=1", …, ranks=1, size="1m") -> exit code, output, errors of a training into disk/run."""

    def _train(*changes, words=(), ranks=1, size=None):
        line = ["train", recipe_file, "--data", packed, "--out", "disk/run" if size else "kept"]
        program = [SMALL_DISK, size, ranks] if size else ["-m", "trainer"]
        env = each_rank(ranks)[0] if size else None
        return finish(start(*program, *line, *setting(changes), *words, env=env, reports=bool(size)))

    return _train


@pytest.fixture(scope="module")
def whole_run(packed, recipe_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.run.run.report_run", skip_report)
        assert run(load_recipe(str(recipe_file), [*SMALL, "train.epochs=1"]), packed, folder) == 0
    return folder


@pytest.fixture
def first(whole_run, tmp_path):
    """A run of one epoch; its last checkpoint and its best are one file."""
    subprocess.run(["cp", "-a", whole_run, tmp_path / "first"], check=True)
    return tmp_path / "first"


def said(err: str, name: str, ranks: int) -> None:
    """Each rank gives the path and the reason, in one line."""
    reason = f"[Errno 28] No space left on device: 'disk/run/{name}'"
    assert err.count("error: ") == ranks, err
    assert err.count(f"error: {reason}") == 1 and err.count(f"error: rank 0: {reason}") == ranks - 1, err
    assert "inline_container" not in err and "lost contact" not in err
    assert "Traceback" not in err


TWO = pytest.param(2, marks=pytest.mark.ranks)


@pytest.mark.parametrize("ranks", [1, TWO])
def test_a_checkpoint(train, tmp_path, metrics, ranks):
    """The run continues as far as it can without a new one; its last one must be written."""
    # A checkpoint of this network has 630 kB: there is no room for the second beside the first.
    code, _, err = train("train.batch_size=330", ranks=ranks, size="1m")
    assert code == 1
    said(err, ".checkpoint.pt.partial", ranks)
    (line,) = (line for line in err.splitlines() if "no checkpoint of step" in line)
    assert "that of step 1 stays; training continues (1 of 3 failures in a row that are allowed)" in line
    assert (
        "without the checkpoint of step 3 the run ends: it is the last one, which must be written; that of step 1"
        in err
    )
    assert load_checkpoint(tmp_path / "kept" / "checkpoint.pt")["state"]["epoch"] == 1
    lines = metrics(tmp_path / "kept")
    assert lines[-1]["status"] == "failed"
    assert [line["epoch"] for line in lines if line["event"] == "epoch"] == [1, 2, 3]
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["best.pt", "checkpoint.pt", "metrics.jsonl"]
    code, _, err = train("train.batch_size=330", words=["--resume"])  # where there is room
    assert code == 0, err


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=[pytest.mark.ranks, pytest.mark.slow])])
def test_the_last_checkpoint_of_a_run_that_reached_its_target(train, tmp_path, metrics, ranks):
    """The result is said, what is missing, and what to type: without --resume the run would be refused."""
    changes = "train.batch_size=330", "train.target_accuracy=0.01"
    code, out, err = train(*changes, ranks=ranks, size="512k")  # too small for one checkpoint
    assert code == 1
    said(err, ".checkpoint.pt.partial", ranks)
    assert (
        "(target 1.00% reached)" in out and "report            not written; `trainer report disk/run --out DIR`" in out
    )
    assert "without the checkpoint of step 1 the run ends: it is the last one, which must be written" in err
    (line,) = (line for line in err.splitlines() if line.startswith("error: [Errno 28]"))
    assert line.endswith("; run the same command again with --resume when there is room")
    if ranks == 2:
        code, out, err = train(*changes, words=["--resume"])
        assert code == 0 and "reached" in out, err


@pytest.mark.parametrize("ranks", [1, TWO])
def test_a_line_of_the_metrics(train, first, tmp_path, ranks):
    before = (first / "checkpoint.pt").read_bytes()
    code, _, err = train(*SMALL, words=["--resume"], ranks=ranks, size="4m")
    assert code == 1
    said(err, "metrics.jsonl", ranks)
    assert (tmp_path / "kept" / "checkpoint.pt").read_bytes() == before
    code, _, err = train(*SMALL, "train.epochs=2", words=["--resume"])  # where there is room
    assert code == 0, err


@pytest.mark.parametrize("ranks", [1, TWO])
def test_the_report(train, first, tmp_path, ranks):
    """The training is complete: its exit code says so."""
    before = {path.name for path in first.iterdir()}
    code, out, err = train(*SMALL, "train.epochs=1", words=["--resume"], ranks=ranks, size="4m")
    assert code == 0, err
    assert "accuracy" in out and "report" not in out
    (line,) = (line for line in err.splitlines() if "No space left" in line)
    assert "ERROR no report could be written: [Errno 28]" in line and "report.pdf" in line
    assert "Traceback" not in err
    assert {path.name for path in (tmp_path / "kept").iterdir()} == before


def test_trainer_report(start, first, tmp_path):
    code, out, err = finish(start(SMALL_DISK, "4m", 1, "report", "disk/run"))
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("error: [Errno 28] No space left on device: 'disk/run/.report.pdf")
    assert "Traceback" not in err
    assert not list((tmp_path / "kept").glob(".*"))
