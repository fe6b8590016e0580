"""Sources made to do harm: pickles that crash or fill the memory, and small files that unpack to large ones."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import resource
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from datapipe.errors import SourceError
from datapipe.sources import open_source

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
    "marks": b"\x80\x02" + b"(" * (8 * MIB) + b".",
    "dictionaries": b"\x80\x02" + b"}" * (8 * MIB) + b".",
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


def cifar(folder: Path, **spoilt: bytes) -> Path:
    """CIFAR-10 in Python's version; `spoilt`: contents by name, instead of good ones."""
    folder.mkdir()
    rows = {"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2]}
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(spoilt.get(name) or pickle.dumps(rows, protocol=2))
    names = pickle.dumps({"label_names": list("abcdefghij")}, protocol=2)
    (folder / "batches.meta").write_bytes(spoilt.get("meta") or names)
    return folder


def limited(*line: object, limit: int = 1 << 30) -> subprocess.CompletedProcess:
    """Run Python with `limit` bytes of address space."""
    return subprocess.run(
        [sys.executable, *(str(word) for word in line)],
        capture_output=True, text=True, timeout=300, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip


@pytest.mark.parametrize("where", ["data_batch_2", "meta"])
@pytest.mark.parametrize("what", HARMFUL)
def test_a_harmful_pickle_is_refused(tmp_path, what, where):
    """In a process of its own, which a crash would end, and with little memory."""
    source = cifar(tmp_path / "cifar", **{where: HARMFUL[what] or b" "})
    done = limited("-m", "datapipe", "pack", source, tmp_path / "out")
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: {source}: ") and "Traceback" not in done.stderr and len(last) < 500, done.stderr


def test_a_harmful_pickle_fills_no_memory(tmp_path):
    source = cifar(tmp_path / "cifar", test_batch=HARMFUL["far memo"])
    with pytest.raises(SourceError, match=r"test_batch: does not hold 0 images"):
        open_source(source)


def test_a_message_shows_no_tuple_that_it_takes_for_ever_to_write(tmp_path):
    """A hundred tuples, each of the one before it twice: written out they fill any memory."""
    source = cifar(tmp_path / "cifar", data_batch_2=HARMFUL["name of a tuple of tuples"])
    done = limited("-m", "datapipe", "pack", source, tmp_path / "out")
    assert "names a function by what is not a string" in done.stderr, done.stderr


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


FUZZ = '''
import pickle, random, sys
import numpy as np
from datapipe.errors import SourceError
from datapipe.sources import Source, cifar

seed, count = int(sys.argv[1]), int(sys.argv[2])
random.seed(seed)
numbers = np.random.default_rng(seed)
OPCODES = [code for name, code in vars(pickle).items() if name.isupper() and type(code) is bytes and len(code) == 1]
KEYS = ["labels", "data", "filenames", "batch_label", "label_names"]
good = []
for protocol in (0, 2, 4):
    rows = numbers.integers(0, 256, (2, 3072)).astype(np.uint8)
    for labels in ([3, 9], np.array([3, 9])):
        content = {"data": rows, "labels": labels, "filenames": ["a.png", "b.png"], "batch_label": "batch 1"}
        good.append(pickle.dumps(content, protocol))
    good.append(pickle.dumps({"label_names": list("abcdefghij"), "num_vis": 3072}, protocol))

def place(data):
    """Mostly where the structure is, not among the pixels."""
    return random.choice((random.randrange(min(len(data), 200)), len(data) - 1 - random.randrange(min(len(data), 200)),
                          random.randrange(len(data))))

def mutate(data):
    data = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
        at, kind = place(data), random.randrange(5)
        if kind == 0:
            data[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            data[at:at] = random.choice(OPCODES)
        elif kind == 2:
            data[at] = random.choice(OPCODES)[0]
        elif kind == 3:
            other = random.choice(good)
            start = place(other)
            data[at : at + random.randrange(20)] = other[start : start + random.randrange(60)]
        else:
            del data[at : at + random.randrange(1, 9)]
        data = data or bytearray(b".")
    return bytes(data)

loaded = refused = 0
for _ in range(count):
    data = mutate(random.choice(good))
    for look in (
        lambda: cifar._parse_python("x", "cifar10", data),
        lambda: cifar._class_names("x", "cifar10", "python", data),
    ):
        try:
            result = look()
            loaded += 1
            if isinstance(result, list):
                assert all(type(name) is str for name in result)
            else:
                labels, pixels = result
                assert pixels.shape == (len(labels), 32, 32, 3) and pixels.dtype == np.uint8 and labels.max() < 10
        except SourceError as error:
            refused += 1
            assert len(str(error)) < 500
print(loaded, refused)
'''


@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_pickle_of_noise_is_refused_or_read(count):
    done = limited("-c", FUZZ, 17, count, limit=2 << 30)
    assert done.returncode == 0, done.stderr
    loaded, refused = map(int, done.stdout.split())
    assert loaded + refused == 2 * count and loaded > count / 100 and refused > count / 10


def bomb(size: int) -> bytes:
    return gzip.compress(bytes(size), 9)


def idx(folder: Path, images: bytes) -> Path:
    folder.mkdir()
    for split in ("train", "t10k"):
        (folder / f"{split}-images-idx3-ubyte.gz").write_bytes(images)
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, 3) + bytes(3))
    return folder


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("nothing else", "more bytes of pixels"),
        ("announced", "announces"),
        ("not there", "announces"),
    ],
)
def test_a_small_idx_file_that_unpacks_to_gigabytes(tmp_path, what, says):
    head = struct.pack(">4I", 0x803, *((3, 28, 28) if what == "nothing else" else (1 << 21, 1 << 10, 1 << 10)))
    content = gzip.compress(head) + (b"" if what == "not there" else bomb(1 << 30))
    source = idx(tmp_path / "idx", content)
    done = limited("-m", "datapipe", "pack", source, tmp_path / "out", limit=600 * MIB)
    assert done.returncode == 1 and says in done.stderr.splitlines()[-1], done.stderr
    assert "-images-idx3-ubyte.gz" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["data_batch_1", "long name"])
def test_a_small_cifar_archive_that_unpacks_to_gigabytes(tmp_path, name):
    size = 1200 * MIB
    path = tmp_path / "cifar-10-python.tar.gz"
    info = tarfile.TarInfo(name)
    info.size = size
    if name == "long name":
        info.type = tarfile.GNUTYPE_LONGNAME
    meta = tarfile.TarInfo("batches.meta")
    path.write_bytes(gzip.compress(meta.tobuf() + info.tobuf()) + bomb(size))
    done = limited("-m", "datapipe", "pack", path, tmp_path / "out", limit=600 * MIB)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"error: {path}"), done.stderr


def tar_header(kind: bytes, size: int) -> bytes:
    """A header of GNU tar, which has room for any size."""
    header = bytearray(tarfile.TarInfo("name").tobuf(tarfile.GNU_FORMAT))
    header[156:157] = kind
    header[124:136] = (size % 256**12).to_bytes(12, "big") if size < 0 else b"\x80" + size.to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


@pytest.mark.parametrize("name", ["shards/0.tar", "cifar.tar"])
@pytest.mark.parametrize(("kind", "size"), [(b"L", 5 << 30), (b"x", 5 << 30), (b"Z", -512), (b"x", -512)])
def test_a_tar_header_of_a_harmful_size(tmp_path, name, kind, size):
    """Read whole, it would fill the memory; backwards, one header would follow itself for ever."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    with open(path, "wb") as file:
        file.write(tarfile.TarInfo("first").tobuf() + tar_header(kind, size))
        file.truncate(6 << 30)  # sparse: it takes no disk
    source = path if name == "cifar.tar" else path.parent
    done = limited("-m", "datapipe", "pack", source, tmp_path / "out")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"error: {path}"), done.stderr


def test_a_table_whose_line_does_not_end(tmp_path):
    table = tmp_path / "raw" / "train.csv"
    table.parent.mkdir()
    table.write_text("path,label\n")
    os.truncate(table, 3 << 30)  # sparse: it takes no disk
    done = limited("-m", "datapipe", "pack", table.parent, tmp_path / "out")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1] == f"error: {table}: line 2: has more than 1048576 bytes"


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
