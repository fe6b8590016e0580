"""The memory that this process may use."""

from __future__ import annotations

import ctypes
import os
import re
from contextlib import suppress
from pathlib import Path

from .errors import SettingError

# Where the kernel keeps limits, by the controllers on a line of /proc/self/cgroup ("" is version 2): folder and file.
CGROUPS = {"": ("/sys/fs/cgroup", "memory.max"), "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")}
SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,6})?) ?([KMGT]i?)?B?", re.IGNORECASE)
POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def allowed_bytes() -> int:
    """Return the bytes of the machine's memory, or of the narrowest control group above this process."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in set(controllers.split(",")) & CGROUPS.keys():
                root, name = CGROUPS[controller]
                limits += _limits(Path(root), path, name)
    return min(limits)


def _limits(root: Path, path: str, name: str) -> list[int]:
    """Return the limits of a group and of all above it. A container may not see where the path begins."""
    limits = []
    folder = Path(root, path.strip("/"))
    for group in (folder, *folder.parents):
        with suppress(OSError, ValueError):  # "max" is not a number
            limits.append(int((group / name).read_text()))
        if group == root:
            break
    return limits


def return_free_bytes() -> None:
    """Return freed memory to the kernel. glibc keeps hundreds of megabytes per thread after large images."""
    with suppress(AttributeError):  # another C library has no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def parse_bytes(name: str, text: str) -> int:
    """Parse a size such as "8GiB", "500MB" or "1000000" into bytes. Raises SettingError with the setting's `name`."""
    match = SIZE.fullmatch(str(text).strip())
    size = 0
    if match:
        unit = (match[2] or "").lower()
        size = int(float(match[1]) * (1024 if unit.endswith("i") else 1000) ** POWERS[unit[:1]])
    if size < 1:
        raise SettingError(f"{name}: {text!r} is not a size; allowed: such as 8GiB, 500MB, or a number of bytes")
    return size
