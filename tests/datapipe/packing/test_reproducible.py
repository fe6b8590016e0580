"""What is packed twice is the same to the byte, whatever the process, the folders and the libraries' texts."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zlib
from pathlib import Path

import pytest
from PIL import Image

from datapipe.dataset.manifest import QUARANTINE


def of_bits(data: bytes, frame: int, bits: int) -> bytes:
    """Give a baseline JPEG another kind of frame, and another number of bits."""
    at = data.index(b"\xff\xc0")
    return data[: at + 1] + bytes((frame,)) + data[at + 2 : at + 4] + bytes((bits,)) + data[at + 5 :]


def spoilt_png(data: bytes) -> bytes:
    """Damage the compressed pixels, and mend their checksum."""
    at = data.index(b"IDAT")
    (size,) = struct.unpack(">I", data[at - 4 : at])
    pixels = b"\xff" * size
    return data[: at + 4] + pixels + struct.pack(">I", zlib.crc32(b"IDAT" + pixels)) + data[at + 8 + size :]


def cmyk(data: bytes) -> bytes:
    buffer = io.BytesIO()
    Image.open(io.BytesIO(data)).convert("CMYK").save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def bad_images(photo, encoded) -> dict[str, tuple[bytes, str]]:
    """Images that cannot be packed, and what is recorded of each, by name."""
    pixels = photo(64, 48, 1)
    whole, png = encoded(pixels), encoded(pixels, "PNG")
    at = whole.index(b"\xff\xc0") + 5
    adam7 = png[:28] + b"\x01" + struct.pack(">I", zlib.crc32(png[12:28] + b"\x01")) + png[33:]
    unread = "which no decoder here reads"
    return {
        "empty.jpg": (b"", "empty file"),
        "text.jpg": (b"<html>not found</html>", "neither JPEG, PNG nor PNM"),
        "cut.jpg": (whole[: len(whole) - 9], "truncated JPEG: no end of image after its scan"),
        "head.jpg": (whole[:100], "truncated JPEG: it ends before its first scan"),
        "twelve.jpg": (of_bits(whole, 0xC1, 12), f"a JPEG of 12 bits per sample, {unread}"),
        "lossless.jpg": (of_bits(whole, 0xC3, 8), "a JPEG of a kind that no decoder here reads: lossless"),
        "lossless-arithmetic.jpg": (of_bits(whole, 0xCB, 8), "a JPEG of a kind that no decoder here reads: lossless"),
        "hierarchical.jpg": (of_bits(whole, 0xC5, 8), "a JPEG of a kind that no decoder here reads: hierarchical"),
        "bomb.jpg": (
            whole[:at] + b"\xff\xff\xff\xff" + whole[at + 4 :],
            "65535×65535 pixels are out of range (1 to 178956970)",
        ),
        "damaged.jpg": (whole[:-200] + b"\xff\xd9", "cannot be decoded"),
        "damaged-cmyk.jpg": (cmyk(whole)[:-900] + b"\xff\xd9", "cannot be decoded"),
        "cut.png": (png[: len(png) // 2], "truncated PNG: no end chunk"),
        "damaged.png": (spoilt_png(png), "cannot be decoded"),
        "damaged-interlaced.png": (adam7, "cannot be decoded"),
        "damaged-header.png": (adam7[:29] + b"sums" + adam7[33:], "cannot be decoded"),  # Pillow tells an address
    }


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def put_folder(root: Path, images: dict[str, bytes]) -> Path:
    for name, data in images.items():
        (root / "train" / "a").mkdir(parents=True, exist_ok=True)
        (root / "train" / "a" / name).write_bytes(data)
    (root / "train" / "a" / "nowhere.jpg").symlink_to("nothing")
    (root / "train" / "a" / "outside.jpg").symlink_to("/etc/hostname")
    (root / "train" / "a" / "folder.jpg").mkdir()
    return root


def put_table(root: Path, images: dict[str, bytes]) -> Path:
    put_folder(root, images)
    names = [*images, "no-such.jpg", "folder.jpg"]
    (root / "all.csv").write_text("path,label\n" + "".join(f"train/a/{name},0\n" for name in names))
    return root / "all.csv"


def put_shards(root: Path, images: dict[str, bytes]) -> Path:
    root.mkdir(parents=True)
    with tarfile.open(root / "train-0.tar", "w") as archive:
        for number, (name, data) in enumerate(images.items()):
            for member, content in ((f"{number}.{name[-3:]}", data), (f"{number}.cls", b"0")):
                info = tarfile.TarInfo(member)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return root


def put_parquet(root: Path, images: dict[str, bytes]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    root.mkdir(parents=True)
    parquet.write_table(
        pyarrow.table({"image": [*images.values(), None], "label": [0] * (len(images) + 1)}), root / "train-0.parquet"
    )
    return root


PUT = {"folder": put_folder, "table": put_table, "shards": put_shards, "parquet": put_parquet}


@pytest.fixture(scope="module")
def packed(server, tmp_path_factory, photo, encoded, bad_images) -> list[dict[str, bytes]]:
    """Each kind of source, packed by two processes, from two places, in two working folders."""
    images = {"good.jpg": encoded(photo(64, 48, 2)), **{name: data for name, (data, _) in bad_images.items()}}
    root, packed = tmp_path_factory.mktemp("reproducible"), []
    for workers, place in (1, "a"), (3, "deeper/and/longer"):
        sources = [put(root / place / name, images) for name, put in PUT.items()]
        out = root / place / "packed"
        child = Path(__file__).parent / "children" / "packs_sources.py"
        server.run(child, out, workers, *sources, cwd=root / place, check=True)
        packed.append(files_of(out))
        assert not any(str(root).encode() in data for data in packed[-1].values())
    return packed


@pytest.mark.parametrize(("name", "more"), [("folder", 3), ("all.csv", 2), ("shards", 0), ("parquet", 1)])
def test_bad_images_are_recorded_in_our_own_words(packed, bad_images, name, more):
    first, second = ({path: data for path, data in files.items() if path.startswith(name)} for files in packed)
    assert first == second and f"{name}/train/manifest.json" in first
    text = first[f"{name}/train/{QUARANTINE}"].decode()
    assert " at 0x" not in text and "PIL" not in text
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) == len(bad_images) + more and not any(line["path"].startswith("/") for line in lines)
    reasons = {line["path"].rpartition("/")[2]: line["reason"] for line in lines}
    if name in ("folder", "all.csv"):
        for image, (_, reason) in bad_images.items():
            assert reasons[image] == reason, image
    if name == "folder":
        assert (
            reasons["nowhere.jpg"] == "cannot be read (ENOENT)" and reasons["folder.jpg"] == "cannot be read (EISDIR)"
        )
        assert reasons["outside.jpg"] == "is a link that leads out of the source; --outside follows it"
