"""What becomes of a folder: the table of what lies there, what is asked for, and what is decided."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from datapipe.cli.cache import pin
from datapipe.cluster import Placement
from datapipe.dataset.manifest import MANIFEST
from datapipe.errors import ShardReadError, StagingError
from datapipe.fsio import checksum, free_bytes
from datapipe.locks import locked
from datapipe.process_id import is_of_dead_process, make_own_name
from datapipe.staging import StageOptions, stage, stage_once
from datapipe.staging.cache import clean, evict
from datapipe.staging.decide import decide, decide_beside
from datapipe.staging.folder_content import CHECKED, ORIGIN, FolderContent, find_copies
from datapipe.staging.lease import Lease, keep_for_job
from datapipe.staging.local_copy import LocalCopy
from datapipe.staging.options import Request
from tests.datapipe.staging.data_sets import CHUNK, make_data_set, same

SHARD = "shard-000001.tar"
JOB = "17"  # of this process
ANYTHING = StageOptions(placement=Placement(job=JOB))
REPLACE = replace(ANYTHING, replace=True)


class Place:
    """A data set of two shards, another with other classes, and the folder for a copy."""

    def __init__(self, folder: Path) -> None:
        self.source, self.other, self.local = folder / "source", folder / "other", folder / "cache" / "local"
        self.manifest = make_data_set(self.source, [1000, 500])
        make_data_set(self.other, [700, 600, 500], 1, like=self.manifest.model_copy(update={"classes": ["cat", "dog"]}))
        self.local.mkdir(parents=True)

    @property
    def wanted(self) -> LocalCopy:
        (copy,) = Request.read(self.source, self.local, StageOptions()).copies
        return copy

    def repack(self) -> None:
        """Make another version of the data set."""
        shutil.rmtree(self.source)
        make_data_set(self.source, [1000, 600], 2)

    # --- what lies in the folder ---

    def nothing(self) -> None:
        self.local.rmdir()

    def an_empty_folder(self) -> None:
        pass

    def a_copy(self) -> None:
        stage(self.source, self.local)

    def a_copy_by_hand(self) -> None:
        shutil.copytree(self.source, self.local, dirs_exist_ok=True)

    def a_shard_by_hand(self) -> None:
        (self.local / SHARD).write_bytes(b"mine")

    def a_copy_that_is_begun(self) -> None:
        self.a_copy()
        (self.local / MANIFEST).unlink()

    def an_earlier_version(self) -> None:
        self.a_copy()
        self.repack()

    def an_earlier_version_that_is_begun(self) -> None:
        self.a_copy_that_is_begun()
        self.repack()

    def a_pinned_earlier_version(self) -> None:
        self.an_earlier_version()
        pin(self.local)

    def an_earlier_version_for_this_job(self) -> None:
        self.an_earlier_version()
        keep_for_job(self.local, JOB, {})

    def an_earlier_version_for_another_job(self) -> None:
        self.an_earlier_version()
        keep_for_job(self.local.parent, "18", {})

    def another_data_set(self) -> None:
        stage(self.other, self.local)

    def another_data_set_that_is_begun(self) -> None:
        self.another_data_set()
        (self.local / MANIFEST).unlink()

    def another_data_set_by_hand(self) -> None:
        shutil.copytree(self.other, self.local, dirs_exist_ok=True)

    def another_data_set_from_the_same_path(self) -> None:
        """As two containers mount theirs."""
        self.a_copy()
        shutil.rmtree(self.source)
        self.other.rename(self.source)

    def a_folder_with_a_shards_name(self) -> None:
        (self.local / SHARD).mkdir()

    def slots(self) -> None:
        self.wanted.write_origin(True, capacity_bytes=1000)


KEEP, COMPLETE, ANOTHER = "Keep", "Complete", "holds another data set"
FILES, BY_HAND, PINNED, KEPT = "holds files of a copy", "staging has not put there", "is pinned", "is kept for job 18"
TABLE = [
    # what lies there, and what is decided: by default, with --replace, for a part of the data set
    (Place.nothing, COMPLETE, COMPLETE, COMPLETE),
    (Place.an_empty_folder, COMPLETE, COMPLETE, COMPLETE),
    (Place.a_copy, KEEP, KEEP, FILES),
    (Place.a_copy_by_hand, KEEP, KEEP, FILES),
    (Place.a_shard_by_hand, f"{SHARD}: is not the data set's", COMPLETE, FILES),
    (Place.a_copy_that_is_begun, COMPLETE, COMPLETE, FILES),
    (Place.an_earlier_version, "Replace", "Replace", FILES),
    (Place.an_earlier_version_that_is_begun, "Replace", "Replace", FILES),
    (Place.a_pinned_earlier_version, PINNED, PINNED, FILES),
    (Place.an_earlier_version_for_this_job, "Replace", "Replace", FILES),
    (Place.an_earlier_version_for_another_job, KEPT, KEPT, FILES),
    (Place.another_data_set, ANOTHER, "Replace", FILES),
    (Place.another_data_set_that_is_begun, ANOTHER, "Replace", FILES),
    (Place.another_data_set_by_hand, BY_HAND, BY_HAND, FILES),
    (Place.another_data_set_from_the_same_path, ANOTHER, "Replace", FILES),
    (Place.a_folder_with_a_shards_name, "is a folder; remove it", "is a folder; remove it", "is a folder; remove it"),
    (Place.slots, "has room for a part", COMPLETE, COMPLETE),
]


@pytest.mark.parametrize(("lies_there", "default", "replaced", "part"), TABLE, ids=[row[0].__name__ for row in TABLE])
def test_what_is_decided(tmp_path, lies_there: Callable[[Place], None], default, replaced, part):
    place = Place(tmp_path)
    lies_there(place)
    wanted, content = place.wanted, place.wanted.read_folder()
    good = wanted.find_present(10, False)

    def decided(options: StageOptions, is_part: bool = False) -> str:
        decision = decide(content, wanted, options, None if is_part else good, is_part)
        return f"{decision.path}: {decision.why}" if hasattr(decision, "why") else type(decision).__name__

    assert default in decided(ANYTHING)
    assert replaced in decided(REPLACE)
    assert part in decided(replace(ANYTHING, mode="slice", capacity_bytes=100), is_part=True)


def test_what_stands_in_the_way(tmp_path):
    """Copies are removed if that is asked for; what is not staging's, or lies above LOCAL, never."""
    place = Place(tmp_path)
    for name in ("staged", "by hand", "notes"):
        (place.local / name).mkdir()
    stage(place.other, place.local / "staged")
    shutil.copytree(place.other, place.local / "by hand", dirs_exist_ok=True)
    cached = stage_once(place.source, place.local)

    def decided(folder: Path, is_inside: bool, options: StageOptions) -> str:
        content = FolderContent.read(folder, place.local)
        return type(decide_beside(content, place.local, is_inside, options)).__name__

    for folder in (cached, place.local / "notes", place.local / "none"):
        assert decided(folder, True, REPLACE) == "Keep"
    assert decided(place.local / "staged", True, ANYTHING) == "Refuse"
    assert decided(place.local / "staged", True, REPLACE) == "Replace"
    assert decided(place.local / "staged", False, REPLACE) == "Refuse"
    assert decided(place.local / "by hand", True, REPLACE) == "Refuse"
    keep_for_job(place.local, "18", {})
    assert decided(place.local / "staged", True, REPLACE) == "Refuse"


def test_what_is_kept_for_a_job_stays_also_beside(tmp_path):
    place = Place(tmp_path)
    place.another_data_set()
    keep_for_job(place.local, "18", {})
    shutil.copytree(place.source, tmp_path / "splits" / "train")
    with pytest.raises(StagingError, match=r"is in the way, and is kept for job 18 until .*\.keep-18\.json"):
        stage(tmp_path / "splits", place.local, REPLACE)
    assert (place.local / MANIFEST).exists()


def test_data_sets_that_are_mounted_at_one_path_stay_apart(tmp_path):
    """In a cache, and when it is cleaned."""
    place = Place(tmp_path)
    first = stage_once(place.source, tmp_path / "cache")
    manifest = place.manifest
    shutil.rmtree(place.source)
    place.other.rename(place.source)
    second = stage_once(place.source, tmp_path / "cache")
    assert not clean(tmp_path / "cache").removed and first.exists() and same(place.source, second)
    shutil.rmtree(place.source)
    make_data_set(place.source, [1000, 600], 2, like=manifest)  # a later version of the first one
    third = stage_once(place.source, tmp_path / "cache")
    assert not first.exists() and second.exists() and same(place.source, third)


# --- room ---


def test_what_other_copies_still_need_is_not_free(tmp_path, disk, monkeypatch):
    """Of 24 MiB, a process that is at work needs 15; it gets them, whoever begins meanwhile. Then nothing is left."""
    make_data_set(tmp_path / "first", [15 * CHUNK])
    make_data_set(tmp_path / "second", [10 * CHUNK], 1)
    (first,) = Request.read(tmp_path / "first", disk / "first", StageOptions()).copies
    first.target.mkdir()
    first.write_origin(False)
    in_job = StageOptions(placement=Placement(job=JOB))
    with locked(first.target, wait=False):
        for options in (in_job, replace(in_job, evict=True)):
            with pytest.raises(StagingError, match=r"of which 15,728,640 are for copies that other processes"):
                stage(tmp_path / "second", disk / "second", options)
        assert not [*(disk / "second").iterdir()]
    stage(tmp_path / "second", disk / "second", in_job)  # the first one is not at work any more
    assert (disk / "second" / f".keep-{JOB}.json").exists()


def test_a_failed_copy_is_not_kept_for_its_job(tmp_path):
    make_data_set(tmp_path / "source", [1000, 1000])
    (tmp_path / "source" / SHARD).unlink()
    for _ in range(2):
        with pytest.raises(ShardReadError, match=SHARD):
            stage(tmp_path / "source", tmp_path / "cache" / "local", replace(ANYTHING, retries=0))
        assert not [*(tmp_path / "cache" / "local").glob(".keep-*")] and len(find_copies(tmp_path / "cache")) == 1


def test_one_process_of_a_node_compares_the_checksums_after_a_boot(tmp_path, monkeypatch):
    make_data_set(tmp_path / "source", [1000, 1000])
    copy = stage_once(tmp_path / "source", tmp_path / "cache")
    (copy / CHECKED).write_text('{"boot": "an earlier one", "files": {}}')
    compared: list[Path] = []

    def count(path: Path, moved: Callable[[], None]) -> str:
        compared.append(path)
        return checksum(path, moved)

    monkeypatch.setattr("datapipe.staging.local_copy.checksum", count)
    with ThreadPoolExecutor(4) as pool:
        copies = [pool.submit(stage_once, tmp_path / "source", tmp_path / "cache") for _ in range(4)]
    assert {done.result() for done in copies} == {copy} and len(compared) == 2


# --- what is alive, elsewhere too ---


@pytest.mark.parametrize("place", ["another container", "another host of this name"])
def test_temporary_files_of_processes_that_cannot_be_seen_stay(tmp_path, monkeypatch, place):
    """Until they are forgotten; those of this host's ended processes do not."""
    mine = make_own_name()
    with monkeypatch.context() as patch:
        if place == "another container":
            patch.setattr("os.readlink", lambda _: "pid:[1]")
        else:
            patch.setattr("datapipe.process_id.boot_id", lambda: "another")
        theirs = make_own_name()
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: 2**22 + 1)  # above the highest number of a process
        ended = make_own_name()
    paths = [tmp_path / f".shard.tar{name}.partial" for name in (mine, theirs, ended)]
    for path in paths:
        path.touch()
    assert [is_of_dead_process(path) for path in paths] == [False, False, True]
    os.utime(paths[1], (0, 0))
    assert [is_of_dead_process(path) for path in paths] == [False, True, True]


@pytest.mark.parametrize(("filesystem", "counts"), [("ext4", False), ("nfs4", True)])
def test_a_lease_of_another_boot_counts_where_it_may_be_another_hosts(tmp_path, monkeypatch, filesystem, counts):
    with monkeypatch.context() as patch:
        patch.setattr("datapipe.process_id.boot_id", lambda: "another")
        path = keep_for_job(tmp_path, "18", {})
    assert path is not None
    monkeypatch.setattr("datapipe.staging.lease.mounted_as", lambda _: filesystem)
    lease = Lease.read(path)
    assert lease is not None and lease.is_valid() == counts
    assert not replace(lease, until=time.time() - 1).is_valid()


def test_without_locks_nothing_is_replaced_or_removed(tmp_path, monkeypatch):
    """A process that cannot be seen may use it."""
    place = Place(tmp_path)
    place.an_earlier_version()

    def no_locks(*_: object) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr("fcntl.flock", no_locks)
    for options in (ANYTHING, REPLACE):
        with pytest.raises(StagingError, match=r"cannot be locked .* so that a process may use it"):
            stage(place.source, place.local, options)
    assert not evict(place.local, place.local.parent, free_bytes(tmp_path) + 1, in_part=True)
    assert (place.local / MANIFEST).exists() and (place.local / ORIGIN).exists()


def test_the_folder_above_a_copy_need_not_be_listed(tmp_path, monkeypatch):
    """It may be an administrator's, of mode 711."""
    make_data_set(tmp_path / "source", [1000])
    opened = os.open

    def refuse(path: str | Path, *arguments: int, **options: int | None) -> int:
        if Path(path) == tmp_path / "cache":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    (tmp_path / "cache" / "local").mkdir(parents=True)
    monkeypatch.setattr("os.open", refuse)
    stage(tmp_path / "source", tmp_path / "cache" / "local")
    assert same(tmp_path / "source", tmp_path / "cache" / "local")
