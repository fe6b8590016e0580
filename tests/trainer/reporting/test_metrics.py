"""The writer of metrics.jsonl."""

import errno
import json
import time

import pytest

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
    assert abs(later.pop("written_at") - time.time()) < 100
    assert later == {"event": "train", "loss": None, "time_s": {"wait": None}}
    with path.open("a") as file:
        file.write('{"event": "tra')  # killed while writing
    second = MetricsFile(path)
    second.open(keep_bytes=length)
    assert not second.is_empty
    second.write("resume", step=2)
    second.close()
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["run", "resume"]


def test_lines_are_kept_until_there_is_room(tmp_path):
    class Full:
        """A disk that has room for 5 more bytes, and then for none."""

        room = 5

        def write(self, data):
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            taken, self.room = file.write(data[: self.room]), 0
            return taken

        def fileno(self):
            return file.fileno()

    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.open()
    metrics.write("run", format=1)
    file = metrics._file
    metrics._file = Full()
    metrics.write("train", step=1)
    metrics.write("train", step=2)
    with pytest.raises(OSError, match=r"No space left.*metrics\.jsonl"):
        metrics.sync()
    metrics._file = file
    metrics.write("train", step=3)
    assert metrics.sync() == (tmp_path / "metrics.jsonl").stat().st_size
    metrics.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("step") for line in lines] == [None, 1, 2, 3]
