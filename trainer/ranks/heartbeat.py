"""Who watches that all ranks do something: a rank that is dead, stopped or hangs ends the run in time, and is named.

Apart from the collectives, in which the other ranks would wait for it. Each rank says every second what it is doing;
the first rank reads that, and tells all when the run must end. Each ends then by itself, and waits for nobody.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median_low
from typing import Any

from datapipe import clock, watched
from datapipe.console import printable
from datapipe.errors import DatapipeError
from datapipe.fsio import mounted_as
from datapipe.jobgroup.group import Crew
from datapipe.jobgroup.heart import BEAT_S
from datapipe.jobgroup.store import CrewError

from ..reporting.runlog import FAILED_HOSTS

logger = logging.getLogger(__name__)

RANK_TIMEOUT_S = 120.0  # how long a rank may do nothing, unless a setting says otherwise
LONG_FACTOR = 10  # by how much longer it may take for what is long
_SAY_S = 10.0  # how often to log for which rank the others wait; or half as long as they may
_SAY_LONG_S = 60.0  # from when on, where all ranks are in the same, and it is long
_SILENT_S = 5 * BEAT_S  # how long a rank says nothing before those that have to stop no longer count on it
_PARTING_S = 3 * BEAT_S  # how long the first rank, which may keep the store, stays for others to read why it ends
_LEFT_S = 3 * BEAT_S  # how long a rank that has left may be waited for: most errors are told to all ranks anyway
_NAMED = 8  # of the ranks that are behind
_EXIT_CODE = 1
_WRITE_S = 3.0  # how long writing FAILED_HOSTS may take
COMPARE_S = 60.0  # how often to compare how long the ranks take for what they do without the others
_SLOW_SHARE = 0.1  # of that time: a rank that takes so much longer than most makes all of them slower
_SECTIONS = "waiting for data", "forward passes"
_VERDICT = "verdict"


class Watch:
    """What this rank is doing; and, while it runs, whether all ranks do something."""

    def __init__(self) -> None:
        self._doing: tuple[int, str, bool, float] = 0, "starting", True, clock.now()
        self._section, self._spent_s = -1, [0.0] * len(_SECTIONS)
        self._file: tuple[Path, str, float] | None = None  # that it works with, the kind of its filesystem, since when
        self._kinds: dict[Path, str] = {}  # by folder
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._crew: Crew | None = None
        self.exit_code = _EXIT_CODE  # where the run ends because of another rank
        self.run: Path | None = None  # the run's folder
        self.listener: Callable[[str, int], None] | None = None  # is told what `doing` is

    def doing(self, what: str, is_long: bool = False, section: int = -1) -> None:
        """Note what this rank begins to do. All ranks do the same in the same order, so that the last one is behind.

        Args:
            what: Words that name the work, for a message.
            is_long: Whether it may take LONG_FACTOR times as long as other steps.
            section: Index in _SECTIONS, if it needs no other rank; -1: it may wait for others.
        """
        number, _, was_long, since = self._doing
        now = clock.now()
        if self._section >= 0 and not was_long:
            self._spent_s[self._section] += now - since
        self._doing, self._section = (number + 1, what, is_long, now), section
        if self.listener is not None:
            self.listener(what, section)

    @contextmanager
    def at(self, path: Path) -> Iterator[None]:
        """Note that the block works with a file or a folder, whose filesystem may hang. Other ranks need not do so."""
        before, self._file = self._file, (path, "", clock.now())
        if path.parent not in self._kinds:
            with suppress(OSError):  # this may be where it hangs
                self._kinds[path.parent] = mounted_as(path.parent)
        self._file = path, self._kinds.get(path.parent, ""), clock.now()
        try:
            yield
        finally:
            number, what, is_long, _ = self._doing
            self._doing, self._file = (number, what, is_long, clock.now()), before

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that in the block this rank waits until all others have done the same: it is not behind."""
        _, what, is_long, _ = self._doing
        self.doing(f"{what}, which others still do", is_long)
        yield
        self.doing(what, is_long)

    def start(self, crew: Crew, rank: int, world_size: int, timeout_s: float) -> None:
        """Watch the ranks of a crew, in a thread, until `stop`.

        Args:
            crew: The ranks.
            rank: Number of this rank.
            world_size: Number of ranks.
            timeout_s: Longest time that a rank may do nothing, in seconds.
        """
        self._crew, self._rank, self._world_size, self._timeout_s = crew, rank, world_size, timeout_s
        self._heard_all = clock.now()  # when all ranks last seemed to live
        self._changed: dict[int, tuple[Any, float]] = {}  # by rank: the last beat, and when it came
        self._blamed: list[int] = []
        self._left: dict[int, float] = {}  # by rank: when it was seen that it had left
        self._compared: tuple[float, dict[int, list[float]]] = clock.now(), {}
        self._said, self._patience_s = clock.now(), min(_SAY_S, timeout_s / 2)
        crew.describe = self._describe
        self._thread = threading.Thread(target=self._run, name="trainer-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer: the ranks part."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(2 * BEAT_S)

    def find_silent(self) -> str:
        """Return in words which rank has said nothing for long; "" where none has."""
        if self._crew is None or clock.now() - self._heard_all < _SILENT_S:
            return ""
        now = clock.now()
        silent = [rank for rank, (_, changed) in [*self._changed.items()] if now - changed > _SILENT_S] or [0]
        return f"{self._crew.names(silent[:_NAMED])} has given no sign of life for {now - self._heard_all:.0f} s"

    def blame(self, ranks: list[int]) -> None:
        """Write into the run's folder on which hosts ranks are dead, or hang, for the script that leaves these out."""
        if self.run is None or self._crew is None or not ranks:
            return
        hosts, path = sorted({self._crew.hosts_of_ranks[rank] for rank in ranks}), self.run / FAILED_HOSTS

        def write() -> None:
            mode = "w" if self._rank == 0 else "x"  # the others know less, and may be the ones that are cut off
            with suppress(OSError), open(path, mode) as file:  # the run ends all the same
                file.writelines(f"{host}\n" for host in hosts)

        with suppress(DatapipeError):  # the filesystem may be what hangs
            watched.call(write, _WRITE_S, path)

    def _describe(self) -> list[Any]:
        number, what, is_long, since = self._doing
        if self._file is not None:
            path, kind, since = self._file
            what = f"{what}, in {path}" + (f" (filesystem: {kind})" if kind else "")
        return [number, what, is_long, clock.now() - since, [*self._spent_s]]

    def _run(self) -> None:
        assert self._crew is not None
        while not self._ended.wait(BEAT_S):
            self._blamed = []
            try:
                reason = self._crew.read_announced(_VERDICT) or self._judge(self._crew)
            except CrewError as error:  # the first rank does not answer
                reason, self._blamed = error.message, [0]
            if reason and not self._ended.is_set():
                self.end(reason)

    def _judge(self, crew: Crew) -> str:
        """Return why the run must end; "" if it need not. The first rank looks at all others, and they at it.

        `_blamed` are then the ranks at fault.
        """
        ranks = [rank for rank in (range(self._world_size) if self._rank == 0 else (0,)) if rank != self._rank]
        now = clock.now()
        for rank, beat in crew.read_beats(ranks).items():
            if rank not in self._changed or self._changed[rank][0] != beat:
                self._changed[rank] = beat, now
        silent = {rank: now - self._changed.setdefault(rank, (None, now))[1] for rank in ranks}
        for rank, why in crew.find_left(ranks).items():
            if now - self._left.setdefault(rank, now) > _LEFT_S:
                return f"{crew.names([rank])} has left: {why}"
        rank = max(silent, key=silent.__getitem__)
        self._heard_all = now - silent[rank]
        if silent[rank] > self._patience_s:
            beat = self._changed[rank][0]
            last = f"; the last was: {beat[1][1]}" if beat and beat[1] else ""
            message = f"{crew.names([rank])} has given no sign of life for {silent[rank]:.0f} s{last}"
            self._blamed = [rank for rank, seconds in silent.items() if seconds > self._timeout_s]
            return self._say(message, silent[rank], self._timeout_s)
        return self._judge_progress(crew, ranks) if self._rank == 0 else ""

    def _judge_progress(self, crew: Crew, ranks: list[int]) -> str:
        """Do what `_judge` does where all are alive: has none of them begun anything for long?"""
        doing = {rank: self._changed[rank][0][1] for rank in ranks if self._changed[rank][0]} | {0: self._describe()}
        if any(beat is None for beat in doing.values()):
            return ""
        if clock.now() - self._compared[0] > COMPARE_S and not any(beat[2] for beat in doing.values()):
            self._compare_speed(crew, {rank: beat[4] for rank, beat in doing.items()})
        last = min(doing.values())[0]  # the others wait for those that are behind
        behind = [rank for rank, beat in doing.items() if beat[0] == last]
        _, what, is_long, _, _ = doing[behind[0]]
        seconds = min(doing[rank][3] for rank in behind)
        if seconds < (_SAY_LONG_S if is_long and len(behind) == self._world_size else self._patience_s):
            return ""
        self._blamed = behind
        names = crew.names(behind[:_NAMED]) + (", …" if len(behind) > _NAMED else "")
        limit_s = self._timeout_s * (LONG_FACTOR if is_long else 1)
        return self._say(f"{names}: no progress for {seconds:.0f} s in: {what}", seconds, limit_s)

    def _compare_speed(self, crew: Crew, spent_s: dict[int, list[float]]) -> None:
        """Log which rank is slower than most, and at what. `spent_s`: by rank, the seconds in each of _SECTIONS."""
        begun, before = self._compared
        self._compared = clock.now(), spent_s
        if before.keys() != spent_s.keys():
            return
        took_s = {rank: [now - was for now, was in zip(spent_s[rank], before[rank], strict=True)] for rank in before}
        usual_s = [median_low(seconds) for seconds in zip(*took_s.values(), strict=True)]
        rank = max(took_s, key=lambda rank: sum(took_s[rank]))
        more_s = [took - usual for took, usual in zip(took_s[rank], usual_s, strict=True)]
        passed_s = self._compared[0] - begun
        if sum(more_s) > _SLOW_SHARE * passed_s:
            worst = more_s.index(max(more_s))
            name, spent, most = crew.names([rank]), took_s[rank][worst], usual_s[worst]
            text = "slow: %s spent %.1f of %.0f s in %s, most ranks %.1f"
            logger.warning(text, name, spent, passed_s, _SECTIONS[worst], most)

    def _say(self, message: str, seconds: float, limit_s: float) -> str:
        """Log for whom all wait; return the message once they have waited as long as they may."""
        if seconds > limit_s:
            times = f"{LONG_FACTOR} times " if limit_s > self._timeout_s else ""
            return f"{message} ({times}--rank-timeout {self._timeout_s:g})"
        if clock.now() - self._said > self._patience_s:
            self._said = clock.now()
            logger.warning("waiting: %s", message)
        return ""

    def end(self, reason: str) -> None:
        """End this process at once, whatever its other threads are in; from the first rank, also the others."""
        _, what, _, seconds, _ = self._describe()
        who = "" if self._crew is None else f"rank {self._rank}: "
        line = f"error: {who}the run ends, because {reason}. {'This rank: ' if who else 'It was: '}{what}, for"
        # Not by logging, whose lock a thread that hangs may hold.
        os.write(2, f"{printable(line)} {seconds:.0f} s\n".encode())
        if self._crew is not None and self._rank == 0:
            try:
                self._crew.announce(_VERDICT, reason)
                self.blame(self._blamed)
                time.sleep(_PARTING_S)
            except CrewError:
                pass
        elif self._crew is not None:
            self.blame(self._blamed)
        os._exit(self.exit_code)
