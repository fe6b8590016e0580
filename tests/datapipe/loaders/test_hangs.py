"""A loader on files that do not answer: it ends in time, and names what it waits for.

A FIFO in place of a file hangs whoever opens it. Each loader runs in a process of its own, which is killed if it does
not end.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from datapipe.dataset import DataSet

ENDS_S = 60  # by then it hangs; without the fault it takes about 3 s

CHILD = """
import json, sys
from datapipe.console import run
from datapipe.loaders import open_loader
def job():
    settings = {"size": 24, "timeout_s": 2, "threads": 2, **json.loads(sys.argv[2])}
    with open_loader(sys.argv[1], 8, **settings) as loader:
        print("opened", flush=True)
        while True:
            for batch in loader:
                print(*batch.samples.tolist(), flush=True)
sys.exit(run(job))
"""
SETTINGS = [(io, order) for io in ("cached", "mmap", "direct") for order in ("full", "blocks")]


def child(folder: Path | str, settings: str = "{}") -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", CHILD, str(folder), settings], **pipes)


def ended(process: subprocess.Popen) -> tuple[int, str, str]:
    """Exit code, output and errors; a process that hangs is killed, and fails the test."""
    try:
        out, errors = process.communicate(timeout=ENDS_S)
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
def test_a_shard_that_hangs_ends_the_job(copied, io, order):
    """The last of several: in order, the samples of the others are delivered."""
    with DataSet(copied) as data_set:
        shards = [shard.name for shard in data_set.manifest.shards]
        before = int((data_set.index["shard"] < len(shards) - 1).sum())
    assert len(shards) > 1
    hang(copied / shards[-1])
    settings = f'{{"io": "{io}", "order": "{order}", "train": {"false" if order == "full" else "true"}}}'
    code, out, errors = ended(child(copied, settings))
    last = errors.splitlines()[-1]
    assert code == 1 and last.startswith(f"error: {copied}, shard {shards[-1]}: waiting for a batch for 2 s"), errors
    assert "has not answered for" in last and "Traceback" not in errors
    if order == "full":
        delivered = out.splitlines()[1:]
        assert len(delivered) == before // 8 and delivered[0] == "0 1 2 3 4 5 6 7"


def test_sigterm_ends_it_while_a_shard_hangs(copied):
    for shard in copied.glob("*.tar"):
        hang(shard)
    process = child(copied, '{"timeout_s": 300}')
    assert process.stdout.readline() == "opened\n"
    time.sleep(1)  # so that it waits
    process.send_signal(signal.SIGTERM)
    code, _, errors = ended(process)
    assert code == 128 + signal.SIGTERM and errors.endswith("terminated\n")


@pytest.mark.parametrize("backend", ["cpu", "dali", "webdataset"])
@pytest.mark.parametrize("name", ["manifest.json", "index.npy"])
def test_a_data_set_that_cannot_be_opened_ends_the_job(copied, backend, name):
    if backend == "dali":
        pytest.importorskip("nvidia.dali")
    if backend == "webdataset":
        pytest.importorskip("webdataset")
        if name == "index.npy":
            pytest.skip("is not read")
    hang(copied / name)
    code, _, errors = ended(child(copied, f'{{"backend": "{backend}"}}'))
    assert code == 1 and f"error: {copied}: opening the data set has not been answered for 2 s" in errors, errors


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("way", ["fifo", "pipe"])
def test_a_stream_that_hangs_ends_the_job(copied, tmp_path, way, counted):
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
    code, _, errors = ended(child(path, '{"backend": "webdataset"}'))
    assert code == 1 and f"error: {told}" in errors and "timeout_s=2" in errors, errors
    commands = (file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists())
    assert not any(seconds.encode() in command for command in commands), "the command was left behind"


FORKING = """
import os, sys, threading, time
from datapipe.loaders import open_loader
folder, shard, good = sys.argv[1:]
with open_loader(folder, 61, size=24, threads=2, train=False) as loader:
    waiting = threading.Thread(target=lambda: next(iter(loader)), daemon=True)
    waiting.start()
    while loader.data_set.reader.oldest() is None:
        time.sleep(0.01)
    time.sleep(0.5)
    os.replace(good, shard)
    if not os.fork():
        loader.set_epoch(0)
        (batch,) = loader
        os._exit(7 if batch.valid.all() else 1)
    code = os.waitstatus_to_exitcode(os.wait()[1])
sys.exit(code)
"""


def test_a_fork_does_not_inherit_a_shard_that_hangs(copied, tmp_path):
    shard = next(copied.glob("*.tar"))
    shutil.copy(shard, tmp_path / "good")
    hang(shard)
    command = [sys.executable, "-c", FORKING, str(copied), str(shard), str(tmp_path / "good")]
    code, _, errors = ended(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    assert code == 7, errors


FLUSHING = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import slowfs
slowfs.SlowFS.flush = lambda *_: 0
slowfs.main()
"""


@pytest.fixture
def flushing(mounted, tmp_path):
    """Another mount, whose process the system asks when a file is closed, as Lustre and NFS 4 ask their servers."""
    slow = type(mounted)(tmp_path)
    slow.backing.mkdir()
    slow.path.mkdir()
    python, script = Path(f"/proc/{mounted.daemon}/cmdline").read_text().split("\0")[:2]
    process = subprocess.Popen([python, "-c", FLUSHING, Path(script).parent, slow.backing, slow.path])
    try:
        while not os.path.ismount(slow.path):
            assert process.poll() is None
            time.sleep(0.05)
        slow.daemon = process.pid
        yield slow
    finally:
        subprocess.run(["umount", "-l", slow.path], check=False)
        process.kill()
        process.wait()


@pytest.mark.parametrize("stops", ["reads", "closing"])
def test_a_filesystem_that_stops_ends_the_job(flushing, packed_folders, stops):
    """Its process is stopped: who reads what is not in the page cache, and who closes a file, waits for it."""
    shutil.copytree(packed_folders["tar"] / "train", flushing.backing / "data")
    shards = [os.open(path, os.O_RDONLY) for path in (flushing.path / "data").glob("*.tar")]
    process, said = child(flushing.path / "data"), ""
    try:
        for _ in range(20):
            assert process.stdout.readline()
        os.kill(flushing.daemon, signal.SIGSTOP)
        if stops == "reads":
            for shard in shards:
                os.posix_fadvise(shard, 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            process.send_signal(signal.SIGTERM)
        waking = threading.Timer(ENDS_S, lambda: (process.kill(), os.kill(flushing.daemon, signal.SIGCONT)))
        waking.start()
        for line in process.stderr:
            said += line
            if line.startswith(("error: ", "terminated")):
                break
        assert waking.is_alive(), "it waited for the filesystem"
        waking.cancel()
    finally:
        os.kill(flushing.daemon, signal.SIGCONT)
        for shard in shards:
            os.close(shard)
    code, _, rest = ended(process)
    if stops == "reads":
        assert code == 1 and "has not answered for 2 s" in said and ", shard shard-" in said, said + rest
    else:
        assert code == 128 + signal.SIGTERM, said + rest
