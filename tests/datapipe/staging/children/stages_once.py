"""Stage to a cache as a loader does, no faster than so many MB/s: SOURCE CACHE [MB/S]."""

import sys
from pathlib import Path

from datapipe.staging import StageOptions, stage_once

max_mbps = float(sys.argv[3]) if len(sys.argv) > 3 else None
stage_once(Path(sys.argv[1]), Path(sys.argv[2]), StageOptions(chunk_mib=1, max_mbps=max_mbps))
