"""Whole runs in this process: files, lines, exit codes, and failures that lose nothing."""

import json
import logging
import os
import re
import shutil
import signal
import time
from itertools import starmap

import numpy as np
import pytest
import torch
from PIL import Image
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_cache

import trainer.loading
import trainer.loop
import trainer.rehearsal
import trainer.reporting.page
import trainer.run
from datapipe.dataset.manifest import find_data_sets
from datapipe.dataset.verify import verify
from datapipe.errors import DatapipeError, DecodeError, SettingError
from datapipe.fsio import locked
from datapipe.packing import PackOptions, pack
from tests.trainer.waits import waits
from trainer.checkpoint import load_checkpoint
from trainer.config.recipe import load_recipe
from trainer.errors import CheckpointError, DivergedError
from trainer.run import RunOptions, run

COMPILE = torch.nn.Module.compile
SECTIONS = {"staging", "start", "compile", "wait", "forward_backward", "optimizer", "evaluation", "checkpoint", "other"}


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def go(packed, recipe_file, tmp_path):
    """go("train.epochs=1", …, resume=False, data=…) -> exit code of a run in tmp_path/run."""

    def _go(*changes, resume=False, data=packed):
        return run(load_recipe(str(recipe_file), changes), data, tmp_path / "run", RunOptions(resume))

    return _go


@pytest.fixture
def no_report(monkeypatch):
    monkeypatch.setattr(trainer.reporting.page, "write_report", lambda runs, out: out / "report.html")


@pytest.mark.parametrize(
    "changes",
    [(), ("optimizer.max_grad_norm=1.0", "ema.half_life_steps=4"), ("train.accumulation_steps=2", "data.mixup=0.2"),
     ("train.precision=bf16",),
     ('optimizer={name="muon", lr=0.02, adam_lr=0.002}',), ('optimizer={name="soap", lr=0.003}',),
     ('optimizer={name="lars", lr=1.0}',), ('optimizer={name="lamb", lr=0.01}',)],
    ids=" ".join,
)  # fmt: skip
def test_steps_that_do_not_log_never_wait_for_the_device(go, no_report, monkeypatch, tmp_path, changes):
    of_runs, train_epoch = [], trainer.loop.train_epoch

    def watched(*arguments):
        with waits() as names:
            result = train_epoch(*arguments)
        of_runs.append(names)
        return result

    monkeypatch.setattr(trainer.loop, "train_epoch", watched)
    for log_every in (2, 1000):
        assert go("train.epochs=1", f"train.log_every={log_every}", *changes) == 0
        shutil.rmtree(tmp_path / "run")
    assert of_runs[0] and not of_runs[1]


def test_target_reached(go, tmp_path, metrics, capsys):
    changes = "train.epochs=8", "train.log_every=5", "train.precision=off", "data.threads=3"
    assert go("train.target_accuracy=0.5", *changes) == 0
    lines = metrics(tmp_path / "run")
    first, last = lines[0], lines[-1]
    assert (first["event"], first["format"], first["recipe_name"]) == ("run", 1, "quarters")
    assert (first["train_samples"], first["val_samples"], first["world_size"]) == (330, 77, 1)
    assert first["recipe"]["train"]["batch_size"] == first["global_batch_size"] == 32
    assert set(first["versions"]) == {"python", "torch", "numpy", "datapipe"}
    assert first["device"].startswith("cpu (")
    assert (first["precision"], first["threads"], first["loader_threads"]) == ("off", torch.get_num_threads(), 3)
    assert (last["event"], last["status"]) == ("end", "target_reached")
    assert last["accuracy"] >= 0.5
    assert 0 < last["time_to_target_s"] <= last["elapsed_s"]
    epochs = [line for line in lines if line["event"] == "epoch"]
    assert [line["epoch"] for line in epochs] == list(range(1, len(epochs) + 1))
    assert all(line["step"] == 10 * line["epoch"] for line in epochs)  # 330 // 32 steps, the rest left out
    assert all(set(line["time_s"]) == SECTIONS for line in [*epochs, last])
    assert sum(last["time_s"].values()) == pytest.approx(last["elapsed_s"], rel=0.02)
    steps = [line["step"] for line in lines if line["event"] == "train"]
    assert steps == list(range(5, 10 * len(epochs) + 1, 5))
    shown = capsys.readouterr().out
    assert "reached" in shown
    assert str(tmp_path / "run" / "report.html") in shown
    assert (tmp_path / "run" / "report.html").stat().st_size > 0


def test_the_clock_starts_before_the_data_is_touched(packed, recipe_file, tmp_path, metrics, monkeypatch, capsys):
    real_stage, real_open, slow_s = trainer.run.stage, trainer.loading.open_loader, 0.4

    def slow_stage(*arguments):
        time.sleep(slow_s)
        real_stage(*arguments)

    def slow_open(*arguments, **settings):
        time.sleep(slow_s)  # for each split
        return real_open(*arguments, **settings)

    monkeypatch.setattr(trainer.run, "stage", slow_stage)
    monkeypatch.setattr(trainer.loading, "open_loader", slow_open)
    recipe = load_recipe(str(recipe_file), ["train.target_accuracy=0.01", "train.log_every=5"])
    assert run(recipe, packed, tmp_path / "run", RunOptions(local=tmp_path / "local")) == 0
    epoch, end = metrics(tmp_path / "run")[-2:]
    assert slow_s < end["time_s"]["staging"] < 2 * slow_s < end["time_s"]["start"]
    assert end["time_to_target_s"] > 3 * slow_s
    assert sum(end["time_s"].values()) == pytest.approx(end["elapsed_s"], rel=0.02)
    steps_s = 320 / epoch["images_per_s"]
    assert steps_s < end["elapsed_s"] - 3 * slow_s  # rates leave it out
    assert 320 / end["images_per_s"] == pytest.approx(steps_s, abs=0.1)
    assert "before the steps  staging 0." in capsys.readouterr().out


KFAC = ["optimizer.preconditioner=kfac", "kfac.factor_update_steps=1", "kfac.inv_update_steps=2"]


GROWING = ["data.crop=random_resized", "data.start_size=12", "data.grow=[0.0, 0.5]"]  # 16 px in the second epoch


MIXED = ["data.mixup=0.2", "data.cutmix=1.0", "train.precise_bn_batches=2", "train.evaluate_mirrored=true"]
ADAPTIVE = [*KFAC, "kfac.damping_update_steps=2"]


@pytest.mark.parametrize(
    "changes", [[], KFAC, ADAPTIVE, GROWING, MIXED], ids=["sgd", "kfac", "adaptive", "growing", "mixed"]
)
def test_compiling_before_the_first_step_changes_nothing(go, tmp_path, metrics, no_report, monkeypatch, changes):
    """All is compiled then, and the weights, the statistics and random numbers are those of a run that does not."""
    graphs, real, results = [], trainer.run.train, {}

    def backend(graph, _):
        graphs.append(graph)
        return graph

    def train(*arguments):
        before = len(graphs)
        status = real(*arguments)
        results["compiled later"] = len(graphs) - before
        return status

    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **_: COMPILE(module, backend=backend))
    monkeypatch.setattr(trainer.run, "train", train)
    for name in ("with", "without"):
        torch._dynamo.reset()
        if name == "without":
            monkeypatch.setattr(trainer.run, "rehearse", lambda job: None)
        assert go("train.epochs=2", "train.compile=true", *changes) == 0
        assert (results["compiled later"] == 0) == (name == "with") and graphs
        assert (metrics(tmp_path / "run")[-1]["time_s"]["compile"] > 0) == (name == "with")
        content = load_checkpoint(tmp_path / "run" / "checkpoint.pt")
        results[name] = [*_leaves([content[key] for key in ("model", "optimizer", "preconditioner", "random")])]
        shutil.rmtree(tmp_path / "run")
    assert len(results["with"]) == len(results["without"]) > 90
    assert all(starmap(torch.equal, zip(results["with"], results["without"], strict=True)))


def test_a_network_that_does_not_compile_is_trained_as_it_is(go, tmp_path, metrics, no_report, caplog):
    losses = []
    for compiled in ("false", "true"):
        torch._dynamo.reset()
        with fresh_cache(), inductor.patch({"cpp.cxx": ("/bin/false",)}):
            assert go("train.epochs=1", "train.log_every=1", f"train.compile={compiled}") == 0
        losses.append([line["loss"] for line in metrics(tmp_path / "run") if line["event"] == "train"])
        shutil.rmtree(tmp_path / "run")
    assert losses[0] == losses[1]
    warning = next(record.getMessage() for record in caplog.records if "train.compile" in record.getMessage())
    assert warning.startswith("train.compile: not compiled, which is slower, as it failed. rank 0: ")


def test_a_failed_compilation_need_not_say_why(go, monkeypatch, no_report, caplog):
    def fail(*_, **__):
        raise RuntimeError

    monkeypatch.setattr(trainer.rehearsal, "_pass", fail)
    assert go("train.epochs=1", "train.compile=true") == 0
    assert "rank 0: RuntimeError: " in caplog.text


def _leaves(value):
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    elif isinstance(value, torch.Tensor | int | float):
        yield torch.as_tensor(value)


def test_target_missed_is_1_with_a_report(go, tmp_path, metrics, capsys):
    assert go("train.target_accuracy=1.0", "train.epochs=1", "optimizer.lr=1e-9") == 1
    assert metrics(tmp_path / "run")[-1]["status"] == "target_missed"
    assert (tmp_path / "run" / "report.html").stat().st_size > 0
    assert "missed" in capsys.readouterr().out


def test_a_report_that_fails_hides_nothing(go, monkeypatch, capsys, caplog):
    def broken(runs, out):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(trainer.reporting.page, "write_report", broken)
    assert go("train.epochs=1") == 0
    assert "accuracy" in capsys.readouterr().out
    assert "no report could be written" in caplog.text


def test_a_run_is_never_overwritten(go, tmp_path, no_report):
    assert go("train.epochs=1") == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(SettingError, match=r"holds a run.*--resume"):
        go("train.epochs=1")
    with pytest.raises(SettingError, match=r"optimizer\.lr was 0\.05 and is 0\.5"):
        go("train.epochs=1", "optimizer.lr=0.5", resume=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_resume_of_nothing_starts_and_says_so(go, tmp_path, metrics, no_report, caplog):
    caplog.set_level(logging.INFO)
    assert go("train.epochs=1", resume=True) == 0
    assert "nothing to resume" in caplog.text
    assert [line["event"] for line in metrics(tmp_path / "run")].count("resume") == 0


def test_more_epochs_are_the_same_as_all_at_once(go, tmp_path, metrics, no_report):
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


def test_evaluate_every(go, tmp_path, metrics, no_report):
    assert go("train.evaluate_every=2") == 0
    found = [line["val_accuracy"] for line in metrics(tmp_path / "run") if line["event"] == "epoch"]
    assert [accuracy is None for accuracy in found] == [True, False, False]  # and always at the end


def test_a_signal_during_the_evaluation(go, tmp_path, metrics, no_report, monkeypatch):
    real = trainer.loop.evaluate

    def interrupted(*arguments, **settings):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments, **settings)

    monkeypatch.setattr(trainer.loop, "evaluate", interrupted)
    assert go() == 128 + signal.SIGTERM
    state = load_checkpoint(tmp_path / "run" / "checkpoint.pt")["state"]
    assert (state["epoch"], state["step"]) == (0, 10)  # all steps done, the epoch not finished
    monkeypatch.setattr(trainer.loop, "evaluate", real)
    assert go(resume=True) == 0
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if line["event"] == "train"] == list(range(1, 31))
    assert [line["epoch"] for line in lines if line["event"] == "epoch"] == [1, 2, 3]


def test_loss_that_is_not_finite(go, tmp_path, metrics, no_report):
    with pytest.raises(DivergedError, match="the loss became nan at step 2"):
        go("optimizer.lr=1e37", "train.evaluate_every=3")
    assert metrics(tmp_path / "run")[-1]["status"] == "failed"
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


# One step an epoch, of which the first does nothing: the losses before an update are finite until it is too late.
LATE = ["train.batch_size=330", "schedule={name='constant', warmup_epochs=3.0}", "train.epochs=4"]
INFINITE = ["optimizer.lr=1e37", "optimizer.weight_decay=1e30"]  # the next step makes the parameters so
KEPT = r"checkpoint\.pt is still that of epoch 1, step 1: --resume continues from it.*schedule\.warmup_epochs, now 3\)"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["optimizer.lr=1e37"], "loss on the validation set is nan"),
        (["optimizer.lr=1e37", "train.precision=bf16"], "loss on the validation set is nan"),
        (INFINITE, "parameters or running statistics are no longer finite after step 2"),
        ([*INFINITE, "train.evaluate_every=4"], "parameters .* no longer finite after step 2"),
    ],
)
def test_a_network_that_has_lost_itself_replaces_no_checkpoint(go, tmp_path, metrics, no_report, changes, words):
    with pytest.raises(DivergedError, match=f"{words}.*{KEPT}"):
        go(*LATE, *changes)
    state = load_checkpoint(tmp_path / "run" / "checkpoint.pt")["state"]
    assert (state["epoch"], state["step"]) == (1, 1)
    lines = metrics(tmp_path / "run")
    assert lines[-1]["status"] == "failed"
    assert all(line["val_accuracy"] is None for line in lines if line["event"] == "epoch" and line["epoch"] > 1)


def test_a_network_that_has_lost_itself_reaches_no_target(go, packed, tmp_path, metrics, no_report):
    """Its answer is always the first class, which is here that of nearly all validation images."""
    folder = tmp_path / "uneven"
    for split, counts in (("train", (20, 20)), ("val", (10, 2))):
        for label, count in enumerate(counts):
            (folder / split / f"class{label}").mkdir(parents=True)
            for i in range(count):
                image = Image.fromarray(np.full((16, 16), 200 * label + i, np.uint8))
                image.save(folder / split / f"class{label}" / f"{i}.png")
    pack(folder, tmp_path / "packed", PackOptions(workers=1))
    changes = ["train.batch_size=40", "train.target_accuracy=0.8", "optimizer.lr=1e37", "train.epochs=1"]
    with pytest.raises(DivergedError, match=r"There is no checkpoint yet \(.*checkpoint\.pt\)"):
        go(*changes, data=tmp_path / "packed")
    last = metrics(tmp_path / "run")[-1]
    assert (last["status"], last["time_to_target_s"], last["best_accuracy"]) == ("failed", None, None)
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


@pytest.fixture
def damaged(tmp_path):
    """Packed PNG, one of them damaged in each split, in a place that only decoding looks at: verified, and good."""
    for split in ("train", "val"):
        for label in range(2):
            (tmp_path / "raw" / split / f"class{label}").mkdir(parents=True)
            for i in range(20):
                pixels = np.random.default_rng(i).integers(0, 120, (16, 16), dtype=np.uint8) + 100 * label
                Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "raw" / split / f"class{label}" / f"{i}.png")
        path = tmp_path / "raw" / split / "class1" / "7.png"
        data = bytearray(path.read_bytes())
        data[data.index(b"IDAT") + 4] ^= 0xFF
        path.write_bytes(data)
    pack(tmp_path / "raw", tmp_path / "packed", PackOptions(workers=1))
    for split in ("train", "val"):
        assert verify(tmp_path / "packed" / split) == []
    return tmp_path / "packed"


def test_an_image_that_cannot_be_decoded(go, damaged, tmp_path, metrics, no_report, caplog):
    with pytest.raises(DecodeError, match=r"class1/7"):
        go("train.epochs=1", "train.batch_size=10", data=damaged)
    shutil.rmtree(tmp_path / "run")
    assert go("train.epochs=2", "train.batch_size=10", "data.max_bad=1", data=damaged) == 0
    assert caplog.text.count("bad sample, 1 of max_bad=1") == 2  # of each loader
    accuracy = metrics(tmp_path / "run")[-1]["accuracy"]
    assert accuracy * 40 == pytest.approx(round(accuracy * 40)) and accuracy <= 39 / 40


def test_a_cache_on_the_node(go, packed, tmp_path, no_report):
    cache = tmp_path / "cache"
    assert go("train.epochs=1", f"data.cache={cache}") == 0
    assert sorted(folder.name.partition("-")[0] for folder in cache.iterdir()) == ["train", "val"]
    state = load_checkpoint(tmp_path / "run" / "checkpoint.pt")
    shutil.rmtree(tmp_path / "run")
    assert go("train.epochs=1") == 0
    without = load_checkpoint(tmp_path / "run" / "checkpoint.pt")
    assert all(torch.equal(state["model"][key], without["model"][key]) for key in without["model"])


def test_damaged_checkpoint(go, tmp_path, no_report):
    assert go("train.epochs=1") == 0
    path = tmp_path / "run" / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt"):
        go("train.epochs=2", resume=True)


def _weights(path):
    """Return where a checkpoint has some weights."""
    return path.read_bytes().index(load_checkpoint(path)["model"]["fc.weight"].numpy().tobytes())


def _offset(path):
    """Return where a checkpoint tells its directory's place: a wrong bit leads to before its begin."""
    return path.read_bytes().rindex(b"PK\6\6") + 48


def damage(path, place=_weights):
    """Flip a bit of a checkpoint."""
    content, at = bytearray(path.read_bytes()), place(path)
    content[at] ^= 1
    path.unlink()  # best.pt may be another name of it
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (_weights, r"damaged: wrong checksum of 'archive/data/\d+'"),
        (_offset, "not a readable checkpoint: Invalid argument"),
    ],
    ids=["checksum", "read error"],
)
def test_a_damaged_checkpoint_has_one_before_it(go, tmp_path, metrics, no_report, caplog, place, reason):
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


def test_a_damaged_checkpoint_stays_where_the_run_is_refused(go, tmp_path, no_report):
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("train.batch_size=331", r"^train\.batch_size: .*batch of 331 is larger than.*330"),
        ("model.num_classes=3", r"model\.num_classes = 3.*at least 4"),
        ("data={size=16, mean=[0.1, 0.1, 0.1], std=[0.1, 0.1, 0.1]}", r"data\.mean.*1 channel;"),
        ("data.backend=gpu", "backend.*'gpu'"),
        ("train.precision=fp16", r"train\.precision"),
        ("train.batch_size=1", r"train\.batch_size = 1.*at least 2"),
        ("train.accumulation_steps=5", r"train\.accumulation_steps = 5: must divide the 32 images of a rank"),
        ("train.accumulation_steps=32", r"train\.accumulation_steps = 32: must divide the 32 images of a rank"),
        ("data={size=24, mean=[0.1], std=[0.1], crop='pad', pad=1}", r"^data\.pad: 1 is too little"),
    ],
)
def test_a_recipe_that_does_not_fit_leaves_no_run(go, tmp_path, change, words):
    with pytest.raises(SettingError, match=words):
        go(change)
    assert not (tmp_path / "run").exists()


def test_no_data(go, packed, tmp_path):
    with pytest.raises(DatapipeError):
        go(data=tmp_path / "nothing")
    with pytest.raises(DatapipeError, match="the folder holds data sets: choose one of packed"):
        go(data=packed.parent)
    with pytest.raises(SettingError, match=r"--data: .*train is one split; choose the folder that holds it"):
        go(data=packed / "train")
    assert not (tmp_path / "run").exists()


def test_a_run_and_its_data_set_lie_apart(packed, recipe_file):
    recipe = load_recipe(str(recipe_file), [])
    for out, words in (
        (packed, "is --data"),
        (packed / "run", "lies in --data"),
        (packed.parent, "holds --data"),
    ):
        with pytest.raises(SettingError, match=f"--out .*: {words}"):
            run(recipe, packed, out)
    assert not (packed / "run").exists()


def test_resuming_a_complete_run_adds_nothing(go, tmp_path, metrics, no_report, caplog):
    assert go("train.epochs=1") == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    caplog.set_level(logging.INFO)
    assert go("train.epochs=1", resume=True) == 0
    assert "is complete" in caplog.text and (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_complete_run_with_another_target_is_resumed_to_that(go, tmp_path, metrics, no_report):
    assert go("train.epochs=2", "train.target_accuracy=1.0") == 1
    before = metrics(tmp_path / "run")
    assert go("train.epochs=2", "train.target_accuracy=0.01", resume=True) == 0
    *lines, resumed, end = metrics(tmp_path / "run")
    assert lines == before[:-1] and resumed["event"] == "resume" and resumed["target_accuracy"] == 0.01
    assert (end["status"], end["target_accuracy"]) == ("target_reached", 0.01)


def test_resuming_on_another_data_set_is_refused(go, packed, tmp_path, no_report):
    """The same images in another order: an epoch and a step would mean other batches."""
    assert go("train.epochs=1") == 0
    pack(packed.parent / "raw", tmp_path / "other", PackOptions(workers=1, seed=1))
    with pytest.raises(CheckpointError, match="another data set"):
        go("train.epochs=2", resume=True, data=tmp_path / "other")


def test_a_resume_that_is_refused_changes_nothing(go, packed, tmp_path, no_report):
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


def test_whole_checkpoints_that_do_not_fit(go, tmp_path, no_report):
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


def test_metrics_without_their_checkpoint_are_kept(go, tmp_path, metrics, no_report, caplog):
    run, kept = tmp_path / "run", []
    for number in (1, 2):
        assert go("train.epochs=1", resume=True) == 0
        kept.append((run / "metrics.jsonl").read_bytes())
        (run / "checkpoint.pt").unlink()
        assert go("train.epochs=1", resume=True) == 0
        assert f"kept as metrics-{number}.jsonl" in caplog.text
        assert [line["event"] for line in metrics(run)].count("run") == 1
    assert [(run / f"metrics-{number}.jsonl").read_bytes() for number in (1, 2)] == kept


def test_metrics_that_are_too_few_for_their_checkpoint_are_kept(go, tmp_path, metrics, no_report):
    run = tmp_path / "run"
    assert go("train.epochs=1") == 0
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:5]))
    assert go("train.epochs=2", resume=True) == 0
    assert (run / "metrics-1.jsonl").read_bytes() == b"".join(lines[:5])
    assert [line["event"] for line in metrics(run)][:2] == ["run", "resume"]


def test_validation_images_of_other_classes(go, tmp_path):
    for split, names in (("train", ("cat", "dog", "emu")), ("val", ("cat", "emu", "zoo"))):
        for name in names:
            (tmp_path / "raw" / split / name).mkdir(parents=True)
            for i in range(4):
                Image.fromarray(np.full((16, 16), i, np.uint8)).save(tmp_path / "raw" / split / name / f"{i}.png")
    for split in ("train", "val"):
        pack(tmp_path / "raw" / split, tmp_path / split, PackOptions(workers=1))
        shutil.copytree(*find_data_sets(tmp_path / split), tmp_path / "packed" / split)
    words = "class 1 is 'dog' in the training set and 'emu' in the validation set"
    for backend in ("cpu", "webdataset"):
        with pytest.raises(SettingError, match=words):
            go("train.batch_size=4", f"data.backend={backend}", data=tmp_path / "packed")
    assert not (tmp_path / "run").exists()


def test_two_trainings_in_one_folder_are_refused(go, tmp_path):
    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run", wait=False), pytest.raises(SettingError, match="another process trains there"):
        go()


def test_tars_without_a_manifest_need_a_number_of_classes(go, packed, tmp_path, no_report):
    pytest.importorskip("webdataset")
    for split in ("train", "val"):
        (tmp_path / "tars" / split).mkdir(parents=True)
        for shard in (packed / split).glob("shard-*.tar"):
            shutil.copy(shard, tmp_path / "tars" / split)
    changes = ["train.epochs=1", "data.backend=webdataset", "data.mean=[0.3, 0.3, 0.3]", "data.std=[0.3, 0.3, 0.3]"]
    with pytest.raises(SettingError, match=r"model\.num_classes is missing"):
        go(*changes, data=tmp_path / "tars")
    assert go(*changes, "model.num_classes=4", data=tmp_path / "tars") == 0


def test_a_training_that_waits_for_its_data_keeps_others_out(go, start, packed, recipe_file, tmp_path, metrics):
    """It has read the checkpoint by then: when another one could train meanwhile, that one's epochs would be lost."""
    assert go("train.epochs=1", "schedule={name='constant'}") == 0
    slow = shutil.copytree(packed, tmp_path / "slow")
    manifest = slow / "train" / "manifest.json"
    content = manifest.read_bytes()
    manifest.unlink()
    os.mkfifo(manifest)
    changes = ["train.epochs=2", "schedule={name='constant'}"]
    words = [word for change in changes for word in ("--set", change)]
    first = start("-m", "trainer", "train", recipe_file, "--data", slow, "--out", tmp_path / "run", "--resume", *words)
    with open(manifest, "wb") as pipe:  # as soon as it reads
        with pytest.raises(SettingError, match="another process trains there"):
            go(*changes, resume=True)
        pipe.write(content)
    _, err = first.communicate(timeout=120)
    assert first.returncode == 0, err
    assert [line["epoch"] for line in metrics(tmp_path / "run") if line["event"] == "epoch"] == [1, 2]


def test_metrics_cut_short_do_not_hinder_the_report(go, tmp_path, metrics):
    assert go("train.epochs=1") == 0
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:50])
    assert go("train.epochs=2", resume=True) == 0
    assert metrics(tmp_path / "run")[0]["event"] == "run" and metrics(tmp_path / "run")[-1]["status"] == "completed"
    assert trainer.reporting.page.write_report([tmp_path / "run"], tmp_path).exists()


def test_metrics_hold_no_nan(go, tmp_path, no_report):
    assert go("train.epochs=1", "train.precision=bf16", "train.label_smoothing=0.1") == 0
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))
