"""The MLPerf-compliant log of real runs, by MLPerf's own checker."""

from __future__ import annotations

import importlib.util
import json
import signal
import time
from collections import Counter

import pytest

from datapipe.errors import SettingError
from tests.processes import clean_environment
from tests.trainer.runs import DISTURBED
from trainer.config.recipe import load_recipe
from trainer.reporting import page
from trainer.reporting.mlperf import LOG_NAME, read_labels, write_log
from trainer.reporting.runlog import read_run
from trainer.run.run import RunOptions, run

TOKEN = ":::MLLOG "
needs_checker = pytest.mark.skipif(importlib.util.find_spec("mlperf_logging") is None, reason="no mlperf-logging here")
LABELS = {"MLPERF_ORG": "us", "MLPERF_PLATFORM": "a laptop", "MLPERF_STATUS": "onprem"}
# What the rules ask for; each is a key of at least one line, those of ONCE of one line.
ONCE = ["submission_benchmark", "submission_division", "submission_org", "submission_platform", "submission_status"]
ONCE += ["train_samples", "eval_samples", "init_stop", "run_start", "run_stop"]
REQUIRED = [*ONCE, "cache_clear", "init_start", "epoch_start", "epoch_stop", "eval_start", "eval_stop", "eval_accuracy"]


@pytest.fixture(scope="module")
def log(packed, recipe_file, tmp_path_factory):
    """The log of a run that has reached its target."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"CUDA_VISIBLE_DEVICES": "", **LABELS}.items():
            patch.setenv(name, value)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            patch.delenv(name, raising=False)
        patch.setattr(page, "write_plots", lambda *_: [])
        out = tmp_path_factory.mktemp("logged") / "run"
        changes = ["train.target_accuracy=0.01", "train.epochs=4", "train.evaluate_every=3"]
        assert run(load_recipe(str(recipe_file), changes), packed, out) == 0
    return (out / LOG_NAME).read_text().splitlines()


def parse(lines):
    return [json.loads(line.removeprefix(TOKEN)) for line in lines]


@pytest.fixture
def check(server, tmp_path):
    """check(lines of a log) -> the exit code of MLPerf's checker, and what it says."""

    def _check(lines):
        (tmp_path / "log").write_text("".join(f"{line}\n" for line in lines))
        words = ["--usage", "training", "--ruleset", "4.0.0", "--log_output", tmp_path / "said", tmp_path / "log"]
        child = server.run("-m", "mlperf_logging.compliance_checker", *words)
        return child.returncode, child.stdout + child.stderr

    return _check


@needs_checker
@pytest.mark.slow
def test_a_run_is_compliant(log, check):
    code, said = check(log)
    assert code == 0, said
    assert "WARNING" not in said and "training_4.0.0/open_resnet.yaml" in said


@pytest.mark.slow
@needs_checker
@pytest.mark.parametrize("key", REQUIRED)
def test_without_a_required_line(log, check, key):
    kept = [line for line in log if json.loads(line.removeprefix(TOKEN))["key"] != key]
    assert len(kept) < len(log)
    code, said = check(kept)
    assert code == 1 and key in said


BROKEN = {
    "no lines": lambda lines: [],
    "another order": lambda lines: lines[::-1],
    "another division": lambda lines: [line.replace('"open"', '"ajar"') for line in lines],
    "the closed division": lambda lines: [line.replace('"open"', '"closed"') for line in lines],
    "another benchmark": lambda lines: [line.replace('"resnet"', '"resnet8"') for line in lines],
    "no organisation": lambda lines: [line.replace('"us"', '""') for line in lines],
    "no number of the epoch": lambda lines: [line.replace("epoch_num", "epoch") for line in lines],
    "no status": lambda lines: [line.replace('"status"', '"state"') for line in lines],
    "a line cut short": lambda lines: [*lines[:-1], lines[-1], lines[3][:40]],
    "all is right": lambda lines: [line.replace('"value": 0.', '"value": 1.') for line in lines],
    "a day of preparations": lambda lines: [
        line if "init_stop" not in line else TOKEN + json.dumps(moved(line, 86_400_000)) for line in lines
    ],
}  # fmt: skip


def moved(line, by_ms):
    content = json.loads(line.removeprefix(TOKEN))
    return content | {"time_ms": content["time_ms"] + by_ms}


@pytest.mark.slow
@needs_checker
@pytest.mark.parametrize("name", BROKEN)
def test_broken_logs(log, check, name):
    broken = BROKEN[name](log)
    assert broken != log
    code, _ = check(broken)
    assert code == 1


def test_what_stands_in_a_log(log):
    lines = parse(log)
    values = {line["key"]: line["value"] for line in lines}
    counts = Counter(line["key"] for line in lines)
    assert all(counts[key] == 1 for key in ONCE) and set(REQUIRED) <= counts.keys()
    expected = {
        "submission_org": "us",
        "submission_platform": "a laptop",
        "submission_status": "onprem",
        "submission_division": "open",
        "global_batch_size": 32,
        "train_samples": 330,
        "eval_samples": 77,
        "opt_name": "sgd",
        "sgd_opt_base_learning_rate": 0.05,
        "sgd_opt_momentum": 0.9,
        "sgd_opt_weight_decay": 1e-4,
        "opt_learning_rate_warmup_epochs": 0.0,
    }
    assert {key: values[key] for key in expected} == expected
    assert 0 < values["eval_accuracy"] < 1
    order = [(line["key"], line["metadata"].get("epoch_num")) for line in lines if line["key"].startswith(("ep", "ev"))]
    steps = [("epoch_start", 1), ("epoch_stop", 1), ("epoch_start", 2), ("epoch_stop", 2), ("epoch_start", 3)]
    steps += [("epoch_stop", 3), ("eval_start", 3), ("eval_stop", 3), ("eval_accuracy", 3)]
    assert order[1:] == steps  # after eval_samples
    times = [line["time_ms"] for line in lines]
    assert times == sorted(times) and time.time() - times[0] / 1000 < 1000
    assert (lines[-1]["key"], lines[-1]["metadata"]) == ("run_stop", {"status": "success"})


@needs_checker
def test_a_run_that_was_killed_and_resumed(server, packed, recipe_file, check, tmp_path, metrics, monkeypatch, alone):
    """An hour lies between, of which only the clock on the wall knows."""
    out, recipe = tmp_path / "run", load_recipe(str(recipe_file))
    words = ["train", recipe_file, "--data", packed, "--out", out, "--device", "cpu"]
    killed = server.run(DISTURBED, "kill", 15, 0, *words, env=clean_environment(MLPERF_ORG="us"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (out / LOG_NAME).exists()
    monkeypatch.setattr(page, "write_plots", lambda *_: [])
    page.write_report([out], out)
    lines = (out / LOG_NAME).read_text().splitlines()
    code, said = check(lines)
    assert code == 0, said
    assert parse(lines)[-1]["metadata"] == {"status": "aborted"}

    earlier = [{key: value - 3600 if key == "written_at" else value for key, value in line.items()}
               for line in metrics(out)]  # fmt: skip
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in earlier))
    monkeypatch.setenv("MLPERF_ORG", "us")
    assert run(recipe, packed, out, RunOptions(resume=True, device="cpu")) == 0
    page.write_report([out], out)
    lines = (out / LOG_NAME).read_text().splitlines()
    code, said = check(lines)
    assert code == 0 and "WARNING" not in said, said
    counts = Counter(line["key"] for line in parse(lines))
    assert all(counts[key] == 1 for key in ONCE)
    at_s = {line["key"]: line["time_ms"] / 1000 for line in parse(lines)}
    assert any(line["event"] == "resume" for line in metrics(out))
    assert at_s["run_stop"] - at_s["run_start"] > 3600
    epochs = [line["metadata"]["epoch_num"] for line in parse(lines) if line["key"] == "epoch_start"]
    assert epochs == [1, 2, 3]


def header(optimizer: dict, **changes) -> dict:
    recipe = {
        "optimizer": {"preconditioner": "none", "weight_decay": 5e-5, **optimizer},
        "train": {"seed": 3, "epochs": 10},
    }
    recipe["schedule"] = {"name": "constant", "warmup_epochs": 2.0}
    line = {"event": "run", "format": 1, "written_at": 1000.0, "elapsed_s": 10.0, "recipe": recipe, "mlperf": {}}
    return line | {"device": "cpu (x)", "world_size": 2, "global_batch_size": 8, "peak_lr": 9.5} | {
        "train_samples": 80, "val_samples": 16} | changes  # fmt: skip


def written(tmp_path, *lines):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return write_log(read_run(tmp_path), tmp_path)


LARS = {"name": "lars", "momentum": 0.8, "trust_coefficient": 0.001}
LARS_KEYS = {
    "opt_name": "lars",
    "lars_opt_base_learning_rate": 9.5,
    "lars_opt_momentum": 0.8,
    "lars_opt_weight_decay": 5e-5,
    "lars_opt_learning_rate_warmup_epochs": 2.0,
    "lars_epsilon": 0.0,
}
KFAC = {"name": "muon", "preconditioner": "kfac"}
KFAC_KEYS = {"opt_name": "kfac-muon", "opt_base_learning_rate": 9.5, "opt_weight_decay": 5e-5}


@pytest.mark.parametrize(
    ("optimizer", "keys"), [(LARS, LARS_KEYS), (KFAC, KFAC_KEYS | {"opt_learning_rate_warmup_epochs": 2.0})]
)
def test_keys_of_optimizers(tmp_path, optimizer, keys):
    path = written(tmp_path, header(optimizer))
    values = {line["key"]: line["value"] for line in parse(path.read_text().splitlines())}
    assert {key: value for key, value in values.items() if "opt" in key or "lars" in key} == keys
    assert (values["submission_org"], values["submission_platform"], values["seed"]) == ("unknown", "cpu (x)", 3)


def test_parts_of_a_batch_are_told(tmp_path):
    line = header(LARS)
    line["recipe"]["train"]["accumulation_steps"] = 2
    values = {line["key"]: line["value"] for line in parse(written(tmp_path, line).read_text().splitlines())}
    assert (values["global_batch_size"], values["gradient_accumulation_steps"], values["model_bn_span"]) == (8, 2, 2)


CLOSED = """
data = {size = 224, mean = [0.5], std = [0.5], crop = "random_resized"}
model = {name = "resnet50"}
optimizer = {name = "%s", lr = 10.0, weight_decay = 2e-4}
schedule = {name = "polynomial", power = 2, final = 1e-5, warmup_epochs = 2.0}
train = {epochs = 40, batch_size = 3264, label_smoothing = 0.1, target_accuracy = 0.759}
"""


@needs_checker
@pytest.mark.parametrize("optimizer", ["lars", "sgd"])
def test_the_closed_division(tmp_path, check, optimizer):
    (tmp_path / "closed.toml").write_text(CLOSED % optimizer)
    recipe = load_recipe(str(tmp_path / "closed.toml")).model_dump(mode="json")
    labels = read_labels({"MLPERF_DIVISION": "closed"}, recipe)
    first = header({}, recipe=recipe, mlperf=labels, peak_lr=10.0, global_batch_size=3264, train_samples=1_281_167)
    epoch = {"event": "epoch", "epoch": 1, "step": 392, "written_at": 1060.0, "val_accuracy": 0.76}
    lines = written(tmp_path, first, epoch).read_text().splitlines()
    code, said = check(lines)
    assert code == 0 and "closed_resnet" in said, said
    assert {line["key"]: line["value"] for line in parse(lines)}[
        f"{optimizer}_opt_learning_rate_decay_steps"
    ] == 38 * 392
    epoch["val_accuracy"] = 0.75
    assert check(written(tmp_path, first, epoch).read_text().splitlines())[0] == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "optimizer={name='sgd', lr=0.1, preconditioner='kfac'}",
            "closed allows optimizer.preconditioner = none, not",
        ),
        ("train.loss=bce", "closed allows train.loss = cross_entropy, not bce"),
        ("schedule={name='cosine'}", "closed allows schedule.name = polynomial, not cosine"),
        ("optimizer={name='muon', lr=0.1}", "closed allows optimizer.name = sgd or lars, not muon"),
        ("ema.half_life_steps=100", "closed allows ema.half_life_steps = None, not 100"),
        ("train.powersgd_rank=4", "closed allows train.powersgd_rank = None, not 4"),
        (
            "optimizer={name='sgd', lr=0.1, vector_lr_factor=64}",
            "closed allows optimizer.vector_lr_factor = 1, not 64",
        ),
        ("data.flip=alternate", "closed allows data.flip = True, not alternate"),
        ("data.crop=auto", "closed allows data.crop = random_resized, not auto"),
    ],
)
def test_what_is_not_of_the_closed_division(tmp_path, change, words):
    (tmp_path / "closed.toml").write_text(CLOSED % "lars")
    recipe = load_recipe(str(tmp_path / "closed.toml"), [change]).model_dump(mode="json")
    assert read_labels({"MLPERF_DIVISION": "open"}, recipe) == {"submission_division": "open"}
    with pytest.raises(SettingError, match=f"MLPERF_DIVISION: {words}"):
        read_labels({"MLPERF_DIVISION": "closed"}, recipe)


def test_times_and_an_epoch_that_was_done_again(tmp_path):
    first = {"event": "epoch", "epoch": 1, "step": 10, "written_at": 1060.0, "val_accuracy": 0.5}
    first["time_s"] = {"evaluation": 20.0}
    resume = {"event": "resume", "step": 10, "written_at": 5000.0}
    second = first | {"epoch": 2, "step": 20}
    path = written(
        tmp_path, header(LARS), first, second | {"written_at": 1100.0}, resume, second | {"written_at": 5100.0}
    )
    lines = [(line["key"], line["time_ms"]) for line in parse(path.read_text().splitlines())]
    assert lines[lines.index(("run_start", 990_000)) + 1 :] == [
        ("epoch_start", 1_000_000),
        ("epoch_stop", 1_040_000),
        ("eval_start", 1_040_000),
        ("eval_stop", 1_060_000),
        ("eval_accuracy", 1_060_000),
        ("epoch_start", 1_060_000),
        ("epoch_stop", 5_080_000),
        ("eval_start", 5_080_000),
        ("eval_stop", 5_100_000),
        ("eval_accuracy", 5_100_000),
        ("run_stop", 5_100_000),
    ]


def test_metrics_of_an_earlier_version_give_no_log(tmp_path):
    line = header(LARS)
    for key in ("written_at", "elapsed_s", "mlperf", "peak_lr"):
        del line[key]
    assert written(tmp_path, line) is None
    assert not (tmp_path / LOG_NAME).exists()


def test_a_status_that_mlperf_does_not_know(packed, recipe_file, tmp_path, monkeypatch):
    assert read_labels({}, {}) == {} == read_labels({"MLPERF_ORG": ""}, {})
    monkeypatch.setenv("MLPERF_STATUS", "best")
    with pytest.raises(SettingError, match="MLPERF_STATUS: 'best' is not one of cloud, onprem, preview, research"):
        run(load_recipe(str(recipe_file), []), packed, tmp_path / "run")
    assert not (tmp_path / "run").exists()
