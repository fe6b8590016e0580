"""Runs that are resumed: what they continue from, what is refused, and what they keep."""

import logging
import os
import re
import shutil

import pytest
import torch

import trainer.reporting.page
from datapipe.errors import SettingError
from datapipe.packing import PackOptions, pack
from tests.trainer.runs import damage, finish, weights_at
from trainer.checkpoints.file import load_checkpoint
from trainer.errors import CheckpointError
from trainer.reporting import plots
from trainer.run.owner import own


def test_a_run_is_never_overwritten(go, tmp_path):
    assert go("train.epochs=1") == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(SettingError, match=r"holds a run.*--resume"):
        go("train.epochs=1")
    with pytest.raises(SettingError, match=r"optimizer\.lr was 0\.05 and is 0\.5"):
        go("train.epochs=1", "optimizer.lr=0.5", resume=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_resume_of_nothing_starts_and_says_so(go, tmp_path, metrics, caplog):
    caplog.set_level(logging.INFO)
    assert go("train.epochs=1", resume=True) == 0
    assert "nothing to resume" in caplog.text
    assert [line["event"] for line in metrics(tmp_path / "run")].count("resume") == 0


def test_more_epochs_are_the_same_as_all_at_once(go, tmp_path, metrics):
    assert go("train.epochs=3") == 0
    at_once = load_checkpoint(tmp_path / "run" / "checkpoint.pt")
    os.rename(tmp_path / "run", tmp_path / "first")
    assert go("train.epochs=1") == 0
    assert go("train.epochs=3", resume=True) == 0
    in_two = load_checkpoint(tmp_path / "run" / "checkpoint.pt")
    assert all(torch.equal(at_once["model"][key], in_two["model"][key]) for key in at_once["model"])
    steps = [line["step"] for line in metrics(tmp_path / "run") if line["event"] == "train"]
    assert steps == list(range(1, 31))
    assert [line["event"] for line in metrics(tmp_path / "run")].count("end") == 1


def _offset(path):
    """Return where a checkpoint tells its directory's place: a wrong bit leads to before its begin."""
    return path.read_bytes().rindex(b"PK\6\6") + 48


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (weights_at, r"damaged: wrong checksum of 'archive/data/\d+'"),
        (_offset, "not a readable checkpoint: Invalid argument"),
    ],
    ids=["checksum", "read error"],
)
def test_a_damaged_checkpoint_has_one_before_it(go, tmp_path, metrics, caplog, place, reason):
    run = tmp_path / "run"
    assert go("train.epochs=3") == 0
    before = load_checkpoint(run / "checkpoint.pt")
    damage(run / "checkpoint.pt", place)
    damaged = (run / "checkpoint.pt").read_bytes()
    assert go("train.epochs=3", resume=True) == 0
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert re.fullmatch(rf"{run}/checkpoint\.pt: {reason}; continuing from {run}/checkpoint-1\.pt", warning)
    after = load_checkpoint(run / "checkpoint.pt")
    assert all(torch.equal(before["model"][key], after["model"][key]) for key in before["model"])
    assert [line["step"] for line in metrics(run) if line["event"] == "train"] == [
        *range(1, after["state"]["step"] + 1)
    ]
    # The good one has not made room for the damaged one.
    assert load_checkpoint(run / "checkpoint-1.pt")["state"]["epoch"] == 2
    assert (run / "checkpoint-damaged.pt").read_bytes() == damaged


def test_a_damaged_checkpoint_stays_where_the_run_is_refused(go, tmp_path):
    run = tmp_path / "run"
    assert go("train.epochs=2") == 0
    damage(run / "checkpoint.pt")
    before = {path.name: path.read_bytes() for path in run.glob("*.pt")}
    with pytest.raises(SettingError, match=r"optimizer\.lr"):
        go("train.epochs=2", "optimizer.lr=0.01", resume=True)
    assert {path.name: path.read_bytes() for path in run.glob("*.pt")} == before
    damage(run / "checkpoint-1.pt")
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt: damaged: wrong checksum of .*; start a new run$"):
        go("train.epochs=2", resume=True)


def test_resuming_a_complete_run_adds_nothing(go, tmp_path, metrics, caplog):
    assert go("train.epochs=1") == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    caplog.set_level(logging.INFO)
    assert go("train.epochs=1", resume=True) == 0
    assert "is complete" in caplog.text and (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_complete_run_with_another_target_is_resumed_to_that(go, tmp_path, metrics):
    assert go("train.epochs=2", "train.target_accuracy=1.0") == 1
    before = metrics(tmp_path / "run")
    assert go("train.epochs=2", "train.target_accuracy=0.01", resume=True) == 0
    *lines, resumed, end = metrics(tmp_path / "run")
    assert lines == before[:-1] and resumed["event"] == "resume" and resumed["target_accuracy"] == 0.01
    assert (end["status"], end["target_accuracy"]) == ("target_reached", 0.01)


def test_a_resume_that_is_refused_changes_nothing(go, packed, tmp_path):
    assert go("train.epochs=1") == 0
    pack(packed.parent / "raw", tmp_path / "other", PackOptions(workers=1, seed=1))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert before.count(b'"end"') == 1
    with pytest.raises(CheckpointError, match="another data set"):
        go("train.epochs=2", resume=True, data=tmp_path / "other")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def without(part, key):
    return lambda content: content[part].pop(key)


UNFIT = {  # how a whole checkpoint is changed, and what its error says
    **{f"no {key}": (lambda content, key=key: content.pop(key), f"KeyError: '{key}'")
       for key in ("random", "data_sets", "state", "clock", "loader", "model", "optimizer", "scaler", "metrics_bytes")},
    "no recipe": (lambda content: content.pop("recipe"), "no recipe"),
    "recipe of text": (lambda content: content.update(recipe="x"), "no recipe"),
    "no step": (without("state", "step"), "KeyError: 'step'"),
    "no elapsed time": (without("clock", "elapsed_s"), "KeyError: 'elapsed_s'"),
    "no parameter": (without("model", "fc.bias"), "Missing key.*fc.bias"),
    "other shape": (lambda content: content["model"].update({"fc.bias": torch.zeros(9)}), "size mismatch for fc.bias"),
    "other kind": (lambda content: content.update(model=[1]), "cannot be continued from: TypeError"),
    "other groups": (lambda content: content["optimizer"]["param_groups"].clear(), "ValueError"),
    "other random numbers": (lambda content: content["random"].update(cpu=torch.zeros(3)), "TypeError"),
    "a lost network": (lambda content: content["model"]["fc.weight"].fill_(torch.nan), "not finite.* start a new run"),
    "lost statistics": (lambda content: content["model"]["bn1.running_var"].fill_(torch.inf), "not finite"),
}  # fmt: skip


def test_whole_checkpoints_that_do_not_fit(go, tmp_path):
    assert go("train.epochs=1") == 0
    path = tmp_path / "run" / "checkpoint.pt"
    whole, before = path.read_bytes(), (tmp_path / "run" / "metrics.jsonl").read_bytes()
    for name, (change, words) in UNFIT.items():
        path.write_bytes(whole)
        content = torch.load(path, weights_only=True)
        change(content)
        torch.save(content, path)
        with pytest.raises(CheckpointError, match=rf"checkpoint\.pt: .*{words}") as caught:
            go("train.epochs=2", resume=True)
        assert "\n" not in str(caught.value), name
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_metrics_without_their_checkpoint_are_kept(go, tmp_path, metrics, caplog):
    run, kept = tmp_path / "run", []
    for number in (1, 2):
        assert go("train.epochs=1", resume=True) == 0
        kept.append((run / "metrics.jsonl").read_bytes())
        (run / "checkpoint.pt").unlink()
        assert go("train.epochs=1", resume=True) == 0
        assert f"kept as metrics-{number}.jsonl" in caplog.text
        assert [line["event"] for line in metrics(run)].count("run") == 1
    assert [(run / f"metrics-{number}.jsonl").read_bytes() for number in (1, 2)] == kept


def test_metrics_that_are_too_few_for_their_checkpoint_are_kept(go, tmp_path, metrics):
    run = tmp_path / "run"
    assert go("train.epochs=1") == 0
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:5]))
    assert go("train.epochs=2", resume=True) == 0
    assert (run / "metrics-1.jsonl").read_bytes() == b"".join(lines[:5])
    assert [line["event"] for line in metrics(run)][:2] == ["run", "resume"]


def test_metrics_cut_short_do_not_hinder_the_report(go, tmp_path, metrics, monkeypatch):
    monkeypatch.setattr(plots, "PLOTS", plots.PLOTS[:1])
    assert go("train.epochs=1") == 0
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:50])
    assert go("train.epochs=2", resume=True) == 0
    assert metrics(tmp_path / "run")[0]["event"] == "run" and metrics(tmp_path / "run")[-1]["status"] == "completed"
    assert trainer.reporting.page.write_report([tmp_path / "run"], tmp_path).exists()


def test_a_training_that_waits_for_its_data_keeps_others_out(go, train, packed, tmp_path, metrics):
    """It has read the checkpoint by then: when another one could train meanwhile, that one's epochs would be lost."""
    assert go("train.epochs=1", "schedule={name='constant'}") == 0
    slow = shutil.copytree(packed, tmp_path / "slow")
    manifest = slow / "train" / "manifest.json"
    content = manifest.read_bytes()
    manifest.unlink()
    os.mkfifo(manifest)
    changes = ["train.epochs=2", "schedule={name='constant'}"]
    first = train("run", *changes, words=["--resume"], data=slow)
    with open(manifest, "wb") as pipe:  # as soon as it reads
        with pytest.raises(SettingError, match="another process trains there"):
            go(*changes, resume=True)
        pipe.write(content)
    code, _, err = finish(first)
    assert code == 0, err
    assert [line["epoch"] for line in metrics(tmp_path / "run") if line["event"] == "epoch"] == [1, 2]


def test_two_trainings_in_one_folder_are_refused(go, tmp_path):
    (tmp_path / "run").mkdir()
    with own(tmp_path / "run", "", print), pytest.raises(SettingError, match="another process trains there"):
        go()
