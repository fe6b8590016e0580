"""What is saved does not depend on how often it is, nor on a kill between a checkpoint and its second name."""

import shutil
import signal
import sys

import pytest
import torch

from tests.trainer.test_processes import flat, same
from trainer.checkpoint import load_checkpoint

# `trainer`, killed where it would keep a checkpoint as the best.
KILLED = """
import os, signal, sys
from trainer import resume
resume._keep_best = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
from trainer.cli import main
sys.exit(main())
"""


@pytest.fixture
def train(start, packed, recipe_file, tmp_path):
    """train("run", "train.epochs=1", …, ranks=1, code=…) -> exit code of `trainer train` into tmp_path/run."""

    def _train(name, *changes, ranks=1, code=()):
        words = [word for change in changes for word in ("--set", change)]
        line = ["train", recipe_file, "--data", packed, "--out", tmp_path / name, "--resume", *words]
        child = start(*(code or ("-m", "trainer")), *line, ranks=ranks)
        errors = child.communicate(timeout=120)[1]
        print(errors, file=sys.stderr)
        return child.returncode

    return _train


@pytest.mark.ranks
def test_ranks_that_save_more_often_end_with_the_same_bits(train, tmp_path):
    """The file has the mean of their running statistics, but each continues with its own."""
    contents = {}
    for every in ("none", "1"):
        changes = "train.epochs=2", f"train.checkpoint_every_steps={every}", "train.evaluate_every=2"
        assert train(f"every-{every}", *changes, ranks=2) == 0
        contents[every] = load_checkpoint(tmp_path / f"every-{every}" / "checkpoint.pt")
    seldom, often = contents["none"], contents["1"]
    assert [name for name in seldom["model"] if not torch.equal(seldom["model"][name], often["model"][name])] == []
    assert seldom["state"]["evaluations"][0]["loss"] == often["state"]["evaluations"][0]["loss"]
    first, second = often["buffers"]
    assert not torch.equal(first["bn1.running_mean"], second["bn1.running_mean"])  # so that it could fail
    assert torch.equal((first["bn1.running_mean"] + second["bn1.running_mean"]) / 2, often["model"]["bn1.running_mean"])


@pytest.mark.ranks
@pytest.mark.slow
def test_three_ranks_that_continue_end_with_the_same_bits(train, tmp_path):
    """Unlike two, they add a gradient up in an order that depends on where it lies in DDP's buckets."""
    changes = "train.epochs=1", "train.batch_size=30", "train.checkpoint_every_steps=3"
    assert train("whole", *changes, "train.keep_checkpoints=5", ranks=3) == 0
    (tmp_path / "continued").mkdir()
    for name, copy in (("checkpoint-3.pt", "checkpoint.pt"), ("metrics.jsonl", "metrics.jsonl")):
        shutil.copy(tmp_path / "whole" / name, tmp_path / "continued" / copy)
    assert load_checkpoint(tmp_path / "continued" / "checkpoint.pt")["state"]["step"] == 3
    assert train("continued", *changes, ranks=3) == 0
    whole, continued = (load_checkpoint(tmp_path / run / "checkpoint.pt") for run in ("whole", "continued"))
    for part in ("model", "optimizer", "buffers"):
        pairs = zip(flat(whole[part]), flat(continued[part]), strict=True)
        assert [name for (name, value), (_, other) in pairs if not same(value, other)] == []


def test_the_best_is_kept_although_the_run_was_killed_before(train, tmp_path):
    assert train("run", "train.epochs=1", code=("-c", KILLED)) == -signal.SIGKILL
    assert not (tmp_path / "run" / "best.pt").exists()
    assert train("run", "train.epochs=1") == 0
    assert load_checkpoint(tmp_path / "run" / "best.pt")["state"]["epoch"] == 1
