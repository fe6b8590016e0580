"""Run `datapipe` on a filesystem that never answers when image number 23 is read, which it prints.

Arguments: those of `datapipe`.
"""

from __future__ import annotations

import sys
import threading

from datapipe.cli import main
from datapipe.images import Buffer
from datapipe.packing import pipeline
from datapipe.sources.samples import Files

read, place = Files.read, Files.place


def hang(files: Files, i: int, buffer: memoryview) -> Buffer:
    if i == 23:
        print("hangs", flush=True)
        threading.Event().wait()
    return read(files, i, buffer)


def leave_to_python(files: Files, i: int) -> tuple[int, str]:
    folder, name = place(files, i)
    return -1 if i == 23 else folder, name


if __name__ == "__main__":
    Files.read, Files.place = hang, leave_to_python
    pipeline._CHUNK_BYTES = 1  # images are written one by one, so that some of the shard is there
    sys.exit(main())
