"""Run `datapipe` on a host that is a network namespace, where the hosts' names lead to each other: NAMESPACE ARGUMENTS.

As `ip netns exec` does, which would start a new interpreter.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

from datapipe.cli import main

CLONE_NEWNS, CLONE_NEWNET = 0x0002_0000, 0x4000_0000  # of <sched.h>

namespace = sys.argv.pop(1)
libc = ctypes.CDLL(None, use_errno=True)
with Path("/run/netns", namespace).open() as file:
    if libc.setns(file.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "--bind", f"/etc/netns/{namespace}/hosts", "/etc/hosts"], check=True)
sys.exit(main())
