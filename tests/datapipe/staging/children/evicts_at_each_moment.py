"""Stage again and again, and each time copies are removed at another moment: "cache"|"splits" FOLDER STEP.

FOLDER/source has the splits train and val. A moment is just before this process touches a file or a lock of the cache;
of these, each STEP-th is tried. Print how many were, and how many copies have been removed.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

from datapipe.dataset.manifest import MANIFEST
from datapipe.staging import stage, stage_once
from datapipe.staging.cache import remove
from datapipe.staging.folder_content import find_copies
from tests.datapipe.staging.data_sets import same

EVENTS = "open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "fcntl.flock"


class Evictor:
    """What removes all that may be removed from a cache at one moment."""

    def __init__(self, cache: Path) -> None:
        self.cache, self.moment = cache, 0
        self.num_passed = self.num_removed = 0
        self._is_at_work = True
        sys.addaudithook(self._look)

    def begin(self, moment: int) -> None:
        """Look out for a moment, from now on."""
        self.moment, self.num_passed, self._is_at_work = moment, 0, False

    def end(self) -> None:
        """Look no more."""
        self._is_at_work = True

    def evict(self) -> int:
        """Remove what may be removed; return how many copies."""
        return sum(remove(copy, "for the test") for copy in find_copies(self.cache))

    def _look(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._is_at_work or event not in EVENTS:
            return
        path = str(arguments[0])
        if event == "fcntl.flock":
            path = os.readlink(f"/proc/self/fd/{path}")
        if not path.startswith(str(self.cache)):
            return
        self.num_passed += 1
        if self.num_passed == self.moment + 1:
            self._is_at_work = True
            self.num_removed += self.evict()
            self._is_at_work = False


def stage_to_cache(folder: Path, evictor: Evictor) -> None:
    """Stage one data set, and hold it."""
    with ExitStack() as holds:
        copy = stage_once(folder / "source" / "val", evictor.cache, holds=holds)
        evictor.end()
        assert evictor.evict() == 0 and same(folder / "source" / "val", copy)
    assert evictor.evict() == 1


def stage_splits(folder: Path, evictor: Evictor) -> None:
    """Stage two splits. Their folder goes, too, when its last split goes, and is made again meanwhile."""
    assert [staged.num_samples for staged in stage(folder / "source", evictor.cache / "name")] == [1, 1]
    evictor.end()


def stage_at_each_moment(kind: str, folder: Path, step: int) -> tuple[int, int]:
    """Return how many moments there were, and how many copies have been removed at them."""
    evictor = Evictor(folder / "cache")
    work = {"cache": stage_to_cache, "splits": stage_splits}[kind]
    num_moments = 0
    for before in ("nothing", "all", "all but the manifests"):
        for moment in itertools.count(0, step):
            shutil.rmtree(evictor.cache, ignore_errors=True)
            evictor.cache.mkdir()
            if before != "nothing" and kind == "cache":
                stage_once(folder / "source" / "val", evictor.cache)
            elif before != "nothing":
                stage(folder / "source", evictor.cache / "name")
            if before == "all but the manifests":
                for path in evictor.cache.rglob(MANIFEST):
                    path.unlink()
            evictor.begin(moment)
            work(folder, evictor)
            if evictor.num_passed <= moment:
                break
            num_moments += 1
    return num_moments, evictor.num_removed


print(*stage_at_each_moment(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
