"""What packing removes, what it refuses to, and what it remembers between calls."""

import shutil
import threading
from unittest import mock

import pytest

from datapipe.cluster import Task
from datapipe.errors import SettingError, SourceError
from datapipe.fsio import locked
from datapipe.manifest import MANIFEST
from datapipe.packing import PackOptions, convert, finish, pack
from datapipe.recode import RecodeOptions
from datapipe.target import STATE
from datapipe.verifying import verify


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_file_that_is_only_named_like_ours_stays(image_folder, tmp_path, split, overwrite):
    (tmp_path / split).mkdir()
    precious = tmp_path / split / "shard-000007.tar"
    precious.write_text("precious")
    with pytest.raises(SettingError, match=r"remains such as .*shard-000007"):
        pack(image_folder, tmp_path, PackOptions(overwrite=overwrite))
    assert precious.read_text() == "precious" and not (tmp_path / STATE).exists()


def test_the_source_is_never_removed(image_folder, tmp_path):
    pack(image_folder, tmp_path / "out", PackOptions())
    for source, out in ((tmp_path / "out" / "train", tmp_path / "out"), (tmp_path / "out", tmp_path / "out" / "new")):
        with pytest.raises(SettingError, match=r"OUT:.*choose another"):
            convert(source, out, PackOptions(format="hdf5", overwrite=True, shard_mib=None))
    assert not list(verify(tmp_path / "out" / "train"))


def test_a_split_that_is_a_link_is_refused_before_anything_is_removed(image_folder, tmp_path):
    out = tmp_path / "out"
    pack(image_folder, out, PackOptions())
    (out / "train").rename(tmp_path / "elsewhere")
    (out / "train").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingError, match="holds what is no packed data set, such as train"):
        pack(image_folder, out, PackOptions(overwrite=True))
    assert not list(verify(tmp_path / "elsewhere"))


def test_an_overwrite_that_is_interrupted_leaves_no_data_set(image_folder, tmp_path):
    pack(image_folder, tmp_path, PackOptions())
    with mock.patch("datapipe.target.shutil.rmtree", side_effect=OSError), pytest.raises(OSError):
        pack(image_folder, tmp_path, PackOptions(overwrite=True, seed=1))
    assert not list(tmp_path.rglob(MANIFEST))
    manifests = pack(image_folder, tmp_path, PackOptions(seed=1))  # goes on without being told to overwrite
    assert manifests["train"].seed == 1


def test_a_task_looks_at_the_plan_again_when_it_has_waited(image_folder, tmp_path):
    """Behind a pack that holds the folder and replaces the plan."""
    small = mock.patch("datapipe.plan.mean_bytes", lambda *_: 600_000)
    with small:
        assert pack(image_folder, tmp_path, PackOptions(shard_mib=8, task=Task(0, 2, ""))) == {}
        errors = []

        def late() -> None:
            try:
                pack(image_folder, tmp_path, PackOptions(shard_mib=8, task=Task(1, 2, "")))
            except SettingError as error:
                errors.append(str(error))

        with locked(tmp_path, wait=True):
            task = threading.Thread(target=late)
            task.start()
            task.join(1)
            assert task.is_alive()
            with mock.patch("datapipe.target.locked"):  # as the process that has the lock
                pack(image_folder, tmp_path, PackOptions(shard_mib=8, seed=7, overwrite=True))
        task.join(60)
    assert errors and "another seed: 7, not 0" in errors[0]
    assert not list(verify(tmp_path / "train"))


def test_bad_samples_are_counted_over_all_calls(image_folder, tmp_path):
    source = shutil.copytree(image_folder, tmp_path / "source")
    images = sorted(path for path in source.rglob("*") if path.suffix in (".jpg", ".png") and "train" in path.parts)
    images = images or sorted(path for path in source.rglob("*") if path.is_file())
    for path in images[::3]:
        path.write_bytes(b"no image")
    num_bad = len(images[::3])
    assert num_bad > 3
    seen = []
    with mock.patch("datapipe.plan.mean_bytes", lambda *_: 600_000):
        for _ in range(3):
            with pytest.raises(SourceError) as error:
                pack(source, tmp_path / "out", PackOptions(shard_mib=8, workers=1, max_bad="2"))
            seen.append(str(error.value))
    assert all("number 3, and --max-bad allows 2" in message for message in seen), seen


def test_no_manifest_where_another_split_has_nothing(image_folder, tmp_path):
    source = tmp_path / "source"
    train = next(path.parent for path in sorted(image_folder.rglob("*")) if path.is_file())
    shutil.copytree(train, source / "train" / "a")
    (source / "val" / "a").mkdir(parents=True)
    (source / "val" / "a" / "x.jpg").write_bytes(b"no image")
    with pytest.raises(SourceError, match="split val holds no image"):
        pack(source, tmp_path / "out", PackOptions(max_bad="5"))
    assert not list(tmp_path.rglob(MANIFEST))


def test_a_convert_does_not_go_on_from_another_source(image_folder, tmp_path):
    options = PackOptions(format="hdf5", shard_mib=None, task=Task(0, 2, ""))
    with mock.patch("datapipe.plan.mean_bytes", lambda *_: 600_000):
        pack(image_folder, tmp_path / "one", PackOptions(shard_mib=8))
        convert(tmp_path / "one", tmp_path / "two", options)
        pack(
            image_folder,
            tmp_path / "one",
            PackOptions(shard_mib=8, overwrite=True, recode=RecodeOptions(resize="max=32")),
        )
        with pytest.raises(SettingError, match=r"another (manifests|recode)"):
            convert(tmp_path / "one", tmp_path / "two", PackOptions(format="hdf5", shard_mib=None, task=Task(1, 2, "")))


def test_a_complete_data_set_of_another_source_is_not_what_was_asked_for(image_folder, tmp_path):
    pack(image_folder, tmp_path / "out", PackOptions())
    other = shutil.copytree(image_folder, tmp_path / "other")
    next(path for path in sorted(other.rglob("*")) if path.is_file()).unlink()
    for options in (PackOptions(resume=True), PackOptions(task=Task(0, 2, ""))):
        with pytest.raises(SettingError, match="holds another source"):
            pack(other, tmp_path / "out", options)
        assert pack(image_folder, tmp_path / "out", options)
    with pytest.raises(SettingError, match="holds another source"):
        finish(other, tmp_path / "out", PackOptions())
    shutil.rmtree(other)
    assert pack(other, tmp_path / "out", PackOptions(resume=True))  # it is gone, and no longer needed
