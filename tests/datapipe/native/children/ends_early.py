"""Ends while a daemon thread is in the library whose name is given, with more images than it will come to."""

import sys
import threading

import numpy as np

from datapipe import native

SIDE, COUNT = 1000, 100_000  # to resize such an image takes a millisecond, and memory of its own
spent_s = np.zeros(len(native.STAGES))


def decode(library: native.Native) -> None:
    image, out = np.zeros((SIDE, SIDE, 3), np.uint8), np.zeros((200, 200, 3), np.uint8)
    jobs, stop, progress = np.zeros(COUNT, native.JOB), np.zeros(1, np.uint8), np.zeros(native.PROGRESS, np.int64)
    jobs["data"], jobs["size"], jobs["out"], jobs["is_pixels"] = image.ctypes.data, image.size, out.ctypes.data, True
    jobs["width"], jobs["height"], jobs["box"], jobs["scale"] = SIDE, SIDE, (0, 0, SIDE, SIDE), 1
    library.decode(jobs, 3, 200, stop, progress, spent_s)


threading.Thread(target=decode, args=[native.open_library(sys.argv[1])], daemon=True).start()
while not spent_s[2]:  # until the first is resized
    pass
