"""The folder that a pack fills: what is in it, and what may be removed from it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import SettingError
from .fsio import locked, make_folder
from .journal import Journal
from .manifest import INDEX, KEYS, MANIFEST, QUARANTINE, Manifest
from .plan import PLAN, Plan, SplitPlan, load_plan
from .sources import SPLITS

STATE = ".pack"  # in the folder while it is unfinished: the plan, and what is known of finished shards
FINISHING = "finishing"  # in STATE: a task is writing the manifests
DONE = ".pack-done"  # what STATE becomes, to be removed
SETTINGS = ("format", "seed", "shard_mib", "recode")  # in a plan's settings and in a manifest
# And what NFS makes of a file that is removed while it is open.
OUR_FILES = re.compile(rf"\.?(shard-\d{{6}}[.\w]+|{MANIFEST}|{INDEX}|{KEYS}|{QUARANTINE})(\.partial)?|\.nfs\w+")


class Target:
    """`folder`: one data set a split will be in it. Raises SettingError when that is no place for one."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.folder, self.state = folder, folder / STATE
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
        """Of an unfinished pack."""
        return load_plan(self.state)

    def journal(self, split: SplitPlan) -> Journal:
        return Journal(self.state / split.split)

    def is_whole(self) -> bool:
        return not self.state.exists() and any((folder / MANIFEST).exists() for folder in self.splits)

    def manifests(self) -> dict[str, Manifest]:
        return {folder.name: Manifest.read(folder) for folder in self.splits if (folder / MANIFEST).exists()}

    @contextlib.contextmanager
    def turn_to_finish(self) -> Iterator[bool]:
        """Of several tasks that find all shards written, whether this one writes the manifests."""
        marker = self.state / FINISHING
        try:
            os.close(os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except (FileExistsError, FileNotFoundError):  # another does it, or has done it
            yield False
            return
        try:
            yield True
        finally:
            marker.unlink(missing_ok=True)

    def missing(self, plan: Plan) -> list[int]:
        """Numbers of the shards that nobody has finished yet, counted over all splits."""
        missing, first = [], 0
        for split in plan.splits:
            numbers = range(len(split.shards))
            finished = self.journal(split).finished(numbers, self.folder / split.split)
            missing += [first + number for number in numbers if number not in finished]
            first += len(split.shards)
        return missing

    def check_foreign(self) -> None:
        """Raises SettingError when anything here is not ours."""
        foreign = [path for path in self.folder.iterdir() if path not in (*self.splits, self.state, self.folder / DONE)]
        links = [path for path in (*self.splits, self.state) if path.is_symlink() or path.is_file()]
        for folder in () if links else filter(Path.exists, self.splits):
            foreign += [path for path in folder.iterdir() if not OUR_FILES.fullmatch(path.name)]
        foreign += links
        if foreign:
            message = f"OUT: {self.folder} holds what is no packed data set, such as {foreign[0].name}; choose another"
            raise SettingError(message)

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
        """Make the folders of a new pack, and remove what is here if we are `alone`.

        Else another task may have begun. Raises SettingError when there are remains, and nothing says that they are of
        a pack: they may only be named like one's.
        """
        remains = [path for folder in self.splits for path in folder.glob("*")]
        ours = alone and (self.is_whole() or self.state.exists() or (self.folder / DONE).exists())
        if remains and not ours and self.plan() is None:  # which is there before the first shard
            raise SettingError(f"OUT: {self.folder} holds remains such as {remains[0]}; remove it, or choose another")
        self.state.mkdir(exist_ok=True)  # first: from here on it is no data set
        if alone:
            for path in (*(folder / MANIFEST for folder in self.splits), self.state / PLAN):
                path.unlink(missing_ok=True)
            for folder in (self.folder / DONE, *self.splits, *self.state.iterdir()):
                if folder.is_dir():
                    shutil.rmtree(folder)
        for split in plan.splits:
            (self.folder / split.split).mkdir(exist_ok=True)
            (self.state / split.split).mkdir(exist_ok=True)

    def end(self) -> None:
        """Everything is complete."""
        for path in self.folder.glob("*/.*.partial"):  # of a task that was killed
            path.unlink(missing_ok=True)
        self.forget()
        self.state.replace(self.folder / DONE)  # at once: a task that begins now finds a plan with its journal, or none
        self.forget()

    def forget(self) -> None:
        """Remove what an end leaves when it is killed, or was about to remove. Several tasks may do so at once."""
        shutil.rmtree(self.folder / DONE, ignore_errors=True)
