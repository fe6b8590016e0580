"""Run `datapipe` with one more format: the images one after another, and nothing else. Pack, and verify that.

Arguments: SOURCE and OUT.
"""

from __future__ import annotations

import sys
import types

from datapipe import names

names.FORMATS += ("toy",)  # before the command reads them

from datapipe.cli import main  # noqa: E402
from datapipe.formats import Finished  # noqa: E402


class Writer:
    head = b"toy:"

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.end = len(self.head)

    def add(self, key: str, label: int, data: bytes, header: object) -> list[bytes]:
        self.offsets.append(self.end)
        self.end += len(data)
        return [data]

    def finish(self) -> Finished:
        return Finished(b"", {}, self.offsets, {})


if __name__ == "__main__":
    toy = types.ModuleType("datapipe.formats.toy")
    toy.__dict__.update(SUFFIX=".toy", OVERHEAD_BYTES=0, Writer=Writer)
    sys.modules[toy.__name__] = toy
    source, out = sys.argv[1:]
    for arguments in (["pack", source, out, "--format", "toy"], ["verify", "--deep", out]):
        sys.argv[1:] = arguments
        if code := main():
            sys.exit(code)
