"""A staged data set that others use: another user, a read-only filesystem, a damaged manifest."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from datapipe.dataset.manifest import MANIFEST
from datapipe.dataset.verify import verify
from datapipe.locks import locked
from datapipe.staging import stage, stage_once
from tests.datapipe.staging.data_sets import needs_root
from tests.waiting import limit_s, read_until


def state(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in sorted([folder, *folder.rglob("*")])}


@needs_root
def test_another_user_finds_all_in_place(public, as_nobody):
    source, local = public / "source", public / "local"
    stage(source, local)
    before = state(local)
    done = as_nobody("datapipe", "stage", source, local, "--json")
    assert done.returncode == 0, done.stderr
    assert [row["copied_bytes"] for row in json.loads(done.stdout)["data_sets"]] == [0, 0]
    (local / "val" / "keys.txt").write_bytes(b"")
    done = as_nobody("datapipe", "stage", source, local)
    assert done.returncode == 1 and "keys.txt; choose another folder" in done.stderr and "Traceback" not in done.stderr
    stage(source, local)
    assert before.keys() == state(local).keys()


@needs_root
def test_users_share_a_cache(public, as_nobody):
    source, cache = public / "source" / "val", public / "cache"
    before = state(stage_once(source, cache))
    done = as_nobody("counts_images", source, cache)
    assert done.returncode == 0 and done.stdout == "8 False\n", done.stderr
    assert state(next(cache.iterdir())) == before


@needs_root
def test_stage_onto_a_read_only_filesystem(public, command):
    source, local = public / "source", public / "local"
    stage(source, local)
    if subprocess.run(["mount", "--bind", "-o", "ro", local, local], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        done = command("datapipe", "stage", source, local)
        assert done.returncode == 0 and "0.0 MiB read from DIR" in done.stdout, done.stderr
        subprocess.run(["mount", "-o", "remount,bind,rw", local], check=True)
        (local / "val" / MANIFEST).unlink()
        subprocess.run(["mount", "-o", "remount,bind,ro", local], check=True)
        done = command("datapipe", "stage", source, local)
    finally:
        subprocess.run(["umount", "--lazy", local], check=True)
    assert done.returncode == 1 and "Read-only file system" in done.stderr and "Traceback" not in done.stderr


def test_nobody_waits_for_a_lock_where_all_is_in_place(public, command):
    source, local = public / "source", public / "local"
    stage(source, local)
    with locked(local / "train", wait=False), locked(local / "val", wait=False):
        assert command("datapipe", "stage", source, local).returncode == 0


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", None])
def test_a_damaged_local_manifest_is_written_again(public, content, caplog):
    source, local = public / "source" / "train", public / "local"
    stage(source, local)
    path = local / MANIFEST
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"class.0", b"class.1", 1) if content is None else content)
    assert verify(local) != []
    (staged,) = stage(source, local)
    assert staged.copied_bytes == 0 and path.read_bytes() == whole and "is damaged" in caplog.text


def test_the_source_may_be_packed_again_meanwhile(public, start):
    """The manifest is read once: what is written at last is what was copied by."""
    source, local = public / "source" / "train", public / "local"
    whole = (source / MANIFEST).read_bytes()
    local.mkdir()
    with locked(local, wait=False):
        child = start(source, local)
        read_until("waiting for process", child.stderr, child)
        (source / MANIFEST).write_bytes((public / "source" / "val" / MANIFEST).read_bytes())
    child.communicate(timeout=limit_s())
    assert child.returncode == 0
    assert (local / MANIFEST).read_bytes() == whole and verify(local) == []


def test_class_names_that_are_not_utf8(public, tmp_path, photo, encoded):
    from datapipe.packing import PackOptions, pack

    folder = tmp_path / "raw" / os.fsdecode(b"caf\xe9")
    folder.mkdir(parents=True)
    (folder / "0.png").write_bytes(encoded(photo(8, 8, 1), "PNG"))
    pack(tmp_path / "raw", tmp_path / "out", PackOptions(workers=1))
    assert verify(stage_once(tmp_path / "out" / "train", tmp_path / "cache")) == []
