"""Disks that are full, really: a run on a small tmpfs that only its own processes see."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from trainer.checkpoint import load_checkpoint
from trainer.config.recipe import load_recipe
from trainer.run import run

TIMEOUT_S = 120
# The run in `first`, if any, goes there, and all space that it leaves is used up. What remains at the end is copied
# to `kept`, since the mount ends with the command.
ON_TMPFS = """
mkdir disk && mount -t tmpfs -o size="$1" tmpfs disk || exit 99
[ -d first ] && { cp -a first disk/run; cat /dev/zero > disk/rest; } 2> /dev/null
export WORLD_SIZE="$2" MASTER_ADDR=localhost MASTER_PORT="$3"
shift 3
ranks= code=0
for RANK in $(seq 0 $((WORLD_SIZE - 1))); do  # by no launcher, which may end the others when the first has ended
    RANK=$RANK LOCAL_RANK=$RANK "$@" &
    ranks="$ranks $!"
done
for rank in $ranks; do wait $rank || code=$?; done
cp -r disk/run kept
exit $code
"""
SMALL = ["--set", "train.batch_size=6", "--set", "train.log_every=1"]  # an epoch's lines take several pages


@pytest.fixture(scope="module", autouse=True)
def _may_mount():
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root, and unshare, to mount")
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces are not allowed here")


@pytest.fixture
def train(start, packed, recipe_file, port):
    """train("--set", …, ranks=1, size="1m") -> (exit code, output, errors) of `trainer train` into disk/run."""

    def _train(*arguments, ranks=1, size=None, out="disk/run"):
        command = ["-m", "trainer", "train", recipe_file, "--data", packed, "--out", out, *arguments]
        return finish(start(*command, prefix=on_tmpfs(size, ranks, port) if size else ()))

    return _train


@pytest.fixture(scope="module")
def whole_run(packed, recipe_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(load_recipe(str(recipe_file), [*SMALL[1::2], "train.epochs=1"]), packed, folder) == 0
    return folder


@pytest.fixture
def first(whole_run, tmp_path):
    """A run of one epoch, with its report; its last checkpoint and its best are one file."""
    subprocess.run(["cp", "-a", whole_run, tmp_path / "first"], check=True)
    return tmp_path / "first"


def on_tmpfs(size: str, ranks: int, port: str) -> list[str]:
    return ["unshare", "-m", "sh", "-c", ON_TMPFS, "sh", size, str(ranks), port]


def finish(child: subprocess.Popen) -> tuple[int, str, str]:
    out, err = child.communicate(timeout=TIMEOUT_S)
    return child.returncode, out, err


def said(err: str, name: str, ranks: int) -> None:
    """Each rank gives the path and the reason, in one line."""
    reason = f"[Errno 28] No space left on device: 'disk/run/{name}'"
    assert err.count("error: ") == ranks, err
    assert err.count(f"error: {reason}") == 1 and err.count(f"error: rank 0: {reason}") == ranks - 1, err
    assert "inline_container" not in err and "lost contact" not in err
    assert "Traceback" not in err


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_a_checkpoint(train, tmp_path, metrics, ranks):
    """The run goes on as far as it can without a new one; its last one must be written."""
    # A checkpoint of this network has 630 kB: there is no room for the second beside the first.
    code, _, err = train(ranks=ranks, size="1m")
    assert code == 1
    said(err, ".checkpoint.pt.partial", ranks)
    (line,) = (line for line in err.splitlines() if "no checkpoint of step" in line)
    assert "that of step 10 stays; training continues (1 of 3 failures in a row that are allowed)" in line
    assert load_checkpoint(tmp_path / "kept" / "checkpoint.pt")["state"]["epoch"] == 1
    lines = metrics(tmp_path / "kept")
    assert lines[-1]["status"] == "failed" and [line["epoch"] for line in lines if line["event"] == "epoch"] == [
        1,
        2,
        3,
    ]
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["best.pt", "checkpoint.pt", "metrics.jsonl"]
    code, _, err = train("--resume", out="kept")  # where there is room
    assert code == 0, err


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_a_line_of_the_metrics(train, first, tmp_path, ranks):
    before = (first / "checkpoint.pt").read_bytes()
    code, _, err = train("--resume", *SMALL, ranks=ranks, size="4m")
    assert code == 1
    said(err, "metrics.jsonl", ranks)
    assert (tmp_path / "kept" / "checkpoint.pt").read_bytes() == before
    code, _, err = train("--resume", *SMALL, "--set", "train.epochs=2", out="kept")  # where there is room
    assert code == 0, err


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_the_report(train, first, tmp_path, ranks):
    """The training is complete: its exit code says so."""
    before = {path.name for path in first.iterdir()}
    code, out, err = train("--resume", *SMALL, "--set", "train.epochs=1", ranks=ranks, size="4m")
    assert code == 0, err
    assert "accuracy" in out and "report" not in out
    (line,) = (line for line in err.splitlines() if "No space left" in line)
    assert "ERROR no report could be written: [Errno 28]" in line and "report.pdf" in line
    assert "Traceback" not in err
    assert {path.name for path in (tmp_path / "kept").iterdir()} == before


def test_trainer_report(start, first, port, tmp_path):
    code, out, err = finish(start("-m", "trainer", "report", "disk/run", prefix=on_tmpfs("4m", 1, port)))
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("error: [Errno 28] No space left on device: 'disk/run/.report.pdf")
    assert "Traceback" not in err
    assert not list(Path(tmp_path / "kept").glob(".*"))
