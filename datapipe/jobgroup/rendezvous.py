"""How the processes of a job that stage or train together meet, and part."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..cluster import Placement
from ..console import raised_by_signal
from ..errors import SettingError
from .group import Crew
from .secret import SignedStore, choose_file, read_secret
from .store import CrewError, connect_store

_numbers = itertools.count()  # of crews in this process, whose keys differ
_crews: list[Crew] = []  # of this process, that are open


def explain_end(error: BaseException) -> str:
    """Say why a process ends, in words for others.

    >>> explain_end(SystemExit(143))
    'it got SIGTERM'
    """
    number = raised_by_signal(error)
    return f"it got {signal.Signals(number).name}" if number else str(error) or type(error).__name__


def leave_crews(error: BaseException) -> None:
    """Tell the others why this process ends, where it is another thread that meets them or works with them."""
    for crew in [*_crews]:
        crew.leave(explain_end(error))


@contextmanager
def open_crew(
    placement: Placement,
    timeout_s: float,
    noun: str = "node",
    refusal: str = "",
    option: str = "timeout_s",
    secret: Path | None = None,
) -> Iterator[Crew]:
    """Meet the other processes of a job, and part from them at the end.

    Args:
        placement: Placement of this process.
        timeout_s: Longest time that another process may give no sign of life, in seconds.
        noun: "node", where one process of each matters, or "rank", where all do.
        refusal: Reason for which this process comes only to tell the others that it leaves; "" if it stays.
        option: Option by which a user sets `timeout_s`, for messages.
        secret: File of the secret that they share; None: see `secret.choose_file`.

    Yields:
        The processes.

    Raises:
        SettingError: Process 0 cannot be found, or other jobs would meet at the same port.
        CrewError: Not all processes came; or the refusal.
    """
    if not placement.master:
        message = f"the host of process 0 is needed, which {placement.launcher or 'the environment'} does not tell"
        raise SettingError(f"mode: {message}: give --master HOST, or set MASTER_ADDR")
    if problem := placement.find_port_problem():
        raise SettingError(f"{problem}; or stage with --mode copy" if noun == "node" else problem)
    path = secret or choose_file()
    shared = secrets.token_bytes() if placement.world_size == 1 else read_secret(path, not refusal, timeout_s)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives its workers
    prefix = f"{noun}/{placement.job}/{placement.world_size}/{restart}/{next(_numbers)}"
    store, beats = (connect_store(placement, is_first, timeout_s, option) for is_first in (True, False))
    place = f"{placement.master}:{placement.port}, with the secret in {path},"
    stores = SignedStore(store, prefix, shared, place), SignedStore(beats, prefix, shared, place)
    token = hmac.new(shared, prefix.encode(), hashlib.sha256).hexdigest()  # torch's own keys are not to be guessed
    crew = Crew(noun, f"{prefix}/{token}", stores, placement, timeout_s, option)
    with parting(crew):
        if refusal:
            raise CrewError(refusal)
        crew.meet()
        yield crew


@contextmanager
def parting(crew: Crew) -> Iterator[None]:
    """Part from the others of a crew at the end; if this process ends with an error, tell them."""
    _crews.append(crew)
    try:
        yield
    except BaseException as error:
        crew.leave(explain_end(error))
        raise
    finally:
        _crews.remove(crew)
        crew.close()
