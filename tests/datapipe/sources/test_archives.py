"""Images in tar archives: where they lie, ImageNet's own archives, WebDataset's shards."""

import io
import json
import os
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from datapipe.errors import MissingBackendError, SourceError
from datapipe.formats import tar_listing
from datapipe.formats.tar_listing import list_members
from datapipe.sources import open_source
from datapipe.sources.listing import PARTIAL

RANDOM = np.random.default_rng(0)
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def member(name, size=0, **fields):
    info = tarfile.TarInfo(name)
    info.size = size
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def tar(members, format=tarfile.GNU_FORMAT):
    """The bytes of an archive; members: (name or TarInfo, content)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as archive:
        for info, content in members:
            info = member(info) if isinstance(info, str) else info
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def read(samples, i, size=1 << 16):
    return bytes(samples.read(i, memoryview(bytearray(size))))


def content(samples):
    return {samples.names[i]: read(samples, i) for i in range(len(samples))}


# --- where files lie --------------------------------------------------------------------------------


def listed(path, begin=0, end=None, **options):
    fd = os.open(path, os.O_RDONLY)
    try:
        return list_members(fd, str(path), begin, end, **options)
    finally:
        os.close(fd)


@pytest.fixture
def counted(monkeypatch):
    """How often an archive was left to tarfile."""
    calls = []
    slowly = tar_listing._list_slowly
    monkeypatch.setattr(tar_listing, "_list_slowly", lambda *arguments: calls.append(1) or slowly(*arguments))
    return calls


def sparse(path):
    """`x.tar` with a sparse file and one that is not, as GNU tar stores them."""
    (path / "a.jpg").write_bytes(b"a" * 5)
    with open(path / "sparse.jpg", "wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"x" * 5000)
    subprocess.run(["tar", "--sparse", "-cf", "x.tar", "a.jpg", "sparse.jpg"], cwd=path, check=True)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("b.jpg", {"ustar", "gnu", "pax"}),
        ("deep/" * 30 + "b.jpg", {"ustar"}),  # goes into its prefix
        ("é" * 20 + ".jpg", {"ustar", "gnu"}),
        ("x" * 99 + "/" + "y" * 60 + ".jpg", {"ustar"}),
    ],
)
@pytest.mark.parametrize("mtime", [0, 1.5])
def test_members_are_where_tarfile_finds_them(tmp_path, counted, format, name, plain, mtime):
    sizes = [0, 1, 511, 512, 513, 5000, 70_000]
    members = [(member(f"{size}.jpg", mtime=mtime), RANDOM.bytes(size)) for size in sizes]
    members[3:3] = [(member("folder", type=tarfile.DIRTYPE), b""), (member(name, mtime=mtime), b"here")]
    data = tar(members, FORMATS[format])
    (tmp_path / "x.tar").write_bytes(b"before" + data + b"behind")
    archive = listed(tmp_path / "x.tar", 6, 6 + len(data), keep_content=lambda name: name.startswith("5"))
    with tarfile.open(fileobj=io.BytesIO(data)) as opened:
        truth = {info.name: opened.extractfile(info).read() for info in opened if info.isreg()}
    assert [member.name for member in archive.members] == list(truth)
    whole = (tmp_path / "x.tar").read_bytes()
    for found in archive.members:
        assert whole[found.offset : found.offset + found.size] == truth[found.name]
        assert found.content == (truth[found.name] if found.name.startswith("5") else None)
    assert not archive.others
    assert bool(counted) == (format not in plain)


def test_what_is_no_regular_file_is_named(tmp_path, counted):
    kinds = [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE]
    others = [(member(f"{i}.jpg", type=kind, linkname="/etc/passwd"), b"") for i, kind in enumerate(kinds)]
    link = "link that leads to no file of the archive"
    for rest in ([], [("long" * 50 + ".jpg", b"z")]):  # with tarfile, too
        files = [("../../b.jpg", b"b"), ("/c.jpg", b"c"), *rest]
        (tmp_path / "x.tar").write_bytes(tar([("a.jpg", b"a"), *others, *files]))
        archive = listed(tmp_path / "x.tar")
        named = [("device", "2.jpg"), ("device", "3.jpg"), ("pipe", "4.jpg"), (link, "0.jpg"), (link, "1.jpg")]
        assert archive.others == named and bool(counted) == bool(rest)
        assert [member.name for member in archive.members][:3] == ["a.jpg", "../../b.jpg", "/c.jpg"]


def test_sparse_files_are_not_taken_for_images(tmp_path):
    sparse(tmp_path)
    archive = listed(tmp_path / "x.tar")
    assert [member.name for member in archive.members] == ["a.jpg"]
    assert archive.others == [("sparse file", "sparse.jpg")]


@pytest.mark.parametrize("format", ["gnu", "pax"])
@pytest.mark.parametrize("long", [False, True])
def test_an_archive_cut_anywhere_is_refused(tmp_path, format, long):
    name = "long" * 40 if long else "a"
    data = tar([(f"{name}.jpg", b"1" * 700), ("b.jpg", b"2" * 10)], FORMATS[format]).rstrip(b"\0")
    data += bytes(-len(data) % 512)
    assert listed_size(tmp_path, data + bytes(512)) == 2
    for size in [*range(0, len(data), 100), len(data) - 1, len(data)]:
        with pytest.raises(SourceError, match=r"x\.tar: is a corrupt or truncated tar archive"):
            listed_size(tmp_path, data[:size])


def listed_size(folder, data):
    (folder / "x.tar").write_bytes(data)
    return len(listed(folder / "x.tar").members)


@pytest.mark.parametrize("spoilt", [range(0, 100), range(124, 136), range(148, 156), range(512 + 1024, 512 + 1124)])
def test_a_corrupt_header_is_refused(tmp_path, spoilt):
    data = bytearray(tar([("a.jpg", b"1" * 700), ("b.jpg", b"2" * 10)]))
    for i in spoilt:
        data[i] ^= 0x15
    with pytest.raises(SourceError, match="corrupt or truncated"):
        listed_size(tmp_path, data)


@pytest.mark.parametrize("size", [1 << 40, 1 << 70, -1])
@pytest.mark.parametrize("type", [b"0", b"x", b"L"])
def test_a_size_that_lies_is_refused(tmp_path, size, type):
    header = bytearray(member("a.jpg", type=type).tobuf(tarfile.GNU_FORMAT)[:512])
    header[124:136] = tarfile.itn(size % (1 << 80), 12, tarfile.GNU_FORMAT) if size > 0 else b"\xff" * 12
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    with pytest.raises(SourceError, match="corrupt or truncated"):
        listed_size(tmp_path, bytes(header) + b"x" * 2048 + bytes(1024))


def behind(*archives):
    """Archives one behind the other, each with its end mark, as `cat` joins them."""
    return b"".join(tar(members) for members in archives)


LONG = "long" * 50


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (behind([("a.jpg", b"a")], [("b.jpg", b"b")]), ["a.jpg", "b.jpg"]),
        (behind([("a.jpg", b"a")], [], [], [("b.jpg", b"b"), ("c.jpg", b"c" * 9999)]), ["a.jpg", "b.jpg", "c.jpg"]),
        (behind([(LONG, b"a")], [("b.jpg", b"b")], [(LONG + "2", b"c")]), [LONG, "b.jpg", LONG + "2"]),
        (behind([("a.jpg", b"a")], [(LONG, b"b")]), ["a.jpg", LONG]),
        (tar([("a.jpg", b"a")])[:1024] + bytes(512) + tar([("b.jpg", b"b")]), ["a.jpg", "b.jpg"]),
        (tar([("a.jpg", b"a")]) + bytes(1 << 20) + tar([("b.jpg", b"b")]), ["a.jpg", "b.jpg"]),
        (tar([("a.jpg", b"a")]) + bytes(1 << 20), ["a.jpg"]),
    ],
)  # fmt: skip
def test_what_lies_behind_an_end_mark_is_listed(tmp_path, data, names):
    (tmp_path / "x.tar").write_bytes(data)
    members = listed(tmp_path / "x.tar").members
    assert [member.name for member in members] == names
    with tarfile.open(tmp_path / "x.tar", ignore_zeros=True) as archive:
        truth = [archive.extractfile(info).read() for info in archive]
    assert [data[member.offset : member.offset + member.size] for member in members] == truth


@pytest.mark.parametrize("tail", [b"x", b"no archive" * 99, bytes(700) + b"\x01", tar([("b.jpg", b"b" * 999)])[:1024]])
@pytest.mark.parametrize("name", ["a.jpg", LONG])
def test_what_lies_behind_an_end_mark_and_is_no_archive_is_refused(tmp_path, tail, name):
    with pytest.raises(SourceError, match="corrupt or truncated tar archive"):
        listed_size(tmp_path, tar([(name, b"a")]) + tail)


@pytest.mark.parametrize("rest", [[], [(LONG, b"")]])
def test_links_stand_for_what_they_lead_to(tmp_path, rest):
    """Whether they come before or behind it; hard links lead from the top, symbolic ones from their folder."""

    def link(name, target, kind):
        return member(name, type=kind, linkname=target), b""

    members = [
        link("early.jpg", "d/a.jpg", tarfile.SYMTYPE), ("./d/a.jpg", b"abc"), link("d/b.jpg", "a.jpg", tarfile.SYMTYPE),
        link("d/c.jpg", "./d/a.jpg", tarfile.LNKTYPE), link("e/d.jpg", "../d/b.jpg", tarfile.SYMTYPE),
        link("lost.jpg", "a.jpg", tarfile.LNKTYPE), link("one", "two", tarfile.SYMTYPE),
        link("two", "one", tarfile.SYMTYPE), link("up.jpg", "../../etc/passwd", tarfile.SYMTYPE), *rest,
    ]  # fmt: skip
    data = tar(members)
    (tmp_path / "x.tar").write_bytes(data)
    archive = listed(tmp_path / "x.tar")
    content = {
        member.name: data[member.offset : member.offset + member.size] for member in archive.members if member.size
    }
    assert content == dict.fromkeys(("early.jpg", "./d/a.jpg", "d/b.jpg", "d/c.jpg", "e/d.jpg"), b"abc")
    assert [name for _, name in archive.others] == ["lost.jpg", "one", "two", "up.jpg"]


# --- ImageNet ---------------------------------------------------------------------------------------

WNIDS = ["n01440764", "n01443537", "n02084071"]


def jpegs(count):
    return [RANDOM.bytes(int(size)) for size in RANDOM.integers(1, 9000, count)]


def class_tars():
    """The class tars by name, and the truth: name -> image."""
    tars, truth = {}, {}
    for number, wnid in enumerate(WNIDS):
        images = {f"{wnid}_{i}": data for i, data in enumerate(jpegs(4 + number))}
        tars[f"{wnid}.tar"] = tar([(f"{name}.JPEG", data) for name, data in images.items()])
        truth |= {f"{wnid}/{name}": data for name, data in images.items()}
    return tars, truth


def put_train(root, archived="archive"):
    tars, truth = class_tars()
    if archived == "archive":
        (root / "ILSVRC2012_img_train.tar").write_bytes(tar(reversed(tars.items())))
        return truth
    for name, data in tars.items():
        (root / "train").mkdir(exist_ok=True)
        if archived == "tars":
            (root / "train" / name).write_bytes(data)
        else:
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                for member in archive:
                    path = root / "train" / name[:-4] / member.name
                    path.parent.mkdir(exist_ok=True)
                    path.write_bytes(archive.extractfile(member).read())
    return truth


def meta_mat():
    """`meta.mat` with the fields of the real one, classes in another order than their ids, and inner nodes behind."""
    savemat = pytest.importorskip("scipy.io").savemat
    synsets = np.zeros((5, 1), [(name, object) for name in ("ILSVRC2012_ID", "WNID", "words", "num_children")])
    for row, (number, wnid) in enumerate([(2, WNIDS[0]), (3, WNIDS[1]), (1, WNIDS[2]), (1001, "n0"), (1002, "n1")]):
        synsets[row, 0] = (float(number), wnid, f"word {number}", float(number > 1000))
    file = io.BytesIO()
    savemat(file, {"synsets": synsets})
    return file.getvalue()


ID = {1: WNIDS[2], 2: WNIDS[0], 3: WNIDS[1]}
DEVKIT = "ILSVRC2012_devkit_t12"


def put_devkit(root, numbers, archived=True):
    files = {
        "data/meta.mat": meta_mat(),
        "data/ILSVRC2012_validation_ground_truth.txt": "".join(f"{number}\n" for number in numbers).encode(),
        "readme.txt": b"",
    }
    if archived:
        with tarfile.open(root / f"{DEVKIT}.tar.gz", "w:gz") as archive:
            for name, data in files.items():
                archive.addfile(member(f"{DEVKIT}/{name}", len(data)), io.BytesIO(data))
        return
    for name, data in files.items():
        (root / DEVKIT / name).parent.mkdir(parents=True, exist_ok=True)
        (root / DEVKIT / name).write_bytes(data)


def put_val(root):
    """A val archive of seven images; their numbers of classes, and the truth."""
    numbers = [2, 2, 1, 3, 1, 2, 3]
    images = jpegs(len(numbers))
    names = [f"ILSVRC2012_val_{i:08d}" for i in range(1, len(numbers) + 1)]
    members = [(f"{name}.JPEG", data) for name, data in zip(names, images, strict=True)]
    (root / "ILSVRC2012_img_val.tar").write_bytes(tar(members[3:] + members[:3]))
    truth = {f"{ID[number]}/{name}": data for number, name, data in zip(numbers, names, images, strict=True)}
    return numbers, truth


@pytest.mark.parametrize("archived", ["archive", "tars", "folders"])
@pytest.mark.parametrize("kind", ["auto", "imagenet"])
def test_imagenet_train(tmp_path, archived, kind):
    truth = put_train(tmp_path, archived)
    source = open_source(tmp_path, kind)
    assert source.kind == ("imagefolder" if (archived, kind) == ("folders", "auto") else "imagenet")
    assert source.classes == WNIDS and list(source.splits) == ["train"]
    samples = source.splits["train"]
    assert content(samples) == truth
    assert [WNIDS[label] for label in samples.labels] == [name.split("/")[0] for name in samples.names]


@pytest.mark.parametrize("devkit", [True, False])
@pytest.mark.parametrize("with_train", [True, False])
def test_imagenet_val(tmp_path, devkit, with_train):
    numbers, truth = put_val(tmp_path)
    put_devkit(tmp_path, numbers, archived=devkit)
    if with_train:
        put_train(tmp_path)
    source = open_source(tmp_path)
    assert source.kind == "imagenet" and source.classes == WNIDS
    samples = source.splits["val"]
    assert content(samples) == truth
    assert [WNIDS[label] for label in samples.labels] == [name.split("/")[0] for name in samples.names]
    assert ("train" in source.splits) == with_train


def test_imagenet_with_val_sorted_into_folders(tmp_path):
    put_train(tmp_path)
    put_val(tmp_path)
    for wnid in WNIDS:
        (tmp_path / "val" / wnid).mkdir(parents=True)
        (tmp_path / "val" / wnid / f"{wnid}.JPEG").write_bytes(wnid.encode())
    source = open_source(tmp_path)
    assert content(source.splits["val"]) == {f"{wnid}/{wnid}": wnid.encode() for wnid in WNIDS}


SOLUTION = "LOC_val_solution.csv"


def put_solution(folder, truth, other=""):
    """Kaggle's table; `other`: the class of the first image in it, if not its own."""
    rows = [(name, wnid) for wnid, name in (key.split("/") for key in truth)]
    rows = [(name, other if other and number == 0 else wnid) for number, (name, wnid) in enumerate(rows)]
    boxes = [f"{wnid} 1 2 30 40 " * (1 + number % 2) for number, (_, wnid) in enumerate(rows)]
    lines = [f"{name},{box}\n" for (name, _), box in zip(rows, boxes, strict=True)]
    (folder / SOLUTION).write_text("ImageId,PredictionString\n" + "".join(lines))


def put_flat_val(folder):
    """The val images in a folder, not sorted by class: numbers of classes, and the truth by key."""
    numbers, truth = put_val(folder)
    (folder / "ILSVRC2012_img_val.tar").unlink()
    (folder / "val").mkdir()
    for key, data in truth.items():
        (folder / "val" / f"{key.split('/')[1]}.JPEG").write_bytes(data)
    return numbers, truth


def check_flat(source, truth):
    samples = source.splits["val"]
    assert source.kind == "imagenet" and source.classes == WNIDS
    assert content(samples) == {key.split("/")[1]: data for key, data in truth.items()}
    wnids = {key.split("/")[1]: key.split("/")[0] for key in truth}
    assert [WNIDS[label] for label in samples.labels] == [wnids[name] for name in samples.names]


@pytest.mark.parametrize(
    ("labels", "train"),
    [("devkit", ""), ("unpacked devkit", "folders"), ("solution", "archive"), ("devkit and solution", "tars")],
)
def test_imagenet_with_a_flat_val_folder(tmp_path, labels, train):
    numbers, truth = put_flat_val(tmp_path)
    if "devkit" in labels:
        put_devkit(tmp_path, numbers, archived="unpacked" not in labels)
    if "solution" in labels:
        put_solution(tmp_path, truth)
    if train:
        put_train(tmp_path, train)
    source = open_source(tmp_path)
    check_flat(source, truth)
    assert ("train" in source.splits) == bool(train)


def test_imagenet_as_kaggle_has_it(tmp_path):
    inside = tmp_path / "ILSVRC" / "Data" / "CLS-LOC"
    inside.mkdir(parents=True)
    _, truth = put_flat_val(inside)
    put_train(inside, "folders")
    with pytest.raises(SourceError, match=r"without its labels: .*LOC_val_solution\.csv .*is missing"):
        open_source(inside)
    put_solution(tmp_path, truth)
    for name in ("LOC_train_solution.csv", "LOC_synset_mapping.txt", "LOC_sample_submission.csv"):
        (tmp_path / name).write_text("")
    check_flat(open_source(tmp_path, strict=True), truth)
    with pytest.raises(SourceError, match=rf"give {tmp_path}, which has them in LOC_val_solution.csv"):
        open_source(inside)


def test_side_files_of_imagenet_are_not_left_out(tmp_path, caplog):
    _, truth = put_flat_val(tmp_path)
    put_train(tmp_path, "folders")
    put_solution(tmp_path, truth)
    (tmp_path / "LOC_train_solution.csv").write_text("")
    check_flat(open_source(tmp_path, strict=True), truth)
    missing = sorted(truth, key=lambda key: key[-8:])[0].split("/")[1]
    (tmp_path / "val" / f"{missing}.JPEG").unlink()
    open_source(tmp_path)
    assert "left out 1 entry (labels of val images that are not there): " in caplog.text
    assert f"{SOLUTION}: {missing}" in caplog.text
    with pytest.raises(SourceError, match=r"--strict: .*labels of val images that are not there"):
        open_source(tmp_path, strict=True)


def test_labels_of_val_that_cannot_be_right(tmp_path):
    numbers, truth = put_flat_val(tmp_path)
    put_devkit(tmp_path, numbers)
    put_solution(tmp_path, truth, other=WNIDS[1])
    with pytest.raises(SourceError, match=rf"{SOLUTION}: has other labels than .*{DEVKIT}.tar.gz: remove one"):
        open_source(tmp_path)
    (tmp_path / f"{DEVKIT}.tar.gz").unlink()
    image = next(iter(truth)).split("/")[1]
    for text in ("a,b\n1,2\n", f"ImageId,PredictionString\n{image},\n", f"ImageId,PredictionString\n{image}\n",
                 f"ImageId,PredictionString\n{image},n01440764 1 2 3 4 n01443537 1 2 3 4\n", "\xff"):  # fmt: skip
        (tmp_path / SOLUTION).write_text(text, encoding="latin1")
        with pytest.raises(SourceError, match=f"{SOLUTION}: is not Kaggle's table"):
            open_source(tmp_path)
    put_solution(tmp_path, dict(list(truth.items())[1:]))
    with pytest.raises(SourceError, match=rf"does not fit .*{SOLUTION}, which has labels for 6 images"):
        open_source(tmp_path)
    put_solution(tmp_path, truth)
    (tmp_path / "val" / WNIDS[0]).mkdir()
    with pytest.raises(SourceError, match=f"holds images beside folders, such as {WNIDS[0]}: sort all of them"):
        open_source(tmp_path)


def test_imagenet_from_many_threads_and_from_its_fields(tmp_path):
    put_train(tmp_path)
    samples = open_source(tmp_path).splits["train"]
    again = type(samples)(samples.files, samples.file, samples.offset, samples.size, samples.names, samples.labels)
    with ThreadPoolExecutor(16) as pool:
        for buffer_size in (0, 100, 20_000):
            found = list(pool.map(lambda i: read(again, i % len(again), buffer_size), range(200)))  # noqa: B023
            assert found == [read(samples, i % len(samples)) for i in range(200)]
    again.close()
    samples.close()


def test_what_is_no_image_in_imagenet_is_left_out_aloud(tmp_path, caplog):
    link = (member("n1_2.JPEG", type=tarfile.SYMTYPE, linkname="/etc/passwd"), b"")
    inner = tar([("n1_1.JPEG", b"1"), link, ("notes.txt", b""), ("README", b""), ("../../up.JPEG", b"up")])
    (tmp_path / "ILSVRC2012_img_train.tar").write_bytes(tar([("./n00000001.tar", inner), ("notes.txt", b""), link]))
    samples = open_source(tmp_path).splits["train"]
    assert content(samples) == {"n00000001/n1_1": b"1", "n00000001/up": b"up"}
    for text in (
        "2 entries (link that leads to no file",
        "1 entry (not an image)",
        "1 entry (not named as a class's tar)",
    ):
        assert text in caplog.text


def test_broken_imagenet_is_named(tmp_path):
    tars, _ = class_tars()
    path = tmp_path / "ILSVRC2012_img_train.tar"
    whole = tar(tars.items())

    def refused(data, message):
        path.write_bytes(data)
        with pytest.raises(SourceError, match=message):
            open_source(tmp_path)

    refused(whole[: len(whole) // 2], r"img_train\.tar: is a corrupt or truncated")
    refused(b"no tar at all" * 100, r"img_train\.tar: is a corrupt or truncated tar archive, or none")
    refused(tar([("n00000001.tar", b"no tar" * 200)]), r"img_train\.tar: n00000001\.tar: is a corrupt or truncated")
    refused(tar([("n00000001.tar", tars["n01440764.tar"][:2000])]), r"n00000001\.tar: is a corrupt or truncated")
    refused(tar([("n00000001.tar", b"")]), r"n00000001\.tar: is a corrupt or truncated")
    refused(tar([("n00000001.tar", tars["n01440764.tar"])] * 2), r"holds n00000001\.tar twice")
    refused(tar([("readme.txt", b"")]), "holds no class tars")
    with pytest.raises(SourceError, match="give the one that holds the archives"):
        open_source(path)
    path.unlink()
    with pytest.raises(SourceError, match=r"holds neither ILSVRC2012_img_train\.tar nor"):
        open_source(tmp_path, "imagenet")


def test_an_archive_that_shrinks_after_it_was_listed(tmp_path):
    put_train(tmp_path)
    samples = open_source(tmp_path).splits["train"]
    os.truncate(tmp_path / "ILSVRC2012_img_train.tar", int(samples.offset[-1]) + 1)
    with pytest.raises(ValueError, match="is truncated: the archive ends after 1 of its"):
        read(samples, len(samples) - 1)


def test_val_without_what_it_needs(tmp_path, monkeypatch):
    numbers, _ = put_val(tmp_path)
    with pytest.raises(SourceError, match=rf"without its labels: {DEVKIT} or {DEVKIT}\.tar\.gz .* is missing"):
        open_source(tmp_path)
    devkit = tmp_path / f"{DEVKIT}.tar.gz"

    def refused(message):
        with pytest.raises(SourceError, match=message):
            open_source(tmp_path)

    put_devkit(tmp_path, numbers[:-1])
    refused(rf"does not fit .*{DEVKIT}\.tar\.gz, which has labels for 6 images, and none for number 7")
    put_devkit(tmp_path, [*numbers, 77])
    refused("ground_truth.txt has a line that is not the number of a class: 77")
    put_devkit(tmp_path, [*numbers, "cat"])
    refused("ground_truth.txt has a line")
    devkit.write_bytes(devkit.read_bytes()[:300])
    refused(r"devkit_t12\.tar\.gz: is a truncated or corrupt archive")
    with tarfile.open(devkit, "w:gz") as archive:
        archive.addfile(member("data/meta.mat", 9), io.BytesIO(b"no matlab"))
    refused("lacks data/ILSVRC2012_validation_ground_truth.txt")
    devkit.unlink()
    put_devkit(tmp_path, numbers, archived=False)
    (tmp_path / DEVKIT / "data" / "meta.mat").write_bytes(b"no matlab")
    refused("data/meta.mat cannot be read")
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(MissingBackendError, match=r"pip install '\.\[imagenet\]'"):
        open_source(tmp_path)


def test_val_of_other_classes_than_train(tmp_path):
    (tmp_path / "ILSVRC2012_img_train.tar").write_bytes(tar([("n00000001.tar", tar([("a.JPEG", b"a")]))]))
    numbers, _ = put_val(tmp_path)
    put_devkit(tmp_path, numbers)
    with pytest.raises(SourceError, match="classes that the train split does not have: n01440764"):
        open_source(tmp_path)


def test_an_archive_that_is_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "raw").mkdir()
    truth = put_train(tmp_path / "elsewhere")
    link = tmp_path / "raw" / "ILSVRC2012_img_train.tar"
    link.symlink_to(tmp_path / "elsewhere" / link.name)
    with pytest.raises(SourceError, match=r"img_train\.tar: is a link that leads out of the source; --outside"):
        open_source(tmp_path / "raw")
    assert content(open_source(tmp_path / "raw", outside=True).splits["train"]) == truth


# --- WebDataset -------------------------------------------------------------------------------------


def shards(root, names, label="cls", count=5):
    """Shards as the webdataset library writes them: path -> samples (key, image, label)."""
    webdataset = pytest.importorskip("webdataset")
    truth = {}
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        with webdataset.TarWriter(str(root / name)) as writer:
            for i in range(count):
                key, image, value = f"part{number}/{i:04d}", jpegs(1)[0], (number + i) % count
                extension = ("jpg", "jpeg", "png")[i % 3]
                content = str(value) if label == "cls" else {"label": value, "caption": "x"}
                writer.write({"__key__": key, extension: image, label: content, "txt": "caption"})
                truth.setdefault(name, {})[key] = (image, value)
    return truth


@pytest.mark.parametrize("label", ["cls", "json"])
@pytest.mark.parametrize(
    ("train", "val"),
    [
        (["imagenet-train-000000.tar", "imagenet-train-000001.tar"], ["imagenet-val-000000.tar"]),
        (["Training_0.tar", "Training_1.tar"], ["Validation_0.tar"]),
        (["train/a.tar", "train/b.tar"], ["test/c.tar"]),
    ],
)
def test_webdataset(tmp_path, caplog, label, train, val):
    truth = shards(tmp_path / "raw", [*train, *val], label)
    source = open_source(tmp_path / "raw")
    assert source.kind == "webdataset"
    labels = [value for samples in truth.values() for _, value in samples.values()]
    assert source.classes == [str(i) for i in range(max(labels) + 1)]
    for split, names in (("train", train), ("val", val)):
        samples = source.splits[split]
        expected = {key: pair for name in names for key, pair in truth[name].items()}
        assert content(samples) == {key: image for key, (image, _) in expected.items()}
        assert samples.labels.tolist() == [expected[key][1] for key in samples.names]
    assert f"left out {5 * len(truth)} entries (not named .jpg" in caplog.text  # the captions


def test_webdataset_as_the_library_reads_it(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    shards(tmp_path / "raw", ["train-000000.tar"], count=20)
    path = tmp_path / "raw" / "train-000000.tar"
    read_by_it = {
        sample["__key__"]: (next(sample[e] for e in ("jpg", "jpeg", "png") if e in sample), int(sample["cls"]))
        for sample in webdataset.WebDataset(str(path), shardshuffle=False)
    }
    samples = open_source(path).splits["train"]  # a shard by itself
    labels = dict(zip(samples.names, samples.labels.tolist(), strict=True))
    assert {key: (image, labels[key]) for key, image in content(samples).items()} == read_by_it
    assert len(read_by_it) == 20


def test_shards_of_the_library_need_no_tarfile(tmp_path, counted):
    shards(tmp_path / "raw", ["000.tar"])  # each member with a pax header: its time is a fraction
    open_source(tmp_path / "raw")
    assert not counted


def test_webdataset_of_ours(tmp_path):
    """What `datapipe pack` writes, without the manifest that makes it a data set."""
    members = [("a/1.jpg", b"image 1"), ("a/1.cls", b"2"), ("b-2.jpg", b"image 2"), ("b-2.cls", b"0")]
    (tmp_path / "shard-000000.tar").write_bytes(tar(members, tarfile.USTAR_FORMAT))
    source = open_source(tmp_path)
    assert source.kind == "webdataset" and source.classes == ["0", "1", "2"]
    assert content(source.splits["train"]) == {"a/1": b"image 1", "b-2": b"image 2"}


def test_names_as_labels_and_cls_before_json(tmp_path):
    members = [
        *[("./a.jpg", b"a"), ("./a.json", json.dumps({"label": "zebra"}).encode())],
        *[("b.JPG", b"b"), ("b.json", json.dumps({"class": "cat"}).encode())],
        *[("c.json", b"{"), ("c.jpg", b"c"), ("c.cls", b" 3\n")],
        *[("d.jpg", b"d"), ("d.json", json.dumps({"class_id": 8, "cls": 8}).encode()), ("d.seg.png", b"")],
    ]
    (tmp_path / "x.tar").write_bytes(tar(members))
    with pytest.raises(SourceError, match=r"mixes labels that are numbers \(3, 8\) with names \(cat, zebra\)"):
        open_source(tmp_path)
    source = open_source(tmp_path, labels="names")
    assert source.classes == ["3", "8", "cat", "zebra"]
    assert source.splits["train"].labels.tolist() == [3, 2, 0, 1]
    assert source.splits["train"].names == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("k/a.jpg", b"a")], r"x\.tar, key k/a: has an image, but no label"),
        ([("a.cls", b"1")], r"x\.tar, key a: has a label, but no image"),
        ([("a.txt", b""), ("a.json", b"{}")], r"key a: has a label, but no image"),
        ([("a.jpg", b"a"), ("a.png", b"a"), ("a.cls", b"1")], r"key a: has two images: a\.jpg and a\.png"),
        ([("a.jpg", b"a"), ("a.cls", b"1")] * 2, r"key a: has two images"),
        ([("a.jpg", b"a"), ("a.cls", b"\0cat")], r"key a: its \.cls holds no whole number or name, but '\\x00cat'"),
        ([("a.jpg", b"a"), ("a.cls", b"")], r"key a: its \.cls holds no whole number or name"),
        ([("a.jpg", b"a"), ("a.cls", b"1.5")], r"key a: its \.cls holds no whole number or name"),
        ([("a.jpg", b"a"), ("a.cls", b"-1")], "holds the label -1"),
        ([("a.jpg", b"a"), ("a.json", b"{")], r"key a: its \.json cannot be read"),
        ([("a.jpg", b"a"), ("a.json", b"\xff\xfe")], r"key a: its \.json cannot be read"),
        ([("a.jpg", b"a"), ("a.json", b"[1]")], r"key a: its \.json has no whole number or name under any of label"),
        ([("a.jpg", b"a"), ("a.json", b'{"name": 1}')], r"key a: its \.json has no whole number"),
        ([("a.jpg", b"a"), ("a.json", b'{"label": true}')], r"key a: its \.json has no whole number"),
        ([("a.jpg", b"a"), ("a.json", b'{"label": 1.5}')], r"key a: its \.json has no whole number"),
        ([("a.jpg", b"a"), ("a.json", b'{"label": ""}')], r"key a: its \.json has no whole number"),
        ([("readme.txt", b"")], "split train holds no images"),
    ],
)
def test_bad_shards_are_named(tmp_path, members, message):
    (tmp_path / "x.tar").write_bytes(tar(members))
    with pytest.raises(SourceError, match=message):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (("k/a.webp", b"x"), r"k/a\.webp \(not named \.jpg, .*\) is not taken"),
        ((member("k/a.jpg", type=tarfile.SYMTYPE, linkname="no"), b""), r"k/a\.jpg \(link that leads to no file"),
        ((member("k/a.png", type=tarfile.FIFOTYPE), b""), r"k/a\.png \(pipe\) is not taken"),
        ((member("k/a.jpg", type=b"V"), b""), r"k/a\.jpg \(member of unknown type\) is not taken"),
    ],
)
def test_what_lies_in_place_of_an_image_is_named(tmp_path, image, message):
    (tmp_path / "x.tar").write_bytes(tar([*SAMPLE, image, ("k/a.cls", b"0")]))
    with pytest.raises(SourceError, match=rf"x\.tar, key k/a: has a label, but no image: {message}"):
        open_source(tmp_path)


def test_a_sparse_image_is_named(tmp_path):
    sparse(tmp_path)
    (tmp_path / "a.jpg").unlink()
    (tmp_path / "sparse.jpg").unlink()
    with open(tmp_path / "x.tar", "ab") as file:
        file.write(tar([("a.cls", b"0"), ("sparse.cls", b"0")]))
    with pytest.raises(SourceError, match=r"sparse\.jpg \(sparse file\) is not taken; sparse files: pack them without"):
        open_source(tmp_path / "x.tar")


def test_a_member_that_names_a_split(tmp_path):
    members = [(f"{name}.{suffix}", content) for name, split in (("a", b"train"), ("b", b"val\n"))
               for suffix, content in (("jpg", b"x"), ("cls", b"0"), ("split", split))]  # fmt: skip
    (tmp_path / "x.tar").write_bytes(tar(members))
    assert {split: samples.names for split, samples in open_source(tmp_path).splits.items()} == {
        "train": ["a"], "val": ["b"],
    }  # fmt: skip


def test_links_in_shards_are_left_out_aloud(tmp_path, caplog):
    link = (member("b.jpg", type=tarfile.SYMTYPE, linkname="/etc/passwd"), b"")
    (tmp_path / "x.tar").write_bytes(tar([("a.jpg", b"a"), ("a.cls", b"0"), link, (".hidden.jpg", b"")]))
    assert content(open_source(tmp_path).splits["train"]) == {"a": b"a"}
    assert "left out 1 entry (link that leads to no file of the archive): " in caplog.text
    assert "left out 1 entry (hidden, or a system's): " in caplog.text and ".hidden.jpg" in caplog.text


def test_a_cut_shard_is_named(tmp_path):
    data = tar([("a.jpg", b"a" * 9000), ("a.cls", b"0")])
    (tmp_path / "x-000.tar").write_bytes(data)
    (tmp_path / "x-001.tar").write_bytes(data[:5000])
    with pytest.raises(SourceError, match=r"x-001\.tar: is a corrupt or truncated tar archive"):
        open_source(tmp_path)


@pytest.mark.parametrize("name", ["x.tar.gz", "x.tgz", "train/x.tar.zst"])
def test_compressed_shards_are_refused(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"\x1f\x8b")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(SourceError, match=rf"{name}: is compressed, .* unpack it to \.tar"):
            open_source(path)


def test_a_folder_of_shards_that_is_a_link(tmp_path):
    shards(tmp_path / "elsewhere", ["a.tar"])
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "train").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SourceError, match=r"train/a\.tar: is a link that leads out of the source; --outside"):
        open_source(tmp_path / "raw")
    assert len(open_source(tmp_path / "raw", outside=True).splits["train"]) == 5


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["x-{train}-0", "x-{val}-0"], {"train": 1, "val": 1}),
        (["train-0", "testing-0"], {"train": 1, "val": 1}),
        (["TRAIN-0", "Eval-0", "holdout-0"], {"train": 1, "val": 1}),
        (["imagenet-train-0", "imagenet-val-0", "other-0"], "names a split, and other-0.tar does not"),
        (["train/0", "val/0", "extra/0"], "names a split, and extra/0.tar does not"),
        (["train/0", "1"], "names a split, and 1.tar does not"),
        (["imagenettrain-0", "imagenetval-0"], "imagenettrain-0.tar names a split, and imagenetval-0.tar does not"),
        (["train-val-0", "val-0"], "has train and val in it"),
        (["a-0", "b-0"], {"train": 2}),
    ],
)
def test_shards_of_splits(tmp_path, files, expected):
    for number, name in enumerate(files):
        path = tmp_path / f"{name}.tar"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(tar([(f"{number}.jpg", b"x"), (f"{number}.cls", b"0")]))
    if isinstance(expected, str):
        with pytest.raises(SourceError, match=expected):
            open_source(tmp_path)
        return
    assert {split: len(samples) for split, samples in open_source(tmp_path).splits.items()} == expected


SAMPLE = [("a.jpg", b"a"), ("a.cls", b"0")]


@pytest.mark.parametrize(
    ("data", "reason", "names"),
    [
        (tar([*SAMPLE, ("a.txt", b"x"), ("b.webp", b"x")]), "not named .jpg, .jpeg, .png, .cls, .json", ["a"]),
        (tar([*SAMPLE, ("._a.jpg", b"x"), ("__MACOSX/._a.jpg", b""), ("@eaDir/b.jpg", b"")]), "hidden, or", ["a"]),
        (tar([*SAMPLE, (member("b.jpg", type=tarfile.SYMTYPE, linkname="c"), b"")]), "link that leads to no", ["a"]),
        (tar([*SAMPLE, (member("b.jpg", type=tarfile.FIFOTYPE), b"")]), "pipe", ["a"]),
        (tar([*SAMPLE, (member("b.jpg", type=b"V"), b"")]), "member of unknown type", ["a"]),
        (behind(SAMPLE, [("b.jpg", b"b"), ("b.cls", b"0")]), None, ["a", "b"]),
        (tar([*SAMPLE, (member("b.jpg", type=b"1", linkname="a.jpg"), b""), ("b.cls", b"0.0")]), None, ["a", "b"]),
    ],
)  # fmt: skip
def test_nothing_of_a_shard_is_missing_without_a_word(tmp_path, caplog, data, reason, names):
    (tmp_path / "x.tar").write_bytes(data)
    assert open_source(tmp_path).splits["train"].names == names
    if reason is None:
        assert not caplog.records and open_source(tmp_path, strict=True)
        return
    assert f"({reason}" in caplog.text
    with pytest.raises(SourceError, match=rf"--strict: .*\({reason}.*x\.tar: "):
        open_source(tmp_path, strict=True)


def test_what_lies_beside_shards_is_counted(tmp_path, caplog):
    (tmp_path / "train").mkdir()
    for path in ("train/0.tar", "train/1.TAR"):
        (tmp_path / path).write_bytes(tar([(f"{path[6]}.jpg", b"x"), (f"{path[6]}.cls", b"0")]))
    for path in ("train/2.tar.part", "train/3.jpg", "train/0.idx", "notes.md", "old.zip"):
        (tmp_path / path).write_bytes(b"")
    (tmp_path / "train" / "deeper").mkdir()
    assert len(open_source(tmp_path, "webdataset").splits["train"]) == 2
    others = "old.zip, notes.md, train/0.idx, train/3.jpg, train/deeper"
    assert f"left out 5 entries (beside the .tar files): {', '.join(sorted(others.split(', ')))}\n" in caplog.text
    assert f"left out 1 entry ({PARTIAL}): train/2.tar.part\n" in caplog.text


def test_two_labels_of_a_sample(tmp_path):
    (tmp_path / "x.tar").write_bytes(tar([*SAMPLE, ("a.cls", b"1")]))
    with pytest.raises(SourceError, match=r"x\.tar, key a: has two \.cls"):
        open_source(tmp_path)


@pytest.mark.parametrize("name", ["valid", "train_set", "Train", "validation"])
def test_a_split_of_imagenet_that_is_not_read(tmp_path, name):
    put_train(tmp_path)
    (tmp_path / name / "n01440764").mkdir(parents=True)
    with pytest.raises(SourceError, match=f"{name}: is not read: ImageNet's folders are called train and val; rename"):
        open_source(tmp_path)


def test_what_lies_beside_imagenets_archives_is_counted(tmp_path, caplog):
    put_train(tmp_path)
    for name in ("ILSVRC2012_img_test.tar", "ILSVRC2012_img_train_t3.tar"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "test").mkdir()
    (tmp_path / "train").mkdir()
    open_source(tmp_path)
    assert (
        "left out 3 entries (called as a split, and not ImageNet's name for it): ILSVRC2012_img_test.tar, "
        in caplog.text
    )
    assert "left out 1 entry (beside ILSVRC2012_img_train.tar, which is read instead)" in caplog.text
