"""How a process that trains on the processor gets its memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import MutableMapping

# malloc.h, and mallopt(3)
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_TOP_PAD_BYTES = 64 << 20
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch asks for huge pages for tensors of 2 MiB and more; it looks once


def keep_freed_memory(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Let the C library keep what is freed, and torch use huge pages, from this process's first tensor on.

    Otherwise glibc gives each large tensor back to the kernel, which has to find and clear other pages for the next:
    thousands in each step, a seventh of its processor time. The process then needs as much memory as at its peak for
    as long as it lives.

    Args:
        environ: Environment variables. Where they set up glibc's allocator (MALLOC_…, GLIBC_TUNABLES), or replace it
            (LD_PRELOAD), it stays as it is.

    Returns:
        Whether freed memory is kept: not with another C library than glibc.
    """
    if any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in environ):
        return False
    environ.setdefault(HUGE_PAGES, "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # -1: no limit. Without mappings all memory comes from one heap, whose end moves in steps of _TOP_PAD_BYTES.
    settings = ((_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, _TOP_PAD_BYTES), (_M_MMAP_MAX, 0))
    return all([mallopt(name, value) == 1 for name, value in settings])
