"""What lies in LOCAL already, or is in its way: nothing is mixed, nothing hangs, and each error says what to do."""

import logging
import os
import random
import shutil
from pathlib import Path

import pytest

from datapipe.cluster import placement
from datapipe.dataset.manifest import MANIFEST, Manifest, find_data_sets
from datapipe.errors import SettingError, StagingError
from datapipe.fsio import checksum
from datapipe.staging import StageOptions, stage, stage_once
from datapipe.staging.cleaning import clean
from datapipe.staging.landing import Landing
from datapipe.staging.origin import ORIGIN, Origin
from datapipe.staging.progress import find_progress
from tests.datapipe.staging.data_sets import CHUNK, make_data_set, same

REPLACE = StageOptions(replace=True)


@pytest.fixture
def splits(tmp_path) -> Path:
    """The splits train and val of a data set."""
    for seed, name in enumerate(("train", "val")):
        make_data_set(tmp_path / "splits" / name, [1000 + seed], seed)
    return tmp_path / "splits"


def names_in(local: Path) -> list[str]:
    return [folder.name for folder in find_data_sets(local)]


def test_splits_of_another_data_set_do_not_stay_beside_the_new_ones(splits, tmp_path):
    local = tmp_path / "local"
    stage(splits, local)
    for name in ("train", "extra"):
        make_data_set(tmp_path / "other" / name, [2000], seed=9)
    with pytest.raises(StagingError, match=r"local/val.*is a copy of .*splits/val, and not a part of .*--replace"):
        stage(tmp_path / "other", local)
    assert all(same(splits / name, local / name) for name in ("train", "val"))
    stage(tmp_path / "other", local, REPLACE)
    assert names_in(local) == ["extra", "train"]


def test_a_split_that_the_source_has_no_more_is_removed(splits, tmp_path):
    local = tmp_path / "local"
    stage(splits, local)
    shutil.rmtree(splits / "val")
    stage(splits, local)
    assert names_in(local) == ["train"]
    assert find_progress(local).state == "whole"


def test_a_split_that_is_in_use_stays(splits, tmp_path):
    local = tmp_path / "local"
    stage(splits, local)
    shutil.rmtree(splits / "val")
    (local / "val" / ".pinned").touch()
    with pytest.raises(StagingError, match=r"local/val.*pinned"):
        stage(splits, local)
    assert names_in(local) == ["train", "val"]


@pytest.mark.parametrize("first", ["splits", "one"])
def test_a_folder_is_a_copy_or_has_copies_in_it(splits, tmp_path, first):
    local = tmp_path / "local"
    make_data_set(tmp_path / "one", [3000], seed=7)
    second = "one" if first == "splits" else "splits"
    stage(tmp_path / first, local)
    with pytest.raises(StagingError, match=f"is a copy of .*{first}.*--replace"):
        stage(tmp_path / second, local)
    stage(tmp_path / second, local, REPLACE)
    assert names_in(local) == (["local"] if second == "one" else ["train", "val"])
    assert find_progress(local).state == "whole"


def test_a_copy_is_not_put_into_another(splits, tmp_path):
    make_data_set(tmp_path / "one", [3000], seed=7)
    stage(tmp_path / "one", tmp_path / "local")
    for options in (StageOptions(), REPLACE):
        with pytest.raises(StagingError, match=r"local.*cannot be a copy as well"):
            stage(splits / "train", tmp_path / "local" / "train", options)
    assert same(tmp_path / "one", tmp_path / "local")
    with pytest.raises(StagingError, match=r"local.*cannot be a copy as well"):
        stage_once(splits / "train", tmp_path / "local")


def test_what_staging_has_not_put_there_is_never_removed(splits, tmp_path):
    make_data_set(tmp_path / "local" / "mine", [500], seed=3)
    with pytest.raises(StagingError, match=r"local/mine.*is a data set"):
        stage(splits, tmp_path / "local", REPLACE)
    assert names_in(tmp_path / "local") == ["mine"]


def test_other_folders_and_manifests_are_nobodys_business(splits, tmp_path):
    for folder in (tmp_path, tmp_path / "local" / "notes"):
        folder.mkdir(exist_ok=True, parents=True)
        (folder / MANIFEST).write_text('{"name": "of a web site"}')
    stage(splits / "train", tmp_path / "local")
    assert same(splits / "train", tmp_path / "local") is False  # the folder notes is still there
    assert (tmp_path / "local" / "notes" / MANIFEST).exists()


def test_slices_know_of_the_other_splits(packed_folders, tmp_path):
    source = packed_folders["tar"]
    options = StageOptions(mode="slice", capacity_bytes=Manifest.read(source / "train").size_bytes, chunk_mib=1)
    for _ in range(2):
        stage(source, tmp_path / "local", options)
    assert find_progress(tmp_path / "local").state == "slice"


@pytest.mark.parametrize("gone", ["shard", "bytes", "split", "manifest"])
def test_a_copy_is_whole_only_if_all_of_it_is_there(splits, tmp_path, gone):
    local = tmp_path / "local"
    stage(splits, local)
    assert find_progress(local).state == "whole"
    shard = local / "train" / "shard-000000.tar"
    if gone == "bytes":
        os.truncate(shard, 10)
    elif gone == "split":
        shutil.rmtree(local / "val")
    else:
        (shard if gone == "shard" else local / "train" / MANIFEST).unlink()
    assert find_progress(local).state == "stopped"
    stage(splits, local)
    assert find_progress(local).state == "whole"


def test_a_pipe_as_manifest_does_not_hang(splits, tmp_path):
    (tmp_path / "local").mkdir()
    os.mkfifo(tmp_path / "local" / MANIFEST)
    with pytest.raises(StagingError, match=r"manifest.json.*not the data set's"):
        stage(splits / "train", tmp_path / "local")


def test_a_folder_in_a_shards_place(splits, tmp_path):
    (tmp_path / "local" / "shard-000000.tar").mkdir(parents=True)
    with pytest.raises(StagingError, match=r"choose another folder$|choose another folder \(on") as info:
        stage(splits / "train", tmp_path / "local")
    assert "--replace" not in str(info.value)


def test_a_disk_that_does_not_keep_what_is_written_is_not_the_sources_fault(splits, tmp_path, monkeypatch):
    write = Landing.write

    def write_other_bytes(self, offset, data):
        return write(self, offset, memoryview(bytes(len(data))))

    monkeypatch.setattr(Landing, "write", write_other_bytes)
    with pytest.raises(StagingError, match=r"local/shard-000000.tar.*does not keep.*the source is good"):
        stage(splits / "train", tmp_path / "local")
    assert not (tmp_path / "local" / "shard-000000.tar").exists()


def test_other_chunks_begin_again_and_say_so(tmp_path, caplog):
    (info,) = make_data_set(tmp_path / "source", [3 * CHUNK]).shards
    tmp_path.joinpath("local").mkdir()
    landing = Landing(tmp_path / "local" / info.name, info, CHUNK, False)
    landing.write(0, memoryview((tmp_path / "source" / info.name).read_bytes()[:CHUNK]))
    landing.close()
    with caplog.at_level(logging.INFO):
        stage(tmp_path / "source", tmp_path / "local", StageOptions(chunk_mib=2))
    assert "has other chunks, or is damaged: beginning it again" in caplog.text


def test_a_note_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
    with pytest.raises(OSError, match="No space"):
        Origin("source").write(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_source_that_hangs_is_asked_once(tmp_path, monkeypatch):
    for number in range(3):
        make_data_set(tmp_path / "source" / str(number), [100], number)
        stage(tmp_path / "source" / str(number), tmp_path / "cache" / str(number))
    asked = []

    def hang(function, path, limit_s):
        asked.append(path)
        raise StagingError("a read has not been answered", path=path)

    monkeypatch.setattr("datapipe.staging.cleaning.in_time", hang)
    assert not clean(tmp_path / "cache").removed
    assert len(asked) == 1


def test_a_damaged_copy_of_another_user_is_named(splits, tmp_path, monkeypatch):
    stage(splits / "train", tmp_path / "local")
    (tmp_path / "local" / "shard-000000.tar").write_bytes(random.Random(1).randbytes(1000))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "local")
    with pytest.raises(StagingError, match=r"cannot write to, and 1 file is missing or damaged there"):
        stage(splits / "train", tmp_path / "local")


def test_ports_and_times_that_do_not_exist():
    for port in ("0", "65535", "70000"):
        with pytest.raises(SettingError, match="MASTER_PORT"):
            placement({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": port})
    for seconds in (float("inf"), float("nan"), 1e300):
        with pytest.raises(SettingError, match="timeout_s"):
            StageOptions(timeout_s=seconds)


@pytest.mark.parametrize(
    "options",
    [["--mode", "copy"], ["--chunk-mib", 2], ["--timeout", 5], ["--streams", 1], ["--max-mbps", 3], ["--background"]],
)
def test_options_that_have_no_meaning_there(tmp_path, command, options):
    done = command("datapipe", "stage", "--status", tmp_path, *map(str, options))
    assert done.returncode == 2
    assert f"--status: stands by itself, and not beside {options[0]}" in done.stderr


def test_it_says_that_it_is_running(splits, tmp_path):
    from datapipe.fsio import locked

    stage(splits / "train", tmp_path / "local")
    origin = Origin.read(tmp_path / "local")
    Origin(**{**vars(origin), "is_complete": False}).write(tmp_path / "local")
    with locked(tmp_path / "local", wait=False):
        assert str(find_progress(tmp_path / "local")).startswith("running, ")
    assert checksum(tmp_path / "local" / "shard-000000.tar") and (tmp_path / "local" / ORIGIN).exists()
