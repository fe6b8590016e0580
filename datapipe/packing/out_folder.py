"""The folder that a pack fills: what is in it, what may be removed from it, and how the new takes the place of the old.

    OUT/.pack/plan.npz          the plan
    OUT/.pack/<split>           the journal of finished shards
    OUT/.pack/new/<split>       where the shards are written
    OUT/.pack/old/<split>       what was OUT/<split>, on its way out
    OUT/.pack-done              what .pack becomes when all shards are finished

When all is written, the old splits move to .pack/old, .pack is renamed to .pack-done, the splits in .pack-done/new move
to OUT, and .pack-done is removed. A process may be killed at any moment. As long as .pack exists, the splits outside
.pack/new are the old data set; as long as .pack-done exists, those outside .pack-done/old are the new one. Two
processes may do this at the same time: a late one, which still moves old splits out, has no .pack to move them to.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..dataset.manifest import INDEX, KEYS, MANIFEST, MOVED_OUT, MOVING_IN, QUARANTINE, SPLITS, STATE, Manifest
from ..errors import ManifestError, SettingError
from ..foreign import read_regular
from ..fsio import atomic_write, make_folder, sync_folder
from ..locks import locked
from ..process_id import ProcessId
from .options import begin_again
from .plan import PackPlan, SplitPlan
from .state import PLAN, Journal, load_plan

DONE = Path(MOVING_IN).parent.name
NEW = Path(MOVING_IN).name  # in STATE, then in DONE
FINISHING = "finishing"  # in STATE: which task writes the manifests, as JSON
SETTINGS = ("format", "seed", "shard_mib", "recode")  # in a plan's settings and in a manifest
# What packing makes below OUT, and may remove. `.nfs…` is what NFS calls a file that is removed while it is open.
SPLIT = rf"({'|'.join(SPLITS)})"
_OURS = rf"{re.escape(STATE)}(-done)?(/old/{re.escape(DONE)})*"  # nested if an earlier one could not be removed
OUR_FOLDERS = re.compile(rf"{SPLIT}|{_OURS}(/({SPLIT}|(new|old)(/{SPLIT})?|manifest-\w+))?")
OUR_FILES = re.compile(
    rf"({SPLIT}|{_OURS}/((new|old)/{SPLIT}|manifest-\w+))/"
    rf"\.?(shard-\d{{6}}[.\w]+|{MANIFEST}|{INDEX}|{KEYS}|{QUARANTINE})(\.partial)?"
    rf"|{_OURS}/\.?({SPLIT}/\.?\d+\.npz|{PLAN}|{FINISHING})(\.\w+\.partial)?"
    rf"|({SPLIT}|{_OURS})(/.+)?/\.nfs\w+"
)


class OutFolder:
    """The folder OUT, which will hold one data set per split.

    Raises SettingError when `folder` cannot be OUT: it lies in the source or in a packed data set, is a file, or holds
    the source.
    """

    def __init__(self, folder: Path, source: Path) -> None:
        self.folder, self.state, self.old = folder, folder / STATE, folder / MOVED_OUT
        self.splits = [folder / split for split in SPLITS]
        place = folder.resolve()
        if place.is_relative_to(source.resolve()):
            raise SettingError(f"OUT: {folder} lies in {source}, which would be packed into itself; choose another")
        if source.resolve().is_relative_to(place):
            raise SettingError(f"OUT: {source} lies in {folder}, and might be removed; choose another")
        for above in (place, *place.parents):
            if above.exists() and not above.is_dir():
                raise SettingError(f"OUT: {above} is a file; allowed: a folder, or a new name")
            if (above / MANIFEST).exists():
                raise SettingError(f"OUT: {folder} lies inside a packed data set, {above}; choose another")

    @contextlib.contextmanager
    def hold_alone(self) -> Iterator[None]:
        """Hold the folder for this process alone. Raises SettingError when another process packs there."""
        is_new = not self.folder.exists()
        make_folder(self.folder)
        try:
            with locked(self.folder, wait=False):
                try:
                    yield
                finally:
                    if is_new and not self.state.exists():
                        with contextlib.suppress(OSError):  # it is not empty
                            self.folder.rmdir()
        except BlockingIOError as error:
            message = f"OUT: another process is packing into {self.folder}; choose another, or wait for it"
            raise SettingError(message) from error

    def load_plan(self) -> PackPlan | None:
        """Load the plan of an unfinished pack; None if there is none.

        Raises ManifestError when the plan cannot be read, or is lost although shards are finished.
        """
        journal = plan = None
        with contextlib.suppress(FileNotFoundError):  # another task has finished the pack meanwhile
            journal = next(self.state.glob("*/[0-9]*.npz"), None)  # first: a plan is written before any journal
            plan = load_plan(self.state)
            if plan is None and journal and PLAN not in os.listdir(self.state):
                message = f"is missing, but finished shards are here: restore it, or {begin_again(self.state)}"
                raise ManifestError(message, path=self.state / PLAN)
        return plan

    def new_folder(self, split: SplitPlan) -> Path:
        """Return where a split's files are until the pack is finished."""
        return self.state / NEW / split.split

    def journal(self, split: SplitPlan) -> Journal:
        """Return the journal of a split's finished shards."""
        return Journal(self.state / split.split)

    def is_whole(self) -> bool:
        """Whether a finished pack is here, and no unfinished one beside it."""
        return not (self.state / PLAN).exists() and any((folder / MANIFEST).exists() for folder in self.splits)

    def read_manifests(self) -> dict[str, Manifest]:
        """Read the manifests of the data sets that are here, by split."""
        return {folder.name: Manifest.read(folder) for folder in self.splits if (folder / MANIFEST).exists()}

    @contextlib.contextmanager
    def note_finishing(self) -> Iterator[None]:
        """Leave a note for other tasks that this one is writing the manifests."""
        note = self.state / FINISHING
        with atomic_write(note, alone=False) as file:
            file.write(json.dumps(vars(ProcessId.here())).encode())
        try:
            yield
        finally:
            note.unlink(missing_ok=True)

    def find_finisher(self, patience_s: float) -> str:
        """Name the process that is writing the manifests, as its note says; "" when none is, or it has ended.

        A process on another host counts as alive until `patience_s` after it began.
        """
        note = self.state / FINISHING
        try:
            began, process = note.stat().st_mtime, ProcessId.read(json.loads(read_regular(note)))
        except (OSError, ValueError, KeyError, TypeError):
            return ""
        has_ended = process.find_state() == "ended" or time.time() - began >= patience_s
        return "" if has_ended else f"process {process.pid} on {process.host}"

    def missing_shards(self, plan: PackPlan) -> list[int]:
        """Return the numbers of the unfinished shards, counted over all splits."""
        missing, first = [], 0
        for split in plan.splits:
            numbers = range(len(split.shards))
            finished = self.journal(split).finished(numbers, self.new_folder(split))
            missing += [first + number for number in numbers if number not in finished]
            first += len(split.shards)
        return missing

    def check_foreign(self, *paths: Path) -> None:
        """Raise SettingError when packing did not make everything at and below these paths, which lie in OUT."""
        foreign = next(filter(None, map(self._find_foreign, paths)), None)
        if foreign:
            message = f"OUT: {self.folder} contains files that datapipe did not write, such as {foreign}"
            raise SettingError(f"{message}; move it away, or choose another")

    def _find_foreign(self, path: Path) -> Path | None:
        """Find a path, relative to OUT, at or below `path` that packing did not make: by its name, or a link."""
        name = path.relative_to(self.folder)
        if path.is_symlink() or not path.is_dir():
            is_ours = OUR_FILES.fullmatch(str(name)) or not os.path.lexists(path)
            return None if is_ours else name
        if not OUR_FOLDERS.fullmatch(str(name)):
            return name
        with contextlib.suppress(FileNotFoundError):  # another task is at work
            return next(filter(None, map(self._find_foreign, path.iterdir())), None)
        return None

    def check_unfinished(self, plan: PackPlan, settings: dict[str, Any]) -> None:
        """Raise SettingError when an unfinished pack is of another source, or has other settings."""
        for name in {**settings, **plan.settings}:
            self._compare(name, plan.settings.get(name), settings.get(name), "holds an unfinished pack")

    def check_whole(self, settings: dict[str, Any]) -> None:
        """Raise SettingError when the data sets here have other settings."""
        for manifest in self.read_manifests().values():
            for name in SETTINGS:
                self._compare(name, getattr(manifest, name), settings[name], "holds a data set packed")

    def _compare(self, name: str, was: Any, asked: Any, what: str) -> None:
        if was != asked:
            way_out = "remove it, or replace it with --overwrite"
            raise SettingError(f"OUT: {self.folder} {what} with another {name}: {was}, not {asked}; {way_out}")

    def begin(self, plan: PackPlan, alone: bool) -> None:
        """Make the folders of a new pack.

        `alone`: this process is the only task, so an unfinished pack is removed; else another task may have begun it.
        Raises SettingError when there are files named like a pack's, but no manifest or plan that says so.
        """
        remains = [path for folder in self.splits for path in folder.glob("*")]
        ours = alone and (self.is_whole() or (self.state / PLAN).exists())
        if remains and not ours and self.load_plan() is None:  # a plan is written before the first shard
            raise SettingError(f"OUT: {self.folder} holds remains such as {remains[0]}; remove it, or choose another")
        if alone and self.state.exists():
            self._discard()
        make_folder(self.old)
        for split in plan.splits:
            make_folder(self.new_folder(split))
            make_folder(self.state / split.split)

    def _discard(self) -> None:
        """Remove what an unfinished pack has written, and put back what it was about to replace."""
        _move_all(self.old, self.folder)
        for path in self.state.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
        (self.state / PLAN).unlink(missing_ok=True)  # last: a plan without shards is still an unfinished pack
        sync_folder(self.state)

    def end(self) -> None:
        """Put the new splits, which are whole, in the place of the old ones, and remove those.

        Raises FileNotFoundError when another task is doing the same, and SettingError when an old split has come to
        hold files that packing did not make.
        """
        self.check_foreign(*filter(Path.exists, self.splits))
        for folder in self.splits:
            with contextlib.suppress(FileNotFoundError):  # there is no old one, or another task was faster
                folder.rename(self.old / folder.name)
        if (self.folder / DONE).exists():  # an earlier pack's, with a file in use that could not be removed (NFS)
            (self.folder / DONE).rename(self.old / DONE)
        sync_folder(self.old)
        sync_folder(self.folder)
        self.state.rename(self.folder / DONE)
        sync_folder(self.folder)
        self.settle()

    def settle(self) -> None:
        """Complete an `end` that was interrupted or is in progress. Several tasks may do so at the same time.

        Raises SettingError when packing did not make everything that is there.
        """
        done = self.folder / DONE
        if done.exists():
            self.check_foreign(done)
            # Of a task that was killed, or that writes what others have finished: none can begin a file there any more.
            for path in (self.folder / MOVING_IN).glob("*/.*.partial"):
                path.unlink(missing_ok=True)
            _move_all(self.folder / MOVING_IN, self.folder)
            with contextlib.suppress(OSError):  # rmtree lets through fstat's ESTALE: another task has removed a folder
                shutil.rmtree(done, ignore_errors=True)


def _move_all(origin: Path, to: Path) -> None:
    """Move everything in a folder, if the folder exists; another task may be doing the same."""
    with contextlib.suppress(FileNotFoundError):
        for path in list(origin.iterdir()):
            with contextlib.suppress(FileNotFoundError):  # it was moved by another task
                path.rename(to / path.name)
    sync_folder(to)
