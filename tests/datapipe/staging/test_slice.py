"""A node with room for a part of the data set: the same batches, and fewer reads from the source, as planned."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from datapipe.cli.cache import describe_copies
from datapipe.cluster import Placement
from datapipe.dataset import block_slots
from datapipe.dataset.block_slots import BlockSlots, make_slots
from datapipe.dataset.manifest import Manifest
from datapipe.dataset.shard_reader import ShardReader
from datapipe.errors import SettingError, StagingError
from datapipe.loaders import open_loader
from datapipe.locks import BusyError
from datapipe.staging import StageOptions, stage
from datapipe.staging.copy import _plan_slots
from datapipe.staging.local_copy import LocalCopy
from datapipe.staging.progress import find_progress
from tests.datapipe.staging.data_sets import NUM_IMAGES, let_others_in, make_data_set, needs_root
from tests.waiting import limit_s, read_until

MIB = 1 << 20
LOADING = {"batch_size": 2, "size": 16, "block_mib": 1, "threads": 2, "order": "blocks", "last": "pad"}
EPOCHS = 4


@pytest.fixture
def source(big_images) -> Path:
    """A data set of 24 blocks of 1 MiB in 4 shards, and one of a single image beside it."""
    return big_images


@pytest.fixture
def sliced(source, tmp_path) -> Path:
    stage(source, tmp_path / "local", StageOptions(mode="slice", capacity_bytes=12 * MIB, chunk_mib=1))
    return tmp_path / "local"


@pytest.fixture
def read_bytes(monkeypatch) -> Counter:
    count: Counter = Counter()
    read = ShardReader.read

    def counted(self, shard, offset, size, into=None):
        count[str(self._paths[shard].parent)] += size
        return read(self, shard, offset, size, into)

    monkeypatch.setattr(ShardReader, "read", counted)
    return count


def batches(source: Path, cache: Path | None, epochs: int = EPOCHS, **options) -> list[list]:
    with open_loader(source / "train", cache=cache, **(LOADING | options)) as loader:
        return [[(batch.samples.tolist(), batch.images.sum().item()) for batch in loader] for _ in range(epochs)]


def test_batches_are_the_same_and_half_is_read_once(source, sliced, read_bytes):
    total = sum(shard.size_bytes for shard in Manifest.read(source / "train").shards)
    expected = batches(source, None)
    whole = read_bytes.pop(str(source / "train"))
    assert batches(source, sliced) == expected
    first = read_bytes.pop(str(source / "train"))
    # Without knowledge of the order, 11 of 24 blocks that stay for good would save 33 of 96 reads; some are of parts.
    assert whole > 0.95 * EPOCHS * total and first < 0.78 * whole
    assert batches(source, sliced) == expected  # the next job finds what this one left
    assert read_bytes[str(source / "train")] < first
    assert 10 * MIB < find_progress(sliced).landed_bytes < 13 * MIB


def test_the_smaller_data_set_is_copied_whole(source, sliced):
    assert (sliced / "val" / "manifest.json").exists() and not (sliced / "train" / "manifest.json").exists()
    assert (sliced / "train" / ".slots").stat().st_size <= 12 * MIB
    with open_loader(source / "val", batch_size=1, size=16, train=False, cache=sliced) as loader:
        assert loader.source.data_set.folder == sliced / "val"


def test_ranks_of_a_node_share_the_slots(source, sliced, read_bytes, monkeypatch):
    expected = {rank: batches(source, None, rank=rank, world_size=2, batch_size=1) for rank in range(2)}
    whole = read_bytes.pop(str(source / "train"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    loaders = [
        open_loader(source / "train", cache=sliced, **(LOADING | {"rank": rank, "world_size": 2, "batch_size": 1}))
        for rank in range(2)
    ]
    got: dict[int, list] = {0: [], 1: []}
    for _ in range(EPOCHS):
        for rank in range(2):
            got[rank].append([])
        for pair in zip(*loaders, strict=True):
            for rank, batch in enumerate(pair):
                got[rank][-1].append((batch.samples.tolist(), batch.images.sum().item()))
    for loader in loaders:
        loader.close()
    assert got == expected
    assert read_bytes[str(source / "train")] < 0.75 * whole


def test_the_same_command_again_changes_nothing(source, sliced):
    batches(source, sliced, epochs=1)
    before = (sliced / "train" / ".slots").stat()
    options = StageOptions(mode="slice", capacity_bytes=12 * MIB, chunk_mib=1)
    results = {result.folder.name: result for result in stage(source, sliced, options)}
    assert (sliced / "train" / ".slots").stat().st_ino == before.st_ino
    assert results["train"].kept_bytes > 10 * MIB
    # With another capacity, it begins from nothing; with all of the room, it is a plain copy.
    stage(source, sliced, StageOptions(mode="slice", capacity_bytes=8 * MIB, chunk_mib=1))
    assert (sliced / "train" / ".slots").stat().st_size <= 8 * MIB
    stage(source, sliced, StageOptions(mode="slice", capacity_bytes=1 << 30))
    assert not (sliced / "train" / ".slots").exists() and (sliced / "train" / "manifest.json").exists()
    assert find_progress(sliced).state == "whole"


def test_there_are_no_more_slots_than_blocks(source, tmp_path):
    train = source / "train"
    copy = LocalCopy.of_content(train, tmp_path / "local", (train / "manifest.json").read_bytes())
    num_blocks, num_slots, slot_bytes = _plan_slots(copy, 1 << 40, MIB)
    assert num_slots == num_blocks == 24
    assert _plan_slots(copy, 7 * slot_bytes + 1, MIB)[1] == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "slice"}, "capacity: is missing"),
        ({"mode": "copy", "capacity_bytes": 1}, "capacity: has no meaning"),
        ({"mode": "slice", "capacity_bytes": 1000, "chunk_mib": 1}, "too few for all of val"),
        ({"mode": "slice", "capacity_bytes": MIB, "chunk_mib": 1}, "no room for a block"),
    ],
)
def test_wrong_settings_of_staging(source, tmp_path, options, message):
    with pytest.raises(SettingError, match=message):
        stage(source, tmp_path / "local", StageOptions(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "full"}, "order: 'full' has no use"),
        ({"block_mib": 8}, "block_mib: 8 is not what"),
        ({"backend": "webdataset", "order": "full", "last": None}, "cache: .* has room for a part only"),
    ],
)
def test_wrong_settings_of_a_loader(source, sliced, options, message):
    with pytest.raises(SettingError, match=message):
        batches(source, sliced, **options)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """16 MiB of memory, mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("needs root, to mount")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_slice_does_not_become_a_whole_copy_by_itself(source, sliced):
    """Its disk has no room for all, perhaps."""
    with pytest.raises(StagingError, match="give --mode slice, or --replace"):
        stage(source, sliced)
    stage(source, sliced, StageOptions(replace=True))
    assert find_progress(sliced).state == "whole"


def test_too_little_space_is_told_before_anything_is_written(source, small_disk):
    with pytest.raises(StagingError, match="are free"):
        stage(source, small_disk, StageOptions(mode="slice", capacity_bytes=20 * MIB, chunk_mib=1))
    assert not (small_disk / "train" / ".slots").exists()


# --- the slots themselves ---


@pytest.fixture
def slots(tmp_path):
    make_slots(tmp_path, num_slots=3, slot_bytes=4096, block_bytes=4096)
    opened = BlockSlots(tmp_path)
    yield opened
    opened.close()


def read(slots: BlockSlots, block: int, size: int) -> bytes | None:
    data = slots.read(block, size, memoryview(bytearray(4096)))
    return None if data is None else bytes(data)


def test_slots_hold_what_was_put_into_them(slots, tmp_path):
    slots.keep(7, memoryview(b"seven" * 100), lambda tags: 1)
    slots.keep(7, memoryview(b"other" * 100), lambda tags: 0)  # it is there already
    slots.keep(8, memoryview(b"eight"), lambda tags: None)
    assert slots.blocks().tolist() == [-1, 7, -1]
    assert read(slots, 7, 500) == b"seven" * 100 and read(slots, 7, 499) is None and read(slots, 8, 5) is None
    again = BlockSlots(tmp_path)
    assert read(again, 7, 500) == b"seven" * 100 and again.held_bytes() == 500
    again.close()


def test_a_damaged_slot_is_a_miss_and_is_free_again(slots, tmp_path, caplog):
    slots.keep(7, memoryview(b"seven" * 100), lambda tags: 1)
    with (tmp_path / ".slots").open("r+b") as file:
        file.seek(4096 + 100)
        file.write(b"rubbish")
    assert read(slots, 7, 500) is None and slots.blocks().tolist() == [-1, -1, -1]
    assert "slot 1 does not hold what was written" in caplog.text


def test_a_slot_that_a_killed_process_was_writing_to_is_freed(slots, tmp_path):
    block_slots._write_tag(slots._files[1], 2, block_slots.BUSY)
    beside = BlockSlots(tmp_path)  # while another process is at work, it may be that one's
    assert beside.blocks().tolist() == [-1, -1, block_slots.BUSY]
    slots.keep(5, memoryview(b"x"), lambda tags: 2)
    assert beside.blocks().tolist() == [-1, -1, block_slots.BUSY]
    beside.close()
    slots.close()
    alone = BlockSlots(tmp_path)
    assert alone.blocks().tolist() == [-1, -1, -1]
    alone.close()


@pytest.mark.parametrize(
    "damage", [lambda f: f.unlink(), lambda f: f.write_bytes(b"x" * 100), lambda f: f.write_bytes(b"")]
)
@pytest.mark.parametrize("name", [".tags", ".slots"])
def test_damaged_files_are_an_error(slots, tmp_path, name, damage):
    damage(tmp_path / name)
    with pytest.raises(StagingError, match="slots"):
        BlockSlots(tmp_path)


def test_processes_that_write_at_once_never_mix(tmp_path, begin):
    """Four processes keep and read blocks in three slots."""
    make_slots(tmp_path, num_slots=3, slot_bytes=1 << 16, block_bytes=1 << 16)
    children = [begin("keeps_blocks", tmp_path, seed) for seed in range(4)]
    said = [child.communicate(timeout=limit_s()) for child in children]
    assert [child.returncode for child in children] == [0] * 4, said
    assert min(int(out) for out, _ in said) > 30


@needs_root
def test_another_user_reads_slots_and_writes_nothing(source, sliced, tmp_path, as_nobody):
    batches(source, sliced, epochs=1)
    let_others_in(tmp_path, source)
    before = (sliced / "train" / ".tags").read_bytes()
    done = as_nobody("counts_images", source / "train", sliced, json.dumps(LOADING))
    assert done.returncode == 0 and done.stdout == f"{NUM_IMAGES} False\n", done.stdout + done.stderr
    assert (sliced / "train" / ".tags").read_bytes() == before


# --- what a slice must not destroy ---

SLICE = StageOptions(mode="slice", capacity_bytes=12 * MIB, chunk_mib=1)


@pytest.mark.parametrize("name", ["manifest.json", "shard-000002.tar", "index.npy"])
def test_a_folder_with_somebodys_files_gets_no_slots(source, tmp_path, name):
    local = tmp_path / "local"
    local.mkdir()
    for file in (name, ".shard-000000.tar.partial", ".notes.partial"):
        (local / file).write_bytes(b"mine")
    if name == "manifest.json":
        shutil.copy(source / "train" / name, local)
    before = {path.name: path.read_bytes() for path in local.iterdir()}
    with pytest.raises(StagingError, match=f"holds files of a copy, such as {name}.*; choose another folder"):
        stage(source / "train", local, SLICE)
    assert {path.name: path.read_bytes() for path in local.iterdir()} == before


def test_temporary_files_of_a_folder_that_staging_has_not_made_stay(source, tmp_path):
    (tmp_path / ".notes.partial").write_bytes(b"mine")
    stage(source / "train", tmp_path, SLICE)
    assert (tmp_path / ".notes.partial").exists()


def test_a_slice_goes_to_the_same_places_as_a_copy(source, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for local, message in ((source / "train" / "local", "into itself"), (tmp_path / "file", "is a file")):
        with pytest.raises(SettingError, match=message):
            stage(source / "train", local, SLICE)
    assert not (source / "train" / "local").exists()


def test_a_slice_is_kept_for_its_job_and_its_time_is_that_of_its_use(source, tmp_path):
    options = replace(SLICE, placement=Placement(job="17"))
    stage(source, tmp_path / "local", options)
    assert (tmp_path / "local" / ".keep-17.json").exists()
    origin = tmp_path / "local" / "train" / ".origin.json"
    os.utime(origin, (1, 1))
    batches(source, tmp_path / "local", epochs=1)
    assert origin.stat().st_mtime > 1


def test_slots_that_a_loader_has_open_stay(source, sliced, begin):
    """Neither another capacity nor a copy takes them away; `--list` names who uses them."""
    before = (sliced / "train" / ".slots").stat().st_ino
    with begin("keeps_a_loader_open", source / "train", sliced, json.dumps(LOADING), stdin=subprocess.PIPE) as child:
        read_until("open", child.stdout, child)
        for options in (replace(SLICE, capacity_bytes=8 * MIB), StageOptions(mode="copy", replace=True)):
            with pytest.raises(StagingError, match=rf"is in use by process {child.pid} \(") as caught:
                stage(source / "train", sliced / "train", options)
            assert not isinstance(caught.value, BusyError)  # in an exchange, all nodes are told
            assert (sliced / "train" / ".slots").stat().st_ino == before
        (row,) = [row for row in describe_copies(sliced) if row["folder"].endswith("train")]
        assert [process["pid"] for process in row["in_use"]] == [child.pid] and not row["unfinished"]
        child.communicate("")
    stage(source / "train", sliced / "train", replace(SLICE, capacity_bytes=8 * MIB))
    assert (sliced / "train" / ".slots").stat().st_size <= 8 * MIB


@pytest.mark.parametrize("gone", [".slots", ".tags", "completion"])
def test_slots_that_are_not_ready_are_not_used_and_are_made_again(source, sliced, gone):
    """As after a kill while they were made."""
    folder = sliced / "train"
    if gone == "completion":
        origin = json.loads((folder / ".origin.json").read_text())
        (folder / ".origin.json").write_text(json.dumps(origin | {"is_complete": False}))
    else:
        (folder / gone).unlink()
    with pytest.raises(StagingError, match="its room for a part is not ready"):
        batches(source, sliced, epochs=1)
    assert not (folder / "manifest.json").exists()
    assert [row["unfinished"] for row in describe_copies(sliced) if row["folder"].endswith("train")] == [True]
    stage(source, sliced, SLICE)
    assert batches(source, sliced, epochs=1) == batches(source, None, epochs=1)


def test_the_folder_says_what_it_is_before_slots_are_made(source, tmp_path, monkeypatch):
    def no_space(folder, *_sizes):
        origin = json.loads((folder / ".origin.json").read_text())
        assert not origin["is_complete"] and origin["capacity_bytes"]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("datapipe.staging.copy.make_slots", no_space)
    with pytest.raises(StagingError, match="No space left"):
        stage(source / "train", tmp_path / "local", SLICE)


def test_slots_make_room_only_when_asked_and_old_ones_count_as_free(source, small_disk):
    stage(source / "train", small_disk / "train", replace(SLICE, capacity_bytes=10 * MIB))
    with pytest.raises(StagingError, match="are free"):
        stage(source / "train", small_disk / "train", replace(SLICE, capacity_bytes=20 * MIB))
    assert find_progress(small_disk / "train").state == "slice"  # what was there is still there
    stage(source / "train", small_disk / "train", SLICE)
    make_data_set(small_disk.parent / "other", [3 * MIB])
    stage(small_disk.parent / "other", small_disk / "other")
    other = StageOptions(mode="slice", capacity_bytes=14 * MIB, chunk_mib=1)
    with pytest.raises(StagingError, match="with --evict, copies in"):
        stage(source / "train", small_disk / "train", other)
    stage(source / "train", small_disk / "train", replace(other, evict=True))
    assert not (small_disk / "other").exists()
