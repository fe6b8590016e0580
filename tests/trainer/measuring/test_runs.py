"""What folders of runs amount to: tables, comparisons, refusals. On metrics that are written here."""

import json
import math

import pytest

from datapipe.errors import DatapipeError, SettingError
from tests.trainer.reporting.test_report import end, epoch, header, train, write
from trainer.measuring.compare import compare, show_comparison
from trainer.measuring.runs import ATTEMPTS, read_group
from trainer.measuring.tables import show_group


def recipe(**changes: object) -> dict:
    return {"data": {"size": 28}, "train": {"target_accuracy": 0.9, "epochs": 3, "seed": 0} | changes}


def seed(
    folder, number: int, time_s: float | None = 100.0, images_per_s: float = 2000.0, accuracy: float = 0.91, **its
):
    """Write a finished run of a seed; without `time_s` it has missed its target."""
    lines = [epoch(1, 0.5), epoch(2, accuracy if time_s else 0.8)]
    status = "target_reached" if time_s else "target_missed"
    last = end(status=status, accuracy=accuracy, time_to_target_s=time_s, images_per_s=images_per_s)
    first = header(recipe=recipe(seed=number)) | its
    return write(folder / f"seed-{number}", first, train(10), *lines, last)


@pytest.fixture
def five(tmp_path):
    """five("name", factor) -> folder of five runs, whose times differ by a factor only."""

    def _five(name: str, factor: float = 1.0, **its):
        for number, time_s in enumerate((100.0, 102.0, 98.0, 101.0, 99.0)):
            seed(tmp_path / name, number, factor * time_s, 2000 / factor, 0.91 + number / 1000, **its)
        return tmp_path / name

    return _five


def test_means_of_repeats(five):
    values = json.loads(show_group(read_group(five("runs")), as_json=True))
    assert (values["num_finished"], values["num_reached"], values["notes"]) == (5, 5, [])
    assert [run["seed"] for run in values["runs"]] == list(range(5))
    times = values["means"]["time_to_target_s"]
    assert (times["num"], times["mean"], times["std"]) == (5, pytest.approx(100), pytest.approx(math.sqrt(2.5)))
    assert (times["low"], times["high"]) == pytest.approx((100 - 1.9632, 100 + 1.9632), abs=1e-3)  # t is 2.7764
    assert values["runs"][0]["epochs_to_target"] == 2
    assert values["recipe"]["train"]["target_accuracy"] == 0.9 and "seed" not in values["recipe"]["train"]
    assert values["hardware"] == [{"device": "cpu (Some Model 5000)", "world_size": 1}]
    assert values["versions"][0]["torch"] == "2.13.0" and values["commits"] == ["abc1234"]


def test_nothing_is_dropped(tmp_path):
    """A run that missed, one that failed, one that still runs, one that never began, and one that is a line's part."""
    seed(tmp_path, 0)
    seed(tmp_path, 1, None, accuracy=0.8)
    write(tmp_path / "seed-2", header(recipe=recipe(seed=2)), epoch(1, 0.2), end(status="failed", accuracy=None))
    write(tmp_path / "seed-3", header(recipe=recipe(seed=3)), epoch(1, 0.4))
    (tmp_path / "seed-10").mkdir()
    write(tmp_path / "seed-4", '{"event": "run", "for')
    (tmp_path / "seed-4" / ATTEMPTS).write_text('{"exit_code": 137}\n{"exit_co')
    group = read_group(tmp_path)
    assert [outcome.name for outcome in group.outcomes] == [f"seed-{n}" for n in (0, 1, 2, 3, 4, 10)]
    text = show_group(group, as_json=False)
    for line in ("target missed", "failed", "unfinished", "failed at its start", "not begun", "2 of 6 finished"):
        assert line in text
    assert "1 of 6 reached" in text and "137" in text
    assert "not in the means, as they have not finished: seed-2, seed-3, seed-4, seed-10." in text
    assert "5 of 6 runs did not reach the target; the mean time to target is that of the others" in text
    assert json.loads(show_group(group, as_json=True))["means"]["accuracy"]["mean"] == pytest.approx(0.855)


def test_resumes_are_told(tmp_path):
    resumes = [{"event": "resume", "step": 100, "world_size": size} for size in (1, 2)]
    write(tmp_path / "run", header(), epoch(1, 0.5), *resumes, epoch(2, 0.92), end())
    text = show_group(read_group(tmp_path / "run"), as_json=False)
    assert "run was resumed 2 times, on other numbers of ranks: 1, 1, 2." in text
    assert "a single run says nothing of the noise" in text


def test_half_the_time(five):
    """Twice the speed is more than such noise; the accuracy is the same."""
    rows = {row.figure: row for row in compare(read_group(five("a")), read_group(five("b", 0.5)))}
    time, rate = rows["time to target, s"], rows["images/s"]
    assert (time.estimate.value, rate.estimate.value) == (pytest.approx(0.5), pytest.approx(2.0))
    assert 0.48 < time.estimate.low < 0.5 < time.estimate.high < 0.52
    assert time.verdict == "B has 50.0\N{NO-BREAK SPACE}% less: more than noise"
    alike = "all runs of each side are equal, so nothing is known of their noise"
    assert rate.verdict == f"B has 100.0\N{NO-BREAK SPACE}% more; {alike}"
    assert (rows["epochs to target"].estimate.value, rows["epochs to target"].verdict) == (1, "both are equal")
    assert (rows["accuracy"].estimate.value, rows["accuracy"].verdict) == (0, "cannot be told from noise")


def test_a_little_faster_is_noise(five):
    text = show_comparison(read_group(five("a")), read_group(five("b", 0.995)), as_json=False)
    assert "time to target: cannot be told from noise." in text
    values = json.loads(show_comparison(read_group(five("a")), read_group(five("b", 0.995)), as_json=True))
    assert values["figures"][0]["value"] == pytest.approx(0.995)
    assert values["figures"][-1]["kind"] == "difference" and values["notes"] == []


def test_other_evaluations_are_told(five):
    often = recipe() | {"train": recipe()["train"] | {"evaluate_every": 1}}
    seldom = recipe() | {"train": recipe()["train"] | {"evaluate_every": 3}}
    groups = [read_group(five(name, recipe=its)) for name, its in (("a", often), ("b", seldom))]
    text = show_comparison(*groups, as_json=False)
    assert "Note: A was evaluated every 1 epoch, B every 3 epochs: a target is reached at the first" in text


def test_accuracies_that_do_not_mean_the_same_are_told(five):
    mirrored = recipe() | {"train": recipe()["train"] | {"evaluate_mirrored": True}, "data": {"eval_size": 256}}
    groups = [read_group(five("a")), read_group(five("b", recipe=mirrored))]
    text = show_comparison(*groups, as_json=False)
    assert "Note: train.evaluate_mirrored is off in A, true in B: their accuracies do not mean the same." in text
    assert "Note: data.eval_size is 28 in A, 256 in B: their accuracies" in text
    assert "do not mean the same" not in show_comparison(*[groups[1]] * 2, as_json=False)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([{"size": 224}, {"size": 176}], "data.eval_size is 224 in A, 176 in B"),
        ([{"size": 224}, {"size": 224, "eval_size": 224}], ""),
    ],
)
def test_the_size_of_evaluations_is_that_of_training_by_default(five, data, says):
    groups = [read_group(five(name, recipe=recipe() | {"data": its})) for name, its in zip("ab", data, strict=True)]
    text = show_comparison(*groups, as_json=False)
    assert says in text and ("data.eval_size" in text) == bool(says)


def test_one_run_on_a_side(five, tmp_path):
    text = show_comparison(read_group(five("a")), read_group(seed(tmp_path / "b", 0, 50.0)), as_json=False)
    assert "nothing is known of its noise" in text
    assert "B: a single run says nothing of the noise." in text


def test_those_that_missed_are_counted(five, tmp_path):
    for number in range(3):
        seed(tmp_path / "b", number, (50.0, 51.0, None)[number])
    text = show_comparison(read_group(five("a")), read_group(tmp_path / "b"), as_json=False)
    assert "50.5 (2 of 3)" in text
    assert "B: 1 of 3 runs did not reach the target" in text
    assert "more than noise, among the runs that have it" in text


def test_without_a_target(tmp_path):
    for name in "ab":
        for number in range(2):
            first = header(recipe=recipe(target_accuracy=None, seed=number))
            write(
                tmp_path / name / f"seed-{number}", first, epoch(1, 0.5), end(status="completed", time_to_target_s=None)
            )
    groups = [read_group(tmp_path / name) for name in "ab"]
    assert [row.figure for row in compare(*groups)] == ["total time, s", "images/s", "accuracy"]
    assert "to target" not in show_group(groups[0], as_json=False).partition("\n\n")[2]


def test_other_circumstances_are_told(five):
    b = five("b", device="cpu (Another)", world_size=2, versions={"torch": "2.14.0"}, commit="def5678")
    text = show_comparison(read_group(five("a")), read_group(b), as_json=False)
    assert "not all alike in device: cpu (Some Model 5000) (A); cpu (Another) (B)." in text
    assert all(f"not all alike in {what}:" in text for what in ("world size", "versions", "commit"))


@pytest.mark.parametrize(
    ("its", "words"),
    [
        ({"recipe": recipe(target_accuracy=0.92)}, "target 90.0000\N{NO-BREAK SPACE}% and 92.0000"),
        ({"recipe": recipe(target_accuracy=None)}, "target 90.0000\N{NO-BREAK SPACE}% and none"),
        ({"train_samples": 50000}, "training images 51200 and 50000"),
        ({"val_samples": 5000}, "validation images 10000 and 5000"),
        ({"num_classes": 11}, "classes 10 and 11"),
        ({"data_sets": ["c", "d"]}, r"data sets \(by checksum\) \['a', 'b'\] and \['c', 'd'\]"),
    ],
)
def test_what_cannot_be_compared(five, its, words):
    known = {"num_classes": 10, "data_sets": ["a", "b"]}
    a, b = read_group(five("a", **known)), read_group(five("b", **known | its))
    with pytest.raises(SettingError, match=f"cannot be compared: {words}"):
        compare(a, b)


def test_data_sets_that_only_the_repeats_know(five):
    """The headers of earlier versions do not tell them."""
    groups = []
    for name in "ab":
        (five(name) / "seed-0" / ATTEMPTS).write_text(json.dumps({"exit_code": 0, "data_sets": [name, name]}))
        groups.append(read_group(five(name)))
    with pytest.raises(SettingError, match="data sets"):
        compare(*groups)


def test_a_folder_of_different_recipes(tmp_path):
    seed(tmp_path, 0)
    seed(tmp_path, 1, recipe=recipe(epochs=4))
    with pytest.raises(SettingError, match="seed-0 and seed-1 are not runs of the same recipe"):
        read_group(tmp_path)


@pytest.mark.parametrize("name", ["absent", "empty", "other"])
def test_no_run_there(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other" / "inner").mkdir(parents=True)
    with pytest.raises(DatapipeError, match="holds no run"):
        read_group(tmp_path / name)


def test_the_command(five, command, tmp_path):
    a, b = five("a"), five("b", val_samples=5)
    assert json.loads(command("trainer", "compare", a, "--json").stdout)["num_reached"] == 5
    compared = command("trainer", "compare", a, five("c")).stdout
    assert "B/A" in compared and "91.20\N{NO-BREAK SPACE}%" in compared
    assert "error: A and B: both are " in command("trainer", "compare", a, a / "seed-0" / "..").stderr
    refused = command("trainer", "compare", a, b)
    assert (refused.returncode, refused.stdout) == (
        2,
        "",
    ) and "error: (A, a, seed-0) and (B, b, seed-0) cannot be compared: validation images 10000 and 5" in refused.stderr
    assert command("trainer", "compare", tmp_path / "nothing", a).returncode == 2
