"""The backend that streams: equal steps, every sample once, also of shards that are not ours."""

import io
import json
import os
import shutil
import signal
import tarfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datapipe.errors import DatapipeError, DecodeError, ManifestError, SettingError, ShardReadError
from datapipe.loaders import open_loader
from datapipe.loaders.options import LoaderOptions
from datapipe.loaders.tar_streams import rank_parts
from tests.waiting import limit_s

webdataset = pytest.importorskip("webdataset")

SIZES = (5, 1, 9, 3, 14, 2, 7)  # seven uneven shards


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.integers(1, 8), st.integers(1, 7), st.integers(0, 3))
def test_ranks_share_the_stream_evenly(counts, ranks, batch_size, epoch):
    total, order = sum(counts), None
    for last in ("pad", "drop"):
        options = [LoaderOptions(batch_size, rank=rank, world_size=ranks, last=last) for rank in range(ranks)]
        parts = [rank_parts(counts, each, epoch) for each in options]
        taken = [(part.shard, part.skip + i) for of in parts for part in of for i in range(part.take)]
        assert len(set(taken)) == len(taken)
        sizes = [sum(part.take for part in of) for of in parts]
        if last == "pad":
            assert len(taken) == total and max(sizes) - min(sizes) <= 1
            order = taken
        else:
            assert set(sizes) == {total // (ranks * batch_size) * batch_size} and taken == order[: len(taken)]


@pytest.fixture(scope="module")
def foreign(tmp_path_factory, request):
    """Shards as WebDataset's own writer makes them; labels count through all samples."""
    photo, encoded = request.getfixturevalue("photo"), request.getfixturevalue("encoded")
    folder, number = tmp_path_factory.mktemp("foreign"), 0
    for shard, size in enumerate(SIZES):
        with webdataset.TarWriter(str(folder / f"part-{shard:03}.tar")) as writer:
            for _ in range(size):
                random = np.random.default_rng(number)
                width, height = (int(n) for n in random.integers(30, 90, 2))
                pixels = photo(width, height, number)
                image = encoded(pixels, "PNG") if number % 5 == 0 else encoded(pixels, quality=90)
                name = "png" if number % 5 == 0 else "jpg"
                label = {"json": {"label": number}} if number % 3 == 0 else {"cls": number}
                writer.write({"__key__": f"sample{number:04}", name: image, **label})
                number += 1
    return folder


def epochs(path, batch_size=4, ranks=1, **settings):
    """All batches of all ranks, side by side."""
    found = []
    for rank in range(ranks):
        with open_loader(
            path, batch_size, backend="webdataset", size=24, rank=rank, world_size=ranks, **settings
        ) as loader:
            found.append(list(loader))
            assert len(found[-1]) == len(loader)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
@pytest.mark.parametrize("train", [True, False])
def test_every_sample_once_and_equal_steps(foreign, ranks, train):
    found = epochs(foreign, ranks=ranks, train=train, last="pad")
    assert {len(batches) for batches in found} == {-(-sum(SIZES) // (4 * ranks))}
    valid = [batch.valid for batches in found for batch in batches]
    labels = torch.cat([batch.labels[batch.valid] for batches in found for batch in batches]).tolist()
    assert sorted(labels) == list(range(sum(SIZES))) and sum(map(int, map(sum, valid))) == sum(SIZES)
    for batches in found:
        for batch in batches:
            assert not batch.images[~batch.valid].any() and (batch.samples[~batch.valid] == -1).all()
            assert batch.samples[batch.valid].tolist() == batch.labels[batch.valid].tolist()
    if train:
        assert labels != sorted(labels)


def test_training_drops_what_does_not_fill_a_batch(foreign):
    found = epochs(foreign, ranks=4)
    assert [len(batches) for batches in found] == [2] * 4
    labels = [label for batches in found for batch in batches for label in batch.labels.tolist()]
    assert len(set(labels)) == 32


def test_pixels_are_those_of_the_cpu_backend(packed_folders):
    """Evaluation goes in the order of the index."""
    folder = packed_folders["tar"] / "train"
    (mine,) = epochs(folder, batch_size=16, train=False)
    with open_loader(folder, 16, train=False, size=24) as loader:
        for a, b in zip(mine, loader, strict=True):
            for name in ("images", "labels", "samples", "valid"):
                assert torch.equal(getattr(a, name), getattr(b, name)), name


@pytest.mark.parametrize("way", ["braces", "pipe", "list"])
def test_urls(foreign, way):
    path = {
        "braces": f"{foreign}/part-{{000..006}}.tar",
        "pipe": f"pipe:cat {foreign}/part-{{000..006}}.tar",
        "list": "::".join(f"{foreign}/part-{i:03}.tar" for i in range(7)),
    }[way]
    (batches,) = epochs(path, train=False)
    assert torch.cat([batch.labels[batch.valid] for batch in batches]).tolist() == list(range(sum(SIZES)))


NAMES = ["pipe:touch PWNED; cat plain.tar #.tar", "http:localhost.tar", "s3:bucket.tar", "gs:bucket.tar", "file:a.tar",
         "a::b.tar", "{0..3}.tar", "-.tar"]  # fmt: skip


def test_a_command_may_be_longer_than_a_name(foreign, monkeypatch):
    """Without a slash it would be one name of a file, and an error of the filesystem."""
    monkeypatch.chdir(foreign)
    shard = min(foreign.glob("*.tar")).name
    command = f"pipe:cat {shard}; true {'x' * 300}::"
    with open_loader(command, 2, backend="webdataset", size=16, train=False) as loader:
        assert loader.num_samples > 0 and len(list(loader)) == len(loader)
    with pytest.raises(SettingError, match="cache: "):
        open_loader(command, 2, backend="webdataset", size=16, cache="cache")


@pytest.mark.parametrize("number", [2**62, 2**63, 10**30])
def test_a_number_beyond_all_reason_is_not_believed(foreign, tmp_path, number, caplog):
    shard = min(foreign.glob("*.tar"))
    for name in ("a.tar", "b.tar"):
        shutil.copy(shard, tmp_path / name)
    (tmp_path / "b.idx").write_text(f"v1.2 {number}\n")
    (tmp_path / "a.idx").write_text(f"v1.2 {number}\n")
    with open_loader(str(tmp_path), 1, backend="webdataset", size=16, train=False) as loader:
        assert len(list(loader)) == loader.num_samples < 100
    assert "the number of samples beside it cannot be read" in caplog.text


def test_names_of_files_are_not_urls(foreign, tmp_path, monkeypatch):
    """Also in the folder ".", whose files are named without a slash."""
    for name in ("plain.tar", *NAMES):
        (tmp_path / name).write_bytes((foreign / "part-000.tar").read_bytes())
    monkeypatch.chdir(tmp_path)
    for folder in (".", Path("."), tmp_path):
        (batches,) = epochs(folder, train=False)
        assert sum(int(batch.valid.sum()) for batch in batches) == SIZES[0] * (len(NAMES) + 1)
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("cached", [False, True])
def test_names_in_a_manifest_are_not_urls(packed_folders, tmp_path, monkeypatch, cached):
    folder = shutil.copytree(packed_folders["tar"] / "train", tmp_path / "copy")
    manifest = json.loads((folder / "manifest.json").read_text())
    first = manifest["shards"][0]["name"]
    name = manifest["shards"][0]["name"] = f"pipe:touch PWNED; cat {manifest['shards'][1]['name']}"
    (folder / first).rename(folder / name)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.chdir(folder)
    cache = {"cache": tmp_path / "cache"} if cached else {}
    with suppress(ManifestError):  # if such a name is not allowed at all
        (batches,) = epochs(".", train=False, **cache)
        assert sum(int(batch.valid.sum()) for batch in batches) == 61
    assert not list(tmp_path.rglob("PWNED"))


def test_epochs_repeat_and_resume(foreign):
    def labels(loader):
        return [batch.labels.tolist() for batch in loader]

    settings = {"backend": "webdataset", "size": 16, "seed": 3}
    with open_loader(foreign, 4, **settings) as loader:
        first, state = labels(loader), None
        loader.set_epoch(1)
        second = labels(loader)
        loader.set_epoch(0)
        for _ in loader:
            if loader.state_dict()["step"] == 4:
                state = loader.state_dict()
                break
    assert first != second
    with open_loader(foreign, 4, threads=3, **settings) as loader:
        loader.load_state_dict(state)
        assert labels(loader) == first[4:]
    with (
        open_loader(foreign, 2, rank=1, world_size=2, **settings) as loader,
        pytest.raises(SettingError, match="world_size"),
    ):
        loader.load_state_dict(state)


@pytest.mark.parametrize("note", ["idx", "sizes.json"])
def test_noted_counts_are_taken(foreign, tmp_path, note, monkeypatch):
    for path in foreign.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for i, size in enumerate(SIZES):
        if note == "idx":
            (tmp_path / f"part-{i:03}.idx").write_text(f"v1.2 {size}\n")
    if note == "sizes.json":
        (tmp_path / note).write_text("{" + ", ".join(f'"part-{i:03}.tar": {n}' for i, n in enumerate(SIZES)) + "}")
    monkeypatch.setattr("datapipe.loaders.webdataset.read_samples", lambda url: pytest.fail("it was read"))
    with open_loader(tmp_path, 4, backend="webdataset", size=16) as loader:
        assert loader.num_samples == sum(SIZES)


def test_a_shard_with_fewer_samples_than_noted_is_an_error(foreign, tmp_path):
    (tmp_path / "a.tar").write_bytes((foreign / "part-002.tar").read_bytes())
    (tmp_path / "a.idx").write_text("v1.2 12\n")
    with (
        open_loader(tmp_path, 4, backend="webdataset", size=16) as loader,
        pytest.raises(ShardReadError, match="ends after 9 samples of 12"),
    ):
        list(loader)


@pytest.mark.parametrize("noted", ["v1.2 4\n", "v1.2 -3\n", "nonsense"])
def test_a_wrong_note_loses_no_sample(foreign, tmp_path, noted):
    (tmp_path / "a.tar").write_bytes((foreign / "part-002.tar").read_bytes())
    (tmp_path / "a.idx").write_text(noted)
    with open_loader(tmp_path, 4, backend="webdataset", size=16, train=False) as loader:
        if loader.num_samples == 4:
            with pytest.raises(ShardReadError, match="holds more than the 4 samples"):
                list(loader)
        else:
            assert sum(int(batch.valid.sum()) for batch in loader) == 9


def test_a_loader_can_be_taken_into_a_forked_process(foreign):
    with open_loader(foreign, 4, backend="webdataset", size=16, train=False) as loader:
        for _ in range(2):  # the second time, the parent has read, too
            child = os.fork()
            if not child:
                signal.alarm(round(limit_s()))  # of which it dies
                count = 0
                try:
                    count = sum(int(batch.valid.sum()) for batch in loader)
                finally:
                    os._exit(0 if count == sum(SIZES) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert sum(int(batch.valid.sum()) for batch in loader) == sum(SIZES)


def test_no_samples_are_no_data_set(tmp_path):
    _tar(tmp_path / "a.tar", {})
    with pytest.raises(ManifestError, match="hold no samples"):
        epochs(tmp_path, train=False)


def test_truncated_and_missing_shards_are_named(foreign, tmp_path):
    data = (foreign / "part-004.tar").read_bytes()
    (tmp_path / "b.tar").write_bytes(data[: len(data) // 2 // 512 * 512 + 100])
    with pytest.raises(DatapipeError, match=r"b\.tar"):
        epochs(tmp_path)
    with pytest.raises(DatapipeError, match=r"nowhere-001\.tar"):
        epochs(f"{tmp_path}/nowhere-001.tar")
    with pytest.raises(DatapipeError, match="exit 3"):
        epochs("pipe:exit 3")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ManifestError, match="no tar shards"):
        epochs(tmp_path / "empty")


def _tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def test_bad_samples_have_a_budget(tmp_path, photo, encoded):
    good = encoded(photo(50, 40, 1))
    members = {}
    for i in range(8):
        members[f"{i}.jpg"] = good if i not in (2, 5) else (b"no image", good[: len(good) // 2])[i == 5]
        members[f"{i}.cls"] = b"%d" % i
    _tar(tmp_path / "a.tar", members)
    with pytest.raises(DecodeError, match=r"a\.tar, key [25]: "):
        epochs(tmp_path, batch_size=8, train=False, max_bad=1)
    ((batch,),) = epochs(tmp_path, batch_size=8, train=False, max_bad=2)
    assert batch.valid.tolist() == [i not in (2, 5) for i in range(8)]
    assert not batch.images[2].any() and not batch.images[5].any() and batch.images[3].any()


def test_samples_without_image_or_number_are_named(tmp_path, photo, encoded):
    _tar(tmp_path / "a.tar", {"x.txt": b"hello", "x.cls": b"1"})
    with pytest.raises(DatapipeError, match=r"key x: has no image .*txt"):
        epochs(tmp_path, batch_size=1)
    _tar(tmp_path / "a.tar", {"x.jpg": encoded(photo(20, 20, 1)), "x.json": b'{"label": "cat"}'})
    with pytest.raises(DatapipeError, match="its label is not the number of a class, 'cat'"):
        epochs(tmp_path, batch_size=1)


def test_samples_without_image_or_label_have_a_budget_too(tmp_path, photo, encoded):
    good = encoded(photo(50, 40, 1))
    members = {"0.jpg": good, "0.cls": b"0", "1.txt": b"no image", "2.jpg": good, "3.jpg": good, "3.cls": b"3"}
    _tar(tmp_path / "a.tar", members)
    ((batch,),) = epochs(tmp_path, batch_size=4, train=False, max_bad=2)
    assert batch.valid.tolist() == [True, False, False, True] and batch.labels.tolist() == [0, 0, 0, 3]
    with pytest.raises(DatapipeError, match=r"key 2: .*no label|key 1: has no image"):
        epochs(tmp_path, batch_size=4, train=False, max_bad=1)


@pytest.mark.parametrize("settings", [{"order": "blocks"}, {"io": "direct"}, {"cache": "/tmp/none"}])
def test_settings_without_a_meaning_are_refused(tmp_path, photo, encoded, settings):
    _tar(tmp_path / "a.tar", {"0.jpg": encoded(photo(50, 40, 1)), "0.cls": b"0"})
    with pytest.raises(SettingError, match=next(iter(settings))):
        open_loader(tmp_path, 1, backend="webdataset", **settings)


def labels_of(path, **settings):
    """The labels of the valid samples, in order."""
    (batches,) = epochs(path, batch_size=2, train=False, **settings)
    return [label for batch in batches for label in batch.labels[batch.valid].tolist()]


@pytest.fixture
def shard(tmp_path, photo, encoded):
    """shard(name, *labels): writes one, below the test's folder."""
    image = encoded(photo(20, 20, 1))

    def write(name, *labels):
        path = tmp_path / "shards" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _tar(path, {f"{label}.{kind}": image if kind == "jpg" else label.encode() for label in map(str, labels)
                    for kind in ("jpg", "cls")})  # fmt: skip
        return path

    return write


@pytest.mark.parametrize(
    ("names", "split", "expected"),
    [
        (
            ["imagenet-train-0.tar", "imagenet-val-0.tar", "imagenet-testing-0.tar"],
            None,
            "test .*: choose one, as split=.train",
        ),
        (["imagenet-train-0.tar", "imagenet-val-0.tar", "imagenet-testing-0.tar"], "train", [0]),
        (["imagenet-train-0.tar", "imagenet-val-0.tar", "imagenet-testing-0.tar"], "val", [1]),
        (["imagenet-train-0.tar", "imagenet-val-0.tar", "imagenet-testing-0.tar"], "test", [2]),
        (["TRAIN-0.tar", "Dev-0.TAR", "TRAIN-1.TAR"], "train", [0, 2]),
        (["train-0.tar", "1.tar"], None, "train-0.tar names a split, and 1.tar does not; give those that you mean"),
        (["train-0.tar", "eval-0.tar", "valid-0.tar"], "train", "both eval .* and valid"),
        (["imagenettrain-0.tar", "imagenetval-0.tar"], None, "names a split, and imagenetval-0.tar does not"),
        (["train-0.tar", "train-1.tar"], None, [0, 1]),
        (["train_a.tar", "train_0.tar", "train_f.tar"], None, [1, 0, 2]),
        (
            ["train_HR-0.tar", "train_LR-0.tar"],
            None,
            "holds train_HR-0.tar and .*; .*shards/train_HR-0.tar",
        ),
        (["train_v1-0.tar", "train_v1-1.tar", "train_v2.tar"], None, r"such as .*shards/train_v1-{0..1}\.tar"),
        (["train.tar", "val_seen.tar", "val_unseen.tar"], "val", "holds val_seen.tar and val_unseen.tar, all of val"),
        (["val.tar", "test_hard.tar", "test.tar"], "val", [0]),
        (["val.tar", "test_hard.tar", "test.tar"], "test", "holds test.tar and test_hard.tar, all of test"),
        (["val-0.tar"], None, [0]),
        (["val-0.tar"], "train", "split: 'train' is not in .*shards, which has val"),
        (["0.tar", "._1.tar"], None, [0]),
        (["0.tar"], "vall", "split: 'vall' is not one of train, val, test"),
        (["train/0.tar", "val/0.tar"], "val", [1]),
    ],
)
def test_shards_of_one_split_are_read(shard, names, split, expected):
    for label, name in enumerate(names):
        folder = shard(name, label).parents[name.count("/")]
    if isinstance(expected, str):
        with pytest.raises(SettingError, match=expected):
            labels_of(folder, split=split)
    else:
        assert labels_of(folder, split=split) == expected


def test_a_split_of_what_has_none(shard, packed_folders):
    path = shard("0.tar", 0)
    with pytest.raises(SettingError, match="split: 'val' has no meaning for what is not a folder"):
        labels_of(path, split="val")
    for backend in ("cpu", "webdataset"):
        with open_loader(packed_folders["tar"], 4, split="val", backend=backend) as loader:
            assert loader.num_samples == 10
        with pytest.raises(SettingError, match="split: 'val' is not in"):
            open_loader(packed_folders["tar"] / "train", 4, split="val", backend=backend)
    with pytest.raises(ManifestError, match="the folder holds splits: choose one of train, val"):
        open_loader(packed_folders["tar"], 4)


def test_a_folder_of_shards_that_is_called_as_a_split(shard):
    shard("val/0.tar", 7)
    folder = shard("val/1.tar", 8).parent
    assert labels_of(folder) == labels_of(folder, split="val") == [7, 8]
    with pytest.raises(SettingError, match=r"split: 'train' is not in .*/val, which has val"):
        labels_of(folder, split="train")


def test_samples_that_the_library_skips_are_told(shard, caplog):
    path = shard("0.tar", 0)
    more = shard("more", 1, 2)
    assert labels_of(path.parent) == [0] and not caplog.records
    path.write_bytes(path.read_bytes() + more.read_bytes())
    assert labels_of(path.parent) == [0]
    assert "0.tar: 2 of its samples are not read, such as 1: they lie behind an end mark, or are links" in caplog.text
    path.write_bytes(more.read_bytes() + b"no archive" * 99)
    with pytest.raises(
        ShardReadError, match=r"0\.tar: cannot be listed: .*what follows its end mark is not an archive"
    ):
        labels_of(path.parent)


def test_links_that_the_library_skips_are_told(shard, caplog):
    path = shard("0.tar", 0)
    with tarfile.open(path, "a") as archive:
        for name, target, kind in (("./5.jpg", "0.jpg", tarfile.LNKTYPE), ("x/6.jpg", "../0.jpg", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            archive.addfile(info)
    assert labels_of(path.parent) == [0]
    assert "2 of its samples are not read, such as 5:" in caplog.text


def test_what_is_not_named_as_a_shard_is_told(shard, caplog):
    for name in ("0.tar", "1.tar.gz", "2.tar.part", "notes.txt"):
        folder = shard(name, 0).parent
    assert labels_of(folder) == [0]
    messages = [record.getMessage() for record in caplog.records if "not named as a tar shard" in record.msg]
    assert [text.split(":")[0].rpartition("/")[2] for text in messages] == ["1.tar.gz", "2.tar.part"]


def test_a_label_that_a_table_wrote(tmp_path, photo, encoded):
    _tar(tmp_path / "0.tar", {"a.jpg": encoded(photo(20, 20, 1)), "a.cls": b"3.0\n"})
    assert labels_of(tmp_path) == [3]


@pytest.mark.ranks
def test_seven_shards_on_three_ranks_do_not_hang(start_ranks, foreign):
    ranks = start_ranks(3, Path(__file__).parent / "children" / "trains_from_a_stream.py", foreign)
    out, errors = ranks.communicate(limit_s())
    assert ranks.returncode == 0, errors
    assert out.count("done") == 3
