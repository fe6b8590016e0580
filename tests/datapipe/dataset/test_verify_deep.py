"""`verify --deep` and `pack --check decode` are of one opinion."""

import io
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datapipe.dataset.manifest import Manifest
from datapipe.dataset.verify import verify
from datapipe.errors import SourceError
from datapipe.images import pnm
from datapipe.images.recode import RecodeOptions
from datapipe.packing import PackOptions, pack

NOISE = np.random.default_rng(1).integers(0, 60, (120, 160, 3), np.uint8) + np.arange(160, dtype=np.uint8)[:, None]


def written(mode: str, kind: str, pixels: np.ndarray = NOISE, **options) -> bytes:
    buffer = io.BytesIO()
    image = Image.fromarray(pixels)
    (image.convert(mode) if pixels is NOISE else image).save(buffer, kind, **options)
    return buffer.getvalue()


def without_entropy_data(data: bytes) -> bytes:
    """What 400 bytes are missing of, in the middle; the end of the image is there."""
    cut = len(data) // 2
    return data[: cut - 400] + data[cut:]


def ending_early(data: bytes) -> bytes:
    return data[:-402] + data[-2:]


def with_half_the_data(data: bytes) -> bytes:
    """A PNG whose chunks have the right checksums, and whose compressed pixels end early."""
    content, chunks, at = b"", [], 8
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        name, body, at = data[at + 4 : at + 8], data[at + 8 : at + 8 + length], at + 12 + length
        content += body if name == b"IDAT" else b""
        chunks += [(name, body)] if name != b"IDAT" else []
    chunks.insert(-1, (b"IDAT", content[: len(content) // 2]))
    return data[:8] + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )


def with_a_flipped_byte(data: bytes) -> bytes:
    half = len(data) // 2
    return data[:half] + bytes([data[half] ^ 0x55]) + data[half + 1 :]


PIXELS = np.arange(40 * 30 * 3, dtype=np.uint8).reshape(30, 40, 3)
GOOD = {
    "baseline": written("RGB", "JPEG", quality=90),
    "progressive": written("RGB", "JPEG", quality=90, progressive=True),
    "grey": written("L", "JPEG", quality=95),
    "grey progressive": written("L", "JPEG", quality=95, progressive=True),
    "CMYK": written("CMYK", "JPEG", quality=90),
    "restart": written("RGB", "JPEG", quality=90, restart_marker_blocks=4),
    "PNG": written("RGB", "PNG"),
    "grey PNG": written("L", "PNG"),
    "palette PNG": written("P", "PNG"),
    "PNG with alpha": written("RGBA", "PNG"),
    "16-bit PNG": written("I;16", "PNG", NOISE[:, :, 0].astype(np.uint16) << 8),
    "PPM": pnm.encode(PIXELS),
    "PGM": pnm.encode(PIXELS[:, :, :1]),
    "PPM, lz4": pnm.compressor("lz4")(pnm.encode(PIXELS)),
    "PPM, zstd": pnm.compressor("zstd")(pnm.encode(PIXELS)),
}
BAD = {
    **{
        f"{name}, {damage.__name__}": damage(GOOD[name])
        for name in ("baseline", "progressive", "grey", "grey progressive", "CMYK")
        for damage in (without_entropy_data, ending_early)
    },
    **{f"{name}, half the data": with_half_the_data(GOOD[name]) for name in ("PNG", "grey PNG", "palette PNG")},
    "PNG, flipped byte": with_a_flipped_byte(GOOD["PNG"]),
    "PPM, lz4, fewer bytes": pnm.compressor("lz4")(pnm.encode(PIXELS)[:-9]),
    "PPM, zstd, more bytes": pnm.compressor("zstd")(pnm.encode(PIXELS) + bytes(9)),
}


def folder_of(path, images: dict[str, bytes]):
    (path / "raw" / "a").mkdir(parents=True)
    for number, data in enumerate(images.values()):
        (path / "raw" / "a" / f"{number}.jpg").write_bytes(data)
    return path / "raw"


def test_good_images_of_all_kinds_are_good(tmp_path):
    raw = folder_of(tmp_path, GOOD)
    manifest = pack(raw, tmp_path / "out", PackOptions(recode=RecodeOptions(check="decode"), workers=1))["train"]
    assert manifest.num_samples == len(GOOD)
    assert verify(tmp_path / "out" / "train", deep=True) == []


@pytest.mark.parametrize("name", BAD)
def test_what_pack_refuses_verify_finds(tmp_path, name):
    raw = folder_of(tmp_path, {"good": GOOD["baseline"], "bad": BAD[name]})
    with pytest.raises(SourceError, match=r"1\.jpg, .*: cannot be packed: cannot be (decoded|unpacked)") as error:
        pack(raw, tmp_path / "strict", PackOptions(recode=RecodeOptions(check="decode"), workers=1))
    pack(raw, tmp_path / "out", PackOptions(workers=1))
    assert verify(tmp_path / "out" / "train") == []
    (problem,) = verify(tmp_path / "out" / "train", deep=True)
    assert problem.key == "a/1" and error.value.message == f"cannot be packed: {problem.reason}"


@pytest.mark.parametrize("deep", [False, True])
def test_a_missing_shard_is_one_line(packed_folders, tmp_path, deep):
    """Not one for each of its samples."""
    folder = Path(shutil.copytree(packed_folders["tar"] / "train", tmp_path / "train"))
    shard = Manifest.read(folder).shards[1]
    (folder / shard.name).unlink()
    (problem,) = verify(folder, deep)
    assert str(problem) == f"{shard.name}: is missing, and with it {shard.num_samples} samples"
