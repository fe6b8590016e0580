"""What lies in LOCAL already, or is in its way: nothing is mixed, nothing hangs, and each error says what to do."""

import logging
import os
import random
import shutil
import socket
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

from datapipe.cluster import Placement, placement
from datapipe.dataset.manifest import MANIFEST, Manifest, find_data_sets
from datapipe.errors import DatapipeError, SettingError, StagingError
from datapipe.fsio import checksum
from datapipe.locks import locked
from datapipe.process_id import make_own_name
from datapipe.staging import StageOptions, stage, stage_once
from datapipe.staging.apply import sweep
from datapipe.staging.cache import clean
from datapipe.staging.decide import is_handmade
from datapipe.staging.folder_content import ORIGIN, Origin
from datapipe.staging.lease import hold_copy
from datapipe.staging.local_copy import LocalCopy
from datapipe.staging.partial_file import PartialFile
from datapipe.staging.progress import find_progress, wait_until_whole
from tests.datapipe.staging.data_sets import CHUNK, make_data_set, same
from tests.waiting import limit_s

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
    with pytest.raises(StagingError, match=r"local/val.*is a copy of .*splits/val, which is not to be in .*--replace"):
        stage(tmp_path / "other", local)
    assert all(same(splits / name, local / name) for name in ("train", "val"))
    stage(tmp_path / "other", local, REPLACE)
    assert names_in(local) == ["extra", "train"]


def test_a_split_that_the_source_has_no_more(splits, tmp_path):
    """It is removed only if that is asked for, and not while somebody needs it."""
    local = tmp_path / "local"
    stage(splits, local)
    shutil.rmtree(splits / "val")
    with pytest.raises(StagingError, match=r"local/val.*--replace"):
        stage(splits, local)
    (local / "val" / ".pinned").touch()
    with pytest.raises(StagingError, match=r"local/val.*pinned"):
        stage(splits, local, REPLACE)
    assert names_in(local) == ["train", "val"]
    (local / "val" / ".pinned").unlink()
    stage(splits, local, REPLACE)
    assert names_in(local) == ["train"] and find_progress(local).state == "whole"


def test_copies_of_a_cache_are_in_nobodys_way(splits, tmp_path):
    """They have a digest in their names; and they leave what staging has noted of the splits."""
    local = tmp_path / "local"
    stage(splits, local)
    stage_once(splits / "train", local)
    shutil.rmtree(splits / "train")
    make_data_set(splits / "train", [1234], seed=5)
    assert stage_once(splits / "train", local).name.startswith("train-")
    stage(splits, local)
    assert "train" in names_in(local) and same(splits / "train", local / "train")
    shutil.rmtree(local / "val")
    assert find_progress(local).state == "stopped"


@pytest.mark.parametrize("obstacle", ["in use", "pinned", "room", "folder"])
def test_nothing_is_removed_before_a_refusal(splits, tmp_path, monkeypatch, obstacle):
    local = tmp_path / "local"
    for seed, name in enumerate(("train", "val")):
        make_data_set(tmp_path / "other" / name, [2000], seed=20 + seed)
    stage(tmp_path / "other", local)
    stage(tmp_path / "other" / "val", tmp_path / "old")
    (tmp_path / "old").rename(local / "old")
    before = {path: path.read_bytes() for path in local.rglob("*") if path.is_file()}
    with ExitStack() as stack:
        if obstacle == "in use":
            stack.enter_context(closing(hold_copy(local / "val", 1)))
        elif obstacle == "pinned":
            (local / "val" / ".pinned").touch()
        elif obstacle == "room":
            monkeypatch.setattr("datapipe.staging.check.free_bytes", lambda folder: -(10**6))
        else:
            (local / "val" / "shard-000000.tar").rename(tmp_path / "shard")
            (local / "val" / "shard-000000.tar").mkdir()
            del before[local / "val" / "shard-000000.tar"]
        with pytest.raises(StagingError):
            stage(splits, local, REPLACE)
    assert {path: path.read_bytes() for path in before} == before


def test_a_lock_that_another_process_has_is_respected(splits, tmp_path):
    """Also where the copies are whole, and only what is in the way is to be removed."""
    local = tmp_path / "local"
    stage(splits, local)
    make_data_set(tmp_path / "one", [3000], seed=7)
    LocalCopy.of_content(tmp_path / "one", local, (tmp_path / "one" / MANIFEST).read_bytes()).write_origin(False)
    with locked(local, wait=False), pytest.raises(StagingError, match="is in the way, and in use"):
        stage(splits, local, REPLACE)
    assert (local / ORIGIN).exists()


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
    staged = stage_once(splits / "train", tmp_path / "local")  # a cache may be: copies there have names of their own
    assert same(splits / "train", staged)


def test_a_single_split_in_the_folder_of_splits_removes_nothing(splits, tmp_path):
    local = tmp_path / "local"
    stage(splits, local)
    with pytest.raises(StagingError, match=r"local/train.*is a copy of"):
        stage(splits / "train", local)
    assert names_in(local) == ["train", "val"] and find_progress(local).state == "whole"


def test_a_split_under_another_name_is_not_removed(splits, tmp_path):
    stage(splits / "train", tmp_path / "local" / "mine")
    with pytest.raises(StagingError, match=r"local/mine.*--replace"):
        stage(splits, tmp_path / "local")
    assert names_in(tmp_path / "local") == ["mine"]


def test_what_is_in_the_way_is_removed_together_or_not_at_all(splits, tmp_path):
    local = tmp_path / "local"
    stage(splits, local)
    make_data_set(tmp_path / "one", [3000], seed=7)
    (local / "val" / ".pinned").touch()
    with pytest.raises(StagingError, match=r"local/val.*pinned"):
        stage(tmp_path / "one", local, REPLACE)
    assert names_in(local) == ["train", "val"]


def test_nothing_is_removed_for_a_slice_that_cannot_be(splits, tmp_path):
    local = tmp_path / "local"
    stage(splits, local)
    make_data_set(tmp_path / "one", [3000], seed=7)
    with pytest.raises(DatapipeError):  # these data sets have no index
        stage(tmp_path / "one", local, StageOptions(mode="slice", capacity_bytes=1000, replace=True))
    assert names_in(local) == ["train", "val"]


@pytest.mark.parametrize("others", ["one", "other"])
def test_two_data_sets_at_once_are_not_mixed(splits, tmp_path, start, others):
    """One of the two is refused, or both; what is there then is of one of them."""
    make_data_set(tmp_path / "one", [3000], seed=7)
    make_data_set(tmp_path / "other" / "train", [1500], seed=8)
    make_data_set(tmp_path / "other" / "test", [1600], seed=9)
    for attempt in range(2):
        local = tmp_path / f"local{attempt}"
        children = [start(tmp_path / name, local) for name in ("splits", others)]
        codes = [(child.communicate(timeout=limit_s()), child.returncode)[1] for child in children]
        assert 1 in codes, codes
        if 0 in codes:
            assert names_in(local) in (["train", "val"], [local.name], ["test", "train"])


def test_a_link_to_a_data_set_is_one(splits, tmp_path):
    make_data_set(tmp_path / "elsewhere" / "test", [700], seed=4)
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "test").symlink_to(tmp_path / "elsewhere" / "test")
    for options in (StageOptions(), REPLACE):
        with pytest.raises(StagingError, match=r"local/test.*is a data set"):
            stage(splits, tmp_path / "local", options)
    assert (tmp_path / "elsewhere" / "test" / MANIFEST).exists()


def test_local_may_be_a_link(splits, tmp_path):
    make_data_set(tmp_path / "one", [3000], seed=7)
    stage(tmp_path / "one", tmp_path / "real")
    (tmp_path / "local").symlink_to("real")
    with pytest.raises(StagingError, match=r"local.*is a copy of .*one.*--replace"):
        stage(splits, tmp_path / "local")
    stage(splits, tmp_path / "local", REPLACE)
    assert names_in(tmp_path / "real") == ["train", "val"]


def test_the_current_folder_has_one_above(splits, tmp_path, monkeypatch):
    make_data_set(tmp_path / "one", [3000], seed=7)
    stage(tmp_path / "one", tmp_path / "local")
    (tmp_path / "local" / "val").mkdir()
    monkeypatch.chdir(tmp_path / "local" / "val")
    with pytest.raises(StagingError, match="cannot be a copy as well"):
        stage(splits / "val", Path("."))


def test_a_split_that_somebody_has_copied_counts(splits, tmp_path):
    local = tmp_path / "local"
    shutil.copytree(splits / "val", local / "val")
    stage(splits, local)
    assert find_progress(local).state == "whole"


def test_a_refused_background_leaves_nothing(splits, tmp_path, command):
    make_data_set(tmp_path / "one", [3000], seed=7)
    stage(tmp_path / "one", tmp_path / "local")
    for source, local in ((splits, "local"), (tmp_path / "none", "new"), (tmp_path / "local", ".")):
        done = command("datapipe", "stage", source, tmp_path / local, "--background")
        assert done.returncode, done.stdout
    assert not [*tmp_path.rglob(".stage.log")] and not (tmp_path / "new").exists()


def test_the_log_of_the_background_stays_when_it_replaces(splits, tmp_path, command):
    make_data_set(tmp_path / "one", [3000], seed=7)
    stage(tmp_path / "one", tmp_path / "local")
    done = command("datapipe", "stage", splits, tmp_path / "local", "--replace", "--background")
    assert done.returncode == 0, done.stderr
    assert "removed" in (tmp_path / "local" / ".stage.log").read_text()


def unfinished(copy: Path) -> None:
    """Have a copy say that it is not complete."""
    origin = Origin.parse((copy / ORIGIN).read_bytes())
    replace(origin, is_complete=False).write(copy)


def test_who_waits_has_a_limit(splits, tmp_path):
    stage(splits / "train", tmp_path / "local")
    unfinished(tmp_path / "local")
    with locked(tmp_path / "local", wait=False), pytest.raises(StagingError, match="nothing has changed for"):
        wait_until_whole(tmp_path / "local", 0.5)


def test_another_program_at_the_port_is_not_process_0(splits, tmp_path):
    with socket.create_server(("127.0.0.1", 0), backlog=5) as server:
        place = Placement(rank=1, world_size=2, master="127.0.0.1", port=server.getsockname()[1])
        with pytest.raises(StagingError, match="what listens there is not process 0"):
            stage(splits, tmp_path / "local", StageOptions(placement=place, timeout_s=2))


def test_what_staging_has_not_put_there_is_never_removed(splits, tmp_path):
    make_data_set(tmp_path / "local" / "mine", [500], seed=3)
    with pytest.raises(StagingError, match=r"local/mine.*is a data set"):
        stage(splits, tmp_path / "local", REPLACE)
    assert names_in(tmp_path / "local") == ["mine"]


@pytest.fixture
def begun(tmp_path) -> LocalCopy:
    """A data set of two shards, and a folder for its copy."""
    make_data_set(tmp_path / "source", [1000, 1000])
    (tmp_path / "local").mkdir()
    content = (tmp_path / "source" / MANIFEST).read_bytes()
    return LocalCopy.of_content(tmp_path / "source", tmp_path / "local", content)


def test_a_folder_is_handmade_if_files_are_there_and_no_note_of_staging(begun):
    assert not is_handmade(begun.read_folder(), begun)
    (begun.target / "notes.txt").touch()
    assert not is_handmade(begun.read_folder(), begun)
    (begun.target / "shard-000001.tar").touch()
    assert is_handmade(begun.read_folder(), begun)
    begun.write_origin(False)
    assert not is_handmade(begun.read_folder(), begun)


@pytest.mark.parametrize("is_locked", [True, False])
def test_temporary_files_that_nobody_continues_are_removed(begun, monkeypatch, is_locked):
    """Without a lock, only those of a process of this host that has ended."""
    ours = make_own_name()
    monkeypatch.setattr("os.getpid", lambda: 2**22 + 1)  # above the highest number of a process
    dead = make_own_name()
    continued = [".shard-000001.tar.partial", ".shard-000001.tar.landed"]
    of_others = [f".shard-000001.tar{ours}.partial", f".shard-000001.tar.not-{dead[1:]}.partial"]
    finished = [".shard-000000.tar.partial", ".shard-000000.tar.landed", ".notes.partial"]
    own = f".shard-000001.tar{dead}.landed", "notes.partial", "shard-000000.tar"
    for name in (*continued, *of_others, *finished, *own):
        (begun.target / name).touch()
    begun = replace(begun, is_locked=is_locked, present={"shard-000000.tar": [0, 0, 0]})
    sweep(begun, begun.missing)
    kept = {*continued, *own[1:], *([] if is_locked else [*of_others, *finished])}
    assert {path.name for path in begun.target.iterdir()} == kept


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
    write = PartialFile.write

    def write_other_bytes(self, offset, data):
        return write(self, offset, memoryview(bytes(len(data))))

    monkeypatch.setattr(PartialFile, "write", write_other_bytes)
    with pytest.raises(StagingError, match=r"local/shard-000000.tar.*does not keep.*the source is good"):
        stage(splits / "train", tmp_path / "local")
    assert not (tmp_path / "local" / "shard-000000.tar").exists()


def test_other_chunks_begin_again_and_say_so(tmp_path, caplog):
    (info,) = make_data_set(tmp_path / "source", [3 * CHUNK]).shards
    tmp_path.joinpath("local").mkdir()
    landing = PartialFile(tmp_path / "local" / info.name, info, CHUNK, False)
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

    def hang(function, limit_s, path):
        asked.append(path)
        raise StagingError("a read has not been answered", path=path)

    monkeypatch.setattr("datapipe.watched.call", hang)
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


def test_it_says_that_it_is_running(splits, tmp_path):
    stage(splits / "train", tmp_path / "local")
    unfinished(tmp_path / "local")
    with locked(tmp_path / "local", wait=False):
        assert str(find_progress(tmp_path / "local")).startswith("running, ")
    assert checksum(tmp_path / "local" / "shard-000000.tar") and (tmp_path / "local" / ORIGIN).exists()
