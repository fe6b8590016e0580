"""Run `datapipe`, and print in the last line the bytes of memory that this process has taken at most since it began.

Arguments: those of `datapipe`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from datapipe.cli import main


def memory_bytes(name: str) -> int:
    """Return a size in proc(5), status: VmRSS, or VmHWM, the most that this has been."""
    (kib,) = re.findall(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kib) << 10


if __name__ == "__main__":
    Path("/proc/self/clear_refs").write_text(
        "5"
    )  # VmHWM counts from here: the server that forked this process has had much more
    for name in ("datapipe.jobgroup.group", "torch.distributed"):  # a server's, with which main() may end this process
        sys.modules.pop(name, None)
    before = memory_bytes("VmRSS")
    code = main()
    print(memory_bytes("VmHWM") - before)
    sys.exit(code)
