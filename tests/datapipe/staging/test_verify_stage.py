"""Verification and staging: every damage is named, every copy is checked, and can go on."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datapipe.dataset import DataSet
from datapipe.dataset.manifest import MANIFEST, FileInfo, Manifest, ShardInfo
from datapipe.dataset.verify import verify
from datapipe.errors import ManifestError, SettingError, ShardCorruptError, StagingError
from datapipe.fsio import checksum, copy_verified, partial_path
from datapipe.staging import stage, stage_once
from datapipe.staging.plan import plan_stage


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
    found = json.loads(command("datapipe", "verify", "--deep", "--json", tmp_path / "out").stdout)
    assert [problem["key"] for problem in found[str(tmp_path / "out" / "train")]] == ["a/3"]


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


# --- staging -----------------------------------------------------------------------------------------

NAMES = ["shard-0", "shard-1", "index", "keys"]
SUM = "0" * 32


@given(
    st.lists(st.integers(1, 1000), min_size=4, max_size=4),
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from([SUM, "1" * 32])),
    st.dictionaries(st.sampled_from(NAMES), st.integers(0, 1200)),
)
def test_plan(sizes, present, partial):
    infos = [FileInfo(name=name, size_bytes=size, xxh3_128=SUM) for name, size in zip(NAMES, sizes, strict=True)]
    manifest = Manifest(
        format="tar", kind="idx", split="train", num_samples=2, classes=["0"], channels=1, width=1, height=1, seed=0,
        shard_mib=1, shards=[ShardInfo(**info.model_dump(), num_samples=1) for info in infos[:2]], files=infos[2:],
    )  # fmt: skip
    plan = plan_stage(manifest, present, partial)
    assert sorted(file.name for file in plan.copy + plan.keep) == sorted(NAMES)
    assert {file.name for file in plan.keep} == {name for name, found in present.items() if found == SUM}
    todo = {file.name: file.size_bytes for file in plan.copy}
    assert plan.needed_bytes == sum(max(0, size - partial.get(name, 0)) for name, size in todo.items())


def same(a: Path, b: Path) -> bool:
    names = sorted(path.name for path in a.iterdir())
    return names == sorted(path.name for path in b.iterdir()) and all(
        (a / name).read_bytes() == (b / name).read_bytes() for name in names
    )


def test_stage_copies_every_split_and_then_nothing(packed_folders, tmp_path, command):
    source, local = packed_folders["tar"], tmp_path / "a" / "local"
    first = json.loads(command("datapipe", "stage", source, local, "--json").stdout)
    second = json.loads(command("datapipe", "stage", source, local, "--json").stdout)
    for split in ("train", "val"):
        assert same(source / split, local / split)
    total = [Manifest.read(source / split).size_bytes for split in ("train", "val")]
    assert [row["copied_bytes"] for row in first["data_sets"]] == total
    assert [(row["copied_bytes"], row["kept_bytes"]) for row in second["data_sets"]] == [(0, n) for n in total]


def test_stage_goes_on_where_it_was_stopped(packed_folders, tmp_path):
    source, local = packed_folders["lmdb"] / "train", tmp_path / "local"
    shard = Manifest.read(source).shards[0]
    local.mkdir()
    begun = (source / shard.name).read_bytes()[: shard.size_bytes // 3]
    partial_path(local / shard.name).write_bytes(begun)
    (staged,) = stage(source, local)
    assert staged.copied_bytes == Manifest.read(source).size_bytes - len(begun)
    assert same(source, local)


@pytest.mark.parametrize("content", [b"rubbish", b"", b"x" * 10_000_000])
def test_a_spoilt_beginning_is_copied_anew(packed_folders, tmp_path, content):
    source, local = packed_folders["hdf5"] / "train", tmp_path / "local"
    local.mkdir()
    partial_path(local / Manifest.read(source).shards[0].name).write_bytes(content)
    stage(source, local)
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
    monkeypatch.setattr("datapipe.staging.copy.free_bytes", lambda _: 1000)
    with pytest.raises(StagingError, match=r"needs .* bytes, 1,000 are free"):
        stage(packed_folders["tar"], tmp_path / "local")


def big_data_set(folder: Path) -> Manifest:
    """A data set of shards that take a while to copy; not readable as images, which staging does not do."""
    folder.mkdir()
    shards = []
    for i in range(3):
        path = folder / f"shard-{i:06d}.tar"
        path.write_bytes(random.Random(i).randbytes(24 << 20))
        info = {"name": path.name, "size_bytes": 24 << 20, "xxh3_128": checksum(path)}
        shards.append(ShardInfo(**info, num_samples=1))
    manifest = Manifest(
        format="tar", kind="idx", split="train", num_samples=3, classes=["0"], channels=1, width=1, height=1, seed=0,
        shard_mib=24, shards=shards, files=[],
    )  # fmt: skip
    manifest.write(folder)
    return manifest


def test_stage_killed_at_random_moments(tmp_path):
    """SIGKILL, SIGTERM and SIGINT; no final name ever holds other than verified bytes; then it goes on."""
    manifest = big_data_set(tmp_path / "source")
    local = tmp_path / "local"
    program = "import sys; from datapipe.cli import main; print(flush=True); sys.exit(main())"
    arguments = [sys.executable, "-c", program, "stage", str(tmp_path / "source"), str(local)]
    chance = random.Random(7)
    for number in [signal.SIGKILL, signal.SIGTERM, signal.SIGINT] * 2:
        with subprocess.Popen(arguments, stderr=subprocess.DEVNULL, stdout=subprocess.PIPE) as child:
            child.stdout.readline()  # Python itself has started: what it does with signals before is not ours
            while not local.exists() and child.poll() is None:
                time.sleep(0.005)
            time.sleep(chance.uniform(0, 0.2))
            child.send_signal(number)
            assert child.wait(60) in (0, -number, 128 + number)
        for shard in manifest.shards:
            path = local / shard.name
            assert not path.exists() or checksum(path) == shard.xxh3_128
    assert subprocess.run(arguments, stdout=subprocess.DEVNULL).returncode == 0
    assert same(tmp_path / "source", local)


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


def test_two_damages_at_once_are_both_named(copied):
    (copied / "keys.txt").write_bytes(b"")
    with DataSet(copied) as data_set:
        record = data_set.index[5]
        shard = data_set.manifest.shards[record["shard"]].name
    flip(copied / shard, int(record["offset"]) + 9)
    problems = verify(copied)
    assert {problem.file for problem in problems} == {"keys.txt", shard}
    assert "number 5" in {problem.key for problem in problems}


def test_two_stages_at_once(tmp_path):
    """As when a job script runs `stage` once a task: the second waits, and both end well."""
    big_data_set(tmp_path / "source")
    program = "import sys; from datapipe.cli import main; sys.exit(main())"
    arguments = [sys.executable, "-c", program, "stage", str(tmp_path / "source"), str(tmp_path / "local")]
    children = [subprocess.Popen(arguments, stdout=subprocess.DEVNULL) for _ in range(3)]
    assert [child.wait(120) for child in children] == [0, 0, 0]
    assert same(tmp_path / "source", tmp_path / "local")


def _stage_once(source, cache):
    stage_once(source, cache)


def test_processes_of_a_node_stage_once(tmp_path):
    big_data_set(tmp_path / "source")
    context = get_context("spawn")
    children = [context.Process(target=_stage_once, args=(tmp_path / "source", tmp_path / "cache")) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert same(tmp_path / "source", stage_once(tmp_path / "source", tmp_path / "cache"))


def test_copy_reports_only_what_it_read(tmp_path):
    (tmp_path / "a").write_bytes(os.urandom(5000))
    total = checksum(tmp_path / "a")
    partial_path(tmp_path / "b").write_bytes((tmp_path / "a").read_bytes()[:1234])
    assert copy_verified(tmp_path / "a", tmp_path / "b", 5000, total) == 5000 - 1234
    with pytest.raises(ValueError, match="expected"):
        copy_verified(tmp_path / "a", tmp_path / "c", 5000, SUM)
