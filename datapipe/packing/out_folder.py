"""The folder that a pack fills: what is in it, what may be removed from it, and how the new takes the place of the old.

    OUT/.pack/plan.npz, OUT/.pack/<split>    the plan, and what is known of finished shards
    OUT/.pack/new/<split>                    where the shards are written
    OUT/.pack/old/<split>                    what was OUT/<split>, on its way out
    OUT/.pack-done                           what .pack becomes when all is whole

When all is written, the old splits move to .pack/old, .pack is renamed to .pack-done, the splits in .pack-done/new move
to OUT, and .pack-done is removed. Killed at any moment: where .pack is, the splits outside .pack/new are the old data
set; where .pack-done is, those outside .pack-done/old are the new one. Two processes may do this at once: a late one,
which still moves old splits out, finds no .pack to move them to.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..dataset.manifest import INDEX, KEYS, MANIFEST, MOVED_OUT, MOVING_IN, QUARANTINE, Manifest
from ..errors import ManifestError, SettingError
from ..fsio import atomic_write, locked, make_folder, sync_folder
from ..sources import SPLITS
from .journal import Journal
from .plan import PLAN, Plan, SplitPlan, load_plan

STATE, DONE = Path(MOVED_OUT).parent.name, Path(MOVING_IN).parent.name
NEW = Path(MOVING_IN).name  # in STATE, then in DONE
FINISHING = "finishing"  # in STATE: which task writes the manifests, as JSON
SETTINGS = ("format", "seed", "shard_mib", "recode")  # in a plan's settings and in a manifest
# What packing makes below OUT, and may remove; and what NFS makes of a file that is removed while it is open.
SPLIT = rf"({'|'.join(dict.fromkeys(SPLITS.values()))})"
OURS = rf"{re.escape(STATE)}(-done)?(/old/{re.escape(DONE)})*"  # one in another could not be removed at first
OUR_FOLDERS = re.compile(rf"{SPLIT}|{OURS}(/({SPLIT}|(new|old)(/{SPLIT})?|manifest-\w+))?")
OUR_FILES = re.compile(
    rf"({SPLIT}|{OURS}/((new|old)/{SPLIT}|manifest-\w+))/"
    rf"\.?(shard-\d{{6}}[.\w]+|{MANIFEST}|{INDEX}|{KEYS}|{QUARANTINE})(\.partial)?"
    rf"|{OURS}/\.?({SPLIT}/\.?\d+\.npz|{PLAN}|{FINISHING})(\.\w+\.partial)?"
    rf"|({SPLIT}|{OURS})(/.+)?/\.nfs\w+"
)


class Target:
    """`folder`: one data set a split will be in it. Raises SettingError when that is no place for one."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.folder, self.state, self.old = folder, folder / STATE, folder / MOVED_OUT
        self.splits = [folder / split for split in dict.fromkeys(SPLITS.values())]
        place = folder.resolve()
        if place.is_relative_to(source.resolve()):
            raise SettingError(f"OUT: {folder} lies in SOURCE, {source}; choose another")
        if source.resolve().is_relative_to(place):
            raise SettingError(f"OUT: SOURCE, {source}, lies in {folder}, and might be removed; choose another")
        for above in (place, *place.parents):
            if above.exists() and not above.is_dir():
                raise SettingError(f"OUT: {above} is a file; allowed: a folder, or a new name")
            if (above / MANIFEST).exists():
                raise SettingError(f"OUT: {folder} lies inside a packed data set, {above}; choose another")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the folder for this process. Raises SettingError when another packs there."""
        is_new = not self.folder.exists()
        make_folder(self.folder)
        try:
            with locked(self.folder, wait=False):
                try:
                    yield
                finally:
                    if is_new and not self.state.exists():
                        with contextlib.suppress(OSError):  # there is something
                            self.folder.rmdir()
        except BlockingIOError as error:
            message = f"OUT: another process is packing into {self.folder}; choose another, or wait for it"
            raise SettingError(message) from error

    def plan(self) -> Plan | None:
        """The plan of an unfinished pack, or None. Raises ManifestError: shards are finished, but the plan is lost."""
        journal = next(self.state.glob("*/[0-9]*.npz"), None)  # looked for first: the plan is there before it
        plan = load_plan(self.state)
        with contextlib.suppress(FileNotFoundError):  # all was finished meanwhile
            if plan is None and journal and PLAN not in os.listdir(self.state):
                message = "is missing, but finished shards are here: restore it, or begin again with --overwrite"
                raise ManifestError(message, path=self.state / PLAN)
        return plan

    def place(self, split: SplitPlan) -> Path:
        """Where a split's files are until all are whole."""
        return self.state / NEW / split.split

    def journal(self, split: SplitPlan) -> Journal:
        return Journal(self.state / split.split)

    def is_whole(self) -> bool:
        return not (self.state / PLAN).exists() and any((folder / MANIFEST).exists() for folder in self.splits)

    def manifests(self) -> dict[str, Manifest]:
        return {folder.name: Manifest.read(folder) for folder in self.splits if (folder / MANIFEST).exists()}

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """Leave a note for other tasks, meanwhile, that this one writes the manifests."""
        note = self.state / FINISHING
        with atomic_write(note, alone=False) as file:
            file.write(json.dumps(_this_process()).encode())
        try:
            yield
        finally:
            note.unlink(missing_ok=True)

    def finisher(self, patience_s: float) -> str:
        """Name the process that writes the manifests, as its note says; "" when there is none, or no longer.

        On another host it may be alive for `patience_s` from when it began.
        """
        note = self.state / FINISHING
        try:
            began, process = note.stat().st_mtime, json.loads(note.read_bytes())
            host, boot, number, started = process["host"], process["boot"], int(process["pid"]), process["started"]
        except (OSError, ValueError, KeyError, TypeError):
            return ""
        here = _this_process(number)
        if host == here["host"] and (boot, started) != (here["boot"], here["started"]):
            return ""
        return f"process {number} on {host}" if time.time() - began < patience_s else ""

    def missing(self, plan: Plan) -> list[int]:
        """Numbers of the shards that nobody has finished yet, counted over all splits."""
        missing, first = [], 0
        for split in plan.splits:
            numbers = range(len(split.shards))
            finished = self.journal(split).finished(numbers, self.place(split))
            missing += [first + number for number in numbers if number not in finished]
            first += len(split.shards)
        return missing

    def check_foreign(self) -> None:
        """Raises SettingError when anything here is not ours."""
        self._refuse_foreign(*self.folder.iterdir())

    def _refuse_foreign(self, *paths: Path) -> None:
        """Raises SettingError when anything at or below these paths, which lie here, is not ours."""
        foreign = next(filter(None, map(self._foreign, paths)), None)
        if foreign:
            message = f"OUT: {self.folder} holds what is not a packed data set, such as {foreign}"
            raise SettingError(f"{message}; move it away, or choose another")

    def _foreign(self, path: Path) -> Path | None:
        """What at or below a path is not made by packing, relative to the folder: not named so, or a link."""
        name = path.relative_to(self.folder)
        if path.is_symlink() or not path.is_dir():
            is_ours = OUR_FILES.fullmatch(str(name)) or not os.path.lexists(path)
            return None if is_ours else name
        if not OUR_FOLDERS.fullmatch(str(name)):
            return name
        with contextlib.suppress(FileNotFoundError):  # another task is at work
            return next(filter(None, map(self._foreign, path.iterdir())), None)
        return None

    def check_unfinished(self, plan: Plan, settings: dict[str, Any]) -> None:
        """Raises SettingError when an unfinished pack is of another source, or made in another way."""
        for name in {**settings, **plan.settings}:
            self._compare(name, plan.settings.get(name), settings.get(name), "holds an unfinished pack")

    def check_whole(self, settings: dict[str, Any]) -> None:
        """Raises SettingError when the data sets here were made in another way."""
        for manifest in self.manifests().values():
            for name in SETTINGS:
                self._compare(name, getattr(manifest, name), settings[name], "holds a data set packed")

    def _compare(self, name: str, was: Any, asked: Any, what: str) -> None:
        if was != asked:
            way_out = "remove it, or replace it with --overwrite"
            raise SettingError(f"OUT: {self.folder} {what} with another {name}: {was}, not {asked}; {way_out}")

    def begin(self, plan: Plan, alone: bool) -> None:
        """Make the folders of a new pack, and remove an unfinished one if we are `alone`.

        Else another task may have begun. Raises SettingError when there are remains, and nothing says that they are of
        a pack: they may only be named like one's.
        """
        remains = [path for folder in self.splits for path in folder.glob("*")]
        ours = alone and (self.is_whole() or (self.state / PLAN).exists())
        if remains and not ours and self.plan() is None:  # which is there before the first shard
            raise SettingError(f"OUT: {self.folder} holds remains such as {remains[0]}; remove it, or choose another")
        if alone and self.state.exists():
            self._discard()
        make_folder(self.old)
        for split in plan.splits:
            make_folder(self.place(split))
            make_folder(self.state / split.split)

    def _discard(self) -> None:
        """Remove what an unfinished pack has written; what it was about to replace is put back."""
        _move_all(self.old, self.folder)
        for path in self.state.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
        (self.state / PLAN).unlink(missing_ok=True)  # last: a plan without shards is an unfinished pack, too
        sync_folder(self.state)

    def end(self) -> None:
        """Put the new splits, which are whole, in place of the old ones, and remove those.

        Raises FileNotFoundError when another task does it, and SettingError when something that is not ours has come
        into an old one meanwhile.
        """
        self._refuse_foreign(*filter(Path.exists, self.splits))
        for path in (self.state / NEW).glob("*/.*.partial"):  # of a task that was killed
            path.unlink(missing_ok=True)
        for folder in self.splits:
            with contextlib.suppress(FileNotFoundError):
                folder.rename(self.old / folder.name)
        if (self.folder / DONE).exists():  # of the pack before, where a file in use could not be removed (on NFS)
            (self.folder / DONE).rename(self.old / DONE)
        sync_folder(self.old)
        sync_folder(self.folder)
        self.state.rename(self.folder / DONE)
        sync_folder(self.folder)
        self.settle()

    def settle(self) -> None:
        """Complete `end`, where a task was killed at it or is about it. Several tasks may do so at once.

        Raises SettingError when something there is not ours.
        """
        done = self.folder / DONE
        if done.exists():
            self._refuse_foreign(done)
            _move_all(self.folder / MOVING_IN, self.folder)
            shutil.rmtree(done, ignore_errors=True)


def _move_all(origin: Path, to: Path) -> None:
    """Move all that is in a folder, if it is there, unless another task moves it first."""
    for name in os.listdir(origin) if origin.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            (origin / name).rename(to / name)
    sync_folder(to)


def _this_process(number: int | None = None) -> dict[str, Any]:
    """Tell a process of this host, or this one itself, from all others, also from later ones of the same number."""
    number = os.getpid() if number is None else number
    started = ""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()  # proc(5)
        started = fields[19] if fields[0] not in "ZX" else ""  # dead, and only its parent has not asked yet
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"host": socket.gethostname(), "boot": boot, "pid": number, "started": started}
