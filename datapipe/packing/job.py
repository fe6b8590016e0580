"""Pack a raw data set: plan purely, then write the shards in parallel, in one process or many.

The same source, seed and options give the same bytes, whatever the number of threads, tasks and nodes. Several tasks
(a Slurm job's, say) need no communication: the plan in OUT/.pack says which shard is whose, a small file
beside it tells of each finished one, and the last task to end finds all of them, writes the manifests, and puts the
whole in its place.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..cluster import Task
from ..console import Progress
from ..dataset.manifest import MANIFEST, Manifest, find_data_sets
from ..errors import DatapipeError, SettingError
from ..formats import shard_format
from ..fsio import checksum, locked, make_folder
from ..images.recode import RecodeOptions, Recoder
from ..names import FORMATS
from ..sources import SPLITS, Pixels, Source, open_source
from ..sources.packed import load as open_packed
from ..sources.packed import quarantined
from .budget import Budget
from .finishing import complete
from .journal import Journal
from .memory import allowed_bytes, parse_bytes
from .out_folder import SETTINGS, Target
from .pipeline import Assembly
from .plan import Plan, make_plan, save_plan, source_changes
from .shard import ShardTask

logger = logging.getLogger(__name__)

WAIT_S = 0.5  # between looks at what another task does
PROBED_SAMPLES = 32  # re-encoded to see what that does to their size
READERS = 32  # files read at once, where that helps: what hides the latency of a shared filesystem
NUMBER_OR_SHARE = re.compile(r"([0-9]{1,18})|([0-9]{1,18}(?:\.[0-9]{1,18})?)%")


class PackResult(dict[str, Manifest]):
    """Manifests by split; none while `num_missing` shards of other tasks are not there."""

    num_missing = 0


@dataclass(frozen=True)
class PackOptions:
    """`shard_mib`: aimed size of a shard in MiB (None, to convert: as it was); `workers`: files read at once, at most;
    `max_bad`: "3" or "0.1%" of all samples; `outside`: follow links and paths that lead out of the source; `timeout_s`:
    a read or write that takes longer is an error; `memory`: "8GiB", for images in all threads together (None: half of
    what the machine or the control group has); `task`: the part of the plan to pack here.
    """

    format: str = "tar"
    kind: str = "auto"
    shard_mib: int | None = 256
    workers: int | None = None
    seed: int = 0
    overwrite: bool = False
    resume: bool = False
    max_bad: str = "0"
    outside: bool = False
    timeout_s: float = 300.0
    memory: str | None = None
    recode: RecodeOptions = field(default_factory=RecodeOptions)
    task: Task = field(default_factory=lambda: Task(0, 1, ""))

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise SettingError(f"format: {self.format!r} is not one of {', '.join(FORMATS)}")
        for name, low in (("shard_mib", 1), ("workers", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise SettingError(f"{name}: {value} is out of range; allowed: {low} and more")
        if not 0 < self.timeout_s < math.inf:
            raise SettingError(f"timeout: {self.timeout_s} is out of range; allowed: seconds, above 0")
        self.bad_allowed(1)
        self.memory_bytes()
        if self.overwrite and self.task.count > 1:
            raise SettingError("overwrite: one of several tasks would remove what another writes; remove OUT first")

    def memory_bytes(self) -> int:
        return allowed_bytes() // 2 if self.memory is None else parse_bytes("memory", self.memory)

    def bad_allowed(self, num_samples: int) -> int:
        match = NUMBER_OR_SHARE.fullmatch(self.max_bad)
        if not match or (match[2] and float(match[2]) > 100):
            raise SettingError(f"max_bad: {self.max_bad!r} is no number such as 10 and no share such as 0.1%")
        return int(match[1]) if match[1] else int(num_samples * float(match[2]) / 100)

    def settings(self) -> dict[str, Any]:
        """What the bytes of the result depend on, beside the source: JSON values."""
        return dict(zip(SETTINGS, (self.format, self.seed, self.shard_mib, self.recode.settings()), strict=True))


def pack(source_path: Path, out: Path, options: PackOptions) -> PackResult:
    """Pack each split of a raw data set into `out/<split>`; return the manifests by split.

    Returns none while other tasks have shards to write. What an interrupted call left in `out` is completed;
    finished shards stay, and with `overwrite` the old data set stays until the new one is whole. Raises SourceError
    (unusable source, too many bad samples; nothing is written for a source that cannot be listed), SettingError (`out`
    holds something else and `overwrite` is not set, lies in the source, or another process packs there; an unfinished
    pack is of a source that has changed since), DatapipeError (a read that hangs), OSError.
    """
    if source_path.is_dir() and (packed := _packed(source_path)):
        raise SettingError(f"SOURCE: {packed} is packed already; datapipe convert puts it into another format")
    if options.format == "npy" and (options.recode.store != "raw" or options.recode.compress):
        raise SettingError("format: npy holds nothing but pixels; allowed: with --store raw, not compressed")
    return _pack_of(source_path, out, options).run()


def convert(folder: Path, out: Path, options: PackOptions) -> PackResult:
    """Put packed data sets into another format: the same images, keys, labels, order and quarantine.

    Like `pack` otherwise.
    """
    return _conversion(folder, out, options).run()


def finish_conversion(folder: Path, out: Path, options: PackOptions) -> PackResult:
    """Write the manifests of a `convert` whose shards are all there. Raises what `finish` does."""
    return _conversion(folder, out, options).finish()


def _conversion(folder: Path, out: Path, options: PackOptions) -> _Pack:
    manifest = Manifest.read(find_data_sets(folder)[0])
    if options.format == "npy":
        allowed = ", ".join(name for name in FORMATS if name != "npy")
        raise SettingError(f"format: npy holds nothing but pixels; allowed: {allowed}")
    listed = {
        "source": str(folder.resolve()),
        "manifests": {path.name: checksum(path / MANIFEST) for path in find_data_sets(folder)},
        "seed": manifest.seed,
        "recode": manifest.recode,
        "shard_mib": options.shard_mib or manifest.shard_mib,
    }
    return _Pack(Target(out, folder), options, listed, partial(open_packed, folder))


def finish(source_path: Path, out: Path, options: PackOptions) -> PackResult:
    """Write the manifests of a pack whose shards are all there.

    Raises SettingError (no unfinished pack in `out`, one of another source or with other options, or tasks are at work
    on it), DatapipeError (shards missing).
    """
    return _pack_of(source_path, out, options).finish()


def _pack_of(source_path: Path, out: Path, options: PackOptions) -> _Pack:
    listed = {
        "source": str(source_path.resolve()),
        "kind": options.kind,
        "outside": options.outside,
        "check": options.recode.check,
    }
    source = partial(open_source, source_path, options.kind, options.outside)
    return _Pack(Target(out, source_path), options, listed, source)


def _packed(folder: Path) -> Path | None:
    """A data set that is, or lies in, `folder`, by its manifest. Not every class folder is asked for one."""
    folders = folder, *(folder / split for split in dict.fromkeys(SPLITS.values()))
    return next((folder for folder in folders if (folder / MANIFEST).exists()), None)


@dataclass(frozen=True)
class _Pack:
    """`listed`: what the plan's settings say of the source; `source`: lists it."""

    target: Target
    options: PackOptions
    listed: dict[str, Any]
    source: Callable[[], Source]

    @property
    def settings(self) -> dict[str, Any]:
        return {**self.options.settings(), **self.listed}

    def run(self) -> PackResult:
        target = self.target
        if self.options.task.count > 1:
            return self._run_part()
        with target.alone():
            target.settle()
            plan = self._plan()
            if plan is None:
                return PackResult(target.manifests())
            self._write(plan)
            return self._complete(plan)

    def _run_part(self) -> PackResult:
        """Be one of several tasks: one plans, all write, and one of those who find everything written finishes.

        Where nodes see no locks of each other (Lustre and NFS may be mounted so), several may plan: the same.
        """
        target, task = self.target, self.options.task
        make_folder(target.folder)
        deadline = time.monotonic() + self.options.timeout_s
        checked = task.index > 0  # one lists a source of millions of files, and compares it with the plan
        while True:
            with locked(target.folder, wait=True, shared=True):  # waits for who has it alone
                plan = target.plan()
                if plan is not None:
                    target.check_unfinished(plan, self.settings)
                    if not checked:
                        self._check_source(plan)
                    try:
                        self._write(plan)
                        return self._finish_if_last(plan)
                    except FileNotFoundError:
                        if target.state.exists():
                            raise
                        continue  # another task has finished all of it meanwhile
                target.settle()
            if target.is_whole():
                return self._whole(look=task.index == 0)
            with contextlib.suppress(BlockingIOError), locked(target.folder, wait=False) as held:
                if held or task.index == 0:
                    self._plan()
                    checked = True
                    continue
            if time.monotonic() > deadline:
                message = f"no task has planned for {self.options.timeout_s:.0f} s (--timeout): is task 0 running?"
                raise DatapipeError(message, path=target.folder)
            time.sleep(WAIT_S)

    def _finish_if_last(self, plan: Plan) -> PackResult:
        """Finish if all shards are there, in turn: wait for another task that does, but not if it dies or hangs."""
        target, patience_s, said = self.target, self.options.timeout_s, ""
        missing = target.missing(plan)
        if missing:
            result = PackResult()
            result.num_missing = len(missing)
            return result
        deadline = time.monotonic() + patience_s
        while True:
            with contextlib.ExitStack() as turn:
                try:
                    is_mine, other = turn.enter_context(locked(target.state, wait=False)), target.finisher(patience_s)
                except BlockingIOError:
                    is_mine, other = False, target.finisher(patience_s) or "another task"
                if is_mine or not other or time.monotonic() > deadline:  # two at once do no harm
                    return self._complete(plan)
            if other != said:
                logger.info("all is packed; waiting for %s, which writes the manifests", other)
                said = other
            time.sleep(WAIT_S)

    def finish(self) -> PackResult:
        target = self.target
        with target.alone():
            target.settle()
            plan = target.plan()
            if plan is None and target.is_whole():
                return self._whole()
            if plan is None:
                raise SettingError(f"OUT: {target.folder} holds no unfinished pack")
            target.check_unfinished(plan, self.settings)
            missing = target.missing(plan)
            if missing:
                message = (
                    f"{len(missing)} of {plan.num_shards} shards are missing, the first is number {missing[0]}: run "
                    "the tasks again that failed (of N tasks, number i packs the shards i, i + N, i + 2 N, …)"
                )
                raise DatapipeError(message, path=target.folder)
            self._check_source(plan)
            return self._complete(plan)

    def _complete(self, plan: Plan) -> PackResult:
        return PackResult(complete(plan, self.target, self.options.bad_allowed(plan.num_samples)))

    def _check_source(self, plan: Plan) -> None:
        """Raises SettingError when the source is not what was planned. Shards that are all there need it no more."""
        target = self.target
        if not Path(self.listed["source"]).exists() and not target.missing(plan):
            return
        changes = source_changes(plan, self.source())
        if changes:
            way_out = f"put that back, or begin again with --overwrite (of several tasks: remove {target.state} first)"
            message = f"OUT: {target.folder} holds an unfinished pack, and since it was planned SOURCE has {changes}"
            raise SettingError(f"{message}; {way_out}")

    def _whole(self, look: bool = True) -> PackResult:
        """The manifests of a pack that is complete. Raises SettingError when it is not what is asked for.

        `look`: at the source, if it is still there.
        """
        target = self.target
        target.check_whole(self.settings)
        manifests = PackResult(target.manifests())
        if look and Path(self.listed["source"]).exists():
            source = self.source()
            was = {split: (manifest.num_samples + manifest.num_bad) for split, manifest in manifests.items()}
            now = {split: len(samples) + len(quarantined(samples)) for split, samples in source.splits.items()}
            if was != now or any(manifest.classes != source.classes for manifest in manifests.values()):
                message = f"OUT: {target.folder} holds another source: {was} images, not {now}, or of other classes"
                raise SettingError(f"{message}; remove it, or replace it with --overwrite")
        logger.info("%s is complete", target.folder)
        return manifests

    def _plan(self) -> Plan | None:
        """The plan of the unfinished pack that is there, or a new one; None when all is there, as asked for.

        Refuses before it removes anything.
        """
        target, options = self.target, self.options
        target.check_foreign()
        if not options.overwrite:
            plan = target.plan()
            if plan is not None:
                target.check_unfinished(plan, self.settings)
                if options.task.index == 0:
                    self._check_source(plan)
                return plan
            if target.is_whole():
                if not (options.resume or options.task.count > 1):
                    message = f"OUT: {target.folder} holds a packed data set already; --overwrite replaces it"
                    raise SettingError(message)
                self._whole()
                return None
        source = self.source()
        share = _stored_share(source, options)
        plan = make_plan(source, self.settings, shard_format(options.format).OVERHEAD_BYTES, share)
        target.begin(plan, alone=options.task.count == 1)
        save_plan(plan, target.state)
        return plan

    def _write(self, plan: Plan) -> None:
        """Write the shards that are this task's and not finished."""
        options, task = self.options, self.options.task
        journals: dict[ShardTask, Journal] = {}
        first = num_bad = 0
        for split in plan.splits:
            folder, journal = self.target.place(split), self.target.journal(split)
            mine = [i for i in range(len(split.shards)) if (first + i) % task.count == task.index]
            first += len(split.shards)
            finished = journal.finished(mine, folder)
            num_bad += sum(len(journal.read(i).bad) for i in finished)
            for i in (i for i in mine if i not in finished):
                shard = ShardTask(folder, i, options.format, split.keys, split.samples, split.shards[i])
                journals[shard] = journal
        if not journals:
            return
        allowed = options.bad_allowed(plan.num_samples)
        mean_bytes = max(split.mean_bytes for split in plan.splits)
        recoder = _recoder(plan, options)
        workers = options.workers or READERS
        assembly = Assembly(recoder, workers, allowed, options.timeout_s, mean_bytes, options.memory_bytes(), num_bad)
        with Progress("packing", sum(len(shard.which) for shard in journals)) as progress:
            for shard, packed in assembly.run(list(journals), progress.advance):
                journals[shard].add(packed)
        for split in plan.splits:
            split.samples.close()


def _recoder(plan: Plan, options: PackOptions) -> Recoder:
    if options.format != "npy":
        return Recoder(options.recode)
    # One array: nothing but pixels, and the same channels for all.
    grey = all(isinstance(split.samples, Pixels) and split.samples.pixels.ndim == 3 for split in plan.splits)
    size = options.recode.size
    return Recoder(RecodeOptions(store="raw", size=size, headerless=True, channels=1 if grey else 3))


def _stored_share(source: Source, options: PackOptions) -> float:
    """By how much re-encoding changes the images' sizes: stored bytes for each source byte, from a few images."""
    recode = Recoder(options.recode)  # before anything is written: it says what is not installed
    if options.recode == RecodeOptions(check=options.recode.check):
        return 1.0
    samples = next(iter(source.splits.values()))  # a data set's splits are alike
    before = after = 0
    buffer = memoryview(bytearray(1 << 20))
    for i in np.linspace(0, len(samples) - 1, min(len(samples), PROBED_SAMPLES), dtype=int).tolist():
        budget = Budget(options.memory_bytes(), 1)
        with contextlib.suppress(ValueError, OSError, MemoryError):  # packing tells of it
            data = samples.read(i, buffer)
            after += len(recode(data, lambda size, budget=budget: budget.claim(size, lambda: True))[0])
            before += len(data)
    return after / before if before else 1.0
