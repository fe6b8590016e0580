"""`trainer profile`: some steps of a recipe, timed and then traced on all ranks, and what bounds them."""

from __future__ import annotations

import gzip
import json
import os
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function

from datapipe.checks import check_apart, checked_int
from datapipe.cluster import rank_placement
from datapipe.console import printable
from datapipe.errors import SettingError
from datapipe.fsio import atomic_write, make_folder
from datapipe.staging import StageOptions, stage

from ..config.recipe import Recipe
from ..ranks.connection import connected, ended_by_signals
from ..ranks.consistency import check_start
from ..ranks.device import set_threads
from ..ranks.memory import keep_freed_memory
from ..ranks.stop import StopSignal
from ..ranks.world import World, gather, together
from ..reporting.metrics import MetricsFile, hardware, memory_bytes
from ..reporting.recipe_settings import read_settings
from ..reporting.timing import Clock
from ..reporting.trace import Span, chrome_trace, compute_shares
from ..reporting.verdict import Figures, advise, find_bound, format_seconds
from ..step.precision import choose_precision
from .job import Job, open_job
from .loop import train_epoch
from .rehearsal import rehearse
from .run import remove_if_empty
from .state import Losses, State

WARM_UP = 5  # steps before the first that counts: kernels are chosen, buffers filled
TRACE, SUMMARY = "trace.json.gz", "profile.json"
MARK = "trainer.run.profile: now"
ROUNDS = 20  # of comparing clocks
COMPUTING = "aten::", "## Call CompiledFxGraph"  # events of a processor: an operator, and what inductor has compiled
NEVER = {"log_every": 10**9, "checkpoint_every_minutes": None, "checkpoint_every_steps": None}
NEVER |= {"check_replicas_every_steps": None}


class Recorder(StopSignal):
    """Counts the steps, times some of them, traces as many, and stops: a stop signal as far as training goes."""

    def __init__(self, job: Job, steps: int) -> None:
        super().__init__(job.world, ())
        self._job, self._steps, self._count = job, steps, 0
        activities = [ProfilerActivity.CPU]
        if job.world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._doing: list[tuple[str, int, float]] = []  # what began, of which section, when
        self._marked_s = 0.0
        self.waited_s, self.timed_s = 0.0, 0.0

    def agreed(self, is_due: bool = False) -> bool:  # nothing is saved
        """Count a step; return whether that was the last one."""
        self._count += 1
        if self._count == WARM_UP:
            self._synchronize()
            self._job.clock.drain()
            self._job.clock.begin_epoch()
            self._began = time.perf_counter()
        if self._count == WARM_UP + self._steps:
            self._synchronize()
            self.timed_s = time.perf_counter() - self._began
            self._job.clock.drain()
            self.waited_s = self._job.clock.epoch()["wait"]  # of the device: not while it has work left
            self._profiler.start()
            self._marked_s = time.perf_counter()
            with record_function(MARK):
                pass
            watch = self._job.world.watch
            watch.listener = lambda what, section: self._doing.append((what, section, time.perf_counter()))
        if self._count == WARM_UP + 2 * self._steps:
            self._synchronize()
            self._doing.append(("", -1, time.perf_counter()))
            self._profiler.stop()
            self._job.world.watch.listener = None
            return True
        return False

    def _synchronize(self) -> None:
        if self._job.world.device.type == "cuda":
            torch.cuda.synchronize(self._job.world.device)

    def _host_spans(self) -> list[Span]:
        spans = []
        for (what, section, begin), (_, _, end) in zip(self._doing, self._doing[1:], strict=False):
            spans.append(Span("data" if section == 0 else "host", what, 1e6 * begin, 1e6 * end))
        return spans

    def spans(self) -> list[Span]:
        """Return what the traced steps consisted of, in microseconds of this rank's time.perf_counter."""
        events: list[Any] = list(self._profiler.events() or ())
        mark = next(event for event in events if event.name == MARK)
        shift_us = 1e6 * self._marked_s - mark.time_range.start
        spans = self._host_spans()
        is_cuda = self._job.world.device.type == "cuda"
        for event in events:
            row = _row_of(event, is_cuda)
            if row:
                spans.append(Span(row, event.name, event.time_range.start + shift_us, event.time_range.end + shift_us))
        return spans


def _row_of(event: Any, is_cuda: bool) -> str:
    """Return the row of an event of the profiler; "" for one that is a part of another, or not a device's work."""
    name = event.name
    if name.startswith("gloo:") or "nccl" in name.lower():
        return "communication" if name.startswith("gloo:") or event.device_type == DeviceType.CUDA else ""
    if is_cuda:
        return "compute" if event.device_type == DeviceType.CUDA and not event.is_user_annotation else ""
    is_outermost = event.cpu_parent is None or not event.cpu_parent.name.startswith(COMPUTING)
    return "compute" if name.startswith(COMPUTING) and is_outermost else ""


def profile(
    recipe: Recipe, data: Path, out: Path, steps: int = 20, device: str = "auto", local: Path | None = None
) -> str | None:
    """Train some steps of a recipe, and find out what bounds them.

    As many steps are timed as they are, and then as many traced, which makes them slower.

    Args:
        recipe: Recipe to train.
        data: Packed data set: the folder that holds train/ and val/.
        out: Folder for trace.json.gz and profile.json.
        steps: Number of steps to time, and to trace.
        device: Device to train on: auto, cpu or cuda.
        local: Folder on each node's own disk, to which the data set is staged first; None: it is not staged.

    Returns:
        Text to print: figures and advice; None on ranks other than the first.

    Raises:
        SettingError: A setting is wrong; with several ranks, on all of them.
        DatapipeError: There is no usable data set, or a step failed.
        OSError: The trace cannot be written.
    """
    checked_int("--steps", steps, 1)
    if out.exists() and not out.is_dir():
        raise SettingError(f"--out {out}: is a file; it must be a folder, or not exist yet")
    check_apart("--out", out, "--data", data)
    if local is not None:
        check_apart("--out", out, "--stage", local)
    place = rank_placement(os.environ)
    World(world_size=place.world_size).batch_size(recipe.train.batch_size)
    if local is not None:
        stage(data, local, StageOptions(placement=place))
        data = local
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update=NEVER)})
    with connected(place, device, run=out, after_staging=local is not None) as world, ExitStack() as stack:
        set_threads(world)
        if world.device.type == "cpu":
            keep_freed_memory()
        precision = choose_precision(recipe.train.precision, world.device)
        clock = Clock()
        clock.use(world.device)
        with ended_by_signals() if world.world_size > 1 else nullcontext():
            with together(world):
                if world.is_main:
                    if not out.exists():
                        stack.callback(remove_if_empty, out)
                    make_folder(out)
            job = replace(open_job(recipe, data, out, world, precision, clock, stack), metrics=MetricsFile(None))
            check_start(world, job.module)
            rehearse(job)
            everyones = _record(job, steps)
            with together(world):
                if everyones is not None:
                    return _write(job, out, everyones, local is not None)
    return None


def _record(job: Job, steps: int) -> list[Any] | None:
    """Do the steps; return of each rank its spans, its shares, the seconds of a step, and its share of the memory.

    None on ranks other than the first.
    """
    recorder = Recorder(job, steps)
    _train(job, recorder)
    spans = recorder.spans()
    offset_us = _clock_offset_us(job.world)
    spans = [Span(row, name, begin - offset_us, end - offset_us) for row, name, begin, end in spans]
    plain = [tuple(span) for span in spans]
    mine = plain, _shares(recorder, spans), recorder.timed_s / steps, _memory_share(job.world)
    everyones = gather(job.world, mine)
    return everyones and [([Span._make(span) for span in its], *others) for its, *others in everyones]


def _train(job: Job, recorder: Recorder) -> None:
    """Train until the recorder has all steps, if need be the recipe's epochs again and again."""
    job.train_loader.set_size(job.recipe.data.size)  # images that grow have it in the end
    state = State(Losses(job.recipe.train.spike_factor))
    while train_epoch(job, state, recorder):
        state.epoch += 1
        if state.epoch == job.recipe.train.epochs:
            state.epoch = state.step = 0
        job.train_loader.set_epoch(state.epoch)


def _shares(recorder: Recorder, spans: list[Span]) -> dict[str, float]:
    """Return the shares of the steps' time: for data that of the timed steps, and the rest as in the traced ones."""
    traced = compute_shares(spans)
    waits = recorder.waited_s / recorder.timed_s
    rest = 1 - traced["data"]
    return {row: waits if row == "data" else share / rest * (1 - waits) for row, share in traced.items()}


def _clock_offset_us(world: World) -> float:
    """Return by how much this rank's time.perf_counter is ahead of the first rank's.

    Each asks the first in turn what time it is; the answer that came fastest counts, which is exact to half as long.
    """
    best = float("inf"), 0.0
    for rank in range(1, world.world_size):
        for _ in range(ROUNDS):
            asked, its = 1e6 * time.perf_counter(), torch.zeros(1, dtype=torch.float64)
            if world.rank == rank:
                dist.send(its, dst=0)
                dist.recv(its, src=0)
                now = 1e6 * time.perf_counter()
                best = min(best, (now - asked, (asked + now) / 2 - its.item()))
            elif world.is_main:
                dist.recv(its, src=rank)
                dist.send(torch.tensor([1e6 * time.perf_counter()], dtype=torch.float64), dst=rank)
    return best[1]


def _memory_share(world: World) -> float:
    device = world.device
    name, ranks = ("gpu_memory_bytes", 1) if device.type == "cuda" else ("memory_bytes", world.local_world_size)
    return memory_bytes(device)[name] * ranks / int(hardware(device, world.host_cores, hosts=1)[name])


def _write(job: Job, out: Path, everyones: list[Any], is_staged: bool) -> str:
    """Write the trace and the summary; return what to print."""
    spans, shares, step_s, memory = zip(*everyones, strict=True)
    world, recipe, options = job.world, job.recipe, job.train_loader.options
    figures = Figures(
        settings=read_settings(recipe.model_dump(mode="json")),
        shares={row: sum(its[row] for its in shares) / len(shares) for row in shares[0]},
        step_s=max(step_s),
        images_per_s=recipe.train.batch_size / max(step_s),
        memory_share=max(memory),
        device=world.device.type,
        world_size=world.world_size,
        hosts=len(set(world.host_of)) or 1,
        num_parameters=sum(parameter.numel() for parameter in job.module.parameters()),
        threads=torch.get_num_threads(),
        cores=world.cores,
        loader_threads=options.num_threads(),
        is_staged=is_staged or recipe.data.cache is not None,
    )
    lines = advise(figures)
    trace = json.dumps(chrome_trace(spans, world.host_of), separators=(",", ":")).encode()
    summary = {"recipe": recipe.name, "size": job.train_loader.size, "precision": job.precision.name}
    summary |= figures._asdict() | {"settings": figures.settings._asdict()}
    summary |= {"shares_of_ranks": list(shares), "bound": find_bound(figures), "verdict": lines}
    for name, content in ((TRACE, gzip.compress(trace, 6)), (SUMMARY, json.dumps(summary, indent=1).encode() + b"\n")):
        with atomic_write(out / name) as file:
            file.write(content)
    return _show(figures, shares, world, lines, out / TRACE)


def _show(figures: Figures, shares: tuple[dict[str, float], ...], world: World, lines: list[str], path: Path) -> str:
    names = [f"rank {rank} ({host})" for rank, host in enumerate(world.host_of)] or ["rank 0"]
    width = max(map(len, names))
    text = [f"{figures.images_per_s:,.0f} images/s, {format_seconds(figures.step_s)} a step", ""]
    text.append(f"{'':{width}}  waiting for data  computing  communication  host")
    for name, its in zip(names, shares, strict=True):
        numbers = f"{its['data']:16.0%}  {its['compute']:9.0%}  {its['communication']:13.0%}  {its['host']:4.0%}"
        text.append(f"{name:{width}}  {numbers}")
    first, *rest = lines
    text += ["", first[0].upper() + first[1:] + ".", *(f"- {line}" for line in rest), "", str(path)]
    return "\n".join(map(printable, text))
