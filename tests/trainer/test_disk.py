"""A disk that takes a checkpoint's bytes, and only says when it is to keep them that it cannot."""

import errno
import os

import pytest

from trainer.checkpoint import load_checkpoint, save_checkpoint


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
