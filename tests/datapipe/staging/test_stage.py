"""Staging by one process: every copy is checked, continues where it was stopped, and disturbs nobody."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from threading import Event, Thread

import pytest

from datapipe.dataset.manifest import MANIFEST, Manifest
from datapipe.errors import ManifestError, SettingError, ShardCorruptError, StagingError
from datapipe.fsio import checksum
from datapipe.locks import hold_lock, locked
from datapipe.packing import PackOptions, pack
from datapipe.staging import StageOptions, stage, stage_once
from datapipe.staging.folder_content import find_copies
from datapipe.staging.partial_file import PartialFile
from tests.datapipe.staging.data_sets import CHUNK, NOTES, make_data_set, same
from tests.waiting import limit_s, wait_until

PACKS_UNTIL = Path(__file__).parents[1] / "packing" / "children" / "packs_until.py"


@pytest.fixture(params=["tar", "hdf5", "lmdb"])
def copied(request, packed_folders, tmp_path):
    target = tmp_path / "copy"
    shutil.copytree(packed_folders[request.param] / "train", target)
    return target


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_stage_copies_every_split_and_then_nothing(packed_folders, tmp_path, command):
    source, local = packed_folders["tar"], tmp_path / "a" / "local"
    first = json.loads(command("datapipe", "stage", source, local, "--json").stdout)
    second = json.loads(command("datapipe", "stage", source, local, "--json").stdout)
    for split in ("train", "val"):
        assert same(source / split, local / split)
    total = [Manifest.read(source / split).size_bytes for split in ("train", "val")]
    assert [row["copied_bytes"] for row in first["data_sets"]] == total
    assert [(row["copied_bytes"], row["kept_bytes"]) for row in second["data_sets"]] == [(0, n) for n in total]


def test_files_have_the_mode_that_the_umask_leaves_them(image_folder, tmp_path):
    """A group's data is to be written by the group; a copy, which is trained on, by its user alone."""
    before = os.umask(0o002)
    try:
        pack(image_folder, tmp_path / "packed", PackOptions())
        stage(tmp_path / "packed", tmp_path / "local")
    finally:
        os.umask(before)
    for folder, mode in (("packed", 0o664), ("local", 0o644)):
        modes = {path: path.stat().st_mode & 0o777 for path in (tmp_path / folder).rglob("shard-*.tar")}
        assert set(modes.values()) == {mode} and len(modes) == 2, modes


def test_stage_continues_where_it_was_stopped(tmp_path):
    """Chunks that have landed are not read again; one that is damaged on the disk makes the file be copied again."""
    sizes = [5 * CHUNK + 17, 3 * CHUNK, 100]
    manifest = make_data_set(tmp_path / "source", sizes)
    local, options = tmp_path / "local", StageOptions(chunk_mib=1)
    local.mkdir()
    content = (tmp_path / "source" / "shard-000000.tar").read_bytes()
    for chunks, damaged in (([0, 3, 5], b""), ([], b""), ([1], b"rubbish"), (range(6), b"")):
        landing = PartialFile(local / manifest.shards[0].name, manifest.shards[0], CHUNK, False)
        landing.open()
        for chunk in chunks:
            data = bytearray(content[chunk * CHUNK : (chunk + 1) * CHUNK])
            data[: len(damaged)] = damaged
            landing.write(chunk * CHUNK, memoryview(data))
        landing.close()
        (staged,) = stage(tmp_path / "source", local, options)
        there = sum(len(content[chunk * CHUNK : (chunk + 1) * CHUNK]) for chunk in chunks)
        assert staged.copied_bytes == sum(sizes) - there + (sizes[0] if damaged else 0)
        assert same(tmp_path / "source", local)
        shutil.rmtree(local)
        local.mkdir()


@pytest.mark.parametrize("content", [b"rubbish", b"", b"x" * 10_000_000])
@pytest.mark.parametrize("landed", [b"", b"rubbish\n\1\1\1"])
def test_a_spoilt_beginning_is_copied_again(packed_folders, tmp_path, content, landed):
    source, local = packed_folders["hdf5"] / "train", tmp_path / "local"
    local.mkdir()
    name = Manifest.read(source).shards[0].name
    (local / f".{name}.partial").write_bytes(content)
    (local / f".{name}.landed").write_bytes(landed)
    stage(source, local, StageOptions(chunk_mib=1))
    assert same(source, local)


def test_stage_of_a_damaged_shard_is_refused(copied, tmp_path):
    name = Manifest.read(copied).shards[1].name
    flip(copied / name, 700)
    with pytest.raises(ShardCorruptError, match=name):
        stage(copied, tmp_path / "local")
    assert not (tmp_path / "local" / MANIFEST).exists() and not (tmp_path / "local" / name).exists()


def test_stage_refuses_what_would_lose_something(packed_folders, tmp_path):
    source = packed_folders["tar"]
    with pytest.raises(SettingError, match="into itself"):
        stage(source, source / "local")
    stage(source / "train", tmp_path / "local")
    with pytest.raises(StagingError, match="another data set"):
        stage(source / "val", tmp_path / "local")
    with pytest.raises(ManifestError):
        stage(tmp_path / "nothing", tmp_path / "elsewhere")


def test_stage_needs_space(packed_folders, tmp_path, monkeypatch):
    monkeypatch.setattr("datapipe.staging.check.free_bytes", lambda _: 1000)
    with pytest.raises(StagingError, match=r"needs .* bytes, 1,000 are free"):
        stage(packed_folders["tar"], tmp_path / "local")


@pytest.mark.parametrize("rest", [0, *(pytest.param(rest, marks=pytest.mark.slow) for rest in (1, 2))])
def test_stage_killed_before_any_change(tmp_path, server, rest):
    """No final name ever holds other than verified bytes, and the next call completes the copy."""
    manifest = make_data_set(tmp_path / "source", [2 * CHUNK, CHUNK + 1, 1000])
    local = tmp_path / "local"

    def stage_until(moment: int) -> subprocess.CompletedProcess:
        line = "stage", tmp_path / "source", local, "--chunk-mib", 1
        return server.run(PACKS_UNTIL, signal.SIGKILL, moment, "as they are", *line, timeout=limit_s())

    num_changes = sum(line.startswith("os.") for line in stage_until(-1).stdout.splitlines())
    assert num_changes > 10
    for moment in range(rest, num_changes, 3):
        shutil.rmtree(local)
        assert stage_until(moment).returncode == -signal.SIGKILL
        for shard in manifest.shards:
            path = local / shard.name
            is_needed = (local / MANIFEST).exists()  # which comes last
            assert checksum(path) == shard.xxh3_128 if path.exists() else not is_needed
        stage(tmp_path / "source", local)
        for note in NOTES:  # as whole copies are not locked, a note that was cut short stays
            for path in local.glob(f".{note}.*.partial"):
                path.unlink()
        assert same(tmp_path / "source", local)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_it_and_the_next_call_continues(tmp_path, start, number, code):
    make_data_set(tmp_path / "source", [8 * CHUNK])
    line = tmp_path / "source", tmp_path / "local", "--chunk-mib", 1, "--json"
    child = start(*line, "--max-mbps", 0.5)
    wait_until(lambda: landed_chunks(tmp_path / "local") >= 2, child)
    child.send_signal(number)
    assert child.wait(limit_s()) == code
    landed = landed_chunks(tmp_path / "local")
    (staged,) = stage(tmp_path / "source", tmp_path / "local", StageOptions(chunk_mib=1))
    assert staged.copied_bytes == (8 - landed) * CHUNK and same(tmp_path / "source", tmp_path / "local")


def landed_chunks(local: Path) -> int:
    """Count the chunks that need not be copied again: of whole files, and of those on their way."""
    whole = sum(-(-path.stat().st_size // CHUNK) for path in local.glob("shard-*"))
    maps = [path for path in local.glob(".*.landed") if not (local / path.name[1:].removesuffix(".landed")).exists()]
    return whole + sum(path.read_bytes().partition(b"\n")[2][:-1].count(1) for path in maps)


def test_at_most_one_chunk_per_stream_is_copied_twice(tmp_path, start):
    """After a kill, what the folder shows as landed is not read again."""
    size = 12 * CHUNK
    make_data_set(tmp_path / "source", [size])
    child = start(tmp_path / "source", tmp_path / "local", "--chunk-mib", 1, "--streams", 3, "--max-mbps", 1)
    wait_until(lambda: landed_chunks(tmp_path / "local") >= 5, child)
    child.kill()
    child.wait(limit_s())
    landed = landed_chunks(tmp_path / "local")
    (staged,) = stage(tmp_path / "source", tmp_path / "local", StageOptions(chunk_mib=1))
    assert staged.copied_bytes == size - landed * CHUNK and same(tmp_path / "source", tmp_path / "local")


def test_what_is_damaged_here_is_copied_again(packed_folders, tmp_path):
    """Also what was staged from another version of the data set, whose files may have the same sizes."""
    source, local = packed_folders["tar"] / "train", tmp_path / "local"
    stage(source, local)
    flip(local / "shard-000001.tar", 700)
    flip(local / "index.npy", 1000)
    (staged,) = stage(source, local)
    assert 0 < staged.copied_bytes < staged.kept_bytes and same(source, local)
    flip(local / "index.npy", 1000)
    (local / MANIFEST).unlink()
    stage(source, local)
    assert same(source, local)


def test_stages_at_once(tmp_path, start):
    """As when a job script runs `stage` once a task: the others wait for the first, and all end well."""
    make_data_set(tmp_path / "source", [4 * CHUNK] * 3)
    line = tmp_path / "source", tmp_path / "local", "--json", "--max-mbps", 20
    children = [start(*line) for _ in range(3)]
    said = [child.communicate(timeout=limit_s()) for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], said
    assert sum(json.loads(out)["data_sets"][0]["copied_bytes"] for out, _ in said) == 3 * 4 * CHUNK
    assert same(tmp_path / "source", tmp_path / "local")


def test_processes_of_a_node_stage_once(tmp_path, begin):
    make_data_set(tmp_path / "source", [4 * CHUNK] * 3)
    children = [begin("stages_once", tmp_path / "source", tmp_path / "cache", 20) for _ in range(3)]
    said = [child.communicate(timeout=limit_s()) for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], said
    assert same(tmp_path / "source", stage_once(tmp_path / "source", tmp_path / "cache"))


def test_a_node_checks_a_cache_once(tmp_path):
    """What was checked since the node booted is not read again, unless it has changed."""
    make_data_set(tmp_path / "source", [CHUNK] * 3)
    folder = stage_once(tmp_path / "source", tmp_path / "cache")

    def read_bytes() -> int:
        before = read_by_this_process()
        assert stage_once(tmp_path / "source", tmp_path / "cache") == folder
        return read_by_this_process() - before

    assert read_bytes() < CHUNK / 4
    shard = folder / "shard-000001.tar"
    flip(shard, 700)
    assert CHUNK <= read_bytes() < 5 * CHUNK and same(tmp_path / "source", folder)
    (folder / ".checked.json").write_text(json.dumps({"boot": "an earlier one", "files": {}}))
    assert read_bytes() >= 3 * CHUNK


def read_by_this_process() -> int:
    return int(Path("/proc/self/io").read_text().splitlines()[0].split()[1])  # rchar, proc(5)


def test_a_later_version_takes_the_place_of_a_copy(tmp_path, start):
    source, local = tmp_path / "source", tmp_path / "local"
    make_data_set(source, [CHUNK, 2 * CHUNK, 100])
    stage(source, local)
    shutil.rmtree(source)
    make_data_set(source, [CHUNK, 300], seed=0)
    (staged,) = stage(source, local)
    assert same(source, local) and staged.kept_bytes == CHUNK
    make_data_set(tmp_path / "other", [50], seed=1)
    with pytest.raises(StagingError, match=r"holds another data set .*--replace"):
        stage(tmp_path / "other", local)
    child = start(tmp_path / "other", local, "--replace")
    assert child.wait(limit_s()) == 0 and same(tmp_path / "other", local)


def test_a_data_set_that_staging_has_not_put_there_is_never_replaced(tmp_path, start):
    """Somebody may have packed it there."""
    make_data_set(tmp_path / "source", [100])
    make_data_set(tmp_path / "mine", [50], seed=1)
    shutil.copytree(tmp_path / "mine", tmp_path / "before")
    child = start(tmp_path / "source", tmp_path / "mine", "--replace")
    errors = child.communicate(timeout=limit_s())[1]
    assert (
        child.returncode == 1 and "staging has not put there" in errors and same(tmp_path / "before", tmp_path / "mine")
    )


def test_a_copy_of_another_data_set_that_was_only_begun_is_not_taken_over(tmp_path):
    make_data_set(tmp_path / "first", [CHUNK, 2 * CHUNK, 100])
    make_data_set(tmp_path / "second", [50], seed=1)
    stage(tmp_path / "first", tmp_path / "local")
    (tmp_path / "local" / MANIFEST).unlink()  # which comes last
    with pytest.raises(StagingError, match=r"holds another data set .*--replace"):
        stage(tmp_path / "second", tmp_path / "local")
    stage(tmp_path / "second", tmp_path / "local", StageOptions(replace=True))
    assert same(tmp_path / "second", tmp_path / "local")


def test_files_of_an_earlier_version_that_was_only_begun_are_removed(tmp_path):
    source, local = tmp_path / "source", tmp_path / "local"
    make_data_set(source, [100] * 5)
    stage(source, local)
    (local / MANIFEST).unlink()
    shutil.rmtree(source)
    make_data_set(source, [100, 300], seed=1)
    stage(source, local)
    assert same(source, local)


def test_what_the_disk_could_not_keep_is_copied_again(tmp_path, monkeypatch):
    """The kernel tells such an error once, and its page cache may still have the bytes."""
    manifest = make_data_set(tmp_path / "source", [3 * CHUNK])
    before, failed = os.fsync, []

    def fail(fd: int) -> None:
        if "shard" in os.readlink(f"/proc/self/fd/{fd}") and not failed:
            failed.append(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        before(fd)

    monkeypatch.setattr(os, "fsync", fail)
    options = StageOptions(chunk_mib=1)
    with pytest.raises(StagingError, match="Input/output error"):
        stage(tmp_path / "source", tmp_path / "local", options)
    (staged,) = stage(tmp_path / "source", tmp_path / "local", options)
    shard = next(file for file in manifest.all_files() if file.name.startswith("shard"))
    assert failed and staged.copied_bytes >= shard.size_bytes and same(tmp_path / "source", tmp_path / "local")


def test_a_pipe_in_place_of_a_map_does_not_hang(tmp_path, start):
    """Another user may have planted it in a shared folder."""
    make_data_set(tmp_path / "source", [3 * CHUNK])
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / ".shard-000000.tar.partial").write_bytes(bytes(3 * CHUNK))
    os.mkfifo(tmp_path / "local" / ".shard-000000.tar.landed")
    child = start(tmp_path / "source", tmp_path / "local", "--chunk-mib", 1)
    errors = child.communicate(timeout=limit_s())[1]
    assert child.returncode == 1 and ".landed: is not a file that this user has made" in errors, errors


def test_who_only_looks_at_a_folder_keeps_nobody_out(tmp_path, monkeypatch):
    monkeypatch.setattr("datapipe.locks._LOOK_S", limit_s())  # of which a look may take half
    done = Event()

    def look() -> None:
        with locked(tmp_path, wait=False, shared=True):
            done.set()
            time.sleep(0.1)

    looking = Thread(target=look)
    looking.start()
    assert done.wait(limit_s())
    with hold_lock(tmp_path, 10, waits=False) as is_locked:
        assert is_locked
    looking.join()


def test_memory_is_no_disk_where_there_is_too_little_of_it(tmp_path, monkeypatch):
    make_data_set(tmp_path / "source", [3 * CHUNK])
    for kind, available in (("tmpfs", 4 * CHUNK), ("ext4", CHUNK), ("tmpfs", CHUNK)):
        monkeypatch.setattr("datapipe.staging.check.mounted_as", lambda _, kind=kind: kind)
        monkeypatch.setattr("datapipe.staging.check.available_bytes", lambda available=available: available)
        if kind == "ext4" or available > CHUNK:
            stage(tmp_path / "source", tmp_path / "local")
            shutil.rmtree(tmp_path / "local")
        else:
            with pytest.raises(StagingError, match=rf"needs .* bytes, {CHUNK:,} are free"):
                stage(tmp_path / "source", tmp_path / "local")


def test_a_source_that_changes_meanwhile_is_named(tmp_path, start):
    source = tmp_path / "source"
    make_data_set(source, [8 * CHUNK])
    child = start(source, tmp_path / "local", "--chunk-mib", 1, "--max-mbps", 1, "--streams", 1)
    wait_until(lambda: landed_chunks(tmp_path / "local") >= 1, child)
    flip(source / "shard-000000.tar", 7 * CHUNK)
    errors = child.communicate(timeout=limit_s())[1]
    assert child.returncode == 1 and "shard-000000.tar: was changed while it was copied" in errors, errors
    assert not (tmp_path / "local" / "shard-000000.tar").exists()


def test_who_waits_for_a_lock_says_for_whom_and_has_a_limit(tmp_path, start, patience_s):
    make_data_set(tmp_path / "source", [100])
    (tmp_path / "local").mkdir()
    with locked(tmp_path / "local", wait=False):
        child = start(tmp_path / "source", tmp_path / "local", "--timeout", patience_s)
        errors = child.communicate(timeout=limit_s())[1]
    assert child.returncode == 1
    holder = f"process {os.getpid()} ("
    assert f"waiting for {holder}" in errors and f"{holder}" in errors.splitlines()[-1], errors
    assert f"(on {socket.gethostname()})" in errors.splitlines()[-1]


def test_a_folder_in_memory_or_on_the_same_disk_is_told_of(tmp_path, caplog):
    caplog.set_level("INFO")
    make_data_set(tmp_path / "source", [100])
    stage(tmp_path / "source", tmp_path / "local")
    assert "is on the same filesystem as" in caplog.text
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        stage(tmp_path / "source", Path(memory, "local"))
    assert "is in memory (tmpfs)" in caplog.text


def test_small_files_share_a_chunk(tmp_path):
    """Ten thousand shards are as good as ten."""
    make_data_set(tmp_path / "source", [0, 1, 5000, 0, *[300] * 50])
    (staged,) = stage(tmp_path / "source", tmp_path / "local")
    assert staged.copied_bytes == 5001 + 300 * 50 and same(tmp_path / "source", tmp_path / "local")


@pytest.mark.parametrize("what", ["partial", "landed", "shard"])
def test_no_link_is_followed(tmp_path, what):
    """Another user of a shared folder may have put it there."""
    make_data_set(tmp_path / "source", [2 * CHUNK])
    local, victim = tmp_path / "local", tmp_path / "victim"
    local.mkdir()
    victim.write_text("precious")
    name = "shard-000000.tar" if what == "shard" else f".shard-000000.tar.{what}"
    (local / name).symlink_to(victim)
    if what == "shard":  # renaming replaces the link
        stage(tmp_path / "source", local, StageOptions(chunk_mib=1, replace=True))
        assert same(tmp_path / "source", local)
    else:
        with pytest.raises(StagingError):
            stage(tmp_path / "source", local, StageOptions(chunk_mib=1))
    assert victim.read_text() == "precious"


def test_without_locks_two_processes_do_not_meet(tmp_path, begin):
    """Each has temporary files of its own, and what comes of it is whole."""
    make_data_set(tmp_path / "source", [4 * CHUNK] * 2)
    line = "without_locks", "stage", tmp_path / "source", tmp_path / "local", "--chunk-mib", 1
    killed = begin(*line, "--max-mbps", 0.5)
    wait_until(lambda: [*(tmp_path / "local").glob(".*.partial")], killed)
    killed.kill()
    killed.wait(limit_s())
    children = [begin(*line, "--max-mbps", 8) for _ in range(2)]
    for child in children:
        errors = child.communicate(timeout=limit_s())[1]
        assert child.returncode == 0 and "cannot be locked" in errors, errors
    assert same(tmp_path / "source", tmp_path / "local")


def test_what_a_process_left_that_was_killed_at_once_is_removed(tmp_path):
    """It had not written of what the folder is a copy, by which staging knows the folders that it has begun."""
    make_data_set(tmp_path / "source", [CHUNK])
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(limit_s())
    (tmp_path / "local").mkdir()
    left = tmp_path / "local" / f"..origin.json.{socket.gethostname()}.{child.pid}.{uuid.uuid4().hex}.partial"
    left.touch()
    stage(tmp_path / "source", tmp_path / "local")
    assert not left.exists() and same(tmp_path / "source", tmp_path / "local")


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"mode": "slice2"}, "mode"), ({"streams": 0}, "streams"), ({"max_mbps": 0}, "max_mbps"),
     ({"timeout_s": -1}, "timeout_s"), ({"chunk_mib": 0.5}, "chunk_mib"), ({"retries": -1}, "retries")],
)  # fmt: skip
def test_settings_out_of_range(settings, word):
    with pytest.raises(SettingError, match=f"{word}: "):
        StageOptions(**settings)


def make_by_hand(source: Path, local: Path, *names: str) -> None:
    local.mkdir()
    for name in names:
        shutil.copy(source / name, local)


@pytest.mark.parametrize("lock", ["lock", "no lock"])
@pytest.mark.parametrize("name", [MANIFEST, "shard-000001.tar"])
def test_a_copy_made_by_hand_is_completed_and_stays_its_makers(tmp_path, monkeypatch, name, lock):
    """It gets no `.origin.json`, so that nothing removes it to make room; temporary files in it are not staging's."""
    source, local = tmp_path / "source", tmp_path / "local"
    make_data_set(source, [CHUNK, 300, 50])
    make_by_hand(source, local, name)
    (local / ".notes.partial").write_text("mine")
    if lock == "no lock":
        monkeypatch.setattr("fcntl.flock", _no_lock)
    for _ in range(2):
        stage(source, local)
        assert (local / ".notes.partial").read_text() == "mine" and not (local / ".origin.json").exists()
    (local / ".notes.partial").unlink()
    assert same(source, local) and find_copies(tmp_path) == []


def _no_lock(*_: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize("name", [MANIFEST, "shard-000001.tar"])
def test_other_bytes_in_a_folder_made_by_hand_are_replaced_only_when_asked(tmp_path, name):
    source, local = tmp_path / "source", tmp_path / "local"
    make_data_set(source, [CHUNK, 300, 50])
    make_by_hand(source, local, "shard-000000.tar")
    (local / name).write_bytes(b"mine")
    for _ in range(2):
        with pytest.raises(StagingError, match=rf"{name}: is not the data set's.*--replace"):
            stage(source, local)
        assert (local / name).read_bytes() == b"mine" and not (local / ".origin.json").exists()
    stage(source, local, StageOptions(replace=True))
    assert same(source, local) and not (local / ".origin.json").exists()


def test_a_copy_that_was_stopped_stays_stagings(tmp_path):
    """Its shards may be damaged, and are copied again."""
    source, local = tmp_path / "source", tmp_path / "local"
    make_data_set(source, [CHUNK, 300])
    stage(source, local)
    (local / MANIFEST).unlink()
    flip(local / "shard-000001.tar", 7)
    stage(source, local)
    assert same(source, local) and len(find_copies(tmp_path)) == 1


def test_a_folder_that_vanishes_again_and_again_is_an_error(tmp_path, monkeypatch):
    """Not a loop without an end."""
    monkeypatch.chdir(tmp_path)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(FileNotFoundError), hold_lock(Path("local"), 0.2):
        pass
