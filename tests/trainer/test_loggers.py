"""Loggers beside metrics.jsonl, in real runs: read back, resumed, added by a package, and failing."""

import csv
import json
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.trainer.reporting.test_report import end as end_line
from tests.trainer.reporting.test_report import epoch, header, write
from tests.trainer.runs import DISTURBED, finish
from tests.waiting import limit_s, read_until
from trainer.reporting.watching import watch_report

CHILDREN = Path(__file__).parent / "children"
ENTRY_POINTS = (
    "[trainer.loggers]\nteller = some_logger:Logger\nbroken = some_logger:Broken\nrefuses = some_logger:refuse\n"
)
ENTRY_POINTS += "exiting = some_logger:Exiting\nleaves = some_logger:leave\ngone = no_such_module:Logger\n"


@pytest.fixture
def package(tmp_path):
    """A folder with an installed package, as importlib.metadata sees it."""
    folder = tmp_path / "site"
    info = folder / "some_logger-1.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(CHILDREN / "some_logger.py", folder)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-logger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


@pytest.fixture
def train(start, packed, recipe_file, package, tmp_path):
    """train("csv", "--set", …) -> exit code and errors of `trainer train` into tmp_path/run.

    `killed_before`: the step at which it is killed.
    """

    def _train(log, *arguments, killed_before=0):
        program = [DISTURBED, "kill", killed_before, 0] if killed_before else [CHILDREN / "with_package.py", package]
        command = ["train", recipe_file, "--data", packed, "--out", tmp_path / "run", "--resume"]
        code, _, errors = finish(start(*program, *command, "--set", "train.epochs=2", "--log", log, *arguments))
        return code, errors

    return _train


EVERY = "--set", "train.checkpoint_every_steps=3"


def test_csv_has_each_step_and_epoch_once_also_of_a_run_that_was_killed(train, metrics, tmp_path):
    run = tmp_path / "run"
    assert train("csv", *EVERY, killed_before=9)[0] == -signal.SIGKILL
    code, errors = train("csv", *EVERY)
    assert code == 0, errors
    lines = [line for line in metrics(run) if line["event"] in ("train", "epoch")]
    with open(run / "metrics.csv", newline="") as file:
        rows = [*csv.DictReader(file)]
    assert len(rows) == len(lines) == 22
    for row, line in zip(rows, lines, strict=True):
        assert row == {name: str(line.get(name, "")) if line.get(name) is not None else "" for name in row}


@pytest.mark.parametrize("before", ["tensorboard", "csv"])
def test_tensorboard_reads_what_was_written(train, metrics, tmp_path, before):
    """Also before it was asked for."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = tmp_path / "run"
    assert train(before, *EVERY, killed_before=9)[0] == -signal.SIGKILL
    code, errors = train("tensorboard", *EVERY)
    assert code == 0, errors
    read = event_accumulator.EventAccumulator(str(run / "tensorboard")).Reload()
    lines = metrics(run)
    for event, names in (("train", ("loss", "lr", "images_per_s")), ("epoch", ("val_accuracy", "train_loss"))):
        for name in names:
            found = [(scalar.step, scalar.value) for scalar in read.Scalars(f"{event}/{name}")]
            expected = [(line["step"], line[name]) for line in lines if line["event"] == event]
            assert [step for step, _ in found] == [step for step, _ in expected]
            assert [value for _, value in found] == pytest.approx([value for _, value in expected], rel=1e-6)


def test_a_package_adds_a_logger(train, tmp_path):
    code, errors = train("teller", "--log", "csv")
    assert code == 0, errors
    run = tmp_path / "run"
    told = [json.loads(line) for line in (run / "told.jsonl").read_text().splitlines()]
    assert told == [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert (run / "closed").exists() and (run / "metrics.csv").exists()


def test_one_that_fails_is_told_of_and_the_run_goes_on(train, metrics, tmp_path):
    code, errors = train("broken", "--log", "exiting")
    assert code == 0 and errors.count("--log broken has failed") == 1 and "Traceback" not in errors, errors
    assert "the run continues: ConnectionError: no such server" in errors
    assert "--log exiting has failed" in errors and "SystemExit: 0" in errors
    assert metrics(tmp_path / "run")[-1]["status"] == "completed"
    assert len((tmp_path / "run" / "told.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("nosuch", 2, "--log nosuch: is not known; allowed: broken, csv, exiting, gone, leaves, .*tensorboard"),
        ("gone", 2, "--log gone: no_such_module:Logger cannot be imported"),
        ("refuses", 1, "--log refuses: RuntimeError: not logged in: see the manual"),
        ("leaves", 1, "--log leaves: SystemExit: log in first"),
    ],
)
def test_one_that_cannot_begin_ends_the_run_before_it_begins(train, name, code, says):
    found, errors = train(name)
    assert found == code and re.search(says, errors.splitlines()[-1]) and "Traceback" not in errors, errors


def test_a_report_is_written_again_until_the_run_has_ended(tmp_path, monkeypatch, caplog):
    """Also one that was interrupted, which may continue. Until then the page loads itself again."""
    run, page = tmp_path / "run", tmp_path / "run" / "report.html"
    lines = [header(), epoch(1, 0.5), end_line(status="interrupted"), {"event": "resume", "epoch": 1, "step": 100}]
    wholes = [[], lines[:1], lines[:1], lines[:3], [*lines, end_line()]]
    refreshed = []

    def sleep(_: float) -> None:
        refreshed.append('<meta http-equiv="refresh" content="5">' in page.read_text() if page.exists() else None)
        page.unlink(missing_ok=True)
        write(run, *wholes[len(refreshed)])

    monkeypatch.setattr("trainer.reporting.watching.time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr("trainer.reporting.page.write_plots", lambda *_: [])
    caplog.set_level("INFO")
    assert watch_report([run], run) == page
    assert refreshed == [None, True, None, True]  # what has not changed is not written again
    assert 'http-equiv="refresh"' not in page.read_text()
    assert caplog.messages[0] == f"waiting for {run / 'metrics.jsonl'}"


def test_who_watches_a_run_may_leave(start, tmp_path):
    watch = start("-m", "trainer", "report", tmp_path / "run", "--watch")
    read_until("waiting for", watch.stderr, watch)
    watch.send_signal(signal.SIGINT)
    assert watch.wait(limit_s()) == 130
