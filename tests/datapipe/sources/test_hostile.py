"""Sources made to do harm: pickles that crash or fill the memory, and small files that unpack to large ones."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

from datapipe.errors import SourceError
from datapipe.sources import open_source, pickled

CHILDREN = Path(__file__).with_name("children")
MIB = 1 << 20
# A dtype with a field of Python objects, whose flags deny it: numpy would decrease numbers at addresses from the file.
OBJECT_TYPE = b"cnumpy\ndtype\n(S'O8'\nI00\nI01\ntR(I3\nS'|'\nNNNI-1\nI-1\nI63\ntb"
FORGED_TYPE = (
    b"cnumpy\ndtype\n(S'V8'\nI00\nI01\ntR(I3\nS'|'\nN(S'a'\nt(dS'a'\n(" + OBJECT_TYPE + b"I0\ntsI8\nI1\nI1\ntb"
)
FORGED = (
    b"(dS'data'\ncnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR(I1\n(I4\nt"
    + FORGED_TYPE + b"I00\nS'" + b"A" * 32 + b"'\ntbsS'labels'\n(lp0\nI1\nas."
)  # fmt: skip
DEEP = b"\x80\x02)" + b"\x85" * 200_000  # a tuple in a tuple in a tuple …
HARMFUL = {
    "forged type": FORGED,
    "deep key": b"\x80\x02}" + DEEP[2:] + b"Ns.",
    "deep value": b"\x80\x02}U\x04data" + DEEP[2:] + b"s.",
    "deep labels": b"\x80\x02}U\x06labels" + DEEP[2:] + b"s.",
    "huge string": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x00" + b"abc.",
    "huge bytearray": b"\x80\x05\x96" + b"\xff\xff\xff\xff\x20\x00\x00\x00" + b"abc.",
    "huge number": b"\x80\x02\x8b" + b"\xff\xff\xff\x7f" + b"abc.",
    "negative length": b"\x80\x02T\xff\xff\xff\xff.",
    "far memo": b"\x80\x02}r\xff\xff\xff\x7f.",
    "copies": b"\x80\x02c_codecs\nencode\nq\x00X\x00\x00\x10\x00" + b"x" * MIB + b"X\x06\x00\x00\x00latin1\x86q\x01R"
              + b"h\x00h\x01R" * 4000 + b".",
    "own class": b"\x80\x02cnumpy\nndarray\n)\x81.",
    "attributes": b"\x80\x02}}U\x01aK\x01sb.",
    "array without state": b"\x80\x02}U\x04datacnumpy.core.multiarray\n_reconstruct\n)Rs.",
    "array's own state": b"\x80\x02}U\x04datacnumpy.core.multiarray\n_reconstruct\n)R}bs.",
    "no opcode": b"\x80\x02\xff.",
    "empty": b"",
    "only end": b".",
    "mark below": b"\x80\x02}(00e.",
    "name of a deep tuple": DEEP + b"U\x01a\x93.",
    "name of a tuple of tuples": b"\x80\x02)" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(100)) + b"U\x01a\x93.",
    "itself": b"\x80\x02]q\x00h\x00a.",
}  # fmt: skip

# What is said of a file of images by each.
SAYS = {
    **dict.fromkeys(("forged type", "array without state", "array's own state"), "an array that is not one of whole"),
    "deep key": "a key of type tuple",
    **dict.fromkeys(("deep value", "far memo"), "does not hold 0 images of 3072 bytes"),
    "deep labels": "holds no labels",
    **dict.fromkeys(("huge string", "huge bytearray", "huge number", "negative length"), "truncated"),
    "copies": "encodes what is not a string of its own",
    **dict.fromkeys(("own class", "no opcode", "empty"), "which no such file needs"),
    "attributes": "gives a state to what has none",
    **dict.fromkeys(("only end", "mark below"), "pop from empty list"),
    # A hundred tuples, each of the one before it twice: written out they fill any memory.
    **dict.fromkeys(("name of a deep tuple", "name of a tuple of tuples"), "names a function by what is not a string"),
    "itself": "holds no dictionary",
}


def cifar(folder: Path, **spoilt: bytes) -> Path:
    """CIFAR-10 in Python's version; `spoilt`: contents by name, instead of good ones."""
    folder.mkdir()
    for number, name in enumerate((*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")):
        rows = {"data": np.zeros((2, 3072), np.uint8), "labels": [2 * number % 10, 2 * number % 10 + 1]}
        (folder / name).write_bytes(spoilt.get(name) or pickle.dumps(rows, protocol=2))
    names = pickle.dumps({"label_names": list("abcdefghij")}, protocol=2)
    (folder / "batches.meta").write_bytes(spoilt.get("meta") or names)
    return folder


@pytest.fixture
def refusals(server):
    """refusals(sources, num_bytes) -> what is said of each, in a process that a crash would end, with little memory."""

    def open_all(sources: list[Path], num_bytes: int) -> list[str]:
        done = server.run(CHILDREN / "opens_sources.py", num_bytes, *sources)
        said = [json.loads(line) for line in done.stdout.splitlines()]
        assert done.returncode == 0, f"{sources[len(said)]}: {done.stderr[-2000:]}"
        for source, text in zip(sources, said, strict=True):
            assert text.startswith(f"{source}") and len(text) < 500, text
        return said

    return open_all


@pytest.mark.parametrize("where", ["data_batch_2", "meta"])
def test_a_harmful_pickle_is_refused(tmp_path, refusals, where):
    sources = [cifar(tmp_path / what, **{where: content or b" "}) for what, content in HARMFUL.items()]
    for what, said in zip(HARMFUL, refusals(sources, 32 * MIB), strict=True):
        assert where == "meta" or ("data_batch_2: " in said and SAYS[what] in said), (what, said)


@pytest.mark.parametrize("opcode", [b"(", b"}"])
def test_a_pickle_of_too_many_opcodes_is_refused(monkeypatch, opcode):
    assert 200 * pickled.MAX_OPCODES < 1 << 30  # bytes of memory
    monkeypatch.setattr(pickled, "MAX_OPCODES", 1000)
    with pytest.raises(ValueError, match="more than 1000 opcodes"):
        pickled.read_pickle(b"\x80\x02" + opcode * 1000 + b".")


def test_a_harmful_pickle_fills_no_memory(tmp_path):
    source = cifar(tmp_path / "cifar", test_batch=HARMFUL["far memo"])
    with pytest.raises(SourceError, match=r"test_batch: does not hold 0 images"):
        open_source(source)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("labels", [list, np.int64, np.dtype(">i4"), np.uint8])
def test_cifar_as_python_3_pickles_it(tmp_path, protocol, order, labels):
    random = np.random.default_rng(protocol)
    rows, truth = random.integers(0, 256, (5, 3072)).astype(np.uint8), random.integers(0, 10, 5)
    content = {
        "data": np.asarray(rows, order=order),
        "labels": truth.tolist() if labels is list else truth.astype(labels),
        "filenames": [f"{i}.png" for i in range(5)], "batch_label": b"x", "more": (1.5, None, True, -7, 2**40, "ä€"),
    }  # fmt: skip
    samples = open_source(cifar(tmp_path / "cifar", test_batch=pickle.dumps(content, protocol))).splits["val"]
    assert samples.labels.tolist() == truth.tolist()
    assert np.array_equal(samples.pixels.transpose(0, 3, 1, 2).reshape(5, -1), rows)


@pytest.mark.parametrize("count", [2_000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_a_pickle_of_noise_is_refused_or_read(server, count):
    done = server.run(CHILDREN / "reads_noisy_pickles.py", 64 * MIB, 17, count)
    assert done.returncode == 0, done.stderr
    loaded, refused = map(int, done.stdout.split())
    assert loaded + refused == 2 * count and loaded > count / 100 and refused > count / 10


def bomb(size: int) -> bytes:
    return gzip.compress(bytes(size), 1)


def idx(folder: Path, images: bytes) -> Path:
    folder.mkdir()
    for split in ("train", "t10k"):
        (folder / f"{split}-images-idx3-ubyte.gz").write_bytes(images)
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, 3) + bytes(3))
    return folder


def test_a_small_idx_file_that_unpacks_to_a_large_one(tmp_path, refusals):
    small, large = (struct.pack(">4I", 0x803, *shape) for shape in ((3, 28, 28), (1 << 21, 1 << 10, 1 << 10)))
    contents = gzip.compress(small) + bomb(128 * MIB), gzip.compress(large) + bomb(MIB), gzip.compress(large)
    sources = [idx(tmp_path / f"{i}", content) for i, content in enumerate(contents)]
    said = refusals(sources, 64 * MIB)
    assert ["more bytes of pixels" in text for text in said] == [True, False, False]
    assert ["its header announces" in text for text in said] == [False, True, True]
    assert all("-images-idx3-ubyte.gz: " in text for text in said)


def large_cifar(path: Path, name: str, size: int, kind: bytes = tarfile.REGTYPE) -> Path:
    """An archive whose second file is large, all zeros: sparse where it is not compressed."""
    path.parent.mkdir()
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    head = tarfile.TarInfo("batches.meta").tobuf() + info.tobuf()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(head) + bomb(size))
    else:
        path.write_bytes(head)
        os.truncate(path, len(head) + size + 1024)
    return path


def test_a_cifar_archive_of_a_file_that_fills_the_memory(tmp_path, refusals):
    sources = [
        large_cifar(tmp_path / "batch" / "cifar-10.tar", "data_batch_1", 1200 * MIB),
        large_cifar(tmp_path / "name" / "cifar-10.tar.gz", "long name", 128 * MIB, tarfile.GNUTYPE_LONGNAME),
    ]
    said = refusals(sources, 64 * MIB)
    assert "data_batch_1: has 1258291200 bytes, and no such file has more than" in said[0]
    assert "it has a header of " in said[1]


def tar_header(kind: bytes, size: int) -> bytes:
    """A header of GNU tar, which has room for any size."""
    header = bytearray(tarfile.TarInfo("name").tobuf(tarfile.GNU_FORMAT))
    header[156:157] = kind
    header[124:136] = (size % 256**12).to_bytes(12, "big") if size < 0 else b"\x80" + size.to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def test_a_tar_header_of_a_harmful_size(tmp_path, refusals):
    """Read whole, it would fill the memory; backwards, one header would follow itself for ever."""
    sources, sizes = [], []
    for number, (kind, size) in enumerate([(b"L", 5 << 30), (b"x", 5 << 30), (b"Z", -512), (b"x", -512)]):
        for name in ("shards/0.tar", "cifar.tar"):
            path = tmp_path / f"{number}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(tarfile.TarInfo("first").tobuf() + tar_header(kind, size))
            os.truncate(path, 6 << 30)  # sparse: it takes no disk
            sources.append(path if name == "cifar.tar" else path.parent)
            sizes.append(size)
    for size, said in zip(sizes, refusals(sources, 64 * MIB), strict=True):
        assert f" of {size} bytes" in said, said


def test_a_table_whose_line_does_not_end(tmp_path, refusals):
    table = tmp_path / "raw" / "train.csv"
    table.parent.mkdir()
    table.write_text("path,label\n")
    os.truncate(table, 3 << 30)  # sparse: it takes no disk
    assert refusals([table.parent], 64 * MIB) == [f"{table}: line 2: has more than 1048576 bytes"]


def test_compressed_archives_are_read_in_all_compressions(tmp_path):
    folder = cifar(tmp_path / "cifar")
    for suffix in ("", ".gz", ".bz2", ".xz"):
        with tarfile.open(tmp_path / f"cifar.tar{suffix}", f"w:{suffix[1:]}") as archive:
            archive.add(folder, "cifar-10-batches-py")
        assert len(open_source(tmp_path / f"cifar.tar{suffix}").splits["train"]) == 10


def test_class_folders_that_lie_too_deep(tmp_path, encoded):
    """Deeper than Python calls itself, and than a path may be long."""
    folder = os.open(tmp_path, os.O_RDONLY)
    for name in ("raw", "class", *["d"] * 3000):
        os.mkdir(name, dir_fd=folder)
        below = os.open(name, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    image = io.BytesIO(encoded(np.zeros((8, 8, 3), np.uint8))).getvalue()
    with open(os.open("1.jpg", os.O_WRONLY | os.O_CREAT, dir_fd=folder), "wb") as file:
        file.write(image)
    os.close(folder)
    try:
        with pytest.raises(SourceError, match="class: holds folders more than 100 deep"):
            open_source(tmp_path / "raw")
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "raw"], check=True)  # shutil would call itself too often, too
