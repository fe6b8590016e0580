"""Packing: safe keys, the same bytes for any number of workers, and nothing half-finished."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datapipe import packing
from datapipe.dataset import DataSet
from datapipe.errors import DatapipeError, ManifestError, SettingError, SourceError
from datapipe.fsio import locked
from datapipe.manifest import MANIFEST, Manifest
from datapipe.packing import MAX_KEY_BYTES, PackOptions, make_keys, pack, plan_shards

WEBDATASET_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")  # how it cuts a name into key and extension

names = st.lists(st.text(st.characters(exclude_characters="\x00"), max_size=120), max_size=30)


@given(names)
def test_keys_are_unique_and_safe(names):
    keys = make_keys(names)
    assert len(keys) == len(names) and len(set(keys)) == len(keys)
    for key in keys:
        assert re.fullmatch(r"[A-Za-z0-9_/-]+", key) and not key.startswith("/")
        assert len(key) <= MAX_KEY_BYTES + 12
        assert WEBDATASET_NAME.match(f"{key}.jpg").groups() == (key, "jpg")


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (["n01440764/n01440764_10026"], ["n01440764/n01440764_10026"]),
        (["a.b/c.d e"], ["a_b/c_d_e"]),
        (["naïve-é", "naive-e"], ["naive-e", "naive-e-2"]),
        (["日本", "日本語"], ["__", "___"]),
        (["a b", "a.b", "a_b-2", "a_b"], ["a_b", "a_b-2", "a_b-2-2", "a_b-3"]),
        (["", "../x", "/"], ["_", "__/x", "_/_"]),
        (["x" * 200 + "/end"], ["x" * 76 + "/end"]),
    ],
)
def test_keys(names, keys):
    assert make_keys(names) == keys


@given(st.integers(1, 400), st.floats(1, 1e6), st.integers(1, 1 << 28), st.integers(0, 99))
def test_plan_has_every_sample_once_in_even_shards(num_samples, mean, shard_bytes, seed):
    shards = plan_shards(num_samples, mean, shard_bytes, seed)
    assert sorted(np.concatenate(shards)) == list(range(num_samples))
    counts = [len(shard) for shard in shards]
    assert max(counts) - min(counts) <= 1 and min(counts) >= 1


def test_plan_meets_the_size():
    assert len(plan_shards(1_281_167, 110_000, 256 << 20, 0)) == 525
    assert len(plan_shards(10, 1.0, 1 << 30, 0)) == 1


def bytes_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def small_shards():
    return mock.patch.object(packing, "mean_bytes", lambda *_: 600_000)


@pytest.mark.parametrize("name", ["tar", "hdf5", "lmdb"])
def test_same_bytes_for_any_number_of_workers(image_folder, tmp_path, name):
    with small_shards():
        for workers in (1, 2, 5):
            pack(image_folder, tmp_path / str(workers), PackOptions(format=name, shard_mib=8, workers=workers))
    first = bytes_of(tmp_path / "1")
    assert len([path for path in first if "shard-" in path]) > 3
    assert bytes_of(tmp_path / "2") == first and bytes_of(tmp_path / "5") == first


def test_seed_changes_the_order_and_nothing_else(image_folder, tmp_path):
    keys = []
    for seed in (0, 1):
        pack(image_folder, tmp_path / str(seed), PackOptions(workers=1, seed=seed))
        with DataSet(tmp_path / str(seed) / "train") as data_set:
            keys.append([data_set.key(i) for i in range(len(data_set))])
    assert keys[0] != keys[1] and sorted(keys[0]) == sorted(keys[1])


def test_classes_are_mixed_by_the_shuffle(image_folder, tmp_path):
    pack(image_folder, tmp_path / "out", PackOptions(workers=1))
    with DataSet(tmp_path / "out" / "train") as data_set:
        runs = 1 + np.count_nonzero(np.diff(data_set.index["label"].astype(int)))
    assert runs > 25  # 3 if it were in the order of the folders, about 37 if shuffled


def test_an_image_that_is_none_is_named_and_leaves_no_data_set(image_folder, tmp_path, photo, encoded):
    whole = encoded(photo(50, 40, 1))
    for content, reason in (
        (b"no image", "neither JPEG nor PNG"), (b"", "empty file"), (whole[: len(whole) // 2], "truncated JPEG"),
    ):  # fmt: skip
        for workers in (1, 2):
            raw = tmp_path / "raw" / "train" / "a"
            raw.mkdir(parents=True, exist_ok=True)
            for i in range(12):
                (raw / f"{i}.jpg").write_bytes(content if i == 7 else whole)
            with small_shards(), pytest.raises(SourceError, match=rf"train/a/7\.jpg: cannot be packed: {reason}"):
                pack(tmp_path / "raw", tmp_path / "out", PackOptions(workers=workers, shard_mib=1))
            assert not list((tmp_path / "out").rglob("*.partial"))
            with pytest.raises(ManifestError):
                Manifest.read(tmp_path / "out" / "train")


def test_existing_data_set_is_kept_unless_told(image_folder, tmp_path):
    out = tmp_path / "out"
    pack(image_folder, out, PackOptions(workers=1))
    before = bytes_of(out)
    with pytest.raises(SettingError, match="--overwrite"):
        pack(image_folder, out, PackOptions(workers=1, seed=3))
    with pytest.raises(SourceError):
        pack(tmp_path / "nothing", out, PackOptions(workers=1, overwrite=True))
    assert bytes_of(out) == before
    pack(image_folder, out, PackOptions(workers=1, format="lmdb", overwrite=True))
    assert {Path(path).suffix for path in bytes_of(out)} == {".lmdb", ".json", ".npy", ".txt"}


def test_foreign_files_are_never_touched(image_folder, tmp_path):
    for place in ("thesis.tex", "train/thesis.tex"):
        path = tmp_path / place.replace("/", "_") / place
        path.parent.mkdir(parents=True)
        path.write_text("years of work")
        out = tmp_path / place.replace("/", "_")
        for overwrite in (False, True):
            with pytest.raises(SettingError, match=r"thesis\.tex"):
                pack(image_folder, out, PackOptions(workers=1, overwrite=overwrite))
        assert path.read_text() == "years of work"


def test_interrupted_pack_is_completed(image_folder, tmp_path):
    pack(image_folder, tmp_path / "whole", PackOptions(workers=1))
    pack(image_folder, tmp_path / "out", PackOptions(workers=1))
    (tmp_path / "out" / "val" / MANIFEST).unlink()
    (tmp_path / "out" / "val" / ".shard-000000.tar.partial").write_bytes(b"half")
    kept = (tmp_path / "out" / "train" / MANIFEST).stat().st_mtime_ns
    with pytest.raises(SettingError, match="another way"):
        pack(image_folder, tmp_path / "out", PackOptions(workers=1, seed=1))
    pack(image_folder, tmp_path / "out", PackOptions(workers=1))
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")
    assert (tmp_path / "out" / "train" / MANIFEST).stat().st_mtime_ns == kept


def test_a_split_of_another_source_is_not_kept(image_folder, tmp_path):
    """The same names and labels, other images: what MNIST and Fashion-MNIST nearly are to each other."""
    twin = tmp_path / "twin"
    shutil.copytree(image_folder, twin)
    for path in (twin / "val").rglob("*.jpg"):
        path.write_bytes(next((twin / "train").rglob("*.jpg")).read_bytes())
    pack(image_folder, tmp_path / "out", PackOptions(workers=1))
    (tmp_path / "out" / "train" / MANIFEST).unlink()
    with pytest.raises(SettingError, match="val was packed in another way"):
        pack(twin, tmp_path / "out", PackOptions(workers=1))


def test_overwriting_leaves_no_split_of_the_old_data_set(image_folder, tmp_path):
    out = tmp_path / "out"
    pack(image_folder, out, PackOptions(workers=1))
    (out / "train" / MANIFEST).unlink()
    with pytest.raises(SettingError, match="another way"):
        pack(image_folder / "train", out, PackOptions(workers=1))  # has no val
    pack(image_folder / "train", out, PackOptions(workers=1, overwrite=True))
    assert [path.name for path in out.iterdir()] == ["train"]


def test_out_may_not_lie_in_the_source(image_folder, tmp_path):
    with pytest.raises(SettingError, match="lies in SOURCE"):
        pack(image_folder, image_folder / "train" / "packed", PackOptions(workers=1))
    pack(image_folder, tmp_path / "out", PackOptions(workers=1))
    with pytest.raises(SettingError, match="inside a packed data set"):
        pack(image_folder, tmp_path / "out" / "train" / "more", PackOptions(workers=1))


def test_a_second_pack_to_the_same_place_is_refused(image_folder, tmp_path):
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out", wait=False), pytest.raises(SettingError, match="another process"):
        pack(image_folder, tmp_path / "out", PackOptions(workers=1))
    assert not any((tmp_path / "out").iterdir())


def _die(_task):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_told(image_folder, tmp_path):
    """As by the kernel when memory runs out."""
    with small_shards(), mock.patch.object(packing, "write_shard", _die), pytest.raises(DatapipeError, match="memory"):
        pack(image_folder, tmp_path / "out", PackOptions(workers=2, shard_mib=1))


PROGRAM = "import sys; from datapipe.cli import main; sys.exit(main())"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("workers", [1, 2])
def test_stopped_pack_leaves_nothing_half_finished_and_goes_on(image_folder, tmp_path, number, workers):
    """A slow source, stopped in the middle: no finished name on unfinished bytes, no process left behind."""
    raw = tmp_path / "raw" / "a"
    raw.mkdir(parents=True)
    data = next(image_folder.rglob("*.jpg")).read_bytes()
    for i in range(30):
        (raw / f"{i:02}.jpg").write_bytes(data)
    os.mkfifo(tmp_path / "pipe")  # a read of it waits, as one of a hanging filesystem
    (raw / "30.jpg").symlink_to(tmp_path / "pipe")
    out = tmp_path / "out"
    arguments = ["pack", tmp_path / "raw", out, "--workers", workers, "--shard-mib", 1]
    child = subprocess.Popen([sys.executable, "-c", PROGRAM, *map(str, arguments)], stderr=subprocess.PIPE)
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    deadline = time.monotonic() + 60
    while not list(out.rglob("*.partial")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    assert child.poll() is None, child.stderr.read()
    child.send_signal(number)
    if workers == 2:
        time.sleep(0.3)
        os.write(writer, data)  # the hanging read of a worker ends
    assert child.wait(30) == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    os.close(writer)
    time.sleep(2.5 if number == signal.SIGKILL else 0)
    assert not workers_of(child.pid, str(tmp_path))
    if number != signal.SIGKILL:
        assert not list(out.rglob("*.partial"))
    assert not list(out.rglob(MANIFEST))
    (raw / "30.jpg").unlink()
    assert subprocess.run([sys.executable, "-c", PROGRAM, *map(str, arguments)]).returncode == 0
    assert not list(out.rglob("*.partial"))
    with DataSet(out / "train") as data_set:
        assert {data_set.read(i) for i in range(30)} == {data}


def workers_of(pid, mark):
    """Processes started by a pack whose command line or open files name `mark`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            targets = [os.readlink(link) for link in (folder / "fd").iterdir()]
        except OSError:
            continue
        if int(folder.name) != os.getpid() and any(mark in target for target in targets):
            found.append(int(folder.name))
    return found


def test_no_space(image_folder, tmp_path, command):
    """A disk of 64 KiB that fills up: the error names the file, and nothing half-finished stays."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        for name in ("tar", "hdf5", "lmdb"):
            done = command("datapipe", "pack", image_folder, small / "out", "--format", name, "--workers", 1)
            assert done.returncode == 1 and "Traceback" not in done.stderr
            assert "No space left on device" in done.stderr and "shard-000000" in done.stderr, done.stderr
            assert not [path for path in small.rglob("*") if path.is_file()]
            subprocess.run(["rm", "-rf", small / "out"], check=True)
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize("settings", [{"format": "zip7"}, {"shard_mib": 0}, {"workers": 0}, {"seed": -1}])
def test_bad_settings_are_named(settings):
    with pytest.raises(SettingError, match=next(iter(settings))):
        PackOptions(**settings)
