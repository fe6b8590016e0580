"""The processes that stage or train together: who they are, what each knows, what has become of one that is silent.

They meet at a key-value store (torch's TCPStore), which process 0 keeps, or torchrun. Small things go through it, as
JSON, and signed: see `secret`.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch.distributed as dist

from .. import clock
from ..cluster import Placement
from ..errors import DatapipeError
from ..fsio import boot_id
from .heart import BEAT_S, BROKEN, LISTEN_S, LOST, Heart
from .network import find_address, find_unreachable
from .secret import SignedStore, StrangerError
from .store import Answer, CrewError, LeftError, UnreachableError, ask, connect_store

logger = logging.getLogger(__name__)

_PARTING_S = 10.0  # how long process 0 keeps the store for others that are not done
_SAY_S = 10.0  # how often to say for whom this process waits
LOOK_S = 0.1
_FIRST_LOOK_S = 0.005  # the others come to most questions at the same time; each pause is twice the last one


class Crew:
    """The processes of a job, and its nodes. See `rendezvous.open_crew`.

    Attributes:
        index: Number of this node, from 0.
        hosts: Names of all nodes, in order.
        is_leader: Whether this is the process that speaks for its node, the first one there.
        hosts_of_ranks: Names of the nodes of all processes, in order.
        local_ranks: Numbers of the processes of this node.
        leaders: Numbers of the first process of each node.
        timeout_s: Longest time that another process may give no sign of life, in seconds.
        describe: Function that returns what this process tells the others of itself each second; JSON must hold it.
        numbers: Numbers by which the nodes are named: those that they had before others were lost.
        missing: Numbers of the processes that `explain` found to be silent, or to have left.
        has_lost_store: Whether `explain` found that the store is gone.
        is_broken: Whether a process has said that the others do not continue as they are (`break_up`).
    """

    def __init__(
        self,
        noun: str,
        prefix: str,
        stores: tuple[SignedStore, SignedStore],
        placement: Placement,
        timeout_s: float,
        option: str = "timeout_s",
    ) -> None:
        self.stores, (self._store, beats) = stores, stores
        self.option = option
        self.noun, self.prefix, self.placement, self.timeout_s = noun, prefix, placement, timeout_s
        self.index, self.is_leader, self.has_lost_store = -1, False, False
        self.hosts = [placement.master]
        self.hosts_of_ranks: list[str] = []
        self.missing: list[int] = []
        self.local_ranks: list[int] = []
        self.numbers: list[int] = []
        self.describe: Callable[[], Any] = lambda: None
        self._heart = Heart(beats, placement.rank, lambda: self.describe())
        self.is_broken = self._heart.is_broken

    def meet(self) -> None:
        """Find out who the nodes are. Raises CrewError when a process does not come, and names it."""
        mine = [socket.gethostname(), boot_id()]
        everyones = self.gather_from_ranks("host", mine)
        nodes = [host for number, host in enumerate(everyones) if host not in everyones[:number]]
        self.leaders = [everyones.index(host) for host in nodes]
        self.hosts, self.index = [name for name, _ in nodes], nodes.index(mine)
        self.is_leader = self.leaders[self.index] == self.placement.rank
        self.hosts_of_ranks = [name for name, _ in everyones]
        self.local_ranks = [rank for rank, host in enumerate(everyones) if host == mine]

        self.numbers = [*range(len(nodes))]

    def settle(self, hosts: list[str], index: int, numbers: list[int]) -> None:
        """Be who is left of other nodes: one process on each, which has found out who they are.

        Args:
            hosts: Names of all nodes.
            index: Number of this one among them.
            numbers: Numbers by which they are named.
        """
        self.hosts, self.hosts_of_ranks, self.index, self.numbers = hosts, hosts, index, numbers
        self.leaders, self.local_ranks, self.is_leader = [*range(len(hosts))], [index], True

    def __len__(self) -> int:
        return len(self.hosts)

    def gather(self, name: str, value: Any) -> list[Any]:
        """Tell the other nodes something, and return what each told, by node.

        Args:
            name: Name of the subject; each is gathered once.
            value: Any value that JSON can hold.

        Raises:
            CrewError: A node has left, or does not answer; names it.
        """
        return self._gather(name, value, self.leaders, self.placement.rank, self.is_broken.is_set)

    def _gather(
        self, name: str, value: Any, ranks: Iterable[int], mine: int, is_over: Callable[[], bool] = lambda: False
    ) -> list[Any]:
        """Do what `gather` does, for some processes. One that lives may take as long as it needs."""
        self._ask(lambda: self._store.set(f"{name}/{mine}", json.dumps(value)))
        keys = {rank: f"{name}/{rank}" for rank in ranks}
        beats: dict[int, str] = {}
        said, pause, alive = clock.now(), _FIRST_LOOK_S, dict.fromkeys(keys, clock.now())
        while not self._ask(lambda: self._store.check([*keys.values()])):
            if is_over():
                self._ask(lambda: self._store.check([BROKEN]), LISTEN_S)  # it may be the store that is gone
                raise CrewError(LOST)
            time.sleep(pause)
            pause = min(2 * pause, LOOK_S)
            now = clock.now()
            has_left = self._ask(lambda: self._store.check(["left"]))  # the store is not kept for long then
            if not has_left and now - said < min(_SAY_S, self.timeout_s / 2):
                continue
            missing = self._ask(lambda: [rank for rank, key in keys.items() if not self._store.check([key])])
            if missing:  # who leaves before all have answered may have answered itself
                self._check_left(keys)
            if now - said < min(_SAY_S, self.timeout_s / 2):
                continue
            said = now
            latest = self._ask(partial(self._latest_beats, missing))
            alive |= {rank: now for rank in missing if latest[rank] != beats.get(rank, "")}
            beats |= latest
            silent = [rank for rank in missing if now - alive[rank] > self.timeout_s]
            if silent:
                raise CrewError(f"{self.names(silent)} did not answer for {self.timeout_s:g} s ({self.option})")
            logger.info("waiting for %s", self.names(missing))
        return [json.loads(answer) for answer in self._ask(lambda: self._store.multi_get([*keys.values()]))]

    def find_address(self, interface: str | None, option: str = "--interface") -> str:
        """Find the address by which the other nodes reach this one; processes that lead a node call this together.

        Args:
            interface: Network interface; None: the one that leads to process 0.
            option: Option by which a user chooses the interface, for the message.

        Raises:
            UnreachableError: A node does not reach another; names the addresses of both sides.
            CrewError: A node is gone.
        """
        mine = find_address(self.gather, self.index, interface, self.placement.master)
        problem = find_unreachable(self.gather, self.index, self.hosts, mine, self.timeout_s)
        if problem:
            chosen = f"{option} has chosen {interface}: leave it out, or choose another"
            raise UnreachableError(f"{problem}; {chosen if interface else f'choose the network by {option}'}")
        return mine

    def open_store(self, name: str) -> dist.Store:
        """Return a store of the processes' own, by a connection that nothing else uses. Raises CrewError."""
        store = self._ask(lambda: connect_store(self.placement, False, self.timeout_s, self.option))
        return dist.PrefixStore(f"{self.prefix}/{name}", store)

    def _latest_beats(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return what each process said last of its life: see `_beat`; "" if it has not said anything."""
        return {rank: self._read(f"beat/{rank}") for rank in ranks}

    def read_beats(self, ranks: Iterable[int]) -> dict[int, list[Any]]:
        """Return a number that rises, and what `describe` returned last, of each process. Raises CrewError."""
        beats = self._ask(partial(self._latest_beats, ranks))
        return {rank: json.loads(beat) for rank, beat in beats.items() if beat}

    def announce(self, name: str, text: str) -> None:
        """Tell all processes something. Raises CrewError."""
        self._ask(partial(self._store.set, f"announced/{name}", text), LISTEN_S)

    def read_announced(self, name: str) -> str:
        """Return what a process has announced; "" if none has. Raises CrewError."""
        return self._ask(partial(self._read, f"announced/{name}"))

    def find_left(self, ranks: Iterable[int], limit_s: float | None = None) -> dict[int, str]:
        """Return why processes have left, those that have. Raises CrewError; `limit_s` as of `_ask`."""
        reasons = self._ask(lambda: {rank: self._read(f"left/{rank}") for rank in ranks}, limit_s)
        return {rank: reason for rank, reason in reasons.items() if reason}

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _check_left(self, ranks: Iterable[int], limit_s: float | None = None) -> None:
        """Raise CrewError with the reason where one of these processes has left."""
        if left := self.find_left(ranks, limit_s):
            raise LeftError(self._tell_left(left))

    def _tell_left(self, left: dict[int, str]) -> str:
        return "; ".join(f"{self.names([rank])} has left: {why}" for rank, why in left.items())

    def _ask(self, question: Callable[[], Answer], limit_s: float | None = None) -> Answer:
        """Call a function that asks the store, and return what it returns. Raises CrewError if that does not answer.

        Args:
            question: Function of `ask`.
            limit_s: Longest time that it may take, in seconds; None: as long as another node may not answer.
        """
        try:
            return ask(question, limit_s or self.timeout_s)
        except StrangerError:
            raise
        except (RuntimeError, DatapipeError) as error:
            name = self.names([0]) if self.hosts_of_ranks else f"node 0 ({self.hosts[0]})"
            raise CrewError(f"{name} does not answer") from error

    def names(self, ranks: Iterable[int]) -> str:
        """Name processes, with their hosts."""
        if self.index < 0:
            return ", ".join(f"process {rank}" for rank in ranks)
        if self.noun == "rank":
            return ", ".join(f"rank {rank} ({self.hosts_of_ranks[rank]})" for rank in ranks)
        nodes = map(self.leaders.index, ranks)
        return ", ".join(f"node {self.numbers[node]} ({self.hosts[node]})" for node in nodes)

    def leave(self, reason: str) -> None:
        """Tell the others why this process stops: they continue without it."""
        with suppress(CrewError):
            self._ask(lambda: self._store.set(f"left/{self.placement.rank}", reason), LISTEN_S)
            self._ask(lambda: self._store.set("left", ""), LISTEN_S)

    def gather_from_ranks(self, name: str, value: Any) -> list[Any]:
        """Do what `gather` does, for all processes."""
        return self._gather(name, value, range(self.placement.world_size), self.placement.rank)

    def gather_from_local_ranks(self, name: str, value: Any) -> list[Any]:
        """Do what `gather` does, for the processes of this node."""
        return self._gather(name, value, self.local_ranks, self.placement.rank)

    def follow(self) -> None:
        """Wait for the process that stages for this node. Raises CrewError where that has left, or is silent."""
        self._gather("done", "", [self.leaders[self.index]], self.placement.rank)

    def break_up(self) -> None:
        """Tell the others that they do not continue as they are: they know within a second."""
        self.is_broken.set()
        with suppress(CrewError):
            self._ask(partial(self._store.set, BROKEN, ""), LISTEN_S)

    def done(self) -> None:
        """Tell the other processes of this node that it is staged."""
        if not self.has_lost_store:
            with suppress(CrewError):
                self._ask(partial(self._store.set, f"done/{self.placement.rank}", '""'), LISTEN_S)

    def explain(self, error: BaseException) -> str:
        """Say which process is missing after an error of a connection to others; takes some seconds.

        One that has left, or is done, is not silent.
        """
        others = [*(self.leaders if self.noun == "node" else range(self.placement.world_size))]
        others.remove(self.placement.rank)
        try:
            time.sleep(BEAT_S)  # for its last words
            left = self.find_left(others, LISTEN_S)  # this process may be the one that is cut off
            if not left:
                before = self._ask(partial(self._latest_beats, others), LISTEN_S)
                time.sleep(LISTEN_S)
                after = self._ask(partial(self._latest_beats, others), LISTEN_S)
                left = self.find_left(others, LISTEN_S)
            done = self._ask(lambda: [rank for rank in others if self._store.check([f"bye/{rank}"])], LISTEN_S)
        except CrewError as reason:
            self.missing, self.has_lost_store = [0], True
            return reason.message
        if left:
            self.missing = [*{*left, *done}]
            return self._tell_left(left)
        silent = [rank for rank in others if before[rank] == after[rank] and rank not in done]
        self.missing = silent + done
        return f"{self.names(silent)} does not answer" if silent else f"the connection to another node broke: {error}"

    def close(self) -> None:
        """Part. Process 0, which may keep the store, waits a moment for the others."""
        self._heart.stop(0.0 if self.has_lost_store else LISTEN_S)
        if self.has_lost_store:
            return

        def part() -> None:
            self._store.set(f"bye/{self.placement.rank}", "")
            others = {*range(self.placement.world_size)}.difference(self.missing)
            keys = [f"bye/{rank}" for rank in others if self.index < 0 or self._store.check([f"beat/{rank}"])]
            deadline = clock.now() + _PARTING_S
            while self.placement.rank == 0 and not self._store.check(keys) and clock.now() < deadline:
                time.sleep(LOOK_S)

        with suppress(CrewError):
            self._ask(part, _PARTING_S + LISTEN_S)
