"""Packs each source that is named into a folder named as it: `out`, number of workers, sources."""

from __future__ import annotations

import sys
from pathlib import Path

from datapipe.images.recode import RecodeOptions
from datapipe.packing import PackOptions, pack

out, workers, *sources = sys.argv[1:]
for source in map(Path, sources):
    options = PackOptions(max_bad=20, workers=int(workers), recode=RecodeOptions(check="decode"))
    pack(source, Path(out) / source.name, options)
