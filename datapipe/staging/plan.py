"""What has to be copied (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..dataset.manifest import FileInfo, Manifest


@dataclass(frozen=True)
class StagePlan:
    copy: list[FileInfo]
    keep: list[FileInfo]
    needed_bytes: int  # free space that the copy takes


def plan_stage(manifest: Manifest, present: Mapping[str, str], partial: Mapping[str, int]) -> StagePlan:
    """`present`: checksum of each file there under its final name; `partial`: bytes under its temporary one."""
    keep = [file for file in manifest.all_files() if present.get(file.name) == file.xxh3_128]
    copy = [file for file in manifest.all_files() if present.get(file.name) != file.xxh3_128]
    needed = sum(max(0, file.size_bytes - partial.get(file.name, 0)) for file in copy)
    return StagePlan(copy, keep, needed)
