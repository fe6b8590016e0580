"""Chooses the decoder in C, and prints the files that it would have written, and the choice."""

import os
import sys

written: list[str] = []


def note(event: str, details: tuple) -> None:
    makes = event in ("os.mkdir", "os.rename", "os.remove")
    if makes or (event == "open" and isinstance(details[0], str) and details[2] & (os.O_WRONLY | os.O_RDWR)):
        written.append(str(details[0]))


sys.addaudithook(note)
from datapipe.loaders.native_pixels import choose_native  # noqa: E402

print(written, choose_native())
