"""The memory that this process may use."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .errors import SettingError

# Where the kernel keeps limits, by the controllers on a line of /proc/self/cgroup ("" is version 2): folder and file.
_CGROUPS = {"": ("/sys/fs/cgroup", "memory.max"), "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")}
# Beside a limit: what is in use, and in memory.stat what of that are files, which can be dropped, and those in memory.
_USAGE = {"memory.max": ("memory.current", "file", "shmem"),
         "memory.limit_in_bytes": ("memory.usage_in_bytes", "total_cache", "total_shmem")}  # fmt: skip
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,6})?) ?([KMGT]i?)?B?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def allowed_bytes() -> int:
    """Return the bytes of the machine's memory, or of the narrowest control group above this process."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(_limit(group, name) for group, name in _groups())])


def available_bytes() -> int:
    """Return the bytes that this process may still use, on the machine and in each control group above it."""
    available = [allowed_bytes()]
    with suppress(OSError, ValueError, IndexError):
        (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
        available.append(int(line.split()[1]) << 10)
    return max(0, min([*available, *(_limit(group, name) - _used(group, name) for group, name in _groups())]))


def _groups() -> Iterator[tuple[Path, str]]:
    """Yield the folder of each control group above this process, and the name of its limit's file."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in set(controllers.split(",")) & _CGROUPS.keys():
                root, name = _CGROUPS[controller]
                yield from ((folder, name) for folder in _folders(Path(root), path))


def _folders(root: Path, path: str) -> Iterator[Path]:
    """Yield the folders of a group and of all above it. A container may not see where the path begins."""
    folder = Path(root, path.strip("/"))
    for group in (folder, *folder.parents):
        yield group
        if group == root:
            break


def _limit(group: Path, name: str) -> int:
    with suppress(OSError, ValueError):  # "max" is not a number
        return int((group / name).read_text())
    return sys.maxsize


def _used(group: Path, name: str) -> int:
    """Return the bytes that a group uses, without files in the page cache, which make way."""
    usage, files, in_memory = _USAGE[name]
    with suppress(OSError, ValueError, KeyError):
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int((group / usage).read_text()) - int(counts[files]) + int(counts[in_memory])
    return 0


def return_free_bytes() -> None:
    """Return freed memory to the kernel. glibc keeps hundreds of megabytes per thread after large images."""
    with suppress(AttributeError):  # another C library has no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def parse_bytes(name: str, text: str) -> int:
    """Parse a size such as "8GiB", "500MB" or "1000000" into bytes. Raises SettingError with the setting's `name`."""
    match = _SIZE.fullmatch(str(text).strip())
    size = 0
    if match:
        unit = (match[2] or "").lower()
        size = int(float(match[1]) * (1024 if unit.endswith("i") else 1000) ** _POWERS[unit[:1]])
    if size < 1:
        raise SettingError(f"{name}: {text!r} is not a size; allowed: such as 8GiB, 500MB, or a number of bytes")
    return size
