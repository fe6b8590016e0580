"""Verification: every damage is named."""

import json
import os
import random
import shutil
import threading

import pytest

from datapipe.dataset import DataSet
from datapipe.dataset.manifest import MANIFEST, Manifest
from datapipe.dataset.verify import verify
from datapipe.errors import DatapipeError, ManifestError
from datapipe.packing import PackOptions, convert
from tests.waiting import limit_s


@pytest.fixture(params=["tar", "hdf5", "lmdb"])
def copied(request, packed_folders, tmp_path):
    target = tmp_path / "copy"
    shutil.copytree(packed_folders[request.param] / "train", target)
    return target


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_a_good_data_set_has_no_problems(packed_folders):
    for folder in packed_folders.values():
        assert verify(folder / "train", deep=True) == []


def test_any_flipped_byte_is_found(copied):
    """One byte at random places of every file; where it is in an image, the image's key is named."""
    place = random.Random(1)
    with DataSet(copied) as data_set:
        index, keys = data_set.index[:], [data_set.key(i) for i in range(len(data_set))]
        shards = [shard.name for shard in data_set.manifest.shards]
        files = [file.name for file in data_set.manifest.all_files()]
    for name in files:
        path = copied / name
        whole = path.read_bytes()
        for at in [0, len(whole) - 1, *(place.randrange(len(whole)) for _ in range(4))]:
            flip(path, at)
            if name == "index.npy":  # without it nothing can be said of the samples
                with pytest.raises(ManifestError, match=r"index\.npy: does not have the checksum"):
                    DataSet(copied)
                path.write_bytes(whole)
                continue
            problems = verify(copied)
            assert name in {problem.file for problem in problems}
            if name in shards:
                rows = index[index["shard"] == shards.index(name)]
                hit = rows[(rows["offset"] <= at) & (at < rows["offset"] + rows["size"])]
                named = [problem.key for problem in problems if problem.key]
                assert named == [keys[i] for i in range(len(index)) if len(hit) and index[i] == hit[0]]
            path.write_bytes(whole)


@pytest.mark.parametrize("how", ["truncated", "longer", "missing"])
def test_other_damage_is_found(copied, how):
    for file in list(Manifest.read(copied).all_files()):
        if file.name == "index.npy":
            continue
        path = copied / file.name
        whole = path.read_bytes()
        if how == "missing":
            path.unlink()
        else:
            path.write_bytes(whole[: len(whole) // 2] if how == "truncated" else whole + b"x")
        problems = verify(copied, deep=file.name.startswith("shard"))
        assert file.name in {problem.file for problem in problems}
        path.write_bytes(whole)


@pytest.mark.parametrize("name", ["shard-000000.tar", "index.npy", "keys.txt", MANIFEST])
def test_a_pipe_in_a_files_place_does_not_hang(packed_folders, tmp_path, name):
    """Nothing ever writes to it: what opens it as a file waits for ever."""
    folder = shutil.copytree(packed_folders["tar"] / "val", tmp_path / "copy")
    whole = len(verify(folder, deep=True))
    (folder / name).unlink()
    os.mkfifo(folder / name)
    if name == MANIFEST:
        with pytest.raises(DatapipeError, match="has not been answered for"):
            verify(folder, timeout_s=0.1)
        with pytest.raises(DatapipeError, match="has not been answered for"):
            convert(folder, tmp_path / "out", PackOptions(timeout_s=0.1))
        os.close(os.open(folder / name, os.O_RDWR))  # the threads that wait for it end
        return
    problems = verify(folder, deep=True, timeout_s=limit_s())
    assert whole == 0 and [problem.file for problem in problems] == [name], problems
    assert "pipe" in problems[0].reason or problems[0].reason.startswith("has 0 bytes"), problems


def test_a_hanging_read_of_a_damaged_shard_ends_it(packed_folders, tmp_path, monkeypatch):
    """The search for the damaged samples reads, too: of a filesystem that stops to answer after the first look."""
    folder = shutil.copytree(packed_folders["tar"] / "val", tmp_path / "copy")
    flip(max(folder.glob("*.tar")), 600)
    answers = threading.Event()
    monkeypatch.setattr(DataSet, "read", lambda *_: answers.wait(limit_s()))
    with pytest.raises(DatapipeError, match=r"shard-0.*has not been answered for"):
        verify(folder, timeout_s=0.1)
    answers.set()


def test_deep_finds_what_was_packed_broken(tmp_path, photo, encoded, command):
    """An image whose header and checksum are right, and whose data are not."""
    good = encoded(photo(64, 64, 1))
    scan = good.index(b"\xff\xda")
    broken = good[:scan] + b"\xff\xda\x00\x0c\x03\x01\x77\x02\x77\x03\x77\x00\x3f\x00" + bytes(20) + b"\xff\xd9"
    folder = tmp_path / "raw" / "a"
    folder.mkdir(parents=True)
    for i in range(5):
        (folder / f"{i}.jpg").write_bytes(broken if i == 3 else good)
    assert command("datapipe", "pack", tmp_path / "raw", tmp_path / "out").returncode == 0
    assert command("datapipe", "verify", tmp_path / "out").returncode == 0
    deep = command("datapipe", "verify", "--deep", tmp_path / "out")
    assert deep.returncode == 1 and "shard-000000.tar: key a/3: cannot be decoded" in deep.stdout
    problems = json.loads(command("datapipe", "verify", "--deep", "--json", tmp_path / "out").stdout)
    assert [problem["key"] for problem in problems[str(tmp_path / "out" / "train")]] == ["a/3"]


# --- manifests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: {**m, "version": 4}, "format version 4.*upgrade"),
        (lambda m: {**m, "surprise": 1}, "surprise"),
        (lambda m: {**m, "num_samples": 60}, "do not add up"),
        (lambda m: {**m, "num_samples": "many"}, "num_samples"),
        (lambda m: {**m, "shards": [{**m["shards"][0], "name": "../../etc/passwd"}]}, r"shards\.0\.name"),
        (lambda m: {k: v for k, v in m.items() if k != "classes"}, "classes"),
        (lambda m: [m], "is not a valid manifest"),
    ],
)
def test_bad_manifests(packed_folders, tmp_path, command, change, message):
    shutil.copytree(packed_folders["tar"] / "val", tmp_path / "val")
    path = tmp_path / "val" / MANIFEST
    fields = json.loads(path.read_text())
    fields = {name: value for name, value in fields.items() if name != "xxh3_128"} | {"version": 2}  # without checksum
    path.write_text(json.dumps(change(fields)))
    with pytest.raises(ManifestError, match=message):
        Manifest.read(tmp_path / "val")
    for name in ("info", "verify"):
        done = command("datapipe", name, tmp_path)
        assert done.returncode == 1 and "Traceback" not in done.stderr and MANIFEST in done.stdout + done.stderr


def test_manifest_that_is_no_json(tmp_path):
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(ManifestError, match="cannot be read"):
        Manifest.read(tmp_path)


def test_two_damages_at_once_are_both_named(copied):
    (copied / "keys.txt").write_bytes(b"")
    with DataSet(copied) as data_set:
        record = data_set.index[5]
        shard = data_set.manifest.shards[record["shard"]].name
    flip(copied / shard, int(record["offset"]) + 9)
    problems = verify(copied)
    assert {problem.file for problem in problems} == {"keys.txt", shard}
    assert "number 5" in {problem.key for problem in problems}
