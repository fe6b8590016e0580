"""What the report says of a run that was resumed, from its metrics.jsonl."""

from tests.trainer.reporting.test_report import Page, end, epoch, header, train, write
from trainer.reporting.page import write_report
from trainer.reporting.runlog import read_run


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


def test_what_kfac_did_is_counted_over_the_processes(tmp_path):
    """Each process counts from 0, and what was done twice counts once; a run that is rolled back stays one process."""

    def kfac(step: int, updates: int) -> dict:
        return {"event": "kfac", "step": step, "factor_updates": 2 * updates, "solution_updates": updates, "skipped": 1}

    back = resume(50, event="roll_back")
    lines = kfac(50, 40), kfac(60, 48), resume(50), kfac(60, 8), resume(60), kfac(70, 5), back, kfac(60, 9)
    counts = [
        [(line["factor_updates"], line["solution_updates"], line["skipped"]) for line in read_run(folder).kfac]
        for folder in (write(tmp_path / str(number), header(), *lines[:number]) for number in (4, 6, 8))
    ]
    first = [(80, 40, 1), (96, 48, 1)]
    assert counts == [first, [*first, (106, 53, 1)], [(80, 40, 1), (114, 57, 1)]]
