"""Whole runs in this process: files, lines, exit codes, and failures that lose nothing."""

import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import trainer.reporting.page
import trainer.reporting.timing
import trainer.run.job
import trainer.run.loading
import trainer.run.loop
import trainer.run.run
from datapipe.dataset.manifest import find_data_sets
from datapipe.dataset.verify import verify
from datapipe.errors import DatapipeError, DecodeError, SettingError
from datapipe.packing import PackOptions, pack
from tests.trainer.waits import waits
from trainer.checkpoints.file import load_checkpoint
from trainer.config.recipe import load_recipe
from trainer.errors import DivergedError
from trainer.run.run import RunOptions, _read_end, _way_back, run

SECTIONS = {"staging", "start", "compile", "wait", "forward_backward", "optimizer", "evaluation", "checkpoint", "other"}


pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize(
    "changes",
    [(), ("optimizer.max_grad_norm=1.0", "ema.half_life_steps=4"), ("train.accumulation_steps=2", "data.mixup=0.2"),
     ("train.precision=bf16",),
     ('optimizer={name="muon", lr=0.02, adam_lr=0.002}',), ('optimizer={name="soap", lr=0.003}',),
     ('optimizer={name="lars", lr=1.0}',), ('optimizer={name="lamb", lr=0.01}',)],
    ids=" ".join,
)  # fmt: skip
def test_steps_that_do_not_log_never_wait_for_the_device(go, monkeypatch, tmp_path, changes):
    of_runs, train_epoch = [], trainer.run.loop.train_epoch

    def watched(*arguments):
        with waits() as names:
            result = train_epoch(*arguments)
        of_runs.append(names)
        return result

    monkeypatch.setattr(trainer.run.loop, "train_epoch", watched)
    for log_every in (2, 1000):
        assert go("train.epochs=1", "train.batch_size=64", f"train.log_every={log_every}", *changes) == 0
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
    in_training = [line["train_accuracy"] * 320 for line in epochs]  # of whole images
    assert all(abs(right - round(right)) < 1e-6 for right in in_training)
    assert in_training[0] < in_training[-1] and abs(epochs[-1]["train_accuracy"] - last["accuracy"]) < 0.3
    steps = [line["step"] for line in lines if line["event"] == "train"]
    assert steps == list(range(5, 10 * len(epochs) + 1, 5))
    shown = capsys.readouterr().out
    assert "reached" in shown
    assert str(tmp_path / "run" / "report.html") in shown
    assert (tmp_path / "run" / "report.html").stat().st_size > 0


def test_the_clock_starts_before_the_data_is_touched(packed, recipe_file, tmp_path, metrics, monkeypatch, capsys):
    """It advances by 100 s as the data is staged, and as each split is opened."""
    real_stage, real_open, slow_s, passed = trainer.run.job.stage, trainer.run.loading.open_loader, 100, []

    def slow_stage(*arguments):
        passed.append(slow_s)
        real_stage(*arguments)

    def slow_open(*arguments, **settings):
        passed.append(slow_s)
        return real_open(*arguments, **settings)

    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + sum(passed))
    monkeypatch.setattr(trainer.reporting.timing, "time", clock)

    monkeypatch.setattr(trainer.run.job, "stage", slow_stage)
    monkeypatch.setattr(trainer.run.loading, "open_loader", slow_open)
    recipe = load_recipe(str(recipe_file), ["train.target_accuracy=0.01", "train.log_every=5"])
    assert run(recipe, packed, tmp_path / "run", RunOptions(local=tmp_path / "local")) == 0
    epoch, end = metrics(tmp_path / "run")[-2:]
    assert slow_s < end["time_s"]["staging"] < 2 * slow_s < end["time_s"]["start"]
    assert end["time_to_target_s"] > 3 * slow_s
    assert sum(end["time_s"].values()) == pytest.approx(end["elapsed_s"], rel=0.02)
    steps_s = 320 / epoch["images_per_s"]
    assert steps_s < end["elapsed_s"] - 3 * slow_s  # rates leave it out
    assert 320 / end["images_per_s"] == pytest.approx(steps_s, abs=slow_s / 2)
    assert "before the steps  staging 1" in capsys.readouterr().out


def test_target_missed_is_1_with_a_report(go, tmp_path, metrics, capsys):
    assert go("train.target_accuracy=1.0", "train.epochs=1", "optimizer.lr=1e-9") == 1
    assert metrics(tmp_path / "run")[-1]["status"] == "target_missed"
    assert (tmp_path / "run" / "report.html").stat().st_size > 0
    assert "missed" in capsys.readouterr().out


@pytest.mark.usefixtures("real_reports")
def test_a_report_that_fails_hides_nothing(go, monkeypatch, capsys, caplog):
    def broken(runs, out):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(trainer.reporting.page, "write_report", broken)
    assert go("train.epochs=1") == 0
    assert "accuracy" in capsys.readouterr().out
    assert "no report could be written" in caplog.text


def test_kfac_says_when_it_does_nothing(go, tmp_path, metrics, caplog):
    """Also in a run of fewer steps than `log_every`."""
    changes = "optimizer.preconditioner=kfac", "kfac.kl_clip=1e-9", "kfac.damping=1e3", "kfac.solver=cholesky"
    with caplog.at_level("INFO", "trainer"):
        assert go("train.epochs=1", "train.log_every=50", *changes) == 0
    (line,) = [line for line in metrics(tmp_path / "run") if line["event"] == "kfac"]
    assert (line["step"], line["clipped"], line["clip_steps"]) == (10, 10, 10)
    said = [text for text in caplog.messages if "K-FAC" in text or "kfac" in text]
    assert said[0].startswith("K-FAC: the clip bound 10 of 10 steps; median cosine 1.0") and len(said) == 3
    assert "kl_clip (now 1e-09) bound 100% of 10 steps" in said[1] and "kfac.damping below 1e+03" in said[2]


def test_evaluate_every(go, tmp_path, metrics):
    assert go("train.evaluate_every=2") == 0
    found = [line["val_accuracy"] for line in metrics(tmp_path / "run") if line["event"] == "epoch"]
    assert [accuracy is None for accuracy in found] == [True, False, False]  # and always at the end


def test_a_signal_during_the_evaluation(go, tmp_path, metrics, monkeypatch):
    real = trainer.run.loop.evaluate

    def interrupted(*arguments, **settings):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments, **settings)

    monkeypatch.setattr(trainer.run.loop, "evaluate", interrupted)
    assert go() == 128 + signal.SIGTERM
    state = load_checkpoint(tmp_path / "run" / "checkpoint.pt")["state"]
    assert (state["epoch"], state["step"]) == (0, 10)  # all steps done, the epoch not finished
    monkeypatch.setattr(trainer.run.loop, "evaluate", real)
    assert go(resume=True) == 0
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if line["event"] == "train"] == list(range(1, 31))
    assert [line["epoch"] for line in lines if line["event"] == "epoch"] == [1, 2, 3]


def test_loss_that_is_not_finite(go, tmp_path, metrics):
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
def test_a_network_that_has_lost_itself_replaces_no_checkpoint(go, tmp_path, metrics, changes, words):
    with pytest.raises(DivergedError, match=f"{words}.*{KEPT}"):
        go(*LATE, *changes)
    state = load_checkpoint(tmp_path / "run" / "checkpoint.pt")["state"]
    assert (state["epoch"], state["step"]) == (1, 1)
    lines = metrics(tmp_path / "run")
    assert lines[-1]["status"] == "failed"
    assert all(line["val_accuracy"] is None for line in lines if line["event"] == "epoch" and line["epoch"] > 1)


ONE_CYCLE = "schedule={name='onecycle', peak_at=0.7}"


@pytest.mark.parametrize(
    ("changes", "clip", "saved", "advice"),
    [
        (["optimizer.lr=0.03"], None, None,
         "There is no checkpoint yet (run/checkpoint.pt). In a new run, try a lower optimizer.lr (now 0.03), a longer "
         "rise of it (schedule.warmup_epochs, now 0); or the data is odd"),
        ([ONE_CYCLE], "no", (0, 0),
         "run/checkpoint.pt is still that of epoch 0, step 0, where the run began. In a new run, try a lower "
         "optimizer.lr (now 0.05), a longer rise of it (schedule.peak_at, now 0.7), a higher kfac.damping (now 0.004), "
         "a kfac.kl_clip; or the data is odd"),
        ([], 0.25, (2, 21),
         "run/checkpoint.pt is still that of epoch 2, step 21: --resume continues from it. In a new run, try a lower "
         "optimizer.lr (now 0.05), a longer rise of it (schedule.warmup_epochs, now 0), a higher kfac.damping (now "
         "0.004), a lower kfac.kl_clip (now 0.25); or the data is odd"),
    ],
)  # fmt: skip
def test_what_to_try_after_a_divergence_names_the_values_there_were(recipe_file, changes, clip, saved, advice):
    kfac = None if clip is None else SimpleNamespace(damping=0.004, kl_clip=None if clip == "no" else clip)
    recipe = load_recipe(str(recipe_file), changes)
    job = SimpleNamespace(local=None, run=Path("run"), recipe=recipe, preconditioner=kfac)
    assert _way_back(job, SimpleNamespace(saved=saved)) == advice
    job.local = SimpleNamespace(folder=Path("local"))
    assert "local/checkpoint.pt" in _way_back(job, SimpleNamespace(saved=saved))


def test_a_run_has_ended_only_for_its_target(recipe_file, tmp_path):
    recipe = load_recipe(str(recipe_file), ["train.target_accuracy=0.5"])
    assert _read_end(tmp_path, "target_reached", recipe) is None
    line = {"event": "end", "status": "target_reached", "target_accuracy": 0.5, "accuracy": 0.75}
    for changed, is_end in (
        ({}, True),
        ({"target_accuracy": 0.4}, False),
        ({"target_accuracy": None}, False),
        ({"status": "target_missed"}, False),
        ({"event": "epoch"}, False),
    ):
        lines = {"event": "run", "format": 1}, line | changed
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert _read_end(tmp_path, "target_reached", recipe) == (line if is_end else None)


def test_a_network_that_has_lost_itself_reaches_no_target(go, packed, tmp_path, metrics):
    """Its answer is always the first class, which is here that of nearly all validation images."""
    folder = tmp_path / "uneven"
    for split, counts in (("train", (20, 20)), ("val", (10, 2))):
        for label, count in enumerate(counts):
            (folder / split / f"class{label}").mkdir(parents=True)
            for i in range(count):
                value = 200 * label + i + 20 * (split == "val")
                image = Image.fromarray(np.full((16, 16), value, np.uint8))
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
                random = np.random.default_rng((split == "val", i))
                pixels = random.integers(0, 120, (16, 16), dtype=np.uint8) + 100 * label
                Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "raw" / split / f"class{label}" / f"{i}.png")
        path = tmp_path / "raw" / split / "class1" / "7.png"
        data = bytearray(path.read_bytes())
        data[data.index(b"IDAT") + 4] ^= 0xFF
        path.write_bytes(data)
    pack(tmp_path / "raw", tmp_path / "packed", PackOptions(workers=1))
    for split in ("train", "val"):
        assert verify(tmp_path / "packed" / split) == []
    return tmp_path / "packed"


def test_an_image_that_cannot_be_decoded(go, damaged, tmp_path, metrics, caplog):
    with pytest.raises(DecodeError, match=r"class1/7"):
        go("train.epochs=1", "train.batch_size=10", data=damaged)
    shutil.rmtree(tmp_path / "run")
    assert go("train.epochs=2", "train.batch_size=10", "data.max_bad=1", data=damaged) == 0
    assert caplog.text.count("bad sample, 1 of max_bad=1") == 2  # of each loader
    accuracy = metrics(tmp_path / "run")[-1]["accuracy"]
    assert accuracy * 40 == pytest.approx(round(accuracy * 40)) and accuracy <= 39 / 40


def test_a_cache_on_the_node(go, packed, tmp_path):
    cache = tmp_path / "cache"
    assert go("train.epochs=1", f"data.cache={cache}") == 0
    assert sorted(folder.name.partition("-")[0] for folder in cache.iterdir()) == ["train", "val"]
    state = load_checkpoint(tmp_path / "run" / "checkpoint.pt")
    shutil.rmtree(tmp_path / "run")
    assert go("train.epochs=1") == 0
    without = load_checkpoint(tmp_path / "run" / "checkpoint.pt")
    assert all(torch.equal(state["model"][key], without["model"][key]) for key in without["model"])


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


def test_validation_images_of_other_classes(go, tmp_path):
    for split, names in (("train", ("cat", "dog", "emu")), ("val", ("cat", "emu", "zoo"))):
        for name in names:
            (tmp_path / "raw" / split / name).mkdir(parents=True)
            for i in range(4):
                Image.fromarray(np.full((16, 16), i, np.uint8)).save(tmp_path / "raw" / split / name / f"{i}.png")
    for split in ("train", "val"):
        pack(tmp_path / "raw" / split, tmp_path / split, PackOptions(workers=1, split=[f"{split}=."]))
        shutil.copytree(*find_data_sets(tmp_path / split), tmp_path / "packed" / split)
    words = "class 1 is 'dog' in the training set and 'emu' in the validation set"
    for backend in ("cpu", "webdataset"):
        with pytest.raises(SettingError, match=words):
            go("train.batch_size=4", f"data.backend={backend}", data=tmp_path / "packed")
    assert not (tmp_path / "run").exists()


def test_tars_without_a_manifest_need_a_number_of_classes(go, packed, tmp_path):
    pytest.importorskip("webdataset")
    for split in ("train", "val"):
        (tmp_path / "tars" / split).mkdir(parents=True)
        for shard in (packed / split).glob("shard-*.tar"):
            shutil.copy(shard, tmp_path / "tars" / split)
    changes = ["train.epochs=1", "data.backend=webdataset", "data.mean=[0.3, 0.3, 0.3]", "data.std=[0.3, 0.3, 0.3]"]
    with pytest.raises(SettingError, match=r"model\.num_classes is missing"):
        go(*changes, data=tmp_path / "tars")
    assert go(*changes, "model.num_classes=4", data=tmp_path / "tars") == 0


def test_metrics_hold_no_nan(go, tmp_path):
    assert go("train.epochs=1", "train.precision=bf16", "train.label_smoothing=0.1") == 0
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))
