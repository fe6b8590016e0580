"""A disk that fills up while a data set is copied to it: a filesystem of its own, in a file."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from datapipe.fsio import checksum
from datapipe.staging import StageOptions, stage, stage_once
from tests.datapipe.staging.data_sets import CHUNK, chunks_on_their_way, make_data_set, same
from tests.waiting import limit_s, wait_until

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """An ext4 of 24 MiB."""
    if shutil.which("mkfs.ext4", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
        pytest.skip("mkfs.ext4 is not installed")
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with open(image, "wb") as file:
        file.truncate(24 << 20)
    subprocess.run(["env", f"PATH={os.environ['PATH']}:/usr/sbin:/sbin", "mkfs.ext4", "-q", image], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no loop devices here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(path: Path) -> None:
    """Write to a file until nothing more fits."""
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            os.fsync(file.fileno())


@needs_root
def test_a_disk_that_fills_up(disk, tmp_path, start):
    """The error names node and file; no shard looks finished that is not; with space again, it continues."""
    sizes = [6 * CHUNK, 6 * CHUNK, *[5000] * 20]
    manifest = make_data_set(tmp_path / "source", sizes)
    local = disk / "data"
    child = start(tmp_path / "source", local, "--chunk-mib", 1, "--max-mbps", 1, host="node7")
    wait_until(lambda: chunks_on_their_way(local) >= 4, child)
    fill(disk / "filler")
    errors = child.communicate(timeout=limit_s())[1]
    assert child.returncode == 1, errors
    assert f"error: {local}/.shard-" in errors and ": No space left on device (errno 28, on node7)" in errors, errors
    finished = [shard for shard in manifest.shards if (local / shard.name).exists()]
    assert all(checksum(local / shard.name) == shard.xxh3_128 for shard in finished)
    assert not (local / "manifest.json").exists()
    (disk / "filler").unlink()
    (staged,) = stage(tmp_path / "source", local, StageOptions(chunk_mib=1))
    assert same(tmp_path / "source", local)
    assert staged.copied_bytes + staged.kept_bytes <= sum(sizes) - 4 * CHUNK


@needs_root
def test_a_disk_that_is_too_small(disk, tmp_path, start):
    """Nothing is copied to it."""
    make_data_set(tmp_path / "source", [30 * CHUNK])
    child = start(tmp_path / "source", disk / "data", host="node7")
    errors = child.communicate(timeout=limit_s())[1]
    assert child.returncode == 1 and "bytes, " in errors and "are free (on node7)" in errors, errors
    assert not [*(disk / "data").glob("*.tar")] and not [*(disk / "data").glob(".*.partial")]


@needs_root
@pytest.mark.parametrize("way", ["stage", "cache"])
def test_room_is_made_on_a_full_disk_before_anything_is_written(disk, tmp_path, way):
    """There is none even for a folder."""
    make_data_set(tmp_path / "old", [15 * CHUNK])
    make_data_set(tmp_path / "new", [10 * CHUNK], 1)
    stage_once(tmp_path / "old", disk / "cache")
    with pytest.raises(OSError, match="No space left"):
        for number in range(100):
            fill(disk / f"filler-{number}")
            (disk / f"folder-{number}").mkdir()
    if way == "cache":
        copy = stage_once(tmp_path / "new", disk / "cache")
    else:
        copy = disk / "cache" / "new"
        stage(tmp_path / "new", copy, StageOptions(evict=True))
    assert same(tmp_path / "new", copy)
