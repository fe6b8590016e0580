"""Nothing is taken or left out in silence: what is not taken is counted and named, and what is damaged is refused."""

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import tarfile

import numpy as np
import pytest

from datapipe.errors import SettingError, SourceError
from datapipe.packing import PackOptions, pack
from datapipe.sources import open_source
from datapipe.sources.file_names import is_harmless, is_partial
from datapipe.sources.listing import PARTIAL


def put_csv(root):
    (root / "i" / "deep").mkdir(parents=True)
    for name in ("1", "deep/2"):
        (root / "i" / f"{name}.jpg").write_bytes(b"x")
    (root / "train.csv").write_text("path,label\ni/1.jpg,0\n./i/deep/2.jpg,1\n")


def put_parquet(root):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"image": [b"1"], "label": [0]}), root / "train-0.parquet")


def put_idx(root):
    for kind, shape in (("images-idx3", (2, 4, 4)), ("labels-idx1", (2,))):
        header = bytes((0, 0, 8, len(shape))) + b"".join(n.to_bytes(4, "big") for n in shape)
        (root / f"train-{kind}-ubyte").write_bytes(header + bytes(np.prod(shape)))


def cifar():
    """The files of a small CIFAR-10."""
    batch = pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1]})
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    return dict.fromkeys(names, batch) | {"batches.meta": pickle.dumps({"label_names": list("abcdefghij")})}


def put_cifar(root):
    for name, data in cifar().items():
        (root / name).write_bytes(data)


def put_shard(root):
    (root / "train-0.tar").write_bytes(tar({"1.jpg": b"x", "1.cls": b"0", ".DS_Store": b"", "README": b""}.items()))


def put_folders(root):
    for place in ("train/a", "train/b", "val/a"):
        (root / place).mkdir(parents=True)
        (root / place / "1.jpg").write_bytes(b"x")
    (root / "train" / "README").touch()
    (root / "train" / "a" / ".DS_Store").touch()


def put_imagenet(root):
    class_tar = tar([("n00000001_1.JPEG", b"x"), ("README", b"")])
    (root / "ILSVRC2012_img_train.tar").write_bytes(tar([("n00000001.tar", class_tar)]))


def tar(files):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


KINDS = {"csv": put_csv, "parquet": put_parquet, "idx": put_idx, "cifar10": put_cifar, "webdataset": put_shard}
KINDS |= {"imagefolder": put_folders, "imagenet": put_imagenet}
# What is passed over, and what is counted, wherever it lies.
HARMLESS = (
    "README",
    "readme.md",
    "LICENSE.txt",
    "CITATION.cff",
    "sha256sums.txt",
    ".DS_Store",
    "Thumbs.db",
    ".git.lock",
    "README.dataset.txt",
    "README.roboflow.txt",
    "LICENSE-CC-BY-4.0",
    "train.tar.sha256",
    "_DS_Store",
)
COUNTED = {
    PARTIAL: (".train-1.tar.Xy12ab", "train-1.tar.part", ".~tmp~"),
    "hidden, or a system's": (".1.jpg", ".train-1.parquet", ".train-1.tar", ".more", "@eaDir"),
    "beside": ("notes.txt", "2.jpg", "README.zip", "train.arrow"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_rule_of_what_is_left_out(tmp_path, caplog, kind):
    KINDS[kind](tmp_path)
    for name in HARMLESS:
        (tmp_path / name).touch()
    assert open_source(tmp_path, strict=True).kind == kind and "left out" not in caplog.text
    for name in (name for names in COUNTED.values() for name in names):
        (tmp_path / name).mkdir() if name in (".more", "@eaDir", ".~tmp~") else (tmp_path / name).touch()
    file = tmp_path.with_suffix(".jsonl")
    with pytest.raises(SourceError, match="--strict: something of it would be left out"):
        open_source(tmp_path, strict=True, left_out=file)
    listed = {}
    for row in map(json.loads, file.read_text().splitlines()):
        reason = row["reason"] if row["reason"] in COUNTED else "beside"
        listed.setdefault(reason, []).append(row["path"])
    assert listed == {reason: sorted(names) for reason, names in COUNTED.items()}


NAMES = {
    "of a transfer": (".x.tar.Xy12ab", ".x.tar.abcdef", ".1.jpg.123456", ".train-images-idx3-ubyte.Xy12ab",
                      "x.tar.part", "1.jpg.crdownload", "1.jpg.filepart", "x.tar.aria2", "1.jpg.partial",
                      "1.jpg.6eF3d5Ab", "1.jpg~", "1.jpg_.gstmp", ".syncthing.1.jpg.tmp", ".azDownload-1-1.jpg",
                      "Unconfirmed 12.crdownload", ".~tmp~", ".rsync-partial", "x.incomplete"),
    "harmless": ("README_zh.md", "Readme.docx", "readme (1).txt", "README", "LICENSE.CC", "license_agreement.txt",
                 "dataset_infos.json", "checksums.md5", "x.tar.md5", ".gitattributes", ".x.backup", ".nfs0001"),
    "data": ("license_plates.txt", "readmeasure.txt", "README.bin", "README.zip", "classes.txt", "x.csv.original",
             "x.csv.20240101", "x.tar.part0001", "file.txt~", "img.001", "1.jpg", ".1.jpg", "data.v1.2"),
}  # fmt: skip


@pytest.mark.parametrize(("what", "name"), [(what, name) for what, names in NAMES.items() for name in names])
def test_what_files_are_by_their_names(what, name):
    assert (is_partial(name), is_harmless(name)) == (what == "of a transfer", what == "harmless")


def test_a_transfer_that_has_not_ended(tmp_path, caplog):
    put_folders(tmp_path)
    for name in ("train/a/.2.jpg.Xy12ab", "train/b/2.jpg.part", ".cache/huggingface/download/train/x.incomplete"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".cache" / "huggingface" / "download" / "train" / "1.jpg.metadata").touch()
    open_source(tmp_path)
    names = ".cache/huggingface/download/train/x.incomplete, train/a/.2.jpg.Xy12ab, train/b/2.jpg.part"
    assert f"left out 3 entries ({PARTIAL}): {names}\n" in caplog.text
    with pytest.raises(SourceError, match=r"--strict: .*\(of a transfer that has not ended"):
        open_source(tmp_path, strict=True)
    for name in names.split(", "):
        (tmp_path / name).unlink()
    assert open_source(tmp_path, strict=True)  # the notes of the Hub are passed over


@pytest.mark.parametrize("name", ["x.tar.part", ".x.tar.Xy12ab"])
def test_a_transfer_that_has_not_ended_alone(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(SourceError, match=f"; {name} is of a transfer that has not ended: run that again"):
        open_source(tmp_path)


def test_images_that_no_row_names(tmp_path, caplog):
    put_csv(tmp_path)
    for place in ("i/3.jpg", "i/deep/4.jpg", "other/5.jpg", "i/deep/below/6.jpg"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).touch()
    assert len(open_source(tmp_path).splits["train"]) == 2
    assert "left out 4 entries (named by no row): i/3.jpg, i/deep/4.jpg, i/deep/below, other\n" in caplog.text
    assert len(open_source(tmp_path / "train.csv", strict=True).splits["train"]) == 2  # a table alone is all of it
    (tmp_path / "train.csv").write_text("path,label\ni/1.jpg,0\nnowhere/2.jpg,1\n")
    assert len(open_source(tmp_path).splits["train"]) == 2  # reading it says what is missing


def test_all_that_is_left_out_is_listed_in_a_file(tmp_path, encoded, photo):
    raw, file = tmp_path / "raw", tmp_path / "left-out.jsonl"
    (raw / "cat").mkdir(parents=True)
    (raw / "cat" / "1.png").write_bytes(encoded(photo(8, 8, 0), "PNG"))
    for i in range(12):
        (raw / "cat" / f"{i:02d}.txt").touch()
    pack(raw, tmp_path / "out", PackOptions(workers=1, left_out=file))
    reason = "not named .jpg, .jpeg, .png"
    rows = [json.dumps({"reason": reason, "path": f"cat/{i:02d}.txt"}) for i in range(12)]
    assert file.read_text().splitlines() == rows
    for place, problem in ((raw / "cat" / "x", "lies in"), (tmp_path / "out" / "x", "lies in"), (raw, "is a folder"),
                           (tmp_path / "no" / "x", "lies in a folder that does not exist")):  # fmt: skip
        with pytest.raises(SettingError, match=f"left_out: {place} {problem}"):
            pack(raw, tmp_path / "out", PackOptions(overwrite=True, left_out=place))
    (raw / "cat" / "1.png").unlink()
    with pytest.raises(SourceError, match="split train holds no images; left out: 12 entries"):
        pack(raw, tmp_path / "out", PackOptions(overwrite=True, left_out=file))
    assert file.read_text().splitlines() == rows


def test_an_idx_file_that_is_there_twice(tmp_path, caplog):
    put_idx(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"another"))
    assert len(open_source(tmp_path).splits["train"]) == 2
    assert "(beside the same file unpacked, which is read): train-images-idx3-ubyte.gz\n" in caplog.text


def packed_cifar(files, compress=gzip.compress):
    return compress(tar((f"cifar-10-batches-py/{name}", data) for name, data in files))


def test_a_file_of_cifar_too_many(tmp_path, caplog):
    path, files = tmp_path / "cifar-10-python.tar.gz", cifar()
    path.write_bytes(packed_cifar([*files.items(), ("data_batch_6", files["data_batch_1"]), ("readme.html", b"")]))
    open_source(path)
    left_out = "left out 1 entry (beside the files of CIFAR): "
    assert f"{left_out}cifar-10-python.tar.gz: cifar-10-batches-py/data_batch_6\n" in caplog.text
    path.write_bytes(packed_cifar([*files.items(), ("data_batch_1", files["data_batch_2"])]))
    with pytest.raises(SourceError, match="holds data_batch_1 twice"):
        open_source(path)
    path.write_bytes(packed_cifar([*files.items(), ("readme.html", b""), ("file.txt~", b"")]))  # as CIFAR-100 has it
    (tmp_path / "README").touch()
    assert len(open_source(tmp_path, strict=True).splits["train"]) == 10  # the archive is all that the folder holds
    (tmp_path / "cifar-10-batches-py").mkdir()
    put_cifar(tmp_path / "cifar-10-batches-py")
    open_source(tmp_path)
    assert f"{left_out}cifar-10-python.tar.gz\n" in caplog.text


@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("how", ["cut short", "another checksum", "no end mark", "more behind it"])
def test_an_archive_is_read_to_its_end(tmp_path, compress, how):
    """What is damaged lies behind the last file: all of them can be read."""
    path, data = tmp_path / "cifar-10-python.tar", packed_cifar(cifar().items(), bytes)
    packed = bytearray(compress(data))
    path.write_bytes(packed)
    assert len(open_source(path).splits["train"]) == 10
    if how == "no end mark":
        packed = compress(data.rstrip(b"\0") + bytes(-len(data.rstrip(b"\0")) % 512))
    elif how == "more behind it":
        packed = compress(data + data)
    elif how == "cut short":
        packed = packed[:-2] if packed[:2] != data[:2] else packed[:2000]
    elif packed[:2] != data[:2]:  # else there is none
        packed[{b"\x1f\x8b": -8, b"BZ": -3, b"\xfd7": -20}[bytes(packed[:2])]] ^= 0x10
    else:
        return
    path.write_bytes(packed)
    for kind in ("auto", "cifar10"):
        with pytest.raises(SourceError, match=r"python\.tar: (is a truncated or corrupt archive|cannot be read)"):
            open_source(path, kind)


def test_a_compression_that_is_not_read(tmp_path):
    (tmp_path / "cifar-10-python.tar.zst").write_bytes(b"\x28\xb5\x2f\xfd" * 3)
    with pytest.raises(SourceError, match="is compressed with Zstandard, and not read: unpack it with zstd -d"):
        open_source(tmp_path)


@pytest.mark.parametrize("folders", [["train/a", "train/b", "val/a"], ["a", "b"], ["train", "test"], ["images"]])
@pytest.mark.parametrize("splits", [(), ("train=train",)])
def test_a_table_that_is_none_beside_class_folders(tmp_path, folders, splits):
    for place in folders:
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "1.jpg").write_bytes(b"x")
    (tmp_path / "train-annotations.csv").write_text("image_id,xmin\n")
    with pytest.raises(SourceError, match="names no column of paths") as caught:
        open_source(tmp_path, splits=splits)
    note = f"it was taken for csv: if {folders[0][:5]} is a class or a split, type --kind imagefolder"
    assert getattr(caught.value, "__notes__", []) == [note] * (folders[0] in ("train/a", "a"))


def test_links_that_lead_nowhere_when_they_are_packed(tmp_path, caplog, encoded, photo):
    """As an image it is a bad one; as a class it is an error, whatever may be bad; anything else is left out."""
    raw = tmp_path / "raw"
    (raw / "cat").mkdir(parents=True)
    (raw / "cat" / "1.png").write_bytes(encoded(photo(8, 8, 0), "PNG"))
    for name, target in (("2.png", "nowhere"), ("3.png", "3.png"), ("day", "nowhere")):
        (raw / "cat" / name).symlink_to(target)
    with pytest.raises(SourceError, match=r"cat/[23]\.png, .*(No such file|in a circle)"):
        pack(raw, tmp_path / "none", PackOptions(workers=1))
    assert pack(raw, tmp_path / "out", PackOptions(workers=1, max_bad=2))["train"].num_bad == 2
    assert "left out 1 entry (not named .jpg, .jpeg, .png): cat/day\n" in caplog.text
    (raw / "dog").symlink_to("nowhere")
    with pytest.raises(SourceError, match="raw/dog: is a link that leads nowhere: mend or remove it"):
        pack(raw, tmp_path / "other", PackOptions(workers=1, max_bad=2))


def test_a_locale_that_reads_names_otherwise(tmp_path, command, encoded, photo):
    (tmp_path / "raw" / "é").mkdir(parents=True)
    (tmp_path / "raw" / "é" / "1.png").write_bytes(encoded(photo(8, 8, 0), "PNG"))
    environ = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    line = "datapipe", "pack", tmp_path / "raw", tmp_path / "out"
    done = command(*line, env=environ, fresh=True)
    assert done.returncode == 1 and "set PYTHONUTF8=1" in done.stderr and not (tmp_path / "out").exists()
