"""How a rank ends: the ranks' connections are taken down after a training that worked, and only then."""

import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

TIMEOUT_S = 60  # a hang is of 600 s, or of the ranks' 30 minutes

# `trainer`, with a destroy_process_group of torch's that behaves as it does under NCCL while the other ranks are in a
# collective: it does not come back.
COMMAND = """
import sys, time
import torch.distributed as dist
real = dist.destroy_process_group
def blocks(*arguments):
    print("destroying", flush=True)
    time.sleep(600)
def works(*arguments):
    print("destroying", flush=True)
    real(*arguments)
dist.destroy_process_group = {"blocks": blocks, "works": works}[sys.argv.pop(1)]
from trainer.cli import main
%s
sys.exit(main())
"""
# What one rank raises in the third step.
RAISE = """
import os
from trainer import loop
real_update, steps = loop._update, []
def update(*arguments):
    steps.append(0)
    if len(steps) == 3 and os.environ["RANK"] == "1":
        raise {}
    real_update(*arguments)
loop._update = update
"""


@pytest.fixture
def damaged(packed, tmp_path):
    """The same data set, as far as its manifest goes, with training images that another node's disk has spoilt."""
    folder = tmp_path / "damaged"
    shutil.copytree(packed, folder)
    for shard in (folder / "train").glob("shard-*"):
        if shard.suffix == ".tar":
            content = bytearray(shard.read_bytes())
            content[512 : len(content) // 2] = bytes(len(content) // 2 - 512)
            shard.write_bytes(content)
    return folder


@pytest.fixture
def two_ranks(start, recipe_file, packed, port, tmp_path):
    """two_ranks("blocks", data of rank 1, code) -> both ranks, without a launcher that would end the other."""

    def _two_ranks(destroy: str, data: Path = packed, code: str = "", changes: Sequence[str] = ()) -> list:
        (tmp_path / "command.py").write_text(COMMAND % code)
        env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        words = ["train", recipe_file, "--out", tmp_path / "run", *(w for c in changes for w in ("--set", c))]
        return [
            start(
                tmp_path / "command.py", destroy, *words, "--data", folder,
                env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank, folder in enumerate((packed, data))
        ]  # fmt: skip

    return _two_ranks


def finish(child: subprocess.Popen) -> tuple[int, str, str]:
    out, err = child.communicate(timeout=TIMEOUT_S)
    return child.returncode, out, err


def test_a_rank_that_cannot_read_an_image_says_so_and_is_gone(two_ranks, damaged, metrics, tmp_path):
    """Rank 0 waits in a collective operation meanwhile."""
    first, second = two_ranks("blocks", damaged)
    code, out, err = finish(second)
    assert code == 1, err
    assert "error: " in err and str(damaged) in err and "Traceback" not in err
    assert "destroying" not in out
    code, out, err = finish(first)  # its connection was closed, also without a launcher
    assert code == 1, err
    assert "lost contact with another rank" in err and "destroying" not in out
    last = metrics(tmp_path / "run")[-1]
    assert (last["event"], last["status"]) == ("end", "failed")


@pytest.mark.parametrize(
    ("raised", "expected", "says"),
    [
        ('ZeroDivisionError("a surprise")', 1, "ZeroDivisionError: a surprise"),
        ("KeyboardInterrupt", 130, "interrupted"),  # a second Ctrl-C
        ("SystemExit(143)", 143, "terminated"),
    ],
)
def test_other_ways_out(two_ranks, raised, expected, says):
    first, second = two_ranks("blocks", code=RAISE.format(raised))
    code, out, err = finish(second)
    assert code == expected
    assert says in err and ("Traceback" in err) == (expected == 1) and "destroying" not in out
    assert finish(first)[0] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_waits_for_one_that_never_comes_can_be_stopped(start, recipe_file, packed, port, tmp_path, number):
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    child = start("-m", "trainer", "train", recipe_file, "--data", packed, "--out", tmp_path / "run", env=env)
    deadline = time.monotonic() + TIMEOUT_S
    while "waiting for 2 ranks" not in child.said()[1]:
        assert child.poll() is None and time.monotonic() < deadline, child.said()
        time.sleep(0.05)
    time.sleep(1)  # it is in torch by then
    child.send_signal(number)
    assert finish(child)[0] == -number
    assert not (tmp_path / "run").exists()


def test_success_takes_the_connections_down(two_ranks):
    for child in two_ranks("works", changes=["train.epochs=1"]):
        code, out, err = finish(child)
        assert code == 0, err
        assert out.count("destroying") == 1
