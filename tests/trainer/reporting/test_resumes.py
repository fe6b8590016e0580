"""What the report says of a run that was resumed, from its metrics.jsonl."""

from tests.trainer.reporting.test_report import Page, end, epoch, header, train, write
from trainer.reporting.page import write_report


def resume(step: int, **changes: object) -> dict:
    return {"event": "resume", "epoch": 0, "step": step, "elapsed_s": 2.0, "world_size": 2} | changes


def notes(folder, *lines: dict, monkeypatch) -> str:
    monkeypatch.setattr("trainer.reporting.page.write_plots", lambda *_: [])  # they take most of the time
    return Page(write_report([write(folder / "run", header(), *lines)], folder / "out")).text


def test_once(tmp_path, monkeypatch):
    """How long the run waited, and what it did twice; no sum of one."""
    lines = train(10), resume(10, waited_s=1234.4, repeated_steps=7), train(20), epoch(1, 0.9), end()
    text = notes(tmp_path, *lines, monkeypatch=monkeypatch)
    assert "Resumed at step 10, world size 2, 1,234 s after it stopped; 7 steps were done twice." in text
    assert "It was resumed" not in text


def test_several_times(tmp_path, monkeypatch):
    first = resume(10, waited_s=100, repeated_steps=1500)
    second = resume(20, world_size=4, waited_s=20.6, repeated_steps=3)
    text = notes(tmp_path, first, train(20), second, train(30), end(), monkeypatch=monkeypatch)
    assert "Resumed at step 10, world size 2, 100 s after it stopped; 1,500 steps were done twice." in text
    assert "Resumed at step 20, world size 4, 21 s after it stopped; 3 steps were done twice." in text
    assert "It was resumed 2 times: 121 s passed in between, and 1,503 steps were done twice." in text


def test_by_an_earlier_version(tmp_path, monkeypatch):
    """It did not write how long the run had waited."""
    text = notes(tmp_path, resume(10), train(20), end(), monkeypatch=monkeypatch)
    assert "Resumed at step 10, world size 2." in text and "done twice" not in text
