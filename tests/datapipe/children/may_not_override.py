"""Run `datapipe` as a process that may not do what a file's mode forbids: root may, and gives that up."""

from __future__ import annotations

import ctypes
import os
import sys

from datapipe.cli import main

# <linux/capability.h>
VERSION_3 = 0x2008_0522
DAC_OVERRIDE, DAC_READ_SEARCH = 1 << 1, 1 << 2


def give_up_override() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, then their upper halves
    for call in (libc.capget, libc.capset):
        if call(header, sets):
            raise OSError(ctypes.get_errno(), f"cannot give up capabilities: {call.__name__}")
        for i in range(3):
            sets[i] &= ~(DAC_OVERRIDE | DAC_READ_SEARCH)


if __name__ == "__main__":
    if os.geteuid() == 0:
        give_up_override()
    sys.exit(main())
