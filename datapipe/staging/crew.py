"""The nodes that stage together: who they are, what each knows, and what has become of one that is silent.

They meet at a key-value store (torch's TCPStore), which process 0 keeps, or torchrun. Small things go through it. Bytes
go through gloo, over the interface by which a node reaches process 0.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..cluster import Placement
from ..errors import SettingError, StagingError

Answer = TypeVar("Answer")
logger = logging.getLogger(__name__)

JOIN_S = 300.0  # how long to wait for processes that begin later
BEAT_S = 1.0  # how often a node says that it lives
LISTEN_S = 3 * BEAT_S  # how long to listen for that
PARTING_S = 10.0  # how long process 0 keeps the store for others that are not done
LOOK_S = 0.05
SAY_S = 10.0  # how often to say for whom this node waits
SIOCGIFADDR = 0x8915  # netdevice(7)
_numbers = itertools.count()  # of crews in this process: each has keys of its own in the store


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
        self._store, self._placement, self._timeout_s = store, placement, timeout_s
        host = socket.gethostname()
        self._num_ranks, self._rank = placement.world_size, placement.rank
        all_hosts = self._gather("host", host, self._rank, list(range(self._num_ranks)))
        self.hosts = list(dict.fromkeys(all_hosts))
        self.index = self.hosts.index(host)
        self.is_leader = all_hosts.index(host) == self._rank
        self._ended = threading.Event()
        if self.is_leader:
            threading.Thread(target=self._beat, args=(beats,), name="datapipe-beat", daemon=True).start()

    def __len__(self) -> int:
        return len(self.hosts)

    # --- small things ---

    def gather(self, name: str, value: Any) -> list[Any]:
        """Tell the other nodes something, and return what each told, by node.

        Args:
            name: of the subject; each is gathered once.
            value: what JSON can hold.

        Raises:
            CrewError: a node has told nothing in time; names it.
        """
        return self._gather(name, value, self.index, list(range(len(self))))

    def _gather(self, name: str, value: Any, mine: int, numbers: list[int]) -> list[Any]:
        keys = [f"{name}/{number}" for number in numbers]
        began = said = time.monotonic()
        self._ask(lambda: self._store.set(f"{name}/{mine}", json.dumps(value)))
        while not self._ask(lambda: self._store.check(keys)):
            now = time.monotonic()
            if now - max(said, began) > min(SAY_S, self._timeout_s):
                said = now
                missing = self._ask(
                    lambda: [n for n, key in zip(numbers, keys, strict=True) if not self._store.check([key])]
                )
                if now - began > self._timeout_s:
                    raise CrewError(f"{self._names(missing)} did not answer for {self._timeout_s:g} s (timeout_s)")
                logger.info("waiting for %s", self._names(missing))
            time.sleep(LOOK_S)
        return [json.loads(answer) for answer in self._ask(lambda: self._store.multi_get(keys))]

    def _ask(self, question: Callable[[], Answer], limit_s: float | None = None) -> Answer:
        """Call a function that asks the store, which may hang with the process that keeps it.

        Args:
            question: is called once, in a thread.
            limit_s: how long it may take, in seconds; None: as long as another node.

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
            keeper = self.hosts[0] if hasattr(self, "hosts") else self._placement.master
            raise CrewError(f"node 0 ({keeper}) does not answer") from error
        return answer

    def _names(self, numbers: list[int]) -> str:
        if hasattr(self, "hosts"):
            return ", ".join(f"node {number} ({self.hosts[number]})" for number in numbers)
        return ", ".join(f"process {number}" for number in numbers)

    def leave(self, reason: str) -> None:
        """Tell the others why this node stops. They continue without it."""
        with suppress(CrewError):
            self._ask(lambda: self._store.set(f"left/{self.index}", reason), LISTEN_S)

    def follow(self) -> None:
        """Wait until the process that stages for this node is done."""

        def is_over() -> bool:  # of one that left, this process finds out why itself
            return self._store.check([f"done/{self.index}"]) or self._store.check([f"left/{self.index}"])

        with suppress(CrewError):
            while not self._ask(is_over):
                time.sleep(10 * LOOK_S)

    def done(self) -> None:
        """Tell the other processes of this node that it is staged."""
        with suppress(CrewError):
            self._ask(lambda: self._store.set(f"done/{self.index}", ""), LISTEN_S)

    # --- bytes ---

    def connect(self, interface: str | None) -> None:
        """Connect to all other nodes.

        Args:
            interface: the network interface; None: the one that leads to process 0.

        Raises:
            CrewError: that is not possible; names the addresses of both sides.
        """
        mine = "" if self.index == 0 else _address_towards(self._placement.master)
        addresses = self.gather("address", mine)
        if self.index == 0:
            mine = _address_towards(addresses[1])
        name = interface or os.environ.get("GLOO_SOCKET_IFNAME") or _interface_with(mine)
        try:
            if name:
                os.environ["GLOO_SOCKET_IFNAME"] = name
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore("gloo", self._store),
                rank=self.index,
                world_size=len(self),
                timeout=timedelta(seconds=self._timeout_s),
            )
        except RuntimeError as error:
            others = ", ".join(filter(None, addresses))
            message = f"cannot connect from {mine} ({name}) to {others}: {error}; choose another network by --interface"
            raise CrewError(message) from error

    def exchange(self, mine: torch.Tensor, everyones: torch.Tensor) -> None:
        """Send bytes to all nodes, and receive those of each.

        Args:
            mine: uint8[n].
            everyones: uint8[nodes, n], is filled.

        Raises:
            CrewError: a node is gone, or has not taken part in time; names it.
        """
        try:
            dist.all_gather([*everyones], mine)
        except RuntimeError as error:
            raise CrewError(self._explain(error)) from error

    def _explain(self, error: RuntimeError) -> str:
        """Say which node is missing."""
        try:
            return self._ask(self._find_missing, 3 * LISTEN_S) or f"the connection to another node broke: {error}"
        except CrewError as silence:
            return silence.message

    def _find_missing(self) -> str:
        time.sleep(BEAT_S)  # for its last words
        others = [node for node in range(len(self)) if node != self.index]
        left = [node for node in others if self._store.check([f"left/{node}"])]
        if left:
            reasons = [self._store.get(f"left/{node}").decode() for node in left]
            return "; ".join(f"{self._names([n])} has left: {why}" for n, why in zip(left, reasons, strict=True))
        beats = [f"beat/{node}" for node in others]
        before = self._store.multi_get(beats)
        time.sleep(LISTEN_S)
        after = self._store.multi_get(beats)
        silent = [node for node, was, now in zip(others, before, after, strict=True) if was == now]
        return f"{self._names(silent)} does not answer" if silent else ""

    def _beat(self, store: dist.Store) -> None:
        with suppress(RuntimeError):
            for count in itertools.count():
                store.set(f"beat/{self.index}", str(count))
                if self._ended.wait(BEAT_S):
                    return

    def close(self) -> None:
        """Part. Process 0, which may keep the store, waits a moment for the others."""
        self._ended.set()
        if dist.is_initialized():
            dist.destroy_process_group()
        with suppress(CrewError):
            self._ask(self._part, PARTING_S)

    def _part(self) -> None:
        self._store.set(f"bye/{self._rank}", "")
        keys = [f"bye/{rank}" for rank in range(self._num_ranks)]
        while self._rank == 0 and not self._store.check(keys):
            time.sleep(LOOK_S)


@contextmanager
def open_crew(placement: Placement, timeout_s: float) -> Iterator[Crew]:
    """Meet the other processes of a job, and part from them at the end.

    Args:
        placement: of this process.
        timeout_s: how long another node may not answer, in seconds.

    Raises:
        SettingError: process 0 cannot be found.
        CrewError: not all processes came.
    """
    if not placement.master:
        message = f"mode: exchange needs the host of process 0, which {placement.launcher or 'the environment'} does"
        raise SettingError(f"{message} not tell: give --master HOST, or set MASTER_ADDR")
    prefix = f"stage/{next(_numbers)}"
    store, beats = (dist.PrefixStore(prefix, _meet(placement, is_first)) for is_first in (True, False))
    crew = Crew(store, beats, placement, timeout_s)
    try:
        yield crew
    except BaseException as error:
        crew.leave(str(error) or type(error).__name__)
        raise
    finally:
        crew.close()


def _meet(placement: Placement, is_first: bool) -> dist.Store:
    """Connect to the store, which process 0 keeps from its first connection on, unless torchrun does."""
    is_keeper = is_first and placement.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        limit = timedelta(seconds=JOIN_S)
        place = placement.master, placement.port
        return dist.TCPStore(*place, is_master=is_keeper, timeout=limit, wait_for_workers=False)
    except RuntimeError as error:
        what = "cannot listen" if is_keeper else "process 0 does not answer"
        raise CrewError(f"{placement.master}:{placement.port}: {what}: {error}") from error


def _address_towards(host: str) -> str:
    """Return this host's address on the network that leads to another; nothing is sent."""
    (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _interface_with(address: str) -> str:
    """Return the network interface with an IPv4 address; "" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
