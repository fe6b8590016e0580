"""The summary on the terminal."""

from trainer.reporting.summary import summary


def test_summary(tmp_path):
    end = {
        "status": "target_reached",
        "stopped_by": None,
        "accuracy": 0.9123,
        "time_to_target_s": 61.2,
        "elapsed_s": 70.0,
        "images_per_s": 1234.5,
        "wait_share": 0.314,
        "time_s": {"staging": 3.14, "start": 1.26, "compile": 0.0, "wait": 20.0, "other": 0.1},
    }
    text = summary(end, 0.9, tmp_path / "report.html", tmp_path)
    for words in (
        "91.23%",
        "reached",
        "61.2 s",
        "1,234",
        "report.html",
        "staging 3.1 s, start 1.3 s\n",
        "data-bound: 31% of the steps' time",
    ):
        assert words in text
    assert "published" not in text
    beside = summary(end, 0.9, None, tmp_path, "92.0 % after 3 epochs").splitlines()
    assert beside[1] == "published         92.0 % after 3 epochs (the recipe unchanged)"  # below the run's own accuracy
    for reason, words in (
        ("time", "interrupted since the time is nearly over;"),
        ("SIGTERM", "interrupted by SIGTERM;"),
    ):
        stopped = end | {"wait_share": 0.01, "status": "interrupted", "stopped_by": reason}
        report, last = summary(stopped, 0.99, None, tmp_path).splitlines()[-2:]
        assert report == f"trainer report {tmp_path} writes a report until here"
        assert last.startswith(words) and last.endswith(f"--resume continues {tmp_path}")
