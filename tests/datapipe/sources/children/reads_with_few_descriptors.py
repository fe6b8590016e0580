"""Read all images of a source twice with few file descriptors. Image number i holds the digits of i.

Argument: the source.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from datapipe.sources import open_source

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))
    samples = open_source(Path(sys.argv[1])).splits["train"]
    for _ in range(2):
        for i in range(len(samples)):
            assert samples.read(i, memoryview(bytearray(9))) == str(i).encode(), i
    assert len(os.listdir("/proc/self/fd")) < 50
