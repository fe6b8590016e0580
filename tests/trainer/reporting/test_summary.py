"""The summary on the terminal."""

from trainer.reporting.summary import summary


def test_summary(tmp_path):
    end = {
        "status": "target_reached",
        "accuracy": 0.9123,
        "time_to_target_s": 61.2,
        "elapsed_s": 70.0,
        "images_per_s": 1234.5,
        "wait_share": 0.314,
    }
    text = summary(end, 0.9, tmp_path / "report.html", tmp_path)
    for words in ("91.23%", "reached", "61.2 s", "1,234", "report.html", "data-bound: 31% of the steps' time"):
        assert words in text
    text = summary(end | {"wait_share": 0.01, "status": "interrupted"}, 0.99, None, tmp_path)
    assert "data-bound" not in text
    assert "--resume" in text
