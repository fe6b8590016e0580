"""What the commands say of packed data sets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from .dataset.manifest import Manifest


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
    return (
        f"{row['path']}: {row['num_samples']:,} images of {row['num_classes']} classes "
        f"in {row['num_shards']} shards, {format_mib(row['size_bytes'])}"
    )


def format_images(manifest: Manifest, is_recoded: bool) -> Iterator[str]:
    """Yield lines on what became of the images.

    `convert` keeps their bytes (`is_recoded` False): the options in its manifest are those of the pack before.
    """
    if is_recoded and manifest.recode and manifest.source_bytes and manifest.image_bytes:
        stored = manifest.image_bytes / manifest.source_bytes
        yield f"images had {format_mib(manifest.source_bytes)}, have {format_mib(manifest.image_bytes)} ({stored:.1%})"
    if manifest.converted:
        yield "of another kind, converted: " + ", ".join(f"{n:,} {kind}" for kind, n in manifest.converted.items())
    if manifest.num_bad:
        yield f"{manifest.num_bad:,} bad images left out, see quarantine.jsonl"


def format_mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
