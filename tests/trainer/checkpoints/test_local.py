"""Checkpoints on a node's own disk, copied to the run's folder while training continues."""

import errno
import os
import shutil
import signal
import threading

import pytest
import torch

import trainer.checkpoints.local
import trainer.run.loop
from tests.datapipe.staging.data_sets import needs_root
from tests.waiting import limit_s
from trainer.checkpoints.file import list_checkpoints, load_checkpoint, save_checkpoint
from trainer.checkpoints.local import LocalCheckpoints, local_folder
from trainer.cli import main
from trainer.config.recipe import load_recipe
from trainer.reporting.metrics import digest_before
from trainer.run.resume import read_checkpoint

EVERY = ["--set", "train.checkpoint_every_steps=5"]


pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def go(packed, recipe_file, tmp_path, monkeypatch):
    """go("run", "--resume", …) -> exit code of `trainer train` into tmp_path/run."""

    def _go(name, *arguments):
        command = ["trainer", "train", recipe_file, "--data", packed, "--out", tmp_path / name, *arguments]
        monkeypatch.setattr("sys.argv", [str(word) for word in command])
        return main()

    return _go


@pytest.fixture
def gate(monkeypatch):
    """Hold all copies while it is clear, as a filesystem does that others load."""
    opened, real = threading.Event(), shutil.copyfileobj

    def copy(*args):
        assert opened.wait(limit_s())
        real(*args)

    monkeypatch.setattr(trainer.checkpoints.local.shutil, "copyfileobj", copy)
    yield opened
    opened.set()


def _stop_at(monkeypatch, step, act):
    real, count = trainer.run.loop._update, iter(range(1, 10**6))

    def update(*arguments):
        real(*arguments)
        if next(count) == step:
            act()

    monkeypatch.setattr(trainer.run.loop, "_update", update)


def test_the_run_has_what_it_has_without(go, tmp_path):
    assert go("plain", *EVERY) == go("run", *EVERY, "--local-checkpoints", tmp_path / "local") == 0
    assert [*(tmp_path / "local").iterdir()] == []
    for name in ("plain", "run"):
        names = {path.name for path in (tmp_path / name).glob("*.pt")}
        assert names == {"best.pt", "checkpoint-1.pt", "checkpoint.pt"}
    plain, content = (load_checkpoint(tmp_path / name / "checkpoint.pt") for name in ("plain", "run"))
    assert all(torch.equal(value, content["model"][name]) for name, value in plain["model"].items())
    best = load_checkpoint(tmp_path / "run" / "best.pt")["state"]["evaluations"]
    assert best[-1]["accuracy"] == max(each["accuracy"] for each in content["state"]["evaluations"])


def test_training_does_not_wait_for_copies(go, gate, tmp_path, monkeypatch):
    seen = []

    def look():
        folder = local_folder(tmp_path / "local", tmp_path / "run")
        seen.append((list_checkpoints(tmp_path / "run"), load_checkpoint(folder / "checkpoint.pt")["state"]["step"]))
        gate.set()

    _stop_at(monkeypatch, 23, look)
    assert go("run", *EVERY, "--local-checkpoints", tmp_path / "local") == 0
    assert seen == [([], 20)]
    assert load_checkpoint(tmp_path / "run" / "checkpoint.pt")["state"]["step"] == 30


@pytest.fixture
def left(go, tmp_path):
    """A run that has stopped: the local disk has its checkpoint of step 20, of which the copy was lost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalCheckpoints, "discard", lambda self: None)
        _stop_at(patch, 20, lambda: signal.raise_signal(signal.SIGTERM))
        assert go("run", *EVERY, "--local-checkpoints", tmp_path / "local") == 143
    (tmp_path / "run" / "checkpoint.pt").unlink()
    return local_folder(tmp_path / "local", tmp_path / "run") / "checkpoint.pt"


def _resumed_at(metrics, run):
    return [line["step"] for line in metrics(run) if line["event"] == "resume"]


def test_what_this_disk_has_is_continued_from_where_it_is_newer(go, left, tmp_path, metrics):
    go("whole", *EVERY)
    assert go("run", *EVERY, "--resume", "--local-checkpoints", tmp_path / "local") == 0
    assert _resumed_at(metrics, tmp_path / "run") == [20]
    whole, content = (load_checkpoint(tmp_path / name / "checkpoint.pt") for name in ("whole", "run"))
    assert all(torch.equal(value, content["model"][name]) for name, value in whole["model"].items())


def test_where_it_is_damaged_the_runs_own_is(go, left, tmp_path, metrics, caplog):
    data = bytearray(left.read_bytes())
    data[len(data) // 2] ^= 255
    left.write_bytes(data)
    assert go("run", *EVERY, "--resume", "--local-checkpoints", tmp_path / "local") == 0
    assert _resumed_at(metrics, tmp_path / "run") == [15]
    assert "damaged" in caplog.text and "continuing from" in caplog.text


def test_what_was_not_copied_when_the_run_ended_is_copied_by_the_next(go, tmp_path, metrics):
    """The process was killed while it copied the last checkpoint, that of a run which is complete, and its best one."""
    local = ["--local-checkpoints", tmp_path / "local"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalCheckpoints, "discard", lambda self: None)
        assert go("run", *EVERY, *local) == 0
    for path in (tmp_path / "run").glob("*.pt"):
        path.unlink()
    assert go("run", *EVERY, "--resume", *local) == 0
    assert load_checkpoint(tmp_path / "run" / "checkpoint.pt")["state"]["epoch"] == 3
    assert (tmp_path / "run" / "best.pt").exists()
    assert not [*(tmp_path / "local").iterdir()]


def test_where_the_run_was_continued_on_another_node_it_is_not_taken(go, left, tmp_path, metrics, caplog):
    assert go("run", *EVERY, "--resume", "--set", "train.epochs=2") == 0  # elsewhere
    (tmp_path / "run" / "checkpoint.pt").unlink()
    with pytest.MonkeyPatch.context() as patch:  # killed before it saves
        _stop_at(patch, 1, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            go("run", *EVERY, "--resume", "--local-checkpoints", tmp_path / "local")
    assert "the run was continued elsewhere meanwhile" in caplog.text
    steps = [load_checkpoint(path)["state"]["step"] for path in list_checkpoints(tmp_path / "run")]
    assert steps == [15]  # what was not used is not copied
    assert go("run", *EVERY, "--resume", "--local-checkpoints", tmp_path / "local") == 0
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if line["event"] == "train"] == list(range(1, 31))
    assert not list((tmp_path / "run").glob("metrics-*"))


def test_a_copy_that_failed_once_is_made_up_for(monkeypatch, tmp_path):
    (tmp_path / "run").mkdir()
    local, real, failures = (
        LocalCheckpoints(tmp_path / "local", tmp_path / "run", 2),
        trainer.checkpoints.local.atomic_write,
        [MemoryError()],
    )

    def write(path):
        if failures:
            raise failures.pop()
        return real(path)

    monkeypatch.setattr(trainer.checkpoints.local, "atomic_write", write)
    local.save({"step": 1}, is_best=True)
    local._wait()
    assert not failures and not list_checkpoints(tmp_path / "run")
    local.save({"step": 2}, is_best=False)
    local.finish()
    steps = {path.name: load_checkpoint(path)["step"] for path in (tmp_path / "run").iterdir()}
    assert steps == {"checkpoint.pt": 2, "best.pt": 1}


def test_a_folder_in_the_run_is_refused(go, tmp_path, capsys):
    assert go("run", "--local-checkpoints", tmp_path / "run" / "local") == 2
    assert "lies in --out" in capsys.readouterr().err


@needs_root
@pytest.mark.parametrize("planted", ["the folder", "the file", "a link", "the folder above", "a mode"])
def test_what_another_user_has_planted_is_refused(go, left, tmp_path, capsys, planted):
    """Nothing is taken from it, and nothing is removed; the run itself can be continued without."""
    local, folder = tmp_path / "local", left.parent
    local.chmod(0o1777)
    if planted == "a link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
        os.chown(folder, 65534, 65534, follow_symlinks=False)
    elif planted == "a mode":
        folder.chmod(0o777)
    else:
        os.chown({"the folder": folder, "the file": left, "the folder above": local}[planted], 65534, 65534)
    assert go("run", *EVERY, "--resume", "--local-checkpoints", local) == 2
    errors = capsys.readouterr().err
    assert f"error: --local-checkpoints {local}: {local}" in errors and ("nobody's" in errors or "0777" in errors), (
        errors
    )
    assert left.exists()


def test_other_users_cannot_read_or_write_there(go, left, tmp_path):
    assert left.parent.stat().st_mode & 0o777 == 0o700


def test_that_of_another_run_in_the_same_folder_is_not_taken(go, left, tmp_path, metrics):
    shutil.rmtree(tmp_path / "run")
    assert go("run", *EVERY, "--resume", "--local-checkpoints", tmp_path / "local") == 0
    assert _resumed_at(metrics, tmp_path / "run") == []


def test_the_best_is_copied_even_where_later_ones_overtake_it(gate, tmp_path):
    (tmp_path / "run").mkdir()
    local = LocalCheckpoints(tmp_path / "local", tmp_path / "run", keep=2)
    for step in range(6):
        assert local.save({"step": step}, is_best=step == 3)
    gate.set()
    local.finish()
    steps = {path.name: load_checkpoint(path)["step"] for path in (tmp_path / "run").iterdir()}
    assert steps["checkpoint.pt"] == 5 and steps["best.pt"] == 3
    assert steps.keys() == {"checkpoint.pt", "checkpoint-1.pt", "best.pt"}


def test_a_checkpoint_that_is_the_best_is_copied_once(monkeypatch, tmp_path):
    (tmp_path / "run").mkdir()
    copies, real = [], shutil.copyfileobj
    monkeypatch.setattr(trainer.checkpoints.local.shutil, "copyfileobj", lambda *args: copies.append(1) or real(*args))
    local = LocalCheckpoints(tmp_path / "local", tmp_path / "run", keep=2)
    local.save({"step": 1}, is_best=True)
    local.finish()
    assert len(copies) == 1
    assert (tmp_path / "run" / "best.pt").samefile(tmp_path / "run" / "checkpoint.pt")


def test_without_room_on_this_disk_it_is_written_to_the_run(go, tmp_path, caplog):
    (tmp_path / "local").write_text("a file")
    assert go("run", "--set", "train.epochs=1", "--local-checkpoints", tmp_path / "local") == 0
    assert "no checkpoint on this node's disk" in caplog.text
    assert load_checkpoint(tmp_path / "run" / "checkpoint.pt")["state"]["epoch"] == 1


def test_copies_that_fail_count_as_checkpoints_that_fail(go, monkeypatch, tmp_path, caplog):
    def full(*_args, **_settings):
        raise OSError(errno.ENOSPC, "No space left on device", "run/checkpoint.pt")

    monkeypatch.setattr(trainer.checkpoints.local, "atomic_write", full)
    arguments = [*EVERY, "--local-checkpoints", tmp_path / "local", "--set", "train.failed_checkpoints=1"]
    assert go("run", *arguments) == 1
    assert "No space left on device" in caplog.text
    assert "(1 of 1 failures in a row that are allowed)" in caplog.text
    folder = local_folder(tmp_path / "local", tmp_path / "run")
    assert load_checkpoint(folder / "checkpoint.pt")["state"]["step"] > 0  # the last one is here


@pytest.mark.parametrize("step", [5, 3])
def test_the_checkpoint_after_a_roll_back_is_newer_than_those_before(recipe_file, tmp_path, step):
    """On the node's disk, not copied when the run was killed; after a damaged one, it is of an older step."""
    recipe, run, local = load_recipe(str(recipe_file), ()), tmp_path / "run", tmp_path / "local"
    lines = b'{"event": "run"}\n', b'{"event": "roll_back"}\n'
    for folder, number, content in ((run, 0, lines[0]), (local, 1, b"".join(lines))):
        folder.mkdir()
        (run / "metrics.jsonl").write_bytes(content)
        state = {"epoch": 0, "step": (5, step)[number], "recoveries": number, "lr_factor": 0.5**number}
        metrics = {"metrics_bytes": len(content), "metrics_digest": digest_before(run / "metrics.jsonl", len(content))}
        save_checkpoint(folder / "checkpoint.pt", {"recipe": recipe.model_dump(mode="json"), "state": state} | metrics)
    content = read_checkpoint(run, recipe, local)
    assert (content["path"], content["state"]["lr_factor"]) == (str(local / "checkpoint.pt"), 0.5)
