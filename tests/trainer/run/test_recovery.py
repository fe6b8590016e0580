"""A step whose loss is not finite, or a spike: named by its samples, skipped, rolled back, or the end."""

import math
import re

import pytest
import torch

import trainer.run.objective
import trainer.run.recovery
from datapipe.dataset.index import read_keys
from tests.trainer.runs import DISTURBED, damage, differing, finish
from trainer.checkpoints.file import load_checkpoint
from trainer.config.recipe import load_recipe
from trainer.errors import DivergedError
from trainer.reporting.runlog import read_run
from trainer.run.run import RunOptions, run

KFAC = ["optimizer.preconditioner=kfac", "kfac.factor_update_steps=1", "kfac.inv_update_steps=8"]
FIVE_STEPS = ["train.epochs=1", "train.batch_size=64"]

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def go(packed, recipe_file, tmp_path):
    """go("run", "train.epochs=1", …, resume=False) -> exit code of a run in tmp_path/run."""
    return lambda name, *changes, resume=False: run(
        load_recipe(str(recipe_file), changes), packed, tmp_path / name, RunOptions(resume)
    )


@pytest.fixture
def fault(monkeypatch):
    """fault(12, math.nan): multiply the loss of the forward passes with these numbers, from 1."""

    def _fault(*numbers, factor=math.nan):
        real, count = trainer.run.objective.batch_loss, iter(range(1, 10**6))

        def wrong(job, batch, step, *answers):
            loss = real(job, batch, step, *answers)
            return loss * factor if next(count) in numbers else loss

        monkeypatch.setattr(trainer.run.objective, "batch_loss", wrong)

    return _fault


def _assert_same(left, right, parts=("model", "optimizer", "preconditioner")):
    for part in parts:
        assert differing(left[part], right[part]) == [], part


def test_the_end_names_the_samples(go, fault, packed, tmp_path, metrics, caplog):
    fault(7)
    with pytest.raises(DivergedError, match="the loss became nan at step 7"):
        go("run", "train.log_every=5", "train.epochs=1")
    (line,) = (line for line in metrics(tmp_path / "run") if line["event"] == "diverged")
    assert (line["step"], line["rank"], line["loss"]) == (7, 0, None)
    keys = read_keys(packed / "train")
    assert len(set(line["keys"])) == 32 and set(line["keys"]) <= set(keys)
    message = next(record.getMessage() for record in caplog.records if "images:" in record.getMessage())
    assert "for 32 images: " + ", ".join(line["keys"][:8]) + ", …" in message
    # The same batch as an undisturbed run trains on in that step.
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.run.objective, "batch_loss", _remembering(seen))
        go("other", "train.epochs=1")
    assert line["keys"] == [keys[sample] for sample in seen[6]]


def _remembering(seen):
    real = trainer.run.objective.batch_loss

    def loss(job, batch, step, *answers):
        seen.append(batch.samples.tolist())
        return real(job, batch, step, *answers)

    return loss


@pytest.mark.parametrize(
    ("factor", "changes"),
    [(math.nan, []), (math.inf, []), (50.0, []), (math.nan, KFAC)],
    ids=["nan", "inf", "spike", "nan with kfac"],
)
def test_a_skipped_step_leaves_everything_as_it_was(go, fault, tmp_path, metrics, caplog, factor, changes):
    fault(24, factor=factor)
    every = ["train.checkpoint_every_steps=1", "train.keep_checkpoints=6", *changes]
    every += ["train.epochs=1", "train.batch_size=12"]  # 27 steps, and a spike needs some before it
    assert go("run", *every, "train.when_diverged=skip", "train.spike_factor=10.0") == 0
    contents = [load_checkpoint(path) for path in (tmp_path / "run").glob("checkpoint*.pt")]
    at = {content["state"]["step"]: content for content in contents}
    _assert_same(at[23], at[24], ("model", "preconditioner"))
    _assert_same(at[23]["optimizer"], at[24]["optimizer"], ("state",))  # its groups have the step's learning rate
    assert not torch.equal(at[24]["model"]["fc.weight"], at[25]["model"]["fc.weight"])
    assert at[25]["state"]["recoveries"] == 1
    assert "more micro-batches" not in caplog.text  # K-FAC has forgotten those of the step that was skipped
    if changes:
        assert at[23]["preconditioner"][0]["steps"] == at[24]["preconditioner"][0]["steps"] == 23
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if line["event"] == "skip"] == [24]
    assert [line["event"] for line in lines].count("diverged") == 1
    assert "Steps that were skipped, as the loss had diverged: 24." in read_run(tmp_path / "run").notes()


def test_gradients_that_are_not_finite_are_skipped_too(go, monkeypatch, tmp_path, metrics):
    real, count = trainer.run.objective.batch_loss, iter(range(1, 100))

    def wrong(job, batch, step, *answers):
        loss = real(job, batch, step, *answers)
        if next(count) == 5:
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss

    monkeypatch.setattr(trainer.run.objective, "batch_loss", wrong)
    assert go("run", *FIVE_STEPS, "train.when_diverged=skip") == 0
    assert [line["step"] for line in metrics(tmp_path / "run") if line["event"] == "skip"] == [5]


def test_skipping_changes_nothing_where_nothing_is_wrong(go, tmp_path):
    go("skip", "train.when_diverged=skip", "train.spike_factor=1000.0", *FIVE_STEPS, *KFAC)
    go("stop", *FIVE_STEPS, *KFAC)
    _assert_same(*(load_checkpoint(tmp_path / name / "checkpoint.pt") for name in ("skip", "stop")))


def test_skipping_ends_after_so_many(go, fault, tmp_path, metrics):
    fault(3, 4, 5)
    with pytest.raises(DivergedError, match="the loss or its gradients became nan at step 5, after 2 recoveries"):
        go("run", "train.when_diverged=skip", "train.max_recoveries=2")
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if line["event"] == "skip"] == [3, 4]
    assert [line["step"] for line in lines if line["event"] == "diverged"] == [3, 4, 5]


@pytest.mark.parametrize("changes", [pytest.param([], marks=pytest.mark.slow), KFAC], ids=["sgd", "kfac"])
def test_rolled_back_with_the_same_rate_ends_with_the_same_bits(go, fault, tmp_path, metrics, changes):
    changes = ["train.when_diverged=roll_back", "train.roll_back_lr_factor=1.0", "train.log_every=3", *changes]
    changes += ["train.epochs=2", "train.batch_size=64"]
    go("whole", *changes)
    fault(7)
    assert go("run", *changes) == 0
    whole, content = (load_checkpoint(tmp_path / name / "checkpoint.pt") for name in ("whole", "run"))
    _assert_same(whole, content)
    assert content["state"]["recoveries"] == 1
    (line,) = (line for line in metrics(tmp_path / "run") if line["event"] == "roll_back")
    assert (line["step"], line["from_step"], line["lr_factor"]) == (5, 9, 1.0)
    read, undisturbed = read_run(tmp_path / "run"), read_run(tmp_path / "whole")
    for ours, theirs in zip(read.train, undisturbed.train, strict=True):
        assert (ours["step"], ours["loss"], ours["lr"]) == (theirs["step"], theirs["loss"], theirs["lr"])
    assert any("Rolled back from step 9 to 5" in note for note in read.notes())


def test_rolled_back_the_rate_is_lower_until_the_end_also_when_resumed(go, fault, tmp_path, metrics):
    changes = ["train.when_diverged=roll_back", "train.checkpoint_every_steps=5"]
    changes += ["schedule.milestones=[2]", "schedule.gamma=0.1"]
    fault(17, 19)  # the second one is the first step again that came after the checkpoint of step 15, and one more
    assert go("run", *changes, "train.target_accuracy=0.01") == 0  # ends after an epoch
    assert go("run", *changes, resume=True) == 0
    read = read_run(tmp_path / "run")
    assert {line["lr_factor"] for line in read.roll_backs} == {0.5, 0.25}
    rates = {line["step"]: line["lr"] for line in read.train}
    assert rates[15] == 0.05
    assert rates[16] == rates[20] == 0.05 / 4
    assert rates[21] == pytest.approx(0.005 / 4)  # the schedule's step, too
    assert load_checkpoint(tmp_path / "run" / "checkpoint.pt")["state"]["lr_factor"] == 0.25


def test_rolling_back_ends_after_so_many(go, fault):
    fault(*range(15, 100))
    with pytest.raises(DivergedError, match="at step 11, after 2 recoveries"):
        go("run", "train.when_diverged=roll_back", "train.max_recoveries=2")


def test_rolled_back_in_the_first_epoch_ends_with_the_same_bits(go, fault, tmp_path, metrics):
    changes = ["train.when_diverged=roll_back", "train.roll_back_lr_factor=1.0", *FIVE_STEPS]
    go("whole", *changes)
    fault(3)
    assert go("run", *changes) == 0
    _assert_same(*(load_checkpoint(tmp_path / name / "checkpoint.pt") for name in ("whole", "run")))
    (line,) = (line for line in metrics(tmp_path / "run") if line["event"] == "roll_back")
    assert (line["step"], line["from_step"]) == (0, 3)
    assert [line["step"] for line in read_run(tmp_path / "run").train] == list(range(1, 6))


def test_other_policies_save_nothing_before_the_first_step(go, fault, tmp_path):
    fault(5)
    with pytest.raises(DivergedError, match=r"nan at step 5\. There is no checkpoint yet"):
        go("run")
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


def test_rolling_back_passes_over_a_damaged_checkpoint(go, fault, tmp_path, monkeypatch):
    """The good one is then not displaced by it."""
    real = trainer.run.recovery.read_checkpoint

    def read(run, *others):
        damage(run / "checkpoint.pt")
        return real(run, *others)

    monkeypatch.setattr(trainer.run.recovery, "read_checkpoint", read)
    fault(17)
    assert go("run", "train.when_diverged=roll_back", "train.epochs=2") == 0
    contents = {path.name: path for path in (tmp_path / "run").glob("*.pt")}
    assert contents.keys() == {"best.pt", "checkpoint.pt", "checkpoint-1.pt", "checkpoint-damaged.pt"}
    assert load_checkpoint(contents["checkpoint-1.pt"])["state"]["step"] == 10


@pytest.mark.ranks
@pytest.mark.parametrize("policy", ["skip", "roll_back"])
def test_all_ranks_recover_from_what_one_met(train, tmp_path, metrics, policy):
    changes = [*FIVE_STEPS, f"train.when_diverged={policy}"]
    code, _, err = finish(train("run", *changes, program=[DISTURBED, "nan", 3, 1], ranks=2))
    assert code == 0, err
    lines = metrics(tmp_path / "run")
    (line,) = (line for line in lines if line["event"] == "diverged")
    assert (line["rank"], line["step"], len(line["keys"])) == (1, 3, 32)
    assert [line["event"] for line in lines].count(policy) == 1
    assert re.search(
        r"the loss( or its gradients)? became nan at step 3; on rank 1 \(.+\) it was nan, for 32 images: ", err
    )
