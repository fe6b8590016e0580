"""For children that may take little memory beside what they have: a server's other packages are mapped in them."""

from __future__ import annotations

import resource
from pathlib import Path


def limit_memory(num_bytes: int) -> None:
    """Let this process have so many more bytes of address space."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + num_bytes,) * 2)
