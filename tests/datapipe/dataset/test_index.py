"""The index: what it says is possible, whoever wrote it and whatever its checksum."""

import json
import random
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from datapipe.cli import info
from datapipe.dataset import DataSet
from datapipe.dataset.index import _PART, INDEX, RECORD, check_records, sample_checksum, write_index
from datapipe.dataset.manifest import KEYS, MANIFEST, FileInfo, Manifest, ShardInfo
from datapipe.dataset.verify import verify
from datapipe.errors import DatapipeError, DecodeError, ManifestError, SettingError
from datapipe.fsio import checksum
from datapipe.images.codec import encode_png
from datapipe.images.recode import RecodeOptions
from datapipe.loaders import blocks, open_loader
from datapipe.packing import PackOptions, convert, pack
from datapipe.sampling.augment import Augment


@pytest.fixture(scope="module")
def same_size(tmp_path_factory, encoded, photo):
    """A data set whose images all have 64×48 pixels."""
    root = tmp_path_factory.mktemp("same")
    for label in ("cat", "dog"):
        (root / "raw" / label).mkdir(parents=True)
        for i in range(6):
            (root / "raw" / label / f"{i}.jpg").write_bytes(encoded(photo(64, 48, i)))
    pack(root / "raw", root / "tar", PackOptions(workers=1))
    pack(root / "raw", root / "npy", PackOptions(format="npy", recode=RecodeOptions(store="raw"), workers=1))
    return root


def reseal(folder: Path, name: str = INDEX) -> None:
    """Make the manifest right for the index (or keys) as it is now: as a faulty or hostile writer would."""
    info = {"size_bytes": (folder / name).stat().st_size, "xxh3_128": checksum(folder / name)}
    manifest = Manifest.read(folder)
    files = [file.model_copy(update=info) if file.name == name else file for file in manifest.files]
    manifest.model_copy(update={"files": files}).write(folder)


def forge(source: Path, target: Path, **fields: int) -> Path:
    shutil.copytree(source, target)
    records = np.load(target / INDEX)
    for field, value in fields.items():
        records[field][5] = value
    write_index(target, records)
    reseal(target)
    return target


FORGED = [
    ("tar", {"label": 4_000_000_000}, "label is 4000000000, expected 0 to 1"),
    ("tar", {"label": 2}, "label is 2"),
    ("tar", {"shard": 7}, "shard is 7, expected 0"),
    ("tar", {"width": 6000, "height": 6000}, "height is 6000, expected 48"),
    ("tar", {"width": 10}, "width is 10, expected 64"),
    ("tar", {"height": 0}, "height is 0"),
    ("tar", {"offset": 2**63 + 5}, "offset is 9223372036854775813"),
    ("tar", {"offset": 2**64 - 1}, "offset is 18446744073709551615"),
    ("tar", {"size": 0}, "size is 0"),
    ("tar", {"size": 2**32 - 1}, "its 4294967295 bytes end beyond the"),
    ("tar", {"encoding": 77}, "encoding is 77"),
    ("tar", {"encoding": 5}, "encoding is 5"),
    ("npy", {"encoding": 0}, "encoding is 0, expected 5"),
    ("npy", {"size": 9215}, "size is 9215, expected 9216"),
    ("npy", {"width": 48, "height": 64}, "height is 64, expected 48"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), FORGED)
def test_impossible_records_are_refused(same_size, tmp_path, kind, fields, message):
    forged = forge(same_size / kind / "train", tmp_path / "forged", **fields)
    (problem,) = verify(forged)
    assert problem.file == INDEX and "sample 5: " in problem.reason and message in problem.reason
    for order in ("full", "blocks"):
        with pytest.raises(ManifestError, match="sample 5: "):
            open_loader(forged, 2, size=16, order=order)


def test_a_command_says_which_record_is_impossible(same_size, tmp_path, command):
    whole = same_size / "tar" / "train"
    assert verify(whole, deep=True) == []
    done = command("datapipe", "info", forge(whole, tmp_path / "forged", label=2))
    assert done.returncode == 1 and "sample 5: label is 2" in done.stderr and "Traceback" not in done.stderr


def test_sides_may_differ_but_are_some(packed_folders, tmp_path):
    forged = forge(packed_folders["lmdb"] / "train", tmp_path / "forged", width=0)
    with pytest.raises(ManifestError, match="sample 5: width is 0, expected 1 to 65535"):
        DataSet(forged)


ENCODED = ["jpg", "png", "pnm"]


@pytest.fixture(scope="module")
def differing(tmp_path_factory, encoded, photo):
    """Data sets whose images differ in size, by their encoding."""
    root = tmp_path_factory.mktemp("differing")
    for kind in ENCODED:
        folder = root / f"raw-{kind}" / "cat"
        folder.mkdir(parents=True)
        for i in range(6):
            pixels = photo(64 + i, 48 + i, i)
            data, suffix = (encoded(pixels), "jpg") if kind == "jpg" else (encode_png(pixels), "png")
            (folder / f"{i}.{suffix}").write_bytes(data)
        recode = RecodeOptions(store="raw") if kind == "pnm" else RecodeOptions()
        pack(root / f"raw-{kind}", root / kind, PackOptions(workers=1, recode=recode))
    return root


@pytest.mark.parametrize("backend", ["cpu", "dali"])
@pytest.mark.parametrize("sides", [(6000, 6000), (70, 52), (20, 20)])
@pytest.mark.parametrize("kind", ENCODED)
def test_an_image_of_another_size_than_the_index_says_is_a_bad_sample(differing, tmp_path, kind, sides, backend):
    if backend == "dali":
        pytest.importorskip("nvidia.dali")
    forged = forge(differing / kind / "train", tmp_path / "forged", width=sides[0], height=sides[1])
    for train in (True, False):
        settings = {"backend": backend, "size": 24, "threads": 1, "train": train, "augment": Augment("random_resized")}
        with open_loader(forged, 6, max_bad=1, **settings) as loader:
            (batch,) = loader
        assert batch.samples[~batch.valid].tolist() == [5] and not batch.images[~batch.valid].any()
        assert batch.images[batch.valid].flatten(1).any(1).all()
        with open_loader(forged, 6, **settings) as loader, pytest.raises(DecodeError) as caught:
            list(loader)
        with DataSet(forged) as data_set:
            shard, key = data_set.manifest.shards[0].name, data_set.key(5)
        assert (caught.value.path, caught.value.shard, caught.value.key) == (forged, shard, key)
        assert f"the index says {sides[0]}×{sides[1]}" in str(caught.value)


KEYS_OF_OTHERS = [
    (lambda keys: keys[:-1], "holds 60 keys, expected 61"),
    (lambda keys: [*keys, "more"], "holds 62 keys, expected 61"),
    (lambda keys: ["../../elsewhere", *keys[1:]], "line 1, '../../elsewhere', is not a key"),
    (lambda keys: [*keys[:-1], "/etc/passwd"], "line 61, '/etc/passwd', is not a key"),
    (lambda keys: [keys[0], "\x1b[2J", *keys[2:]], "line 2, '\\x1b[2J', is not a key"),
    (lambda keys: [keys[0], keys[0], *keys[2:]], "has been there before"),
]


@pytest.mark.parametrize(("change", "message"), KEYS_OF_OTHERS)
def test_keys_that_pack_does_not_make_are_told_of_and_not_converted(packed_folders, tmp_path, change, message, command):
    folder = shutil.copytree(packed_folders["tar"] / "train", tmp_path / "forged")
    keys = (folder / KEYS).read_text().splitlines()
    (folder / KEYS).write_text("".join(f"{key}\n" for key in change(keys)))
    reseal(folder, KEYS)
    (problem,) = verify(folder)
    assert problem.file == KEYS and message in problem.reason
    done = command("datapipe", "convert", folder, tmp_path / "out", "--format", "tar")
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("shard-*.tar.partial")) and not (tmp_path / "out" / "train").exists()


def test_a_split_that_is_there_twice_is_not_converted(packed_folders, tmp_path):
    """One of the two would be left out without a word."""
    for name in ("a", "b"):
        shutil.copytree(packed_folders["tar"] / "train", tmp_path / "both" / name)
    with pytest.raises(SettingError, match="two data sets of split 'train'"):
        convert(tmp_path / "both", tmp_path / "out", PackOptions(format="zip"))


def test_pixels_that_begin_like_a_jpeg(tmp_path):
    """An npy shard holds nothing but pixels; a light pink one is the first three bytes of a JPEG."""
    pixels = np.broadcast_to(np.array([0xFF, 0xD8, 0xFF], np.uint8), (24, 24, 3))
    (tmp_path / "raw" / "pink").mkdir(parents=True)
    (tmp_path / "raw" / "pink" / "0.png").write_bytes(encode_png(pixels))
    pack(tmp_path / "raw", tmp_path / "npy", PackOptions(format="npy", recode=RecodeOptions(store="raw"), workers=1))
    with open_loader(tmp_path / "npy" / "train", 1, size=24, train=False) as loader:
        (batch,) = loader
    assert (batch.images[0].permute(1, 2, 0).numpy() == pixels).all()


def test_what_a_shard_holds_is_counted(packed_folders, tmp_path):
    folder = shutil.copytree(packed_folders["tar"] / "train", tmp_path / "forged")
    records = np.load(folder / INDEX)
    first = Manifest.read(folder).shards[0]
    last = int(np.flatnonzero(records["shard"] == 0)[-1])
    records["shard"][last], records["offset"][last], records["size"][last] = 1, 0, 1
    write_index(folder, records)
    reseal(folder)
    message = f"has {first.num_samples - 1} samples in {first.name}, expected {first.num_samples}"
    assert [problem.reason for problem in verify(folder)] == [message]


def test_a_sample_that_ends_in_the_next_has_all_of_its_bytes(same_size, tmp_path, monkeypatch):
    """Though that one is in another piece of a block: the decoder in C reads as many as the index says."""
    monkeypatch.setattr(blocks, "PIECE_BYTES", 1)
    whole = same_size / "tar" / "train"
    records = np.load(whole / INDEX)
    end, start = int(records["offset"][6] + records["size"][6]), int(records["offset"][5])
    data = (whole / Manifest.read(whole).shards[0].name).read_bytes()[start:end]
    forged = forge(whole, tmp_path / "forged", size=len(data), checksum=sample_checksum(data))
    epochs = []
    for folder in (whole, forged):
        with open_loader(folder, 1, size=24, order="blocks", augment=Augment("none")) as loader:
            epochs.append([(batch.samples.item(), batch.images.numpy().copy()) for batch in loader])
    for (sample, image), (same_sample, same_image) in zip(*epochs, strict=True):
        assert sample == same_sample and np.array_equal(image, same_image)


def large(count: int) -> tuple[np.ndarray, Manifest]:
    """Records of several parts, and their manifest."""
    records = np.zeros(count, RECORD)
    records["size"], records["width"], records["height"] = 10, 4, 5
    records["offset"], records["shard"] = np.arange(count) // 3 * 10, np.arange(count) % 3
    shards = [
        ShardInfo(name=f"{i}", size_bytes=count // 3 * 10, xxh3_128="0" * 32, num_samples=count // 3) for i in range(3)
    ]
    manifest = Manifest(
        format="tar", kind="idx", split="train", num_samples=count, classes=["0"], channels=1, width=None, height=None,
        seed=0, shard_mib=1, shards=shards, files=[FileInfo(name=INDEX, size_bytes=0, xxh3_128="0" * 32)],
    )  # fmt: skip
    return records, manifest


@pytest.mark.parametrize("number", [0, _PART - 1, _PART, 3 * _PART - 1])
@pytest.mark.parametrize("field", ["label", "shard", "size", "offset", "width", "height", "encoding"])
def test_the_first_bad_sample_of_any_part_is_named(field, number):
    records, manifest = large(3 * _PART)
    check_records(records, manifest, Path(INDEX))
    records[field][[number, -1]] = {"size": 0, "width": 0, "height": 0, "offset": 10**9}.get(field, 999)
    with pytest.raises(ManifestError, match=rf"{INDEX}: sample {number}: {field} is "):
        check_records(records, manifest, Path(INDEX))


@pytest.mark.parametrize(("more", "is_inside"), [(0, True), (1, False), (10, False), (11, False)])
def test_a_sample_ends_where_its_shard_ends_at_the_latest(more, is_inside):
    records, manifest = large(30)
    records["offset"][7] = manifest.shards[0].size_bytes - 10 + more
    if is_inside:
        check_records(records, manifest, Path(INDEX))
    else:
        with pytest.raises(ManifestError, match=r"sample 7: offset is .* its 10 bytes end beyond the 100 of its shard"):
            check_records(records, manifest, Path(INDEX))


def harmless(folder: Path) -> None:
    """Open and go through a data set in every way: nothing but our own errors may come of it."""
    verify(folder, deep=True)
    with suppress(DatapipeError):
        info(folder)
    for order in ("full", "blocks"):
        settings = {"size": 16, "order": order, "threads": 1, "retries": 0, "max_bad": 100}
        with suppress(DatapipeError, SettingError), open_loader(folder, 2, **settings) as loader:
            for _ in loader:
                pass


HEADS = [
    b"{'descr': [('offset', '<u8'), 'fortran_order': False, 'shape': (61,), }",
    b"{'descr': '<u8', 'fortran_order': False, 'shape': (99999999999999999999,), }",
    b"{'descr': '<u8', 'fortran_order': False, 'shape': (-1,), }",
    b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
    b"{'descr': 'nonsense', 'fortran_order': False, 'shape': (1,), }",
    b"(" * 110 + b")" * 8,
    b"{'descr'\0: 1}",
    b"{" + b"-" * 100 + b"1}",
    b"\xff\xfe",
]


@pytest.mark.parametrize("head", HEADS)
def test_heads_that_numpy_stumbles_over(same_size, tmp_path, head):
    folder = shutil.copytree(same_size / "tar" / "train", tmp_path / "copy")
    content = (folder / INDEX).read_bytes()
    length = int.from_bytes(content[8:10], "little")
    (folder / INDEX).write_bytes(content[:10] + head.ljust(length - 1)[: length - 1] + b"\n" + content[10 + length :])
    reseal(folder)
    with pytest.raises(ManifestError, match=rf"{INDEX}: (cannot be read|holds)"):
        DataSet(folder)
    assert [problem.file for problem in verify(folder)] == [INDEX]


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"PK\x05\x06" + bytes(18), b"\x80\x04N."])
def test_what_is_not_an_array(same_size, tmp_path, content):
    folder = shutil.copytree(same_size / "tar" / "train", tmp_path / "copy")
    (folder / INDEX).write_bytes(content)
    reseal(folder)
    with pytest.raises(ManifestError, match=rf"{INDEX}: cannot be read"):
        DataSet(folder)


@pytest.mark.parametrize("kind", ["tar", "npy"])
def test_changed_bytes_of_the_index_do_no_harm(same_size, tmp_path, kind):
    """With a checksum that is right for them."""
    folder = shutil.copytree(same_size / kind / "train", tmp_path / "copy")
    content, place = (folder / INDEX).read_bytes(), random.Random(1)
    for _ in range(60):
        changed = bytearray(content)
        for _ in range(place.randint(1, 3)):
            changed[place.randrange(len(changed))] = place.choice((0, 1, 0x7F, 0x80, 0xFF, place.randrange(256)))
        (folder / INDEX).write_bytes(changed[: place.choice((None, None, None, place.randrange(len(changed))))])
        reseal(folder)
        harmless(folder)


def test_changed_values_of_the_manifest_do_no_harm(same_size, tmp_path):
    """In format 2, which has no checksum of itself."""
    folder = shutil.copytree(same_size / "tar" / "train", tmp_path / "copy")
    fields = json.loads((folder / MANIFEST).read_bytes()) | {"version": 2}
    del fields["xxh3_128"]
    content, place = json.dumps(fields).encode(), random.Random(2)
    for _ in range(150):
        changed = bytearray(content)
        changed[place.randrange(len(changed))] = place.choice(b'019-aE."[]{},: \\\xff\0')
        (folder / MANIFEST).write_bytes(changed)
        harmless(folder)
