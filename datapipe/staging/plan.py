"""Which files have to be copied (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..dataset.manifest import FileInfo, Manifest


@dataclass(frozen=True)
class StagePlan:
    """The files to copy, those that can stay, and the free space in bytes that the copy needs."""

    copy: list[FileInfo]
    keep: list[FileInfo]
    needed_bytes: int


def plan_stage(manifest: Manifest, present: Mapping[str, str], partial: Mapping[str, int]) -> StagePlan:
    """Plan the copy of one data set.

    Args:
        manifest: of the data set.
        present: by name, the checksum (xxh3-128, hexadecimal) of each file that is in place.
        partial: by name, the bytes of each file that an interrupted copy left under its temporary name.

    Returns:
        The plan, its files in the order of the manifest.
    """
    keep = [file for file in manifest.all_files() if present.get(file.name) == file.xxh3_128]
    copy = [file for file in manifest.all_files() if present.get(file.name) != file.xxh3_128]
    needed = sum(max(0, file.size_bytes - partial.get(file.name, 0)) for file in copy)
    return StagePlan(copy, keep, needed)
