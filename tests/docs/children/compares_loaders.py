"""Pack a SOURCE to a FOLDER, and compare the batches of the worked example "serial" with those of the known loader."""

import sys
from pathlib import Path
from typing import Any

from datapipe.loaders import open_loader
from datapipe.packing import PackOptions, pack

source, out = map(Path, sys.argv[1:])
pack(source, out, PackOptions(workers=1))
for train, size in ((True, 28), (True, 16), (False, 28), (False, 20)):
    settings: dict[str, Any] = {"batch_size": 128, "train": train, "size": size, "seed": 3, "rank": 1, "world_size": 2}
    with open_loader(out / "val", **settings) as known, open_loader(out / "val", backend="serial", **settings) as new:
        assert len(known) == len(new)
        for a, b in zip(known, new, strict=True):
            assert a.samples.equal(b.samples) and a.labels[a.valid].equal(b.labels[b.valid]) and a.valid.equal(b.valid)
            assert a.images.shape == b.images.shape
            assert (a.images.float() - b.images.float()).abs().mean() < 1
