"""What the commands say of packed data sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..console import format_count

if TYPE_CHECKING:
    import numpy as np

    from ..dataset.manifest import Manifest
    from ..staging import Staged


def summarise(path: Path, manifest: Manifest, index: np.ndarray | None = None) -> dict[str, Any]:
    """Return what `info` and `pack` print of a data set, as JSON values.

    Args:
        path: Folder of the data set.
        manifest: Its manifest.
        index: Its index, RECORD[num_samples], for the classes and the mean size of an image.
    """
    same = manifest.width is not None and manifest.height is not None
    colour = "grey" if manifest.channels == 1 else "RGB"
    row: dict[str, Any] = {
        "path": str(path),
        "split": manifest.split,
        "format": manifest.format,
        "kind": manifest.kind,
        "num_samples": manifest.num_samples,
        "num_classes": manifest.num_classes,
        "num_shards": len(manifest.shards),
        "size_bytes": manifest.size_bytes,
        "num_bad": manifest.num_bad,
        "recode": manifest.recode,
        "converted": manifest.converted,
        "source_bytes": manifest.source_bytes,
        "image_bytes": manifest.image_bytes,
        "pixels": f"{manifest.width}×{manifest.height} {colour}" if same else f"{colour} of differing sizes",
    }
    if index is not None:
        row["image_bytes_mean"] = float(index["size"].mean())
        row["classes"] = manifest.classes
    return row


def format_summary(row: dict[str, Any]) -> str:
    """Return the first line on a data set, from what `summarise` returned."""
    images, classes = format_count(row["num_samples"], "image"), format_count(row["num_classes"], "class", "classes")
    shards = format_count(row["num_shards"], "shard")
    return f"{row['path']}: {images} of {classes} in {shards}, {_format_mib(row['size_bytes'])}"


def format_details(row: dict[str, Any]) -> str:
    """Return the second line on a data set, from what `summarise` returned with an index."""
    return f"{row['format']}, {row['image_bytes_mean']:,.0f} bytes per image, {row['pixels']}, from {row['kind']}"


def format_packed(out: Path, manifests: Mapping[str, Manifest], seconds: float) -> Iterator[str]:
    """Yield the lines on a pack or a conversion that is complete.

    Args:
        out: Folder of the data sets.
        manifests: Their manifests by split.
        seconds: Time that it took, in seconds.
    """
    for split, manifest in manifests.items():
        yield format_summary(summarise(out / split, manifest))
        before, after = manifest.source_bytes, manifest.image_bytes
        if before and after and before != after:
            yield f"  images had {_format_mib(before)}, have {_format_mib(after)} ({after / before:.1%})"
        if manifest.converted:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in manifest.converted.items())
            yield f"  of another kind, converted: {kinds}"
        if manifest.num_bad:
            yield f"  {format_count(manifest.num_bad, 'bad image')} left out, see quarantine.jsonl"
    images = sum(manifest.num_samples for manifest in manifests.values())
    yield f"{format_count(images, 'image')} in {seconds:.1f} s"


def format_staged(result: Staged) -> str:
    """Return the line on a data set that `stage` copied. After a fault more may be read than it has."""
    read, kept = _format_mib(result.copied_bytes), _format_mib(result.kept_bytes)
    received = f", {_format_mib(result.received_bytes)} from other nodes" if result.received_bytes else ""
    images = format_count(result.num_samples, "image")
    return f"{result.folder}: {images}, {read} read from DIR{received}, {kept} there already"


def _format_mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
