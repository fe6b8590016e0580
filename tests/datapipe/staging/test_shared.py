"""A staged data set that others use: another user, a read-only filesystem, a damaged manifest."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from datapipe.dataset.manifest import MANIFEST
from datapipe.dataset.verify import verify
from datapipe.fsio import locked
from datapipe.staging import stage, stage_once

NOBODY = 65534
STAGE = "import sys; from datapipe.cli import main; sys.argv[0] = 'datapipe'; sys.exit(main())"
# What is imported when it is needed may lie where only root can read.
AS_NOBODY = f"""
import os, sys
import datapipe.cli, datapipe.staging, datapipe.loaders.cpu
os.setgroups([]); os.setresgid({NOBODY}, {NOBODY}, {NOBODY}); os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
"""
LOAD = """
from datapipe.loaders import open_loader
with open_loader(sys.argv[1], 4, size=16, cache=sys.argv[2]) as loader:
    print(sum(len(batch.labels) for batch in loader))
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


@pytest.fixture
def public(packed_folders) -> Iterator[Path]:
    """A folder with a data set, `source`, that any user can read; pytest's own are closed."""
    folder = Path(tempfile.mkdtemp(prefix="stage-"))
    folder.chmod(0o755)
    shutil.copytree(packed_folders["tar"], folder / "source")
    yield folder
    shutil.rmtree(folder)


def run(program: str, *arguments: Path, prefix: list[str] = ()) -> subprocess.CompletedProcess:
    line = [*prefix, sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120)


def state(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in sorted([folder, *folder.rglob("*")])}


@needs_root
def test_another_user_finds_all_in_place(public):
    source, local = public / "source", public / "local"
    stage(source, local)
    before = state(local)
    done = run(AS_NOBODY + STAGE, "stage", source, local, "--json")
    assert done.returncode == 0, done.stderr
    assert [row["copied_bytes"] for row in json.loads(done.stdout)["data_sets"]] == [0, 0]
    (local / "val" / "keys.txt").write_bytes(b"")
    done = run(AS_NOBODY + STAGE, "stage", source, local)
    assert done.returncode == 1 and "keys.txt; choose another folder" in done.stderr and "Traceback" not in done.stderr
    stage(source, local)
    assert before.keys() == state(local).keys()


@needs_root
def test_users_share_a_cache(public):
    source, cache = public / "source" / "val", public / "cache"
    before = state(stage_once(source, cache))
    done = run(AS_NOBODY + LOAD, source, cache)
    assert done.returncode == 0 and done.stdout.split() == ["8"], done.stderr
    assert state(next(cache.iterdir())) == before


@needs_root
def test_stage_onto_a_read_only_filesystem(public):
    source, local = public / "source", public / "local"
    stage(source, local)
    mount = f'mount --bind {local} {local} && mount -o remount,bind,ro {local} && exec "$@"'
    prefix = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    done = run(STAGE, "stage", source, local, prefix=prefix)
    assert done.returncode == 0 and "0.0 MiB copied" in done.stdout, done.stderr
    (local / "val" / MANIFEST).unlink()
    done = run(STAGE, "stage", source, local, prefix=prefix)
    assert done.returncode == 1 and "Read-only file system" in done.stderr and "Traceback" not in done.stderr


def test_nobody_waits_for_a_lock_where_all_is_in_place(public):
    source, local = public / "source", public / "local"
    stage(source, local)
    with locked(local / "train", wait=False), locked(local / "val", wait=False):
        assert run(STAGE, "stage", source, local).returncode == 0


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


def test_the_source_may_be_packed_again_meanwhile(public):
    """The manifest is read once: what is written at last is what was copied by."""
    source, local = public / "source" / "train", public / "local"
    whole = (source / MANIFEST).read_bytes()
    local.mkdir()
    with locked(local, wait=False):
        line = [sys.executable, "-c", STAGE, "stage", str(source), str(local)]
        child = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
        lines = [child.stderr.readline() for _ in range(2)]  # first, that LOCAL is on the same disk
        assert "waiting for process" in lines[1]
        (source / MANIFEST).write_bytes((public / "source" / "val" / MANIFEST).read_bytes())
    child.communicate(timeout=60)
    assert child.returncode == 0
    assert (local / MANIFEST).read_bytes() == whole and verify(local) == []


def test_class_names_that_are_not_utf8(public, tmp_path, photo, encoded):
    from datapipe.packing import PackOptions, pack

    folder = tmp_path / "raw" / os.fsdecode(b"caf\xe9")
    folder.mkdir(parents=True)
    (folder / "0.png").write_bytes(encoded(photo(8, 8, 1), "PNG"))
    pack(tmp_path / "raw", tmp_path / "out", PackOptions(workers=1))
    assert verify(stage_once(tmp_path / "out" / "train", tmp_path / "cache")) == []
