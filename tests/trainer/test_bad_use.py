"""What a user may get wrong, on the command line: one clear line, the right exit code, and nothing left behind."""

import json
import sys

import pytest

from tests.trainer.reporting.test_report import finished, header
from trainer.reporting import plots

LARS = '--set=optimizer={name="lars", preconditioner="kfac"'

CASES = {
    # A schedule that is longer than the epochs.
    "milestone": (
        "train cifar10-resnet32 --set train.epochs=120 --set schedule.milestones=[100,150]",
        "train: epochs = 120: must be more than",
    ),
    "warm-up alone": (
        "train imagenet-resnet50-mlperf-lars --set train.epochs=2 --set schedule.warmup_epochs=2",
        "schedule.warmup_epochs = 2",
    ),
    # A target above 1.
    "target in percent": (
        "train fashion-mnist-resnet8 --set train.target_accuracy=93",
        "target_accuracy = 93: must be less than or equal to 1; 93 % is 0.93",
    ),
    # What is mistyped.
    "comma": ("train fashion-mnist-resnet8 --set optimizer.lr=0,1", "must be a valid number; did you mean 0.1?"),
    "setting": ("train fashion-mnist-resnet8 --set train.target=0.9", "did you mean target_accuracy?"),
    "network": ("train fashion-mnist-resnet8 --set model.name=resnet5", "; did you mean resnet50?"),
    "word": ("train fashion-mnist-resnet8 --set train.precision=bf61", "; did you mean bf16?"),
    "kind": ("train cifar10-resnet32 --set optimizer.name=sgdd", "soap; did you mean sgd?"),
    "recipe": ("train fashion-mnist-resnet9", "; did you mean fashion-mnist-resnet8?"),
    "logger": ("train fashion-mnist-resnet8 --log tensorbord", "; did you mean tensorboard?"),
    # Sizes that BlurPool, a network or the loader cannot do.
    "blur without strides": (
        "train fashion-mnist-speedrun --set model.blur_pool=true",
        'model: blur_pool must be false with name = "whitened_small"',
    ),
    "smaller than the network": (
        "train fashion-mnist-speedrun --set data.size=8",
        'model: name = "whitened_small" takes 9 pixels or more, not data.size = 8',
    ),
    "huge": ("train imagenet-resnet50-mild --set data.size=100000", "data.size = 100000: must be less than or equal"),
    "of resident images": ("train fashion-mnist-resnet8 --set data.size=32", "data.size: 32 with images of 16×16"),
    "crops of resident images": (
        "train fashion-mnist-resnet8 --set data.size=16 --set data.crop=random_resized",
        "data.crop: 'random_resized' scales images",
    ),
    # LARS with K-FAC's clip, and no learning rate.
    "LARS without a rate": (["train", "fashion-mnist-resnet8", LARS + "}"], "optimizer.lr is missing"),
    "LARS with K-FAC's clip": (
        ["train", "fashion-mnist-resnet8", LARS + ", lr=1}"],
        'error: kfac: kl_clip must be "none" with optimizer.name = "lars"',
    ),
    # Images that are mixed by a wrong amount.
    "mixup": ("train fashion-mnist-resnet8 --set data.mixup=-0.2", "data.mixup = -0.2: must be greater than"),
    # Repeats of nothing.
    "no seeds": ("repeat fashion-mnist-resnet8 --seeds 0", "--seeds: 0 is out of range; allowed: whole numbers from 1"),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused(cli, packed, tmp_path, case):
    words, message = CASES[case]
    words = words.split() if isinstance(words, str) else words
    code, said, errors = cli(*words, "--data", packed, "--out", tmp_path / "out")
    assert code == 2, errors
    last = errors.splitlines()[-1]
    assert last.startswith("error: ") and message in last and "Traceback" not in errors, errors
    assert "Settings(" not in errors and said == ""
    assert not (tmp_path / "out").exists()


RECIPE = header()["recipe"]


def unlike(folder, line):
    """Write two runs, the second of which has other values in its first line; return their folders."""
    runs = [finished(folder / name) for name in ("a", "b")]
    for run, values in zip(runs, ({"data_sets": ["1", "3"]}, line), strict=True):
        first, rest = (run / "metrics.jsonl").read_text().split("\n", 1)
        (run / "metrics.jsonl").write_text(json.dumps(json.loads(first) | values) + "\n" + rest)
    return runs


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ({"recipe": RECIPE | {"train": RECIPE["train"] | {"target_accuracy": 0.8}}}, "target"),
        ({"data_sets": ["1", "2"]}, "sets"),
        ({"val_samples": 9}, "images"),
    ],
    ids=["targets", "data sets", "validation images"],
)
def test_runs_that_do_not_compare_are_not_rated(cli, tmp_path, line, word):
    code, said, errors = cli("compare", *unlike(tmp_path, line))
    assert code == 2 and said == "" and "Traceback" not in errors, errors
    assert errors.startswith("error: (A, a) and (B, b) cannot be compared: ") and word in errors


def test_a_report_on_runs_of_several_data_sets_says_so(cli, monkeypatch, tmp_path):
    """It shows them beside each other."""
    monkeypatch.setattr(plots, "PLOTS", plots.PLOTS[:1])
    code, _, errors = cli("report", *unlike(tmp_path, {"data_sets": ["1", "2"]}), "--out", tmp_path / "out")
    assert code == 0 and "Traceback" not in errors, errors
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Not all runs are known to be of the same data set" in page


@pytest.mark.parametrize("line", ["train fashion-mnist-resnet8 --data none --out out", "report none", "compare none",
                                  "profile fashion-mnist-resnet8 --data none --out out"])  # fmt: skip
def test_a_path_that_leads_nowhere_is_wrong_use(cli, tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    code, _, errors = cli(*line.split())
    assert code == 2 and "none" in errors.splitlines()[-1] and [*tmp_path.iterdir()] == [], errors


def test_tensorboard_that_is_not_installed_leaves_nothing(cli, packed, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    line = "train", "fashion-mnist-resnet8", "--log", "tensorboard", "--data", packed, "--out", tmp_path / "out"
    code, _, errors = cli(*line)
    assert code == 2 and "--log tensorboard: its package is not installed" in errors and "pip install" in errors
    assert not (tmp_path / "out").exists()
