"""Packing: the same bytes for any number of threads and tasks, nothing half-finished, and nothing done twice."""

import json
import os
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from datapipe.cluster import Task
from datapipe.dataset import DataSet
from datapipe.dataset.manifest import MANIFEST, QUARANTINE, Manifest
from datapipe.dataset.verify import verify
from datapipe.errors import DatapipeError, ManifestError, SettingError, SourceError
from datapipe.images import turbojpeg
from datapipe.images.recode import RecodeOptions
from datapipe.locks import locked
from datapipe.names import CONVERTED
from datapipe.packing import PackOptions, convert, finish, finish_conversion, pack
from datapipe.packing.options import SHARD_MIB
from datapipe.packing.out_folder import NEW, STATE
from tests.waiting import limit_s, read_until

CHILDREN = Path(__file__).with_name("children")
SMALL = 0.25  # MiB: four shards of train and one of val, of `image_folder`


def bytes_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def one_at_a_time():
    """Make threads read one image at a time, as they do with large images, so that several share a shard."""
    return mock.patch("datapipe.packing.pipeline._CHUNK_BYTES", 1)


@pytest.mark.parametrize("name", CONVERTED)
def test_same_bytes_for_any_number_of_workers(image_folder, tmp_path, name):
    with one_at_a_time():
        for workers in (1, 2, 5):
            pack(image_folder, tmp_path / str(workers), PackOptions(format=name, shard_mib=SMALL, workers=workers))
    first = bytes_of(tmp_path / "1")
    assert len([path for path in first if "shard-" in path]) > 3
    assert bytes_of(tmp_path / "2") == first and bytes_of(tmp_path / "5") == first


@pytest.mark.parametrize("error", [None, OSError(22, "no advice here")])
def test_the_disk_begins_before_a_shard_is_whole(image_folder, tmp_path, monkeypatch, error):
    begun = []

    def advise(fd, position, size, advice):
        assert advice == os.POSIX_FADV_DONTNEED and os.fstat(fd).st_size >= position + size
        begun.append(size)
        if error:
            raise error

    monkeypatch.setattr(os, "posix_fadvise", advise)
    pack(image_folder, tmp_path / "out", PackOptions(shard_mib=SMALL))
    sizes = [path.stat().st_size for path in tmp_path.glob("out/*/*.tar")]
    assert len(sizes) == 5 <= len(begun) and 0 < sum(sizes) - sum(begun) <= 5 * 20 * 512  # all but their ends


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_same_bytes_for_any_number_of_tasks(image_folder, tmp_path, order):
    with one_at_a_time():
        whole = pack(image_folder, tmp_path / "one", PackOptions(shard_mib=SMALL))
        for index in order:
            assert not list((tmp_path / "three").rglob(MANIFEST))
            done = pack(image_folder, tmp_path / "three", PackOptions(shard_mib=SMALL, task=Task(index, 3, "")))
            assert bool(done) == (index == order[-1])
        again = pack(image_folder, tmp_path / "three", PackOptions(shard_mib=SMALL, task=Task(1, 3, "")))
    assert done == again == whole
    assert bytes_of(tmp_path / "three") == bytes_of(tmp_path / "one")


def test_finish_says_what_is_missing(image_folder, tmp_path):
    out = tmp_path / "out"
    with one_at_a_time():
        with pytest.raises(SettingError, match="holds no unfinished pack"):
            finish(image_folder, out, PackOptions(shard_mib=SMALL))
        for index in (0, 2):
            pack(image_folder, out, PackOptions(shard_mib=SMALL, task=Task(index, 3, "")))
        with pytest.raises(DatapipeError, match=r"2 of 5 shards are missing, the first is number 1"):
            finish(image_folder, out, PackOptions(shard_mib=SMALL))
        with mock.patch("datapipe.packing.out_folder.OutFolder.missing_shards", lambda *_: [0]):  # not the last task
            assert pack(image_folder, out, PackOptions(shard_mib=SMALL, task=Task(1, 3, ""))) == {}
        finished = finish(image_folder, out, PackOptions(shard_mib=SMALL))
    assert (
        finished
        == finish(image_folder, out, PackOptions(shard_mib=SMALL))
        == {split: Manifest.read(out / split) for split in ("train", "val")}
    )
    assert not (out / STATE).exists()


@pytest.fixture(scope="module")
def large_files(tmp_path_factory):
    """Eight pictures of half a MiB, nearly all of it a comment: four shards of 1 MiB that take little to pack."""
    folder = tmp_path_factory.mktemp("large") / "class"
    folder.mkdir()
    for i in range(8):
        comment = PngImagePlugin.PngInfo()
        comment.add_text("Comment", f"{i}" * 500_000)
        Image.new("L", (8, 8), i).save(folder / f"{i}.png", pnginfo=comment)
    return folder.parent


@pytest.mark.parametrize("locks", ["as they are", "not at all", "unseen by others"])
@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_tasks_started_at_once(large_files, server, tmp_path, locks, times):
    """Real processes, all of which begin with nothing there; each lists, packs or waits as it finds."""
    pack(large_files, tmp_path / "one", PackOptions(shard_mib=1))
    assert len(list((tmp_path / "one" / "train").glob("shard-*.tar"))) >= 4
    options = "--shard-mib", 1, "--workers", 2
    for number in range(times):
        out = tmp_path / f"{number}"
        line = CHILDREN / "packs_until.py", 0, -1, locks, "pack", large_files, out, *options
        tasks = [server.start(*line, "--task", f"{i}/4") for i in range(4)]
        errors = [task.communicate(timeout=limit_s())[1] for task in tasks]
        assert [task.returncode for task in tasks] == [0] * 4, errors
        assert bytes_of(out) == bytes_of(tmp_path / "one")


def test_tasks_of_another_pack_are_refused(image_folder, tmp_path):
    with one_at_a_time():
        pack(image_folder, tmp_path / "out", PackOptions(shard_mib=SMALL, task=Task(0, 2, "")))
        for changed in ({"seed": 1}, {"shard_mib": 9}, {"format": "zip"}, {"outside": True}):
            options = {"shard_mib": SMALL, "task": Task(1, 2, ""), **changed}
            with pytest.raises(SettingError, match=f"unfinished pack with another {next(iter(changed))}"):
                pack(image_folder, tmp_path / "out", PackOptions(**options))
    with pytest.raises(SettingError, match="overwrite"):
        PackOptions(overwrite=True, task=Task(0, 2, ""))


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
        (b"no image", "neither JPEG, PNG nor PNM"), (b"", "empty file"), (whole[: len(whole) // 2], "truncated JPEG"),
    ):  # fmt: skip
        for workers in (1, 2):
            raw = tmp_path / "raw" / "train" / "a"
            raw.mkdir(parents=True, exist_ok=True)
            for i in range(12):
                (raw / f"{i}.jpg").write_bytes(content if i == 7 else whole)
            message = rf"train/a/7\.jpg, shard shard-00000\d\.tar: cannot be packed: {reason}"
            with one_at_a_time(), pytest.raises(SourceError, match=message):
                pack(tmp_path / "raw", tmp_path / "out", PackOptions(workers=workers, shard_mib=0.005))
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


def stop_after(shards):
    """Fail when so many shards are finished, as if the process were killed there."""
    from datapipe.packing.state import Journal

    add, count = Journal.add, [0]

    def counted(journal, shard):
        add(journal, shard)
        count[0] += 1
        if count[0] == shards:
            raise KeyboardInterrupt

    return mock.patch.object(Journal, "add", counted)


def test_interrupted_pack_is_completed_and_no_finished_shard_is_written_again(image_folder, tmp_path):
    out = tmp_path / "out"
    with one_at_a_time():
        pack(image_folder, tmp_path / "whole", PackOptions(shard_mib=SMALL))
        with stop_after(3), pytest.raises(KeyboardInterrupt):
            pack(image_folder, out, PackOptions(shard_mib=SMALL))
        assert not list(out.rglob(MANIFEST)) and not list(out.rglob(".*.partial"))
        finished = [path.stem for path in (out / STATE).rglob("0*.npz")]
        new = out / STATE / NEW  # from where shards come to OUT as they are
        paths = [path for number in finished for path in new.rglob(f"shard-{number}.*")]
        kept = {out / path.relative_to(new): path.stat() for path in paths}
        assert len(finished) >= 3 and kept
        with pytest.raises(SettingError, match="another seed: 0, not 1"):
            pack(image_folder, out, PackOptions(shard_mib=SMALL, seed=1))
        (new / "train" / ".shard-000001.tar.partial").write_bytes(b"half")
        pack(image_folder, out, PackOptions(shard_mib=SMALL, resume=True))
    assert bytes_of(out) == bytes_of(tmp_path / "whole")
    again = [
        path
        for path, was in kept.items()
        if (path.stat().st_ino, path.stat().st_mtime_ns) != (was.st_ino, was.st_mtime_ns)
    ]
    journaled = len({(path.parent, path.stem) for path in kept}) - len({(path.parent, path.stem) for path in again})
    assert journaled >= 3


def test_a_finished_shard_that_was_lost_is_written_again(image_folder, tmp_path):
    out = tmp_path / "out"
    with one_at_a_time():
        pack(image_folder, tmp_path / "whole", PackOptions(shard_mib=SMALL))
        with stop_after(4), pytest.raises(KeyboardInterrupt):
            pack(image_folder, out, PackOptions(shard_mib=SMALL))
        shards = sorted(out.rglob("shard-*.tar"))
        shards[0].unlink()
        with open(shards[1], "r+b") as file:
            file.truncate(100)
        pack(image_folder, out, PackOptions(shard_mib=SMALL))
    assert bytes_of(out) == bytes_of(tmp_path / "whole")


def test_resuming_what_is_complete_is_good(image_folder, tmp_path):
    first = pack(image_folder, tmp_path / "out", PackOptions())
    before = bytes_of(tmp_path / "out")
    shutil.move(image_folder, tmp_path / "gone")  # it is not even listed again
    try:
        assert pack(image_folder, tmp_path / "out", PackOptions(resume=True)) == first
        with pytest.raises(SettingError, match="data set packed with another seed: 0, not 1"):
            pack(image_folder, tmp_path / "out", PackOptions(resume=True, seed=1))
    finally:
        shutil.move(tmp_path / "gone", image_folder)
    assert bytes_of(tmp_path / "out") == before


def test_an_unfinished_pack_of_another_source_is_not_continued(image_folder, tmp_path):
    shutil.copytree(image_folder, tmp_path / "twin")
    with one_at_a_time(), stop_after(1), pytest.raises(KeyboardInterrupt):
        pack(image_folder, tmp_path / "out", PackOptions(shard_mib=SMALL))
    with pytest.raises(SettingError, match="another source"):
        pack(tmp_path / "twin", tmp_path / "out", PackOptions(shard_mib=SMALL))


def bad_source(folder, photo, encoded, count=40):
    """Of `count` images, number 7 is not an image, 8 is cut off, and 9 claims to be a bomb of pixels."""
    whole = encoded(photo(50, 40, 1))
    at = whole.index(b"\xff\xc0") + 5
    bomb = whole[:at] + b"\xff\xff\xff\xff" + whole[at + 4 :]
    for i in range(count):
        path = folder / "train" / "a" / f"{i:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes({7: b"no image", 8: whole[: len(whole) // 2], 9: bomb}.get(i, whole))
    return folder


@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize("max_bad", ["3", "7.5%", "100%"])
def test_bad_samples_within_the_budget_are_listed(tmp_path, photo, encoded, max_bad, tasks):
    raw = bad_source(tmp_path / "raw", photo, encoded)
    with one_at_a_time():
        for i in range(tasks):
            pack(raw, tmp_path / "out", PackOptions(shard_mib=0.02, max_bad=max_bad, task=Task(i, tasks, "")))
    lines = [json.loads(line) for line in (tmp_path / "out" / "train" / QUARANTINE).read_text().splitlines()]
    reasons = {line["path"][-6:]: line["reason"] for line in lines}
    for name, reason in (
        ("07.jpg", "neither JPEG, PNG nor PNM"),
        ("08.jpg", "truncated JPEG"),
        ("09.jpg", "out of range"),
    ):
        assert reason in reasons.pop(name)
    assert not reasons
    with DataSet(tmp_path / "out" / "train") as data_set:
        assert len(data_set) == 37 and data_set.manifest.num_bad == 3
        keys = [data_set.key(i) for i in range(37)]
        assert sorted(keys) == [f"a/{i:02}" for i in range(40) if i not in (7, 8, 9)]
        assert {data_set.read(i) for i in range(37)} == {encoded(photo(50, 40, 1))}
    assert {line["key"] for line in lines} == {"a/07", "a/08", "a/09"}


@pytest.mark.parametrize("max_bad", ["0", "2", "7.4%"])
def test_too_many_bad_samples_stop_the_pack_which_can_go_on(tmp_path, photo, encoded, max_bad):
    raw, out = bad_source(tmp_path / "raw", photo, encoded), tmp_path / "out"
    with one_at_a_time():
        with pytest.raises(SourceError, match=r"train/a/0[789]\.jpg.*cannot be packed"):
            pack(raw, out, PackOptions(shard_mib=0.02, max_bad=max_bad))
        assert not list(out.rglob(MANIFEST)) and not list(out.rglob(".*.partial"))
        pack(raw, out, PackOptions(shard_mib=0.02, max_bad="3"))
        assert Manifest.read(out / "train").num_samples == 37


def test_the_budget_is_for_all_tasks_together(tmp_path, photo, encoded):
    raw, out = bad_source(tmp_path / "raw", photo, encoded), tmp_path / "out"
    with one_at_a_time():
        for i in range(19):
            pack(raw, out, PackOptions(shard_mib=0.005, max_bad="2", task=Task(i, 20, "")))
        with pytest.raises(SourceError, match="3 samples are bad, and --max-bad allows 2"):
            pack(raw, out, PackOptions(shard_mib=0.005, max_bad="2", task=Task(19, 20, "")))
        finish(raw, out, PackOptions(shard_mib=0.005, max_bad="3"))
    assert Manifest.read(out / "train").num_bad == 3


def test_a_shard_of_nothing_but_bad_samples(tmp_path, photo, encoded):
    raw = bad_source(tmp_path / "raw", photo, encoded, count=10)
    pack(raw, tmp_path / "out", PackOptions(shard_mib=0.0001, max_bad="3"))  # less than an image: a shard for each
    with DataSet(tmp_path / "out" / "train") as data_set:
        assert len(data_set.manifest.shards) == len(data_set) == 7
        assert {data_set.read(i) for i in range(7)} == {encoded(photo(50, 40, 1))}


@pytest.mark.parametrize("max_bad", ["", "-1", "101%", "x", "1.5"])
def test_a_budget_that_is_none(max_bad):
    with pytest.raises(SettingError, match="max_bad"):
        PackOptions(max_bad=max_bad)


def test_overwriting_leaves_no_split_of_the_old_data_set(image_folder, tmp_path, caplog):
    out = tmp_path / "out"
    pack(image_folder, out, PackOptions(workers=1))
    (out / "train" / MANIFEST).unlink()
    with pytest.raises(SettingError, match="holds a packed data set already"):
        pack(image_folder / "train", out, PackOptions(workers=1))  # has no val
    assert "val split" not in caplog.text
    pack(image_folder / "train", out, PackOptions(workers=1, overwrite=True))
    assert [path.name for path in out.iterdir()] == ["train"]
    assert "no val split, and trainer train needs it" in caplog.text


def test_out_may_not_lie_in_the_source(image_folder, tmp_path):
    with pytest.raises(SettingError, match="packed into itself"):
        pack(image_folder, image_folder / "train" / "packed", PackOptions(workers=1))
    pack(image_folder, tmp_path / "out", PackOptions(workers=1))
    with pytest.raises(SettingError, match="inside a packed data set"):
        pack(image_folder, tmp_path / "out" / "train" / "more", PackOptions(workers=1))


def test_a_second_pack_to_the_same_place_is_refused(image_folder, tmp_path):
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out", wait=False), pytest.raises(SettingError, match="another process"):
        pack(image_folder, tmp_path / "out", PackOptions(workers=1))
    assert not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize("target", CONVERTED)
@pytest.mark.parametrize("origin", CONVERTED)
def test_any_format_becomes_any_other(packed_folders, tmp_path, origin, target):
    manifests = convert(packed_folders[origin], tmp_path / "out", PackOptions(format=target, shard_mib=None))
    for split, manifest in manifests.items():
        with DataSet(packed_folders[origin] / split) as one, DataSet(tmp_path / "out" / split) as two:
            assert manifest.format == target and manifest.classes == one.manifest.classes
            for field in ("label", "size", "checksum", "width", "height", "encoding"):
                assert (one.index[field] == two.index[field]).all()
            assert [one.key(i) for i in range(len(one))] == [two.key(i) for i in range(len(two))]
            assert all(one.read(i) == two.read(i) for i in range(len(one)))


def test_converting_back_gives_the_same_bytes(image_folder, tmp_path):
    pack(image_folder, tmp_path / "a", PackOptions(shard_mib=1))
    convert(tmp_path / "a", tmp_path / "b", PackOptions(format="tfrecord", shard_mib=None))
    convert(tmp_path / "b", tmp_path / "c", PackOptions(format="tar", shard_mib=None))
    one, two = bytes_of(tmp_path / "a"), bytes_of(tmp_path / "c")
    assert [name for name in one if not name.endswith(MANIFEST) and one[name] != two.get(name)] == []
    with pytest.raises(SettingError, match="datapipe convert"):
        pack(tmp_path / "a", tmp_path / "d", PackOptions())


@pytest.fixture(scope="module")
def with_bad_images(image_folder, tmp_path_factory):
    """Packed with a quarantine for each split."""
    folder = tmp_path_factory.mktemp("bad")
    source = shutil.copytree(image_folder, folder / "source")
    for name in ("train/class.0 x/bad.jpg", "train/class.1 x/naïve\u2028.jpg", "val/class.1 x/bad.png"):
        (source / name).write_bytes(b"no image")
    pack(source, folder / "packed", PackOptions(max_bad="3"))
    return folder / "packed"


def test_converting_keeps_the_quarantine(with_bad_images, tmp_path):
    for origin, target, format in (with_bad_images, "b", "lmdb"), (tmp_path / "b", "c", "tar"):
        manifests = convert(origin, tmp_path / target, PackOptions(format=format, shard_mib=None))
        assert {split: manifest.num_bad for split, manifest in manifests.items()} == {"train": 2, "val": 1}
        assert not any(verify(tmp_path / target / split) for split in manifests)
    one, two = bytes_of(with_bad_images), bytes_of(tmp_path / "c")
    assert one.keys() == two.keys() and f"train/{QUARANTINE}" in one
    assert [name for name in one if not name.endswith(MANIFEST) and one[name] != two[name]] == []
    again = convert(with_bad_images, tmp_path / "b", PackOptions(format="lmdb", shard_mib=None, resume=True))
    assert again["train"].num_bad == 2


@pytest.mark.parametrize(("content", "problem"), [(None, "No such file"), (b"{}\n", "not the file that was packed")])
def test_a_quarantine_that_is_damaged_is_not_converted(with_bad_images, tmp_path, content, problem):
    source = shutil.copytree(with_bad_images, tmp_path / "packed")
    (source / "val" / QUARANTINE).unlink()
    if content is not None:
        (source / "val" / QUARANTINE).write_bytes(content)
    with pytest.raises(ManifestError, match=problem) as caught:
        convert(source, tmp_path / "out", PackOptions(format="zip", shard_mib=None))
    assert caught.value.path == source / "val" / QUARANTINE and not (tmp_path / "out").exists()


def test_a_conversion_is_finished_by_itself(with_bad_images, command, tmp_path):
    options = PackOptions(format="hdf5", shard_mib=None)
    first, second = (replace(options, task=Task(i, 2, "")) for i in range(2))
    convert(with_bad_images, tmp_path / "whole", options)
    out, copy = tmp_path / "out", tmp_path / "copy"
    with pytest.raises(SettingError, match="no unfinished pack"):
        finish_conversion(with_bad_images, out, options)
    assert convert(with_bad_images, out, first).num_missing == 1
    with pytest.raises(DatapipeError, match="1 of 2 shards are missing"):
        finish_conversion(with_bad_images, out, options)
    with mock.patch("datapipe.packing.out_folder.OutFolder.missing_shards", lambda *_: [0]):  # not the last task
        assert convert(with_bad_images, out, second) == {}
    with pytest.raises(SettingError, match="another format: hdf5, not zip"):
        finish_conversion(with_bad_images, out, replace(options, format="zip"))
    shutil.copytree(out, copy)
    gone = with_bad_images.rename(tmp_path / "gone")  # what was read of it is in the plan
    with pytest.raises(SettingError, match="another shard_mib: 256, not 3"):
        finish_conversion(with_bad_images, out, replace(options, shard_mib=3))
    with pytest.raises(SettingError, match="another source"):
        finish_conversion(tmp_path / "never", out, options)
    assert finish_conversion(with_bad_images, out, options)["train"].num_bad == 2
    gone.rename(with_bad_images)
    done = command("datapipe", "convert", with_bad_images, copy, "--format", "hdf5", "--finish")
    assert done.returncode == 0 and "2 bad images left out" in done.stdout, done.stderr
    assert bytes_of(out) == bytes_of(copy) == bytes_of(tmp_path / "whole")


def test_converting_tells_of_no_sizes(image_folder, command, tmp_path):
    """The images keep theirs; what re-encoding did to them was told when they were packed."""
    done = command("datapipe", "pack", image_folder, tmp_path / "a", "--resize", "max=40", "--quality", "80")
    assert done.returncode == 0 and "images had" in done.stdout
    done = command("datapipe", "convert", tmp_path / "a", tmp_path / "b", "--format", "zip")
    assert done.returncode == 0 and "images had" not in done.stdout and "61 images" in done.stdout


@pytest.mark.parametrize(
    ("number", "workers"),
    [(signal.SIGINT, 1), (signal.SIGINT, 4), (signal.SIGTERM, 4), (signal.SIGKILL, 2), (signal.SIGKILL, 4)],
)
def test_stopped_pack_leaves_nothing_half_finished_and_goes_on(image_folder, server, tmp_path, number, workers):
    """Stopped while a read hangs: no finished name on unfinished bytes, no process left behind."""
    raw, out = tmp_path / "raw", tmp_path / "out"
    (raw / "a").mkdir(parents=True)
    data = next(image_folder.rglob("*.jpg")).read_bytes()
    for i in range(60):
        (raw / "a" / f"{i:03}.jpg").write_bytes(data)
    child = server.start(CHILDREN / "packs_and_hangs.py", "pack", raw, out, "--workers", workers)
    read_until("hangs", child.stdout, child)
    child.send_signal(number)
    assert child.wait(limit_s()) == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    assert not workers_of(str(tmp_path))
    if number != signal.SIGKILL:
        assert not list(out.rglob(".*.partial"))
    assert not list(out.rglob(MANIFEST)) and not list(out.rglob("shard-*"))
    pack(raw, out, PackOptions())
    assert not list(out.rglob("*.partial")) and not (out / STATE).exists()
    with DataSet(out / "train") as data_set:
        assert {data_set.read(i) for i in range(60)} == {data}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("every", "workers"),
    [(9, 1), pytest.param(1, 1, marks=pytest.mark.slow), pytest.param(2, 2, marks=pytest.mark.slow)],
)
def test_killed_before_any_change_ends_with_the_same_bytes(large_files, server, tmp_path, count, every, workers):
    """Every moment, for one process and for the last of several tasks; what was finished is not written again."""

    def run(out, at):
        if count == 2:
            assert not pack(large_files, out, PackOptions(shard_mib=1, task=Task(0, count, "")))
        options = "--shard-mib", 1, "--workers", workers, "--task", f"{count - 1}/{count}"
        line = CHILDREN / "packs_until.py", int(signal.SIGKILL), at, "as they are", "pack", large_files, out, *options
        return server.run(*line, timeout=limit_s())

    whole = run(tmp_path / "whole", -1)
    assert whole.returncode == 0, whole.stderr
    changes = [line for line in whole.stdout.splitlines() if line.startswith("os.")]
    for at in range(len(changes) - 1, -1, -every):
        out = tmp_path / str(at)
        assert run(out, at).returncode == -signal.SIGKILL
        journals = [path for path in (out / STATE).glob("train/*.npz") if not path.name.startswith(".")]
        finished = {path.stem: (out / STATE / NEW / "train" / f"shard-{path.stem}.tar").stat() for path in journals}
        assert pack(large_files, out, PackOptions(shard_mib=1, resume=True, workers=workers))
        assert bytes_of(out) == bytes_of(tmp_path / "whole"), f"killed before change {at} of {len(changes)}"
        for number, was in finished.items():
            shard = (out / "train" / f"shard-{number}.tar").stat()
            assert (shard.st_ino, shard.st_mtime_ns) == (was.st_ino, was.st_mtime_ns)


def workers_of(mark):
    """Processes that have files open whose names hold `mark`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            targets = [os.readlink(link) for link in (folder / "fd").iterdir()]
        except OSError:
            continue
        if int(folder.name) != os.getpid() and any(mark in target for target in targets):
            found.append(int(folder.name))
    return found


def test_no_space(image_folder, tmp_path):
    """A disk of 64 KiB that fills up: the error names the file, and nothing half-finished stays."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        for name in CONVERTED:
            with pytest.raises(OSError, match=r"No space left on device.*shard-000000"):
                pack(image_folder, small / "out", PackOptions(format=name, workers=1))
            assert not [path for path in small.rglob("*") if path.is_file() and STATE not in path.parts]
            subprocess.run(["rm", "-rf", small / "out"], check=True)
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize(
    "settings", [{"format": "zip7"}, {"shard_mib": 0}, {"workers": 0}, {"seed": -1}, {"kind": "foo"}, {"kind": []},
                 {"seed": 1.5}, {"workers": "2"}, {"shard_mib": "1"}, {"shard_mib": float("inf")}, {"max_bad": 0.5},
                 {"timeout_s": -1}, {"timeout_s": None}, {"overwrite": "no"}, {"resume": 1}, {"outside": None},
                 {"memory": 0}, {"recode": "raw"}, {"task": 1}],
)  # fmt: skip
def test_bad_settings_are_named(settings):
    with pytest.raises(SettingError, match=f"^{next(iter(settings))}: "):
        PackOptions(**settings)


def test_numbers_of_other_types():
    options = PackOptions(seed=np.int64(3), workers=np.int32(2), max_bad=5)
    assert json.dumps([options.seed, options.workers]) == "[3, 2]" and options.bad_allowed(100) == 5


def test_the_size_of_shards_unless_asked_for(image_folder, tmp_path):
    assert pack(image_folder, tmp_path / "a", PackOptions(shard_mib=16))["train"].shard_mib == 16
    assert convert(tmp_path / "a", tmp_path / "b", PackOptions(format="zip"))["train"].shard_mib == 16
    assert convert(tmp_path / "a", tmp_path / "c", PackOptions(format="zip", shard_mib=7))["train"].shard_mib == 7
    for name, options in ("d", PackOptions()), ("e", PackOptions(shard_mib=None)):
        manifests = pack(image_folder, tmp_path / name, options)
        assert {manifest.shard_mib for manifest in manifests.values()} == {SHARD_MIB} == {256}


def pixels_of(folder):
    """Every image by its key, decoded."""
    with DataSet(folder) as data_set:
        return {data_set.key(i): data_set.pixels(i, data_set.read(i)) for i in range(len(data_set))}


def test_raw_pixels_in_every_format_and_back(image_folder, tmp_path):
    recode = RecodeOptions(store="raw", size=32)
    pack(image_folder, tmp_path / "npy", PackOptions(format="npy", recode=recode))
    expected = pixels_of(tmp_path / "npy" / "train")
    assert {image.shape for image in expected.values()} == {(32, 32, 3)}
    for name in ("tar", "hdf5"):
        pack(image_folder, tmp_path / name, PackOptions(format=name, recode=recode))
        convert(tmp_path / "npy", tmp_path / f"from-npy-{name}", PackOptions(format=name, shard_mib=None))
        for folder in (tmp_path / name, tmp_path / f"from-npy-{name}"):
            found = pixels_of(folder / "train")
            assert found.keys() == expected.keys()
            assert all((found[key] == expected[key]).all() for key in expected)
    for options in (PackOptions(format="npy"), PackOptions(format="npy", recode=RecodeOptions(store="raw"))):
        with pytest.raises((SettingError, SourceError), match="npy"):
            pack(image_folder, tmp_path / "mixed", options)
        shutil.rmtree(tmp_path / "mixed", ignore_errors=True)


def test_resizing_is_counted_and_kept_small(image_folder, tmp_path):
    recode = RecodeOptions(resize="max=64", restart=8)
    manifests = pack(image_folder, tmp_path / "out", PackOptions(recode=recode))
    manifest = manifests["train"]
    assert manifest.recode.items() >= {"resize": "max=64", "restart": 8}.items()
    assert manifest.converted["png"] == 12 and manifest.image_bytes < manifest.source_bytes
    with DataSet(tmp_path / "out" / "train") as data_set:
        assert max(data_set.index["width"].max(), data_set.index["height"].max()) == 64
        assert set(data_set.index["encoding"]) == {0} and data_set.index["restart_interval"].min() > 0
    with pytest.raises(SettingError, match="another recode"):
        pack(image_folder, tmp_path / "out", PackOptions(resume=True))


def test_two_encoders_do_not_share_a_pack(image_folder, tmp_path, monkeypatch):
    """On one node libturbojpeg, on another Pillow: their bytes differ."""
    options = {"shard_mib": 1, "recode": RecodeOptions(quality=80)}
    assert pack(image_folder, tmp_path / "out", PackOptions(task=Task(0, 2, ""), **options)) == {}
    other = (lambda: None) if turbojpeg.turbojpeg() else (lambda: SimpleNamespace(restart=None))
    monkeypatch.setattr(turbojpeg, "turbojpeg", other)
    with pytest.raises(SettingError, match=r"another recode: .*'encoder'.*, not .*'encoder'"):
        pack(image_folder, tmp_path / "out", PackOptions(task=Task(1, 2, ""), **options))


def test_remains_of_another_pack_are_no_place_for_tasks(image_folder, tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "shard-000099.tar").touch()
    with pytest.raises(SettingError, match=r"remains such as .*shard-000099"):
        pack(image_folder, tmp_path, PackOptions(task=Task(0, 2, "")))


def test_finishing_checks_what_was_asked_for(image_folder, tmp_path):
    pack(image_folder, tmp_path / "out", PackOptions())
    with pytest.raises(SettingError, match="another seed: 0, not 1"):
        finish(image_folder, tmp_path / "out", PackOptions(seed=1))
    with one_at_a_time():
        pack(image_folder, tmp_path / "part", PackOptions(shard_mib=SMALL, task=Task(0, 2, "")))
    with pytest.raises(SettingError, match="another source"):
        finish(tmp_path / "else", tmp_path / "part", PackOptions(shard_mib=SMALL))


def test_a_source_that_cannot_be_listed_leaves_nothing(tmp_path):
    with pytest.raises(SourceError):
        pack(tmp_path / "none", tmp_path / "out", PackOptions())
    assert not (tmp_path / "out").exists()
