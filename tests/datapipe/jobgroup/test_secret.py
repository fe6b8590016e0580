"""Processes of a job believe each other, and no stranger that reaches their port."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from datapipe.cluster import Placement
from datapipe.errors import SettingError
from datapipe.jobgroup.rendezvous import open_crew
from datapipe.jobgroup.secret import SignedStore, StrangerError, choose_file, read_secret
from datapipe.jobgroup.store import CrewError
from tests.datapipe.staging.data_sets import CHILDREN, needs_root
from tests.ports import free_ports
from tests.waiting import limit_s

ROOT = Path(__file__).parents[3]


def test_who_shares_the_secret_meets_and_a_stranger_does_not(tmp_path, server):
    def meet(*secrets: str) -> list[str]:
        port = free_ports()
        line = CHILDREN / "meets.py"
        ranks = [server.start(line, rank, port, tmp_path / secret) for rank, secret in enumerate(secrets)]
        return [rank.communicate(timeout=limit_s())[0] for rank in ranks]

    assert meet("run/secret", "run/secret") == ["['of 0', 'of 1']\n"] * 2
    assert (tmp_path / "run/secret").stat().st_mode & 0o777 == 0o600
    first, stranger = meet("run/secret", "other")
    assert re.search(r"'host/.' at localhost:\d+.*not written by a process of this job.*MASTER_PORT", stranger), (
        stranger
    )
    assert "StrangerError" in first or "has left" in first, first


@pytest.mark.parametrize("value", ['["host", "boot"]', "0" * 64 + '["host", "boot"]', ""])
def test_only_what_was_signed_for_a_name_is_read(value):
    """Neither what is not signed, nor what was signed under another name, or for another job."""
    store = dist.HashStore()
    ours = SignedStore(store, "a", b"secret", "here")
    ours.set("host/1", "words")
    assert ours.get("host/1") == b"words" and ours.multi_get(["host/1"]) == [b"words"]
    raw = dist.PrefixStore("a", store)
    raw.set("host/0", raw.get("host/1"))
    dist.PrefixStore("b", store).set("host/1", raw.get("host/1"))
    raw.set("host/2", value)
    for prefix, key in (("a", "host/0"), ("b", "host/1"), ("a", "host/2")):
        signed = SignedStore(store, prefix, b"secret", "here")
        for ask in (signed.get, lambda key, signed=signed: signed.multi_get([key])):
            with pytest.raises(StrangerError, match=key):
                ask(key)


@needs_root
def test_a_file_that_others_could_have_read_or_written_is_no_secret(tmp_path):
    path = tmp_path / "secret"
    assert read_secret(path) == read_secret(path) and len(read_secret(path)) == 64
    for change in (lambda: path.chmod(0o640), lambda: path.chmod(0o602), lambda: os.chown(path, 65534, 0)):
        path.chmod(0o600)
        change()
        with pytest.raises(CrewError, match="not a file of mode 600 of this user's: remove it, or set DATAPIPE_SECRET"):
            read_secret(path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(CrewError, match=r"is a link.*set DATAPIPE_SECRET_FILE"):
        read_secret(tmp_path / "link")
    (tmp_path / "short").touch(0o600)
    with pytest.raises(CrewError, match="no whole secret: remove it"):
        read_secret(tmp_path / "short", patience_s=0)


def test_where_a_run_has_no_room_the_secret_is_the_users_own(tmp_path, monkeypatch):
    """The process that finds the disk full says so to those that only read: they see an empty file of mode 400."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "file").write_text("in the place of a folder")
    own = read_secret(tmp_path / "file" / ".secret")
    assert own == read_secret(choose_file())
    (tmp_path / "run").mkdir()

    def write(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "write", write)
        assert read_secret(tmp_path / "run" / ".secret") == own
    assert read_secret(tmp_path / "run" / ".secret", patience_s=0) == own
    with pytest.raises(CrewError, match=r"file/datapipe.*set DATAPIPE_SECRET_FILE"):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
        read_secret(tmp_path / "run" / ".secret")


def test_where_the_secret_is(monkeypatch):
    monkeypatch.delenv("DATAPIPE_SECRET_FILE", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert choose_file() == Path("/state/datapipe/secret") and choose_file(Path("/run")) == Path("/run/.secret")
    monkeypatch.setenv("DATAPIPE_SECRET_FILE", "/shared/mine")
    assert choose_file() == choose_file(Path("/run")) == Path("/shared/mine")


def test_without_a_name_of_the_job_or_a_port_nobody_meets():
    place = Placement(1, 2, "localhost", 20000, launcher="--node", has_own_port=False)
    words = r"MASTER_PORT: is not set.*export MASTER_PORT=.*or stage with --mode copy"
    with pytest.raises(SettingError, match=words), open_crew(place, 1.0):
        pass


def test_nothing_that_another_process_has_sent_is_unpickled():
    """Collectives of torch's whose name ends with _object unpickle it, which may run code."""
    files = [path for name in ("datapipe", "trainer") for path in (ROOT / name).rglob("*.py")]
    callers = [str(path) for path in files if re.search(r"(?<!ctypes)\.\w+_object(_list)?\(", path.read_text())]
    assert len(files) > 200 and callers == []
