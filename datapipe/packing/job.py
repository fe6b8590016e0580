"""One process's work on a pack: alone, as one of several tasks, or to finish it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import clock
from ..console import Progress
from ..dataset.manifest import SPLITS, Manifest
from ..errors import DatapipeError, ManifestError, SettingError
from ..formats import shard_format
from ..fsio import make_folder
from ..images.recode import RecodeOptions, Recoder
from ..locks import locked
from ..sources import Pixels, Source
from ..sources.packed import quarantined
from .budget import Budget
from .finishing import complete
from .options import PackOptions, begin_again
from .out_folder import OutFolder
from .pipeline import PackPipeline
from .plan import PackPlan, make_plan, source_changes
from .shard import ShardFile
from .state import Journal, save_plan

logger = logging.getLogger(__name__)

WAIT_S = 0.5  # between looks at what another task does
_PROBED_SAMPLES = 32  # re-encoded to see what that does to their size


class PackResult(dict[str, Manifest]):
    """Manifests by split; none while `num_missing` shards of other tasks are not there."""

    num_missing = 0


@dataclass(frozen=True)
class PackJob:
    """One process's work on a pack, which is in one of five states. OUT alone says in which:

        empty      OUT holds nothing, or an old data set that is to be replaced.
        planned    OUT/.pack holds the plan, and no shard is finished.
        writing    The journals in OUT/.pack name some shards.
        finishing  The journals name all shards. A note in OUT/.pack names the task that writes the manifests.
        whole      The splits are in OUT, and OUT/.pack is gone.

    Who moves a pack from one state to the next:

        empty → planned                 `_load_or_make_plan`: a process alone, or the first task that gets the lock.
        planned → writing → finishing   `_write`: each task writes its own shards.
        finishing → whole               `_complete`: the task that finds all shards finished, or `finish`.

    A process that is killed leaves the state as it is, and the next one continues there. Only `begin`, with `overwrite`
    and for a single task, takes a pack back to empty.

    Attributes:
        out: Folder of the pack.
        options: Options of the pack, and the share of this process.
        source_settings: Settings of the plan that describe the source; they take precedence over those of `options`.
        list_source: Function that lists the source, which may take minutes.
    """

    out: OutFolder
    options: PackOptions
    source_settings: dict[str, Any]
    list_source: Callable[[], Source]

    @property
    def settings(self) -> dict[str, Any]:
        """All that the bytes of the result depend on, and where the source is."""
        return {**self.options.settings(), **self.source_settings}

    def run(self) -> PackResult:
        """Plan, if nobody has, write this task's shards, and finish if they are the last. Raises what `pack` does."""
        out = self.out
        if self.options.overwrite or not out.is_whole():
            Recoder(self.options.recode)  # raises MissingBackendError, before a source is listed and OUT is made
            shard_format(self.options.format).Writer()
        if self.options.task.count > 1:
            return self._run_part()
        with out.hold_alone():
            out.settle()
            plan = self._load_or_make_plan()
            if plan is None:
                return PackResult(out.read_manifests())
            self._write(plan)
            return self._complete(plan)

    def _run_part(self) -> PackResult:
        """Work as one of several tasks: one plans, all write, and one that sees everything written finishes.

        Where nodes do not see each other's locks (Lustre and NFS may be mounted so), several tasks may plan. They all
        make the same plan.
        """
        out, task = self.out, self.options.task
        make_folder(out.folder)
        deadline = clock.now() + self.options.timeout_s
        checked = task.index > 0  # task 0 alone lists a source of millions of files and compares it with the plan
        while True:
            with locked(out.folder, wait=True, shared=True):  # waits for a process that holds it alone
                try:
                    plan = out.load_plan()
                    if plan is not None:
                        out.check_unfinished(plan, self.settings)
                        if not checked:
                            self._check_source(plan)
                        self._write(plan)
                        return self._finish_if_last(plan)
                except (OSError, ManifestError):  # ENOENT, ESTALE on a shared filesystem, or that in a file's reader
                    if out.state.exists():
                        raise
                    continue  # another task has finished the pack meanwhile
                out.settle()
            if out.is_whole():
                return self._check_whole(look=task.index == 0)
            with contextlib.suppress(BlockingIOError), locked(out.folder, wait=False) as has_lock:
                if has_lock or task.index == 0:
                    self._load_or_make_plan()
                    checked = True
                    continue
            if clock.now() > deadline:
                message = f"no task has planned for {self.options.timeout_s:.0f} s (--timeout): is task 0 running?"
                raise DatapipeError(message, path=out.folder)
            time.sleep(WAIT_S)

    def _finish_if_last(self, plan: PackPlan) -> PackResult:
        """Finish if all shards are there. Wait for another task that is finishing, unless it dies or hangs."""
        out, patience_s, logged = self.out, self.options.timeout_s, ""
        if missing := out.missing_shards(plan):
            result = PackResult()
            result.num_missing = len(missing)
            return result
        deadline = clock.now() + patience_s
        while True:
            with contextlib.ExitStack() as turn:
                try:
                    is_mine, other = turn.enter_context(locked(out.state, wait=False)), out.find_finisher(patience_s)
                except BlockingIOError:
                    is_mine, other = False, out.find_finisher(patience_s) or "another task"
                if is_mine or not other or clock.now() > deadline:  # two at once do no harm
                    return self._complete(plan)
            if other != logged:
                logger.info("all is packed; waiting for %s, which writes the manifests", other)
                logged = other
            time.sleep(WAIT_S)

    def finish(self) -> PackResult:
        """Finish a pack whose shards are all there. Raises what `packing.finish` does."""
        out = self.out
        with out.hold_alone():
            out.settle()
            plan = out.load_plan()
            if plan is None and out.is_whole():
                return self._check_whole()
            if plan is None:
                raise SettingError(f"OUT: {out.folder} holds no unfinished pack")
            out.check_unfinished(plan, self.settings)
            missing = out.missing_shards(plan)
            if missing:
                message = (
                    f"{len(missing)} of {plan.num_shards} shards are missing, the first is number {missing[0]}: run "
                    "the tasks again that failed (of N tasks, number i packs the shards i, i + N, i + 2 N, …)"
                )
                raise DatapipeError(message, path=out.folder)
            self._check_source(plan)
            return self._complete(plan)

    def _complete(self, plan: PackPlan) -> PackResult:
        return PackResult(complete(plan, self.out, self.options.bad_allowed(plan.num_samples)))

    def _check_source(self, plan: PackPlan) -> None:
        """Raise SettingError when the source has changed since it was planned.

        Once all shards are finished the source may also be gone.
        """
        out = self.out
        if not Path(self.source_settings["source"]).exists() and not out.missing_shards(plan):
            return
        changes = source_changes(plan, self.list_source())
        if changes:
            message = f"OUT: {out.folder} holds an unfinished pack, and since it was planned its source has {changes}"
            raise SettingError(f"{message}; put that back, or {begin_again(out.state)}")

    def _check_whole(self, look: bool = True) -> PackResult:
        """Return the manifests of a complete pack. Raises SettingError when it is not what is asked for.

        `look`: compare it with the source, if that is still there.
        """
        out = self.out
        out.check_whole(self.settings)
        manifests = PackResult(out.read_manifests())
        if look and Path(self.source_settings["source"]).exists():
            source = self.list_source()
            was = {split: (manifest.num_samples + manifest.num_bad) for split, manifest in manifests.items()}
            now = {split: len(samples) + len(quarantined(samples)) for split, samples in source.splits.items()}
            if was != now or any(manifest.classes != source.classes for manifest in manifests.values()):
                message = f"OUT: {out.folder} holds another source: {was} images, not {now}, or of other classes"
                raise SettingError(f"{message}; remove it, or replace it with --overwrite")
        logger.info("%s is complete", out.folder)
        return manifests

    def _load_or_make_plan(self) -> PackPlan | None:
        """Load the plan of an unfinished pack, or plan a new one; None when OUT is whole already, as asked for.

        Raises SettingError, before anything is removed, when OUT holds something else.
        """
        out, options = self.out, self.options
        out.check_foreign(*out.folder.iterdir())
        if not options.overwrite:
            plan = out.load_plan()
            if plan is not None:
                out.check_unfinished(plan, self.settings)
                if options.task.index == 0:
                    self._check_source(plan)
                return plan
            if out.is_whole():
                if not (options.resume or options.task.count > 1):
                    message = f"OUT: {out.folder} holds a packed data set already; --overwrite replaces it"
                    raise SettingError(message)
                self._check_whole()
                return None
        source = self.list_source()
        missing = [split for split in SPLITS if split not in source.splits]
        if missing and not source.ordered:  # what is packed already was warned of
            logger.warning("%s: no %s split, and trainer train needs it", self.source_settings["source"], missing[0])
        share = _measure_stored_share(source, options)
        plan = make_plan(source, self.settings, shard_format(options.format).OVERHEAD_BYTES, share)
        out.begin(plan, alone=options.task.count == 1)
        save_plan(plan, out.state)
        return plan

    def _write(self, plan: PackPlan) -> None:
        """Write the unfinished shards of this task's share: of N tasks, number i has the shards i, i + N, i + 2 N, …"""
        options, task = self.options, self.options.task
        journals: dict[ShardFile, Journal] = {}
        first = num_bad = 0  # the number of the split's first shard, counted over all splits
        for split in plan.splits:
            folder, journal = self.out.new_folder(split), self.out.journal(split)
            mine = [i for i in range(len(split.shards)) if (first + i) % task.count == task.index]
            first += len(split.shards)
            finished = journal.finished(mine, folder)
            num_bad += sum(finished.values())
            for i in (i for i in mine if i not in finished):
                journals[ShardFile(split, i, folder, options.format)] = journal
        if not journals:
            return
        pipeline = PackPipeline(_make_recoder(plan, options), options, plan, num_bad)
        with Progress("packing", sum(len(shard.which) for shard in journals)) as progress:
            for shard, packed in pipeline.run(list(journals), progress.advance):
                journals[shard].add(packed)
        for split in plan.splits:
            split.samples.close()


def _make_recoder(plan: PackPlan, options: PackOptions) -> Recoder:
    if options.format != "npy":
        return Recoder(options.recode)
    # An npy shard is one array: it holds nothing but pixels, with the same number of channels in all images.
    grey = all(isinstance(split.samples, Pixels) and split.samples.pixels.ndim == 3 for split in plan.splits)
    size, channels = options.recode.size, options.recode.channels or (1 if grey else 3)
    return Recoder(RecodeOptions(store="raw", size=size, headerless=True, channels=channels))


def _measure_stored_share(source: Source, options: PackOptions) -> float:
    """Re-encode a few images, and return how many bytes are stored per byte of the source."""
    recode = Recoder(options.recode)
    if options.recode == RecodeOptions(check=options.recode.check):
        return 1.0
    samples = next(iter(source.splits.values()))  # a data set's splits are alike
    before = after = 0
    buffer = memoryview(bytearray(1 << 20))
    for i in np.linspace(0, len(samples) - 1, min(len(samples), _PROBED_SAMPLES), dtype=int).tolist():
        budget = Budget(options.memory_bytes(), 1)
        with contextlib.suppress(ValueError, OSError, MemoryError):  # packing reports it
            data = samples.read(i, buffer)
            after += len(recode(data, partial(budget.claim, is_awaited=lambda: True))[0])
            before += len(data)
    return after / before if before else 1.0
