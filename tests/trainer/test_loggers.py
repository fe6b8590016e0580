"""Loggers beside metrics.jsonl, in real runs: read back, resumed, added by a package, and failing."""

import csv
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120

# A package that adds loggers: one writes what it is told, others fail at its third line, or end what calls them.
PACKAGE = """
import json
class Logger:
    def __init__(self, run, lines):
        self.path = run / "told.jsonl"
        self.path.write_text("".join(json.dumps(line) + "\\n" for line in lines))
    def write(self, line):
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\\n")
    def close(self):
        self.path.with_name("closed").touch()
class Broken(Logger):
    def write(self, line):
        super().write(line)
        if len(self.path.read_text().splitlines()) == 3:
            raise ConnectionError("no such server")
class Exiting(Logger):
    def write(self, line):
        pass
    def close(self):
        raise SystemExit(0)
def refuse(run, lines):
    raise RuntimeError("not logged in:\\nsee the manual")
def leave(run, lines):
    raise SystemExit("log in first")
"""
ENTRY_POINTS = (
    "[trainer.loggers]\nteller = some_logger:Logger\nbroken = some_logger:Broken\nrefuses = some_logger:refuse\n"
)
ENTRY_POINTS += "exiting = some_logger:Exiting\nleaves = some_logger:leave\ngone = no_such_module:Logger\n"


@pytest.fixture
def package(tmp_path):
    """A folder for PYTHONPATH with an installed package, as importlib.metadata sees it."""
    folder = tmp_path / "site"
    info = folder / "some_logger-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "some_logger.py").write_text(PACKAGE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-logger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


@pytest.fixture
def train(start, packed, recipe_file, package, tmp_path):
    """train("csv", "--set", …) -> Popen of `trainer train` into tmp_path/run."""

    def _train(log, *arguments):
        command = ["-m", "trainer", "train", recipe_file, "--data", packed, "--out", tmp_path / "run", "--resume"]
        return start(*command, "--log", log, *arguments, env={"PYTHONPATH": f"{package}{os.pathsep}{ROOT}"})

    return _train


def end(child) -> tuple[int, str]:
    _, errors = child.communicate(timeout=TIMEOUT_S)
    return child.returncode, errors


def interrupt_at(child, run: Path, step: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not (run / "metrics.jsonl").exists() or f'"step": {step},' not in (run / "metrics.jsonl").read_text():
        assert child.poll() is None and time.monotonic() < deadline, child.communicate()
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert end(child)[0] == -signal.SIGKILL


def test_csv_has_each_step_and_epoch_once_also_of_a_run_that_was_killed(train, metrics, tmp_path):
    run, every = tmp_path / "run", ("--set", "train.checkpoint_every_steps=3")
    interrupt_at(train("csv", *every), run, 8)
    code, errors = end(train("csv", *every))
    assert code == 0, errors
    lines = [line for line in metrics(run) if line["event"] in ("train", "epoch")]
    with open(run / "metrics.csv", newline="") as file:
        rows = [*csv.DictReader(file)]
    assert len(rows) == len(lines) == 33
    for row, line in zip(rows, lines, strict=True):
        assert row == {name: str(line.get(name, "")) if line.get(name) is not None else "" for name in row}


@pytest.mark.parametrize("before", ["tensorboard", "csv"])
def test_tensorboard_reads_what_was_written(train, metrics, tmp_path, before):
    """Also before it was asked for."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run, every = tmp_path / "run", ("--set", "train.checkpoint_every_steps=3")
    interrupt_at(train(before, *every), run, 8)
    code, errors = end(train("tensorboard", *every))
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
    code, errors = end(train("teller", "--log", "csv"))
    assert code == 0, errors
    run = tmp_path / "run"
    told = [json.loads(line) for line in (run / "told.jsonl").read_text().splitlines()]
    assert told == [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert (run / "closed").exists() and (run / "metrics.csv").exists()


def test_one_that_fails_is_told_of_and_the_run_goes_on(train, metrics, tmp_path):
    code, errors = end(train("broken", "--log", "exiting"))
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
    found, errors = end(train(name))
    assert found == code and re.search(says, errors.splitlines()[-1]) and "Traceback" not in errors, errors


def test_a_report_is_written_again_until_the_run_has_ended(train, start, tmp_path):
    run = tmp_path / "run"
    watch = start("-m", "trainer", "report", run, "--watch")  # into the run's folder, as the run itself does
    code, said = end(train("csv", "--set", "train.epochs=1", "--set", "data.timeout_s=100"))
    assert code == 0 and "no report could be written" not in said
    said, errors = watch.communicate(timeout=TIMEOUT_S)
    assert watch.returncode == 0, errors
    assert said == f"{run / 'report.html'}\n" and "waiting for" in errors
    assert "refresh" not in (run / "report.html").read_text()


def test_a_report_of_a_run_that_goes_on_loads_itself_again(train, start, tmp_path):
    run, page = tmp_path / "run", tmp_path / "report" / "report.html"
    child = train("csv", "--set", "train.epochs=100000", "--set", "train.log_every=10")
    watch = start("-m", "trainer", "report", run, "--watch", "--out", tmp_path / "report")
    deadline, written = time.monotonic() + TIMEOUT_S, set()
    while len(written) < 2:
        assert watch.poll() is None and time.monotonic() < deadline
        if page.exists():
            written.add(page.stat().st_mtime_ns)
        time.sleep(0.05)
    assert '<meta http-equiv="refresh" content="5">' in page.read_text()
    watch.send_signal(signal.SIGINT)
    assert end(watch)[0] == 130
    child.kill()
