"""The nodes that stage together: who they are, what each knows, and what has become of one that is silent.

They meet at a key-value store (torch's TCPStore), which process 0 keeps, or torchrun. Small things go through it; bytes
through a process group of gloo's, over the interface by which a node reaches process 0. A training's group is not used.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..cluster import Placement
from ..errors import SettingError, StagingError
from ..fsio import boot_id
from .network import find_address, find_unreachable

Answer = TypeVar("Answer")
logger = logging.getLogger(__name__)

BEAT_S = 1.0  # how often a process says that it lives
LISTEN_S = 5 * BEAT_S  # how long to listen for that
PARTING_S = 10.0  # how long process 0 keeps the store for others that are not done
SAY_S = 10.0  # how often to say for whom this process waits
LOOK_S = 0.1
FIRST_LOOK_S = 0.005  # the others come to most questions at the same time; each pause is twice the last one
CONNECTS = 5  # how often gloo tries to connect, each time for as long as it may take
_numbers = itertools.count()  # of crews in this process, whose keys differ


class CrewError(StagingError):
    """The nodes cannot continue together; each can alone."""


class Crew:
    """The nodes of a job, one process each. See `open_crew`.

    Attributes:
        index: number of this node, from 0.
        hosts: names of all nodes, in order.
        is_leader: whether this is the process that stages for its node.
    """

    def __init__(self, store: dist.Store, beats: dist.Store, placement: Placement, timeout_s: float) -> None:
        self._store, self._beats, self._placement, self._timeout_s = store, beats, placement, timeout_s
        self._group: dist.ProcessGroupGloo | None = None
        self._ended = threading.Event()
        self.index, self.hosts, self.is_leader = -1, [placement.master], False
        threading.Thread(target=self._beat, name="datapipe-beat", daemon=True).start()

    def meet(self) -> None:
        """Find out who the nodes are. Raises CrewError when a process does not come, and names it."""
        mine = [socket.gethostname(), boot_id()]
        everyones = self._gather("host", mine, range(self._placement.world_size), self._placement.rank)
        nodes = [host for number, host in enumerate(everyones) if host not in everyones[:number]]
        self._leaders = [everyones.index(host) for host in nodes]
        self.hosts, self.index = [name for name, _ in nodes], nodes.index(mine)
        self.is_leader = self._leaders[self.index] == self._placement.rank

    def __len__(self) -> int:
        return len(self.hosts)

    # --- small things ---

    def gather(self, name: str, value: Any) -> list[Any]:
        """Tell the other nodes something, and return what each told, by node.

        Args:
            name: of the subject; each is gathered once.
            value: what JSON can hold.

        Raises:
            CrewError: a node has left, or does not answer; names it.
        """
        return self._gather(name, value, self._leaders, self._placement.rank)

    def _gather(self, name: str, value: Any, ranks: Iterable[int], mine: int) -> list[Any]:
        """Do what `gather` does, for some processes. One that lives may take as long as it needs."""
        self._ask(lambda: self._store.set(f"{name}/{mine}", json.dumps(value)))
        keys = {rank: f"{name}/{rank}" for rank in ranks}
        beats: dict[int, bytes] = {}
        said, alive = time.monotonic(), dict.fromkeys(keys, time.monotonic())
        pause = FIRST_LOOK_S
        while not self._ask(lambda: self._store.check([*keys.values()])):
            time.sleep(pause)
            pause = min(2 * pause, LOOK_S)
            now = time.monotonic()
            has_left = self._ask(lambda: self._store.check(["left"]))  # the store is not kept for long then
            if not has_left and now - said < min(SAY_S, self._timeout_s / 2):
                continue
            missing = self._ask(lambda: [rank for rank, key in keys.items() if not self._store.check([key])])
            self._check_left(missing)
            if now - said < min(SAY_S, self._timeout_s / 2):
                continue
            said = now
            latest = self._ask(partial(self._latest_beats, missing))
            alive |= {rank: now for rank in missing if latest[rank] != beats.get(rank, b"")}
            beats |= latest
            silent = [rank for rank in missing if now - alive[rank] > self._timeout_s]
            if silent:
                raise CrewError(f"{self._names(silent)} did not answer for {self._timeout_s:g} s (timeout_s)")
            logger.info("waiting for %s", self._names(missing))
        return [json.loads(answer) for answer in self._ask(lambda: self._store.multi_get([*keys.values()]))]

    def _latest_beats(self, ranks: Iterable[int]) -> dict[int, bytes]:
        """Return what each process said last of its life; b"" if it has not said anything."""
        return {rank: self._store.get(key) if self._store.check([key := f"beat/{rank}"]) else b"" for rank in ranks}

    def _check_left(self, ranks: Iterable[int]) -> None:
        """Raise CrewError with the reason where one of these processes has left."""

        def find() -> dict[int, str]:
            return {
                rank: self._store.get(f"left/{rank}").decode() for rank in ranks if self._store.check([f"left/{rank}"])
            }

        left = self._ask(find)
        if left:
            raise CrewError("; ".join(f"{self._names([rank])} has left: {why}" for rank, why in left.items()))

    def _ask(self, question: Callable[[], Answer], limit_s: float | None = None) -> Answer:
        """Call a function that asks the store, which may hang with the process that keeps it.

        Args:
            question: is called once, in a thread.
            limit_s: how long it may take, in seconds; None: as long as another node may not answer.

        Returns:
            What the function returns.

        Raises:
            CrewError: it takes longer, or the store is gone.
        """
        answers: queue.SimpleQueue[tuple[Any, RuntimeError | None]] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put((question(), None))
            except RuntimeError as error:
                answers.put((None, error))

        threading.Thread(target=ask, name="datapipe-ask", daemon=True).start()
        try:
            answer, error = answers.get(timeout=limit_s or self._timeout_s)
        except queue.Empty:
            error = RuntimeError("no answer")
        if error is not None:
            raise CrewError(f"node 0 ({self.hosts[0]}) does not answer") from error
        return answer

    def _names(self, ranks: Iterable[int]) -> str:
        if self.index < 0:
            return ", ".join(f"process {rank}" for rank in ranks)
        return ", ".join(f"node {node} ({self.hosts[node]})" for node in map(self._leaders.index, ranks))

    def leave(self, reason: str) -> None:
        """Tell the others why this process stops: they continue without it."""
        with suppress(CrewError):
            self._ask(lambda: self._store.set(f"left/{self._placement.rank}", reason), LISTEN_S)
            self._ask(lambda: self._store.set("left", ""), LISTEN_S)

    def follow(self) -> None:
        """Wait for the process that stages for this node. Raises CrewError where that has left, or is silent."""
        self._gather("done", "", [self._leaders[self.index]], self._placement.rank)

    def done(self) -> None:
        """Tell the other processes of this node that it is staged."""
        with suppress(CrewError):
            self._ask(partial(self._store.set, f"done/{self._placement.rank}", '""'), LISTEN_S)

    # --- bytes ---

    def connect(self, interface: str | None) -> None:
        """Connect to all other nodes.

        Args:
            interface: the network interface; None: the one that leads to process 0.

        Raises:
            CrewError: that is not possible; names the addresses of both sides.
        """
        mine = find_address(self.gather, self.index, interface, self._placement.master)
        problem = find_unreachable(self.gather, self.index, self.hosts, mine, self._timeout_s)
        if problem:
            raise CrewError(f"{problem}; choose the network by --interface")
        # torch's stubs lack these; it makes its own groups of them in the same way.
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=max(LISTEN_S, self._timeout_s / CONNECTS))
        try:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=mine)]
            store = dist.PrefixStore("gloo", self._store)
            group = dist.ProcessGroupGloo(store, self.index, len(self), options)
        except RuntimeError as error:
            raise CrewError(f"{self._explain(error)}; this node's address is {mine}") from error
        group._set_default_timeout(timedelta(seconds=self._timeout_s))
        self._group = group

    def exchange(self, mine: torch.Tensor, everyones: torch.Tensor) -> None:
        """Send bytes to all nodes, and receive those of each.

        Args:
            mine: uint8[n].
            everyones: uint8[nodes, n], is filled.

        Raises:
            CrewError: a node is gone, or has not taken part in time; names it.
        """
        assert self._group is not None, "connect first"
        try:
            # As dist.all_gather_into_tensor does: the list of allgather() would be copied from memory of its own.
            self._group._allgather_base(everyones.view(-1), mine).wait()  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise CrewError(self._explain(error)) from error

    def _explain(self, error: RuntimeError) -> str:
        """Say which node is missing."""
        others = [rank for rank in self._leaders if rank != self._placement.rank]
        try:
            time.sleep(BEAT_S)  # for its last words
            self._check_left(others)
            before = self._ask(lambda: self._latest_beats(others), LISTEN_S)
            time.sleep(LISTEN_S)
            after = self._ask(lambda: self._latest_beats(others), LISTEN_S)
        except CrewError as reason:
            return reason.message
        silent = [rank for rank in others if before[rank] == after[rank]]
        return f"{self._names(silent)} does not answer" if silent else f"the connection to another node broke: {error}"

    def _beat(self) -> None:
        with suppress(RuntimeError):
            for count in itertools.count():
                self._beats.set(f"beat/{self._placement.rank}", str(count))
                if self._ended.wait(BEAT_S):
                    return

    def close(self) -> None:
        """Part. Process 0, which may keep the store, waits a moment for the others."""
        self._ended.set()
        self._group = None

        def part() -> None:
            self._store.set(f"bye/{self._placement.rank}", "")
            keys, deadline = [f"bye/{rank}" for rank in range(self._placement.world_size)], time.monotonic() + PARTING_S
            while self._placement.rank == 0 and not self._store.check(keys) and time.monotonic() < deadline:
                time.sleep(LOOK_S)

        with suppress(CrewError):
            self._ask(part, PARTING_S + LISTEN_S)


@contextmanager
def open_crew(placement: Placement, timeout_s: float) -> Iterator[Crew]:
    """Meet the other processes of a job, and part from them at the end.

    Args:
        placement: of this process.
        timeout_s: how long another process may give no sign of life, in seconds.

    Raises:
        SettingError: process 0 cannot be found.
        CrewError: not all processes came.
    """
    if not placement.master:
        message = f"mode: exchange needs the host of process 0, which {placement.launcher or 'the environment'} does"
        raise SettingError(f"{message} not tell: give --master HOST, or set MASTER_ADDR")
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives its workers
    prefix = f"stage/{placement.job}/{placement.world_size}/{restart}/{next(_numbers)}"
    store, beats = (dist.PrefixStore(prefix, _meet(placement, is_first, timeout_s)) for is_first in (True, False))
    crew = Crew(store, beats, placement, timeout_s)
    try:
        crew.meet()
        yield crew
    except BaseException as error:
        crew.leave(str(error) or type(error).__name__)
        raise
    finally:
        crew.close()


def _meet(placement: Placement, is_first: bool, timeout_s: float) -> dist.Store:
    """Connect to the store, which process 0 keeps from its first connection on, unless torchrun does."""
    is_keeper = is_first and placement.rank == 0 and not placement.has_store
    try:
        place, limit = (placement.master, placement.port), timedelta(seconds=timeout_s)
        return dist.TCPStore(*place, is_master=is_keeper, timeout=limit, wait_for_workers=False)
    except RuntimeError as error:
        what = "cannot listen" if is_keeper else "process 0 does not answer"
        raise CrewError(f"{placement.master}:{placement.port}: {what}: {error}") from error
