"""Staging and verifying on a filesystem that does not answer: they end in time or when told to, and name the file.

A FIFO in place of a shard hangs whoever opens it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from datapipe.dataset.verify import verify
from datapipe.locks import locked
from datapipe.staging import stage
from datapipe.watched import LOOK_S
from tests.processes import Process
from tests.waiting import limit_s, read_until, suspend, wait_until


@pytest.fixture
def hung(tmp_path, packed_folders) -> Path:
    """A data set whose last shard hangs."""
    folder = shutil.copytree(packed_folders["tar"] / "train", tmp_path / "hung")
    shard = max(folder.glob("*.tar"))
    shard.unlink()
    os.mkfifo(shard)
    return folder


def ended(process: Process) -> tuple[int, str]:
    _, errors = process.communicate(timeout=limit_s())
    return process.returncode, errors


def test_a_shard_that_hangs_ends_it(hung, tmp_path, packed_folders, start, patience_s):
    """What was copied until then is kept."""
    local, shard = tmp_path / "local", max(hung.glob("*.tar"))
    code, errors = ended(start(hung, local, "--timeout", patience_s))
    said = rf"^error: {shard}: a read or write has not been answered for \d+ s \(timeout_s={patience_s}\)"
    assert code == 1 and re.search(said, errors, re.M), errors
    assert not (local / "manifest.json").exists() and (local / min(hung.glob("*.tar")).name).exists()
    (staged,) = stage(packed_folders["tar"] / "train", local)
    assert staged.kept_bytes > 0 and verify(local) == []


@pytest.mark.slow
def test_a_stop_for_longer_than_a_read_may_take_does_not_count(hung, tmp_path, start, patience_s):
    """A scheduler suspends the job while a shard is read. That it hangs is found all the same, after its time."""
    local, shards = tmp_path / "local", {path.name for path in hung.glob("*.tar")}
    process = start(hung, local, "--timeout", patience_s)
    wait_until(lambda: {path.name for path in local.glob("*.tar")} == shards - {max(shards)}, process)
    suspend([process], 1.5 * patience_s)
    looked = time.monotonic() + 2 * LOOK_S
    wait_until(lambda: time.monotonic() > looked, process)
    code, errors = ended(process)
    assert code == 1 and "a read or write has not been answered for" in errors, errors


@pytest.mark.parametrize(("number", "said"), [(signal.SIGTERM, "terminated\n"), (signal.SIGINT, "interrupted\n")])
def test_a_signal_ends_it_while_a_shard_hangs(hung, tmp_path, number, said, start):
    local = tmp_path / "local"
    process, shards = start(hung, local), {path.name for path in hung.glob("*.tar")}
    wait_until(lambda: {path.name for path in local.glob("*.tar")} == shards - {max(shards)}, process)
    process.send_signal(number)
    code, errors = ended(process)
    assert code == 128 + number and errors.splitlines(keepends=True)[-1] == said


def test_the_wait_for_another_process_is_told_of(tmp_path, packed_folders, start):
    local = tmp_path / "local"
    local.mkdir()
    with locked(local, wait=False):
        process = start(packed_folders["tar"] / "train", local)
        read_until(f"{local}: waiting for process", process.stderr, process)
    code, errors = ended(process)
    assert code == 0 and verify(local) == [], errors


def test_a_loader_that_stages_first_has_the_same_limit(hung, tmp_path, begin, patience_s):
    code, errors = ended(begin("counts_images", hung, tmp_path / "cache", f'{{"timeout_s": {patience_s}}}'))
    assert code == 1 and f"error: {max(hung.glob('*.tar'))}: a read or write" in errors, errors
    assert f"timeout_s={patience_s})" in errors


def test_verify_ends_while_a_read_hangs(mounted, packed_folders, begin, patience_s):
    mounted.calm()
    shutil.copytree(packed_folders["tar"] / "train", mounted.backing / "hung")
    shard = max((mounted.path / "hung").glob("*.tar"))
    mounted.set(faults=[f"read:*/{shard.name}:1+:stall={2 * patience_s}"])
    process = begin("datapipe", "verify", mounted.path / "hung", "--timeout", patience_s)
    began, said = time.monotonic(), read_until("error:", process.stderr, process)  # behind warnings, every 10 s
    assert time.monotonic() - began < 2 * patience_s, "it waited for the read"
    assert f"error: {shard}: a read or write has not been answered for" in said
    assert said.endswith(f"(timeout_s={patience_s})\n")
    mounted.calm()  # FUSE keeps a process that ends until it is answered
    assert ended(process)[0] == 1
