"""Archives that are, or hold, other things than their names say: the cause is told, and what to type works."""

import bz2
import gzip
import io
import json
import lzma
import re
import shlex
import subprocess
import tarfile
import zipfile

import pytest

from datapipe.errors import SourceError
from datapipe.sources import open_source


def tar(members):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def zipped(members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


def refusal(root):
    with pytest.raises(SourceError) as caught:
        open_source(root)
    return str(caught.value)


def run(command):
    subprocess.run(command, shell=True, check=True, timeout=60, capture_output=True)


SHARD = {"1.jpg": b"1", "1.cls": b"0"}
FOLDERS = {"a/1.jpg": b"1", "b/1.jpg": b"2"}
# Names of members, and the key and label of each image; or what is said.
DOTTED = {
    "decimals": (["n01_1.5.jpg", "n01_1.5.cls", "n01_1.6.jpg", "n01_1.6.json"], ["n01_1.5: 1", "n01_1.6: 3"]),
    "some of several": (["a.jpg", "a.cls", "x.y.z.jpg", "x.y.z.cls"], ["a: 1", "x.y.z: 3"]),
    "a folder with a dot": (["v1.0/a.jpg", "v1.0/a.cls"], ["v1.0/a: 1"]),
    "a text for the split": (["x.y.jpg", "x.y.cls", "x.y.split"], ["x.y: 1"]),
    "a part of a sample": (["a.jpg", "a.cls", "a.mask.png", "a.mask.json"], ["a: 1"]),
    "texts without an image": (["a.jpg", "a.cls", "b.meta.json", "b.txt"], ["a: 1"]),
    "an image of a label without dots": (["a.1.jpg", "a.cls"], "no image: a.1.jpg .* from the first dot on, where Web"),
    "no label": (["n01/im.1.jpg", "n02/im.2.jpg"], "key n01/im.1: has an image, but no label .*; if its folders are"),
    "two images": (["x.y.jpg", "x.y.png", "x.y.cls"], "key x.y: has two images: x.y.jpg and x.y.png"),
}


@pytest.mark.parametrize("name", DOTTED)
def test_names_of_several_dots_in_shards(tmp_path, caplog, name):
    members, expected = DOTTED[name]
    contents = {"json": b'{"label": %d}', "cls": b"%d", "split": b"train"}
    made = (contents.get(name.rpartition(".")[2], b"x").replace(b"%d", b"%d" % i) for i, name in enumerate(members))
    (tmp_path / "0.tar").write_bytes(tar(dict(zip(members, made, strict=True))))
    if isinstance(expected, str):
        assert re.search(expected, refusal(tmp_path))
        return
    samples = open_source(tmp_path).splits["train"]
    labels = samples.labels.tolist()
    assert [f"{key}: {label}" for key, label in zip(samples.names, labels, strict=True)] == expected
    dotted = [key for key in samples.names if "." in key.rpartition("/")[2]]
    assert (
        (f"such as 0.tar: {dotted[0]}.jpg; the last begins" in caplog.text)
        if dotted
        else "several dots" not in caplog.text
    )


COMPRESSIONS = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("name", ["0.tar", "0.tar.gz", "0.tgz", "0 and 1.tar"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_compressed_shard_is_unpacked_as_said(tmp_path, compression, name):
    (tmp_path / name).write_bytes(COMPRESSIONS[compression](tar(SHARD)))
    message = refusal(tmp_path)
    assert f"{name}: is compressed, with {compression}" in message
    run(re.search("folders of images: (.*), or mkdir", message)[1])
    assert open_source(tmp_path).splits["train"].names == ["1"]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_compressed_folders_are_unpacked_as_said(tmp_path, compression):
    (tmp_path / "0 1.tar").write_bytes(COMPRESSIONS[compression](tar(FOLDERS)))
    command, folder = re.search(", or (mkdir .*), and give (.*)", refusal(tmp_path)).groups()
    run(command)
    assert open_source(*map(type(tmp_path), shlex.split(folder))).classes == ["a", "b"]


@pytest.mark.parametrize("name", ["train-0.tar.gz", "train-0.tgz", "train-0.tar.zst"])
def test_a_shard_that_is_not_compressed_though_it_is_named_so(tmp_path, name):
    (tmp_path / name).write_bytes(tar(SHARD))
    assert open_source(tmp_path).splits["train"].names == ["1"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x28\xb5\x2f\xfd" + bytes(600), r"with Zstandard, which .* mv \S+ \S+\.zst && unzstd --rm "),
        (b"\x04\x22\x4d\x18" + bytes(600), r"with LZ4, which .* mv \S+ \S+\.lz4 && unlz4 --rm "),
        (b"7z\xbc\xaf\x27\x1c" + bytes(600), "is a 7z archive, not a tar archive: unpack it, and give .*: 7z x /"),
        (b"Rar!\x1a\x07\0" + bytes(600), "is a RAR archive, not a tar archive: unpack it.*: unrar x /"),
        (b"PAR1" + bytes(600), r"is a Parquet file, not a tar archive: type mv \S+/0.tar \S+/0.parquet"),
        (b"\xff\xd8\xff\xe0" + bytes(600), r"is a JPEG image, not a tar archive: type mv \S+/0.tar \S+/0.jpg"),
        (b"\n<!DOCTYPE HTML>\n<html>404</html>", "is a page of the Web, not a tar archive: download it again"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "is a pointer of Git LFS, .*: type git lfs pull"),
        (b"x" * 600, "is a corrupt or truncated tar archive, or none: no header at byte 0"),
    ],
)
@pytest.mark.parametrize("name", ["0.tar", "ILSVRC2012_img_train.tar"])
def test_a_tar_that_is_something_else(tmp_path, data, message, name):
    (tmp_path / name).write_bytes(data)
    assert re.search(message.replace("0.", f"{name.removesuffix('.tar')}."), refusal(tmp_path))


def test_an_archive_of_cifar_that_is_a_page_of_the_web(tmp_path):
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"<html>404</html>")
    assert "tar.gz: is a page of the Web, not a tar archive: download it again" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["0.tar", "cifar-10-python.tar.gz"])
def test_a_zip_archive_that_is_named_otherwise_is_unpacked_as_said(tmp_path, name):
    (tmp_path / name).write_bytes(zipped(FOLDERS))
    message = refusal(tmp_path)
    assert "is a zip archive, not a tar archive: unpack it" in message
    words = shlex.split(message.rpartition(": ")[2])
    assert words[:3] == ["python", "-m", "zipfile"]
    zipfile.main(words[3:])
    assert open_source(type(tmp_path)(words[-1])).classes == ["a", "b"]


def class_tars(names, pack=tar):
    return {f"{name}": pack({f"{i}.jpg": name.encode()}) for name in names for i in (1,)}


def tgz(members):
    return gzip.compress(tar(members))


# Tars of archives: what they hold, and the classes that are read in the end.
NESTED = {
    "class tars": (class_tars(["cat.tar", "dog.tar"]), ["cat", "dog"]),
    "class tars in folders": (class_tars(["a b/cat.tar", "a b/dog's.tar"]), ["cat", "dog's"]),
    "class tars in a split": (class_tars(["train/cat.tar", "train/dog.tar"]), ["cat", "dog"]),
    "compressed class tars": (class_tars(["cat.tar.gz", "dog.tar.gz"], tgz), ["cat", "dog"]),
    "short names": (class_tars(["cat.tgz", "dog.tgz"], tgz), ["cat", "dog"]),
    "zips": (class_tars(["cat.ZIP", "dog.ZIP"], zipped), ["cat", "dog"]),
    "a zip": ({"images.zip": zipped(FOLDERS)}, ["a", "b"]),
    "shards": ({"train-0.tar": tar(SHARD), "val-0.tar": tar(SHARD | {"1.jpg": b"2"})}, ["0"]),
}


@pytest.mark.parametrize("name", NESTED)
def test_a_tar_of_archives_is_unpacked_as_said(tmp_path, name):
    members, classes = NESTED[name]
    (tmp_path / "all.tar").write_bytes(tar(members))
    message = refusal(tmp_path)
    assert f"all.tar: holds {len(members)} archive" in message and f"such as {next(iter(members))}, and no" in message
    folder, command = re.search(r"and give (\S+): (mkdir .*)", message).groups()
    run(command)
    root = type(tmp_path)(folder)
    try:
        source = open_source(root)
    except SourceError as error:  # of folders around them
        source = open_source(type(tmp_path)(*shlex.split(re.search("are in ([^;]*), give that", str(error))[1])))
    assert source.classes == classes


def test_several_tars_of_class_tars(tmp_path):
    for split in ("train", "val"):
        (tmp_path / f"{split}.tar").write_bytes(tar(class_tars([f"{split}-a.tar".removeprefix(f"{split}-"), "b.tar"])))
    message = refusal(tmp_path)
    assert f"and give {tmp_path}: mkdir" in message


def test_the_train_archive_of_imagenet_under_another_name(tmp_path):
    members = {f"n0144076{i}.tar": tar({f"n0144076{i}_1.JPEG": json.dumps(i).encode()}) for i in (4, 5)}
    (tmp_path / "train.tar").write_bytes(tar(members))
    words = shlex.split(re.search("if it is ImageNet's, type (mv .*), and give", refusal(tmp_path))[1])
    type(tmp_path)(words[1]).rename(words[2])
    assert open_source(tmp_path).classes == ["n01440764", "n01440765"]
