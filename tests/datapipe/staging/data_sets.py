"""Data sets to copy."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import pytest

from datapipe.dataset.manifest import Manifest, ShardInfo
from datapipe.fsio import checksum

CHILDREN = Path(__file__).parent / "children"
NOTES = {".origin.json", ".checked.json"}  # what a copy has beside the data set's files
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
NUM_IMAGES = 480  # of the data set `big_images`
CHUNK = 1 << 20  # of the data sets here, with --chunk-mib 1


def make_data_set(folder: Path, sizes: list[int], seed: int = 0, like: Manifest | None = None) -> Manifest:
    """Make a data set of shards with these sizes; not readable as images, which staging does not do.

    It has the split and the classes of `like`, as another version of the same data set.
    """
    folder.mkdir(parents=True)
    shards = []
    for i, size in enumerate(sizes):
        path = folder / f"shard-{i:06d}.tar"
        path.write_bytes(random.Random(1000 * seed + i).randbytes(size))
        shards.append(ShardInfo(name=path.name, size_bytes=size, xxh3_128=checksum(path), num_samples=1))
    manifest = Manifest(
        format="tar", kind="idx", split=like.split if like else "train", num_samples=len(sizes),
        classes=like.classes if like else ["0"], channels=1, width=1, height=1, seed=seed, shard_mib=24, shards=shards,
        files=[],
    )  # fmt: skip
    manifest.write(folder)
    return manifest


def same(a: Path, b: Path) -> bool:
    """Return whether a copy has the files of the source, and nothing half-finished; it may be kept for a job."""
    names = sorted(path.name for path in a.iterdir())
    notes = NOTES | {path.name for path in b.glob(".keep-*.json")}
    copied = sorted(path.name for path in b.iterdir() if path.name not in notes)
    return names == copied and all((a / name).read_bytes() == (b / name).read_bytes() for name in names)


def let_others_in(*paths: Path) -> None:
    """Let other users reach and read these files and folders, which pytest makes for its own user alone."""
    for path in {above for below in paths for above in (below, *below.parents)}:
        if path.is_relative_to(tempfile.gettempdir()) and path.stat().st_uid == os.geteuid():
            path.chmod(path.stat().st_mode | 0o55)


def chunks_on_their_way(local: Path) -> int:
    """Count the chunks that have landed, of files that do not have all of them."""
    return sum(path.read_bytes().partition(b"\n")[2].count(1) for path in local.glob(".*.landed"))
