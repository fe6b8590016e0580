"""The writer of metrics.jsonl."""

import json

from trainer.reporting.metrics import MetricsFile


def test_metrics_are_cut_to_what_the_checkpoint_knew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    first.open()
    first.write("run", format=1)
    length = first.sync()
    first.write("train", loss=float("inf"), time_s={"wait": float("nan")})
    first.close()
    later = json.loads(path.read_text().splitlines()[1])
    assert later == {"event": "train", "loss": None, "time_s": {"wait": None}}
    with path.open("a") as file:
        file.write('{"event": "tra')  # killed while writing
    second = MetricsFile(path)
    second.open(keep_bytes=length)
    assert not second.is_empty
    second.write("resume", step=2)
    second.close()
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["run", "resume"]
