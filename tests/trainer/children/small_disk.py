"""`trainer` on a small disk that only it sees: small_disk.py SIZE RANKS, and then the words of the command.

The disk is the folder `disk`. The run in `first`, if any, is copied to disk/run, and all space that it leaves is used
up. What is in disk/run at the end is copied to `kept`, since the disk ends with the process. The exit code is the last
rank's that is not 0; no launcher ends the others when the first has ended.
"""

import contextlib
import ctypes
import os
import subprocess
import sys
from pathlib import Path

from trainer.cli import main

CLONE_NEWNS = 0x0002_0000  # of <sched.h>: a mount namespace


def mount(size: str) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "no mount namespace of its own")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    Path("disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", "disk"], check=True)
    if Path("first").exists():
        subprocess.run(["cp", "-a", "first", "disk/run"], check=True)
        with contextlib.suppress(OSError), open("disk/rest", "wb", buffering=0) as rest:
            while True:
                rest.write(bytes(4096))


def start(rank: int) -> int:
    """Fork a rank; return its process."""
    pid = os.fork()
    if pid == 0:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        try:
            code = main()
        finally:
            sys.stdout.flush()
        os._exit(code)
    return pid


if __name__ == "__main__":
    size, ranks = sys.argv[1:3]
    del sys.argv[1:3]
    mount(size)
    processes = [start(rank) for rank in range(int(ranks))]
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    subprocess.run(["cp", "-r", "disk/run", "kept"], check=True)
    sys.exit(next((code for code in reversed(codes) if code), 0))
