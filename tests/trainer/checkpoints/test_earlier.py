"""The earlier checkpoints: what displaces them, and what does not."""

import errno
import os

import pytest

from trainer.checkpoints.file import load_checkpoint, save_checkpoint


def test_what_the_disk_does_not_keep_displaces_no_earlier_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    for step in (1, 2):
        save_checkpoint(path, {"step": step}, keep=2)

    def fail(fd):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as context:
        context.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output error"):
            save_checkpoint(path, {"step": 3}, keep=2)
    steps = {file.name: load_checkpoint(file)["step"] for file in tmp_path.iterdir()}
    assert steps == {"checkpoint.pt": 2, "checkpoint-1.pt": 1}


def test_of_many_checkpoints_each_has_the_number_of_its_age(tmp_path):
    for step in range(1, 7):
        save_checkpoint(tmp_path / "checkpoint.pt", {"step": step}, keep=4)
    steps = {file.name: load_checkpoint(file)["step"] for file in tmp_path.iterdir()}
    assert steps == {"checkpoint.pt": 6, "checkpoint-1.pt": 5, "checkpoint-2.pt": 4, "checkpoint-3.pt": 3}
