"""Images that a pack holds more than once, by what its index says of their bytes: their checksum and their size."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..console import format_count
from ..errors import SourceError
from ..split_names import TRAIN, VAL


def check_copies(records: Mapping[str, np.ndarray]) -> list[str]:
    """Compare the images of a pack with each other, wherever they came from: copies, links, rows of tables.

    Two images are told apart by 32 bits of checksum and their size: of ImageNet's, the chance that any two agree by
    accident is about 1 in 500.

    Args:
        records: RECORD[N] of each split.

    Returns:
        What a user should know, in words.

    Raises:
        SourceError: All images of val are train's.
    """
    said = []
    identities = {split: _identify(images) for split, images in records.items()}
    for split, images in records.items():
        distinct, first, inverse = np.unique(identities[split], return_index=True, return_inverse=True)
        if num_copies := len(images) - len(distinct):
            others = int((images["label"] != images["label"][first[inverse]]).sum())
            classes = f", {others:,} of them as another class" if others else ""
            copies = format_count(num_copies, "image is a copy", "images are copies")
            said.append(f"{copies} of others in {split}, byte for byte{classes}")
    if {TRAIN, VAL} <= records.keys():
        num_shared = int(np.isin(identities[VAL], identities[TRAIN]).sum())
        if num_shared == len(records[VAL]):
            message = "all images of val are train's, byte for byte: val would measure nothing"
            raise SourceError(f"{message}; to pack train alone, name it with --split")
        if num_shared:
            said.append(f"{format_count(num_shared, 'image')} of val are train's, too, byte for byte")
    return said


def _identify(records: np.ndarray) -> np.ndarray:
    """Return the checksum and the size of each image, uint64[N]."""
    identity: np.ndarray = records["checksum"].astype(np.uint64) << np.uint64(32) | records["size"]
    return identity
