"""How the processes of a job that stage or train together meet, and part."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ..cluster import Placement
from ..errors import SettingError
from .crew import Crew
from .store import CrewError, connect_store

_numbers = itertools.count()  # of crews in this process, whose keys differ


@contextmanager
def open_crew(placement: Placement, timeout_s: float, noun: str = "node", refusal: str = "") -> Iterator[Crew]:
    """Meet the other processes of a job, and part from them at the end.

    Args:
        placement: of this process.
        timeout_s: how long another may give no sign of life, in seconds.
        noun: "node", where one process of each matters, or "rank", where all do.
        refusal: why this process comes only to tell the others that it leaves; "" if it stays.

    Yields:
        The processes.

    Raises:
        SettingError: process 0 cannot be found.
        CrewError: not all processes came; or the refusal.
    """
    if not placement.master:
        message = f"the host of process 0 is needed, which {placement.launcher or 'the environment'} does not tell"
        raise SettingError(f"mode: {message}: give --master HOST, or set MASTER_ADDR")
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives its workers
    prefix = f"{noun}/{placement.job}/{placement.world_size}/{restart}/{next(_numbers)}"
    store, beats = (connect_store(placement, is_first, timeout_s) for is_first in (True, False))
    stores = dist.PrefixStore(prefix, store), dist.PrefixStore(prefix, beats)
    crew = Crew(noun, prefix, stores, placement, timeout_s)
    try:
        if refusal:
            raise CrewError(refusal)
        crew.meet()
        yield crew
    except BaseException as error:
        crew.leave(str(error) or type(error).__name__)
        raise
    finally:
        crew.close()
