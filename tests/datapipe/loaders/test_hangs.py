"""A loader on files that do not answer: it ends in time, and names what it waits for.

A FIFO in place of a file hangs whoever opens it. Each loader runs in a process of its own, which is killed if it does
not end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from datapipe.dataset import DataSet
from datapipe.watched import LOOK_S
from tests.processes import Process, ProcessServer, clean_environment
from tests.waiting import limit_s, read_until, suspend, wait_until

CHILDREN = Path(__file__).parent / "children"
SETTINGS = [("cached", "full"), ("cached", "blocks"), ("mmap", "full"), ("direct", "blocks")]


@pytest.fixture
def child(server: ProcessServer) -> Callable[..., Process | subprocess.Popen]:
    """child(folder, setting=value…) -> a process that loads from it until it ends. `fresh`: a new interpreter."""

    def child(folder: Path | str, fresh: bool = False, **settings: object) -> Process | subprocess.Popen:
        arguments = [str(CHILDREN / "loads_forever.py"), str(folder), json.dumps(settings)]
        if not fresh:
            return server.start(*arguments)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, *arguments], env=clean_environment(), **pipes)

    return child


def ended(process: Process | subprocess.Popen) -> tuple[int, str, str]:
    """Exit code, output and errors; a process that hangs is killed, and fails the test."""
    try:
        out, errors = process.communicate(timeout=limit_s())
    finally:
        process.kill()
    return process.returncode, out, errors


def hang(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.fixture
def copied(tmp_path, packed_folders) -> Path:
    return shutil.copytree(packed_folders["tar"] / "train", tmp_path / "copy")


@pytest.mark.parametrize(("io", "order"), SETTINGS)
def test_a_shard_that_hangs_ends_the_job(child, copied, io, order, patience_s):
    """The last of several: in order, the samples of the others are delivered.

    Once in an interpreter that shuts down by itself: a server's process leaves out the end of that.
    """
    with DataSet(copied) as data_set:
        shards = [shard.name for shard in data_set.manifest.shards]
        before = int((data_set.index["shard"] < len(shards) - 1).sum())
    assert len(shards) > 1
    hang(copied / shards[-1])
    settings = {"io": io, "order": order, "train": order != "full", "timeout_s": patience_s}
    code, out, errors = ended(child(copied, (io, order) == SETTINGS[0], **settings))
    last = errors.splitlines()[-1]
    assert code == 1 and last.startswith(f"error: {copied}, shard {shards[-1]}: waiting for a batch for "), errors
    assert "has not answered for" in last and f"timeout_s={patience_s})" in last and "Traceback" not in errors
    if order == "full":
        delivered = out.splitlines()[1:]
        assert len(delivered) == before // 8 and delivered[0] == "0 1 2 3 4 5 6 7"


def test_sigterm_ends_it_while_a_shard_hangs(child, copied):
    for shard in copied.glob("*.tar"):
        hang(shard)
    process = child(copied, timeout_s=3000)
    read_until("has not answered for", process.stderr, process)
    process.send_signal(signal.SIGTERM)
    code, _, errors = ended(process)
    assert code == 128 + signal.SIGTERM and errors.endswith("terminated\n")


@pytest.mark.parametrize("reader", ["cpu", "webdataset"])
def test_a_data_set_that_cannot_be_opened_ends_the_job(child, copied, reader):
    if reader == "webdataset":
        pytest.importorskip("webdataset")
    hang(copied / "manifest.json")
    code, _, errors = ended(child(copied, backend=reader, timeout_s=2))  # of which nothing else can take too long
    assert code == 1 and f"error: {copied}: opening the data set has not been answered for " in errors, errors
    assert errors.endswith("(timeout_s=2)\n")


def test_an_index_that_is_a_pipe_is_refused_at_once(child, copied):
    hang(copied / "index.npy")
    code, _, errors = ended(child(copied, timeout_s=3000))
    assert code == 1 and "index.npy: cannot be read: [Errno 6] is a pipe, a device or a folder, not a" in errors, errors


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("way", ["fifo", "pipe"])
def test_a_stream_that_hangs_ends_the_job(child, copied, tmp_path, way, counted, patience_s):
    """Also while its samples are counted. A command that hangs is ended, too."""
    pytest.importorskip("webdataset")
    seconds = f"{100_000_000 + os.getpid()}.5"  # to know it by
    if way == "fifo":
        shard = copied / "shard-000000.tar"
        for name in ("manifest.json", "shard-000001.tar", "shard-000002.tar"):
            (copied / name).unlink()
        hang(shard)
        path, told = copied, f"{copied}: counting" if not counted else f"{copied}, shard {shard.name}: waiting"
        if not counted:
            shard.with_suffix(".idx").unlink()
            told = f"{shard}: counting"
    else:
        command = f"sleep {seconds}"
        if counted:  # the first time, it is whole
            command = f"test -e {tmp_path}/once && {command}; touch {tmp_path}/once; cat {copied}/shard-000000.tar"
        path = f"pipe:{command}"
        told = f"{path}: {'waiting' if counted else 'counting'}"
    code, _, errors = ended(child(path, backend="webdataset", timeout_s=patience_s))
    assert code == 1 and f"error: {told}" in errors and f"timeout_s={patience_s})" in errors, errors
    commands = (file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists())
    assert not any(seconds.encode() in command for command in commands), "the command was left behind"


@pytest.mark.slow
def test_a_stop_for_longer_than_a_batch_may_take_does_not_count(child, copied, patience_s):
    """A scheduler suspends the job while a shard is read. That it hangs is found all the same, after its time."""
    hang(max(copied.glob("*.tar")))
    process = child(copied, timeout_s=patience_s, order="full", train=False)
    wait_until(lambda: os.read(process.stderr.fileno(), 1), process)  # it says that it waits
    suspend([process], 1.5 * patience_s)
    looked = time.monotonic() + 2 * LOOK_S
    wait_until(lambda: time.monotonic() > looked, process)
    code, _, errors = ended(process)
    assert code == 1 and f"timeout_s={patience_s}" in errors, errors


def test_a_fork_does_not_inherit_a_shard_that_hangs(server, copied, tmp_path):
    shard = next(copied.glob("*.tar"))
    shutil.copy(shard, tmp_path / "good")
    hang(shard)
    code, _, errors = ended(server.start(CHILDREN / "loads_and_forks.py", copied, shard, tmp_path / "good"))
    assert code == 7, errors


@pytest.fixture
def flushing(mounted, tmp_path):
    """Another mount, whose process the system asks when a file is closed, as Lustre and NFS 4 ask their servers."""
    slow = type(mounted)(tmp_path)
    slow.backing.mkdir()
    slow.path.mkdir()
    python, script = Path(f"/proc/{mounted.daemon}/cmdline").read_text().split("\0")[:2]
    mount = [python, CHILDREN / "flushes_slowfs.py", Path(script).parent, slow.backing, slow.path]
    process = subprocess.Popen(mount)
    try:
        wait_until(lambda: os.path.ismount(slow.path), process)
        slow.daemon = process.pid
        yield slow
    finally:
        subprocess.run(["umount", "-l", slow.path], check=False)
        process.kill()
        process.wait(limit_s())


@pytest.mark.parametrize("stops", ["reads", "closing"])
def test_a_filesystem_that_stops_ends_the_job(child, flushing, packed_folders, stops, patience_s):
    """Its process is stopped: who reads what is not in the page cache, and who closes a file, waits for it."""
    shutil.copytree(packed_folders["tar"] / "train", flushing.backing / "data")
    shards = [os.open(path, os.O_RDONLY) for path in (flushing.path / "data").glob("*.tar")]
    process = child(flushing.path / "data", timeout_s=patience_s)
    try:
        for _ in range(20):
            read_until("", process.stdout, process)
        os.kill(flushing.daemon, signal.SIGSTOP)
        if stops == "reads":
            for shard in shards:
                os.posix_fadvise(shard, 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            process.send_signal(signal.SIGTERM)
        said = read_until("error: " if stops == "reads" else "terminated", process.stderr, process)
    finally:
        os.kill(flushing.daemon, signal.SIGCONT)
        for shard in shards:
            os.close(shard)
    code, _, rest = ended(process)
    if stops == "reads":
        assert code == 1 and "has not answered for" in said and ", shard shard-" in said, said + rest
        assert f"timeout_s={patience_s})" in said
    else:
        assert code == 128 + signal.SIGTERM, said + rest
