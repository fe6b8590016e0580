"""What a user may get wrong, on the real command line: one clear line, the right exit code, and nothing left behind."""

import json

import pytest

from tests.trainer.reporting.test_report import finished

LARS = '--set=optimizer={name="lars", preconditioner="kfac"'

CASES = {
    # A schedule that is longer than the epochs.
    "milestone": ("train cifar10-resnet32 --set train.epochs=120", "train: epochs = 120: must be more than"),
    "warm-up alone": ("train imagenet-resnet50-mlperf-lars --set train.epochs=2", "schedule.warmup_epochs = 2"),
    # A target above 1.
    "target in percent": (
        "train fashion-mnist-resnet8 --set train.target_accuracy=93",
        "target_accuracy = 93: must be",
    ),
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
def test_it_is_refused(start, packed, tmp_path, case):
    words, message = CASES[case]
    words = words.split() if isinstance(words, str) else words
    child = start("-m", "trainer", *words, "--data", packed, "--out", tmp_path / "out")
    said, errors = child.communicate(timeout=120)
    assert child.returncode == 2, errors
    last = errors.splitlines()[-1]
    assert last.startswith("error: ") and message in last and "Traceback" not in errors, errors
    assert "Settings(" not in errors and said == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["compare", "report"])
@pytest.mark.parametrize("what", ["targets", "data sets", "validation images"])
def test_runs_that_do_not_compare(start, tmp_path, what, command):
    """They are not rated; the report shows them beside each other, with a warning where it concerns their data."""
    folders = [finished(tmp_path / name) for name in ("a", "b")]
    path = folders[1] / "metrics.jsonl"
    first, rest = path.read_text().split("\n", 1)
    header = json.loads(first)
    if what == "targets":
        header["recipe"]["train"]["target_accuracy"] = 0.8
    else:
        header |= {"data_sets": ["1", "2"]} if what == "data sets" else {"val_samples": 9}
    path.write_text(json.dumps(header) + "\n" + rest)
    first = json.loads((folders[0] / "metrics.jsonl").read_text().split("\n", 1)[0]) | {"data_sets": ["1", "3"]}
    (folders[0] / "metrics.jsonl").write_text(json.dumps(first) + "\n" + rest)
    child = start("-m", "trainer", command, *folders, *(["--out", "out"] if command == "report" else []))
    said, errors = child.communicate(timeout=120)
    assert "Traceback" not in errors
    if command == "compare":
        assert child.returncode == 2 and said == "", errors
        assert errors.startswith("error: (A, a) and (B, b) cannot be compared: ") and what.split()[-1][:6] in errors
    else:
        assert child.returncode == 0, errors
        page = (tmp_path / "out" / "report.html").read_text()
        assert "Not all runs are known to be of the same data set" in page
