"""`trainer profile`: some steps of a recipe, timed and then traced on all ranks, and what bounds them."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function

from datapipe.checks import checked_int
from datapipe.console import Progress, printable
from datapipe.fsio import atomic_write

from ..config.recipe import Recipe
from ..ranks.connection import ended_by_signals
from ..ranks.world import World, gather, together
from ..reporting.metrics import hardware, memory_bytes
from ..reporting.recipe_settings import read_settings
from ..reporting.timing import Clock
from ..reporting.trace import Span, chrome_trace, compute_shares
from ..reporting.verdict import Figures, advise, find_bound, format_seconds
from .job import Job, make_run_folder, open_job, open_world
from .loop import do_steps
from .rehearsal import rehearse
from .state import Losses, State

_WARM_UP = 5  # steps before the first that counts: kernels are chosen, buffers filled
_TRACE, _SUMMARY = "trace.json.gz", "profile.json"
_MARK = "trainer.run.profile: now"
_ROUNDS = 200  # of comparing clocks, of which one should be answered at once, also on a busy machine
_COMPUTING = "aten::", "## Call CompiledFxGraph"  # events of a processor: an operator, and what inductor has compiled


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
    clock = Clock()
    with (
        open_world(recipe, data, out, clock, device, local) as world,
        ExitStack() as stack,
        ended_by_signals(world.world_size),
    ):
        with together(world):
            if world.is_main:
                make_run_folder(out, stack)
        job = open_job(recipe, local or data, out, world, clock, stack)
        rehearse(job)
        everyones = _record(job, steps)
        with together(world):
            return None if everyones is None else _write(job, out, everyones, is_staged=local is not None)


def _record(job: Job, count: int) -> list[Any] | None:
    """Do the steps; return of each rank its spans, its shares, the seconds of a step, and its share of the memory.

    None on ranks other than the first.
    """
    clock = job.clock
    total = _WARM_UP + 2 * count
    with (
        Progress("profile", total, unit="steps", is_shown=job.world.is_main) as progress,
        closing(_repeat_epochs(job, progress)) as done,
    ):
        _take(job, done, _WARM_UP)
        clock.drain()
        clock.begin_epoch()
        began = time.perf_counter()
        _take(job, done, count)
        timed_s = time.perf_counter() - began
        clock.drain()
        waits = clock.epoch()["wait"] / timed_s  # of the device: not while it has work left
        spans = _trace(job, done, count)
    ahead_us = _clock_offset_us(job.world)
    shifted = [(row, name, begin - ahead_us, end - ahead_us) for row, name, begin, end in spans]
    ranks = gather(job.world, (shifted, _shares(waits, spans), timed_s / count, _memory_share(job.world)))
    return ranks and [([*map(Span._make, shifted)], *figures) for shifted, *figures in ranks]


def _repeat_epochs(job: Job, progress: Progress) -> Generator[None, None, None]:
    """Train; yield after each step. The recipe's epochs are done again and again."""
    job.train_loader.set_size(job.recipe.data.size)  # images that grow have it in the end
    state = State(Losses(job.recipe.train.spike_factor))
    while True:
        with closing(do_steps(job, state)) as done:
            for _ in done:
                progress.advance()
                yield
        state.epoch += 1
        if state.epoch == job.recipe.train.epochs:
            state.epoch = state.step = 0
        job.train_loader.set_epoch(state.epoch)


def _take(job: Job, done: Iterator[None], count: int) -> None:
    """Do so many steps, and wait for the device."""
    for _ in islice(done, count):
        pass
    if job.world.device.type == "cuda":
        torch.cuda.synchronize(job.world.device)


def _trace(job: Job, done: Iterator[None], count: int) -> list[Span]:
    """Do so many steps; return what they consisted of, in microseconds of this rank's time.perf_counter."""
    is_cuda, watch = job.world.device.type == "cuda", job.world.watch
    begun: list[tuple[str, int, float]] = []  # what began, of which section, when
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        marked_us = 1e6 * time.perf_counter()
        with record_function(_MARK):
            pass
        watch.listener = lambda what, section: begun.append((what, section, 1e6 * time.perf_counter()))
        _take(job, done, count)
        begun.append(("", -1, 1e6 * time.perf_counter()))
    watch.listener = None
    spans = [
        Span("data" if section == 0 else "host", what, begin, end)
        for (what, section, begin), (_, _, end) in pairwise(begun)
    ]
    events: list[Any] = list(profiler.events() or ())
    shift_us = marked_us - next(event for event in events if event.name == _MARK).time_range.start
    for event in events:
        if row := _row_of(event, is_cuda):
            spans.append(Span(row, event.name, event.time_range.start + shift_us, event.time_range.end + shift_us))
    return spans


def _row_of(event: Any, is_cuda: bool) -> str:
    """Return the row of an event of the profiler; "" for one that is a part of another, or not a device's work."""
    name = event.name
    if name.startswith("gloo:") or "nccl" in name.lower():
        return "communication" if name.startswith("gloo:") or event.device_type == DeviceType.CUDA else ""
    if is_cuda:
        return "compute" if event.device_type == DeviceType.CUDA and not event.is_user_annotation else ""
    is_outermost = event.cpu_parent is None or not event.cpu_parent.name.startswith(_COMPUTING)
    return "compute" if name.startswith(_COMPUTING) and is_outermost else ""


def _shares(waits: float, spans: list[Span]) -> dict[str, float]:
    """Return the shares of the steps' time: for data that of the timed steps, and the rest as in the traced ones."""
    traced = compute_shares(spans)
    rest = 1 - traced["data"]
    return {row: waits if row == "data" else share / rest * (1 - waits) for row, share in traced.items()}


def _clock_offset_us(world: World) -> float:
    """Return by how much this rank's time.perf_counter is ahead of the first rank's.

    Each asks the first in turn what time it is; the answer that came fastest counts, which is exact to half as long.
    """
    best = float("inf"), 0.0
    for rank in range(1, world.world_size):
        for _ in range(_ROUNDS):
            asked, answer = 1e6 * time.perf_counter(), torch.zeros(1, dtype=torch.float64)
            if world.rank == rank:
                dist.send(answer, dst=0)
                dist.recv(answer, src=0)
                now = 1e6 * time.perf_counter()
                best = min(best, (now - asked, (asked + now) / 2 - answer.item()))
            elif world.is_main:
                dist.recv(answer, src=rank)
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
        shares={row: sum(share[row] for share in shares) / len(shares) for row in shares[0]},
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
        is_compiled=job.module._compiled_call_impl is not None,
    )
    lines = advise(figures)
    trace = json.dumps(chrome_trace(spans, world.host_of), separators=(",", ":")).encode()
    summary = {"recipe": recipe.name, "size": job.train_loader.size, "precision": job.precision.name}
    summary |= figures._asdict() | {"settings": figures.settings._asdict()}
    summary |= {"shares_of_ranks": list(shares), "bound": find_bound(figures), "verdict": lines}
    for name, content in (
        (_TRACE, gzip.compress(trace, 6)),
        (_SUMMARY, json.dumps(summary, indent=1).encode() + b"\n"),
    ):
        with atomic_write(out / name) as file:
            file.write(content)
    return _show(figures, shares, world, lines, out / _TRACE)


def _show(figures: Figures, shares: tuple[dict[str, float], ...], world: World, lines: list[str], path: Path) -> str:
    names = [f"rank {rank} ({host})" for rank, host in enumerate(world.host_of)] or ["rank 0"]
    width = max(map(len, names))
    text = [f"{figures.images_per_s:,.0f} images/s, {format_seconds(figures.step_s)} a step", ""]
    text.append(f"{'':{width}}  waiting for data  computing  communication  host")
    for name, share in zip(names, shares, strict=True):
        data, compute, communication, host = (share[row] for row in ("data", "compute", "communication", "host"))
        text.append(f"{name:{width}}  {data:16.0%}  {compute:9.0%}  {communication:13.0%}  {host:4.0%}")
    first, *rest = lines
    text += ["", first[0].upper() + first[1:] + ".", *(f"- {line}" for line in rest), "", str(path)]
    return "\n".join(map(printable, text))
