"""What is saved does not depend on how often it is, nor on a kill between a checkpoint and its second name."""

import errno
import shutil
import signal
import threading
import time
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch

import trainer.run.loop
import trainer.run.saver
import trainer.run.saving
from tests.trainer.runs import DISTURBED, KFAC, differing, finish
from tests.waiting import limit_s
from trainer.checkpoints.file import load_checkpoint
from trainer.config.recipe import load_recipe
from trainer.run.run import RunOptions, run


@pytest.fixture
def exit_code(train):
    """exit_code("run", "train.epochs=1", …, ranks=1) -> that of a training which is resumed, or begun."""
    return lambda name, *changes, **options: finish(train(name, *changes, words=["--resume"], **options))[0]


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_that_save_more_often_end_with_the_same_bits(exit_code, tmp_path):
    """The file has the mean of their running statistics, but each continues with its own."""
    contents = {}
    for every in ("none", "1"):
        changes = "train.epochs=2", "train.batch_size=64", f"train.checkpoint_every_steps={every}"
        assert exit_code(f"every-{every}", *changes, "train.evaluate_every=2", ranks=2) == 0
        contents[every] = load_checkpoint(tmp_path / f"every-{every}" / "checkpoint.pt")
    seldom, often = contents["none"], contents["1"]
    assert [name for name in seldom["model"] if not torch.equal(seldom["model"][name], often["model"][name])] == []
    assert seldom["state"]["evaluations"][0]["loss"] == often["state"]["evaluations"][0]["loss"]
    first, second = often["buffers"]
    assert not torch.equal(first["bn1.running_mean"], second["bn1.running_mean"])  # so that it could fail
    assert torch.equal((first["bn1.running_mean"] + second["bn1.running_mean"]) / 2, often["model"]["bn1.running_mean"])


@pytest.mark.ranks
@pytest.mark.slow
def test_three_ranks_that_continue_end_with_the_same_bits(exit_code, tmp_path):
    """Unlike two, they add a gradient up in an order that depends on where it lies in DDP's buckets."""
    changes = "train.epochs=1", "train.batch_size=30", "train.checkpoint_every_steps=3"
    assert exit_code("whole", *changes, "train.keep_checkpoints=5", ranks=3) == 0
    (tmp_path / "continued").mkdir()
    for name, copy in (("checkpoint-3.pt", "checkpoint.pt"), ("metrics.jsonl", "metrics.jsonl")):
        shutil.copy(tmp_path / "whole" / name, tmp_path / "continued" / copy)
    assert load_checkpoint(tmp_path / "continued" / "checkpoint.pt")["state"]["step"] == 3
    assert exit_code("continued", *changes, ranks=3) == 0
    whole, continued = (load_checkpoint(tmp_path / run / "checkpoint.pt") for run in ("whole", "continued"))
    for part in ("model", "optimizer", "buffers"):
        assert differing(whole[part], continued[part]) == []


def test_the_best_is_kept_although_the_run_was_killed_before(exit_code, tmp_path):
    changes = "train.epochs=1", "train.batch_size=330"
    assert exit_code("run", *changes, program=[DISTURBED, "best", 1, 0]) == -signal.SIGKILL
    assert not (tmp_path / "run" / "best.pt").exists()
    assert exit_code("run", *changes) == 0
    assert load_checkpoint(tmp_path / "run" / "best.pt")["state"]["epoch"] == 1


def test_training_continues_while_a_checkpoint_is_written(go, tmp_path, monkeypatch):
    """The file has the step whose checkpoint it is; the next checkpoint waits for it."""
    steps, may_write, written = [], threading.Event(), []
    real_update, real_save = trainer.run.loop._update, trainer.run.saving.save_checkpoint

    def update(job, state, *step):
        real_update(job, state, *step)
        steps.append([parameter.detach().clone() for parameter in job.module.parameters()])
        if len(steps) == 3:
            may_write.set()

    def save(path, content, keep):
        assert may_write.wait(limit_s(60)), "training waits for the file"
        written.append((content["state"]["step"], len(steps)))
        real_save(path, content, keep)

    monkeypatch.setattr(trainer.run.loop, "_update", update)
    monkeypatch.setattr(trainer.run.saving, "save_checkpoint", save)
    assert go("train.epochs=1", "train.checkpoint_every_steps=2", "train.keep_checkpoints=9") == 0
    numbers = [number for number, _ in written]
    assert numbers == [*range(2, len(steps), 2), len(steps)] and written[0][1] >= 3
    content = load_checkpoint(tmp_path / "run" / f"checkpoint-{len(numbers) - 1}.pt")
    assert content["state"]["step"] == 2
    saved = [value for name, value in content["model"].items() if name.endswith(("weight", "bias"))]
    assert len(saved) == len(steps[1]) and all(map(torch.equal, saved, steps[1]))


def test_solutions_are_saved_only_where_the_same_bits_are_promised(go, recipe_file, tmp_path, monkeypatch):
    """A run continues without them."""
    rules = [((), "cpu", True), ((), "cuda", False), (("train.deterministic=true",), "cuda", True)]
    for changes, device, wanted in rules:
        recipe = load_recipe(str(recipe_file), changes)
        assert trainer.run.saving._repeats_bits(torch.device(device), recipe) is wanted
    monkeypatch.setattr(trainer.run.saving, "_repeats_bits", lambda _, recipe: recipe.train.epochs > 1)
    changes = [*KFAC, "train.batch_size=110", "schedule={name='constant'}"]
    for epochs in (1, 2):
        assert go(*changes, f"train.epochs={epochs}", resume=True) == 0
        (state,) = load_checkpoint(tmp_path / "run" / "checkpoint.pt")["preconditioner"]
        assert any(layer["solution"] for layer in state["layers"].values()) is (epochs > 1)
        assert state["steps"] == 3 * epochs


def test_time_is_reserved_for_two_checkpoints(alone, packed, recipe_file, tmp_path, monkeypatch):
    """One may be under way when the last one is due."""
    times = cycle([0.0, 10_000.0])  # before and after each
    fake = SimpleNamespace(now=lambda: next(times))
    monkeypatch.setattr(trainer.run.saver, "clock", fake)
    recipe = load_recipe(str(recipe_file), ["train.epochs=1", "train.checkpoint_every_steps=1"])
    left_s = 15_000
    assert run(recipe, packed, tmp_path / "run", RunOptions(ends_at=time.time() + left_s)) == 75
    assert load_checkpoint(tmp_path / "run" / "checkpoint.pt")["state"]["step"] <= 3


def test_a_run_ends_after_more_failures_in_a_row_than_are_allowed(go, monkeypatch, caplog):
    """One that succeeds begins a new row."""
    tried, real = [], trainer.run.saving.save_checkpoint

    def save(*arguments):
        tried.append(len(tried) + 1)
        if tried[-1] != 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*arguments)

    monkeypatch.setattr(trainer.run.saving, "save_checkpoint", save)
    with pytest.raises(OSError, match="No space left"):
        go("train.epochs=1", "train.checkpoint_every_steps=1", "train.failed_checkpoints=2")
    assert tried == [1, 2, 3, 4, 5, 6]
    ends = "without the checkpoint of step 6 the run ends: failure 3 in a row; given up after 2, as train.failed_"
    assert [line.partition("checkpoints")[0] for line in caplog.messages if "the run ends" in line] == [ends]
