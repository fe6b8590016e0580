"""Run `datapipe` on a filesystem that never answers when image number 23 is read, which it prints.

Arguments: those of `datapipe`.
"""

from __future__ import annotations

import sys
import threading

from datapipe.cli import main
from datapipe.images import Buffer
from datapipe.packing import pipeline
from datapipe.sources.files import Files

read = Files.read


def hang(files: Files, i: int, buffer: memoryview) -> Buffer:
    if i == 23:
        print("hangs", flush=True)
        threading.Event().wait()
    return read(files, i, buffer)


if __name__ == "__main__":
    Files.read = hang
    pipeline.CHUNK_BYTES = 1  # images are written one by one, so that some of the shard is there
    sys.exit(main())
