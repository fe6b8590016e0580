"""Trainings that are killed, asked to stop or out of time continue where they were."""

import errno
import os
import shutil
import signal
import time

import pytest

import trainer.ranks.stop
from tests.trainer.conftest import each_rank
from tests.trainer.runs import DISTURBED, KFAC, differing, finish, wait_for_step
from tests.waiting import wait_until
from trainer.checkpoints.file import load_checkpoint
from trainer.cli import main

# All that recipes for few epochs add.
FAST = ["ema.half_life_steps=3", "ema.update_every_steps=2", "train.precise_bn_batches=2", "train.loss=bce"]
FAST += ["train.evaluate_mirrored=true", "data.mixup=0.2", "data.cutmix=1", "data.crop=random_resized"]
FAST += ["data.start_size=8", "data.eval_size=20", "data.flip=alternate", "optimizer.max_grad_norm=1"]
FAST += ["model.blur_pool=true", 'schedule={name="polynomial"}']
TEN_STEPS = ["train.epochs=2", "train.batch_size=64"]


@pytest.mark.parametrize(
    ("changes", "kills", "threads"),
    [([], (2, 5, 9), 1), (KFAC, (6,), 1), (FAST, (8,), 1), pytest.param(KFAC, (4, 9), 2, marks=pytest.mark.slow)],
    ids=["sgd", "kfac", "fast", "kfac, sums over two threads"],
)
def test_killed_and_continued_it_ends_with_the_same_bits(train, tmp_path, metrics, changes, kills, threads):
    """Before its first checkpoint, within an epoch or at its end."""
    changes, threads = [*TEN_STEPS, "train.checkpoint_every_steps=3", *changes], {"OMP_NUM_THREADS": str(threads)}
    assert finish(train("whole", *changes, env=threads))[0] == 0
    for step in kills:
        program = [DISTURBED, "kill", step, 0]
        assert finish(train("killed", *changes, program=program, words=["--resume"], env=threads))[0] == -signal.SIGKILL
    code, _, err = finish(train("killed", *changes, words=["--resume"], env=threads))
    assert code == 0, err
    whole, killed = (load_checkpoint(tmp_path / name / "checkpoint.pt") for name in ("whole", "killed"))
    assert whole["state"]["step"] == 10
    assert [name for part in ("model", "optimizer", "preconditioner", "average", "random")
            for name in differing(whole[part], killed[part])] == []  # fmt: skip
    lines = {name: metrics(tmp_path / name) for name in ("whole", "killed")}
    of_epoch = ("epoch", "train_loss", "train_accuracy", "val_loss")
    for event, fields in (("train", ("epoch", "step", "loss", "lr")), ("epoch", of_epoch)):
        found = {
            name: [[line[field] for field in fields] for line in lines[name] if line["event"] == event]
            for name in lines
        }
        assert found["whole"] == found["killed"]  # every line once, with the same numbers
    assert lines["killed"][0]["event"] == "run"
    names = {key for line in lines["whole"] if line["event"] in ("train", "epoch") for key in line}
    assert {name for name in names if "accuracy" in name} == {"train_accuracy", "val_accuracy"}
    assert [path.name for path in (tmp_path / "killed").glob(".*")] == []


@pytest.mark.parametrize(("what", "code"), [("terminate", 143), ("interrupt", 130)])
def test_a_signal_saves_and_stops(train, tmp_path, metrics, what, code):
    found, out, err = finish(train("run", *TEN_STEPS, program=[DISTURBED, what, 4, 0]))
    assert found == code, err
    assert "--resume" in out
    assert "Traceback" not in err
    last = metrics(tmp_path / "run")[-1]
    assert (last["event"], last["status"]) == ("end", "interrupted")
    assert load_checkpoint(tmp_path / "run" / "checkpoint.pt")["state"]["step"] == 4
    code, _, err = finish(train("run", *TEN_STEPS, words=["--resume"]))
    assert code == 0, err
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if line["event"] == "train"] == list(range(1, 11))
    assert [line["status"] for line in lines if line["event"] == "end"] == ["completed"]


def test_it_stops_before_the_job_ends(train, tmp_path, metrics):
    """Half a minute before; with less than that left, after one step, so that a requeued job always comes further."""
    environ = {"SLURM_JOB_END_TIME": str(int(time.time()) + 20)}
    code, out, err = finish(train("run", *TEN_STEPS, words=["--max-time", "1-0"], env=environ))
    assert code == 75 and out.splitlines()[-1].startswith("interrupted since the time is nearly over;"), err
    assert "are left before the time is over, and 30 s are kept" in err and "does a single step" in err
    assert metrics(tmp_path / "run")[-1]["status"] == "interrupted"
    assert load_checkpoint(tmp_path / "run" / "checkpoint.pt")["state"]["step"] == 1
    code, _, err = finish(train("run", *TEN_STEPS, words=["--resume", "--max-time", "1-0"]))
    assert code == 0, err
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if line["event"] == "train"] == list(range(1, 11))
    (resumed,) = [line for line in lines if line["event"] == "resume"]
    assert resumed["waited_s"] > 0 and resumed["repeated_steps"] == 0


@pytest.mark.usefixtures("alone")
def test_it_stops_before_the_time_that_the_command_gives_it(packed, recipe_file, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer.ranks.stop, "RESERVE_S", 10_000.0)  # more than what is left, as after a slow start
    line = ["trainer", "train", recipe_file, "--data", packed, "--out", tmp_path / "run", "--max-time", "1:00:00"]
    monkeypatch.setattr("sys.argv", [str(word) for word in line])
    assert main() == 75
    assert load_checkpoint(tmp_path / "run" / "checkpoint.pt")["state"]["step"] == 1


@pytest.mark.ranks
def test_checkpoints_by_time(train, tmp_path):
    """Within an epoch, of all ranks at the same step; a run that is killed continues from there."""
    changes = ["train.checkpoint_every_minutes=1e-6", "train.epochs=1"]  # due in every other step
    both = [train("run", *changes, program=[DISTURBED, "kill", 7, "all"], env=env) for env in each_rank(2)]
    codes = {finish(rank)[0] for rank in both}
    assert -signal.SIGKILL in codes <= {1, -signal.SIGKILL}  # 1: the other one was killed first
    kept = [load_checkpoint(tmp_path / "run" / f"checkpoint{end}.pt")["state"]["step"] for end in ("", "-1")]
    assert 7 > kept[0] > kept[1] > 0 and not (tmp_path / "run" / "best.pt").exists()
    code, _, err = finish(train("run", *changes, words=["--resume"], ranks=2))
    assert code == 0, err
    assert load_checkpoint(tmp_path / "run" / "best.pt")["state"]["step"] == 10


def test_a_signal_while_a_batch_does_not_come(train, packed, tmp_path):
    """The only rank saves and ends at once."""
    data = shutil.copytree(packed, tmp_path / "data")
    shard = data / "train" / "shard-000000.tar"
    shard.unlink()
    os.mkfifo(shard)
    child = train("run", "data.timeout_s=1000", data=data)
    pipe = wait_until(lambda: open_for_reader(shard), child)  # what reads there hangs
    child.terminate()
    code, _, err = finish(child)
    os.close(pipe)
    assert code == 143 and load_checkpoint(tmp_path / "run" / "checkpoint.pt")["state"]["step"] == 0, err


def open_for_reader(fifo) -> int | None:
    """Open a FIFO for writing once it is opened for reading."""
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        assert error.errno == errno.ENXIO
        return None


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_stop_together_and_one_goes_on(train, tmp_path, metrics):
    child = train("run", "train.epochs=1000", ranks=2, torchrun=True)
    wait_for_step(tmp_path / "run", 4, child)
    child.send_signal(signal.SIGTERM)  # torchrun passes it on to both
    code, _, err = finish(child)
    assert code != 0
    assert metrics(tmp_path / "run")[-1]["status"] == "interrupted", err
    step = load_checkpoint(tmp_path / "run" / "checkpoint.pt")["state"]["step"]
    epochs = step // 10 + 1
    code, _, err = finish(train("run", f"train.epochs={epochs}", words=["--resume"]))
    assert code == 0, err
    lines = metrics(tmp_path / "run")
    assert [(line["step"], line["world_size"]) for line in lines if line["event"] == "resume"] == [(step, 1)]
    assert [line["step"] for line in lines if line["event"] == "train"] == list(range(1, 10 * epochs + 1))
