"""What a file is by its first bytes, where its name says another thing, and what to type to have it read."""

from __future__ import annotations

import os
from shlex import quote

HEAD_BYTES = 512  # that are looked at: a tar header
TAR_AT, TAR = 257, b"ustar"
# By the first bytes: the name of a compression, its suffix, and the command that takes away both.
_COMPRESSED = {
    b"\x1f\x8b": ("gzip", ".gz", "gunzip"),
    b"BZh": ("bzip2", ".bz2", "bunzip2"),
    b"\xfd7zXZ\0": ("xz", ".xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("Zstandard", ".zst", "unzstd --rm"),
    b"\x04\x22\x4d\x18": ("LZ4", ".lz4", "unlz4 --rm"),
}
_SHORT = {".tgz": ".gz", ".tbz": ".bz2", ".tbz2": ".bz2", ".txz": ".xz", ".tzst": ".zst"}
# Files of other kinds, and what to do about them.
UNPACK = "unpack it, and give the folder that it becomes: "
OTHERS = {
    b"PK\x03\x04": ("a zip archive", UNPACK + "python -m zipfile -e {path} {folder}"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", UNPACK + "7z x {path} -o{folder}"),
    b"Rar!": ("a RAR archive", UNPACK + "unrar x {path} {folder}/"),
    b"PAR1": ("a Parquet file", "type mv {path} {folder}.parquet, and give that"),
    b"\x89HDF": ("an HDF5 file", "write its images as files, or into Parquet or WebDataset's tars"),
    b"\xff\xd8\xff": ("a JPEG image", "type mv {path} {folder}.jpg, and sort it into a class folder"),
    b"\x89PNG": ("a PNG image", "type mv {path} {folder}.png, and sort it into a class folder"),
    b"version https://git-lfs": ("a pointer of Git LFS", "type git lfs pull in its folder, which brings the file"),
    b"<!doctype html": ("a page of the Web", "download it again, and look at what comes"),
    b"<html": ("a page of the Web", "download it again, and look at what comes"),
    b"<?xml": ("XML, as servers answer that refuse a file", "download it again, and look at what comes"),
}


def is_tar(head: bytes) -> bool:
    """Whether a file begins as tar archives do, except those of the 1980s."""
    return head[TAR_AT : TAR_AT + len(TAR)] == TAR


def explain(head: bytes, path: str) -> str:
    """Say what a file is that is not a tar archive, though it is named so, and what to type.

    `head`: its first HEAD_BYTES. Returns "" if they do not say.
    """
    folder = folder_of(path)
    for magic, (name, _, _) in _COMPRESSED.items():
        if head.startswith(magic):
            told_by_name = path.lower().endswith((*(compressed[1] for compressed in _COMPRESSED.values()), *_SHORT))
            what = name if told_by_name else f"{name}, which its name does not say"
            return f"is compressed, with {what}{advise_unpacking(path, magic)}"
    start = head.lstrip().lower()
    for magic, (what, advice) in OTHERS.items():
        if head.startswith(magic) or start.startswith(magic):
            return f"is {what}, not a tar archive: {advice.format(path=quote(path), folder=quote(folder))}"
    return ""


def advise_unpacking(path: str, magic: bytes = b"") -> str:
    """Say what to do about a compressed archive. `magic`: what it begins with, if it is known."""
    message = ", so no image in it can be read by itself; unpack it to .tar if it is a shard, or to a folder if it "
    message += "holds folders of images"
    if not magic:
        return message
    _, suffix, command = _COMPRESSED[magic]
    last = os.path.splitext(path)[1].lower()
    if _SHORT.get(last, last) == suffix:
        to_tar = f"{command} {quote(path)}"
    else:
        to_tar = f"mv {quote(path)} {quote(path + suffix)} && {command} {quote(path + suffix)}"
    folder = quote(folder_of(path))
    return f"{message}: {to_tar}, or mkdir {folder} && tar -xf {quote(path)} -C {folder}, and give {folder}"


def folder_of(path: str) -> str:
    """Return the path of the folder that an archive becomes when it is unpacked: its own, without .tar and the like."""
    folder, name = os.path.split(path)
    base = name
    while os.path.splitext(base)[1].lower() in (".tar", *_SHORT, *(kind[1] for kind in _COMPRESSED.values()), ".zip"):
        base = os.path.splitext(base)[0]
    return os.path.join(folder, base if base != name else f"{name}.unpacked")
