"""What bounds a run, in words, and what to change, each with its number. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from datapipe.console import format_count

from .recipe_settings import RecipeSettings

WORTH = 0.1  # the share of the time from which on it is worth to change something
_FULL = 0.9  # the share of the memory from which on a larger batch hardly fits
_ROOMY = 0.5  # the share of the memory below which twice the batch fits
_SOONEST = 2  # the first step that PowerSGD can begin with
_SMALL_MIB = 2  # gradients below this are too few to be divided
_MIB = 2**20
_NAMES = {
    "data": "waiting for data",
    "host": "the host",
    "communication": "communication",
    "compute": "computing",
    "memory": "memory",
}


class Figures(NamedTuple):
    """What was measured of some steps.

    Attributes:
        settings: Settings of the recipe.
        shares: Shares of the time, by row of a trace; means over the ranks.
        step_s: Time of a step, in seconds.
        images_per_s: Images per second, over all ranks.
        memory_share: Largest share of the device's memory that was used; on the rank that had the least left; NaN: not
            known.
        device: "cuda" or "cpu".
        world_size: Number of ranks.
        hosts: Number of hosts on which the ranks are.
        num_parameters: Number of parameters of the network.
        threads: Number of threads that compute, per rank.
        cores: Number of cores that a rank may use.
        loader_threads: Number of threads that decode, per rank.
        is_staged: Whether data is read from a copy on the node's own disk.
        is_compiled: Whether the network was compiled.
    """

    settings: RecipeSettings
    shares: dict[str, float]
    step_s: float
    images_per_s: float
    memory_share: float
    device: str
    world_size: int
    hosts: int
    num_parameters: int
    threads: int
    cores: int
    loader_threads: int
    is_staged: bool
    is_compiled: bool

    def duration(self, row: str) -> str:
        """Return how much of a step a row of a trace took, as text."""
        return format_seconds(self.step_s * self.shares[row])


def format_seconds(seconds: float) -> str:
    """Return a duration with as many digits as mean something.

    >>> format_seconds(0.01234), format_seconds(13.5225)
    ('12.3 ms', '13.5 s')
    """
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def find_bound(figures: Figures) -> str:
    """Return what bounds the run: that of data, host and communication that takes most, if it is much; or compute.

    It is memory where that would be the host or communication, whose time per step a larger batch would share among
    more images, and no larger batch fits.
    """
    most = max(("data", "host", "communication"), key=lambda row: figures.shares[row])
    if figures.shares[most] < WORTH:
        return "compute"
    return "memory" if most != "data" and figures.memory_share >= _FULL else most


def advise(figures: Figures) -> list[str]:
    """Return the verdict and the advice: the first line says what bounds the run, each other one what may help."""
    bound = find_bound(figures)
    step = f"each step of {format_seconds(figures.step_s)}"
    if bound == "memory":
        rest = figures.shares["host"] + figures.shares["communication"]
        lines = [
            f"memory bounds this run: {figures.memory_share:.0%} is in use, and no larger batch fits, which would "
            f"share among more images the {rest:.0%} of {step} that the host and communication take"
        ]
        return lines + _advise_memory(figures)
    lines = [f"{_NAMES[bound]} bounds this run: {figures.shares[bound]:.0%} of {step}", *_ADVICE[bound](figures)]
    if bound == "compute":
        lines.append(
            f"otherwise a network of fewer than {figures.num_parameters:,} parameters, an input of fewer than "
            f"{figures.settings.size} px, or more than {format_count(figures.world_size, 'device')}: at most "
            f"{1 - figures.shares['compute']:.0%} of the time can be saved elsewhere"
        )
    return lines + describe_full_memory(figures)


def describe_full_memory(figures: Figures) -> list[str]:
    """Return a line where the memory is nearly full."""
    if not figures.memory_share >= _FULL:
        return []
    return [f"memory: {figures.memory_share:.0%} is in use, so that a larger batch hardly fits"]


def advise_data(figures: Figures) -> list[str]:
    """Return what may shorten the wait for data."""
    settings, wait = figures.settings, figures.duration("data")
    lines: list[str] = []
    is_scaled = settings.crop == "random_resized" or {settings.start_size, settings.eval_size} - {0, settings.size}
    can_stay = settings.order == "full" and settings.io in ("", "cached") and not is_scaled
    if settings.backend != "resident" and can_stay and figures.memory_share < _ROOMY:
        lines.append(
            f"data.backend = 'resident' (now '{settings.backend}') decodes images once that are all of {settings.size} "
            f"px; they have to fit into memory, of which {figures.memory_share:.0%} is in use"
        )
    if figures.loader_threads < figures.cores:
        lines.append(
            f"data.threads = {figures.cores} (now {figures.loader_threads}): each rank has {figures.cores} cores"
        )
    if figures.device == "cuda" and settings.backend == "cpu":
        lines.append(f"data.backend = 'dali' (now 'cpu') decodes on the GPU, not on {figures.cores} cores of each rank")
    if not figures.is_staged:
        lines.append(
            f"--stage reads from the node's own disk, where the filesystem is what makes each step wait {wait}: "
            f"datapipe bench tells whether the loader alone exceeds this run's {figures.images_per_s:,.0f} images/s"
        )
    lines.append(
        f"datapipe convert --resize stores images no larger than an input of {settings.size} px needs: less to read "
        f"and to decode in the {wait} that each step waits"
    )
    return lines


def _advise_host(figures: Figures) -> list[str]:
    settings, host = figures.settings, figures.duration("host")
    lines: list[str] = []
    if not figures.is_compiled:
        lines.append(
            f"train.compile = true (now not compiled): fewer kernels to start, which is part of the host's {host}"
        )
    elif figures.device == "cuda" and settings.compile_mode == "default" and settings.accumulation_steps == 1:
        name = "train.compile_mode = 'reduce-overhead' (now 'default')"
        lines.append(f"{name} starts all kernels of a pass at once, which is part of the host's {host}")
    return [
        *lines,
        *_advise_fewer_parts(figures),
        _describe_larger_batch(figures, f"shares the host's {host} among more images"),
    ]


def _advise_communication(figures: Figures) -> list[str]:
    settings, sent_mib = figures.settings, 4 * figures.num_parameters / _MIB
    lines = [_advise_bucket(settings.bucket_mib, sent_mib)]
    can_change = settings.preconditioner == "none" or settings.grad_worker_fraction > 0
    if settings.powersgd_rank and settings.powersgd_start_step > _SOONEST:
        lines.append(
            f"train.powersgd_rank = {settings.powersgd_rank} begins at step {settings.powersgd_start_step}; until then "
            f"gradients are sent whole: train.powersgd_start_step = {_SOONEST} to see in a few steps what it saves"
        )
    elif can_change and not settings.powersgd_rank and settings.gradient_dtype == "float32":
        lines.append(
            f"train.gradient_dtype = 'bfloat16' (now 'float32') sends {sent_mib / 2:,.1f} MiB of gradients per step, "
            f"not {sent_mib:,.1f}"
        )
        is_much = sent_mib >= _SMALL_MIB and figures.shares["communication"] >= 2 * WORTH  # half of it would be, too
        if is_much and settings.when_diverged == "stop" and settings.precision != "fp16":
            lines.append(
                f"train.powersgd_rank = 4 (now 'none') sends two narrow matrices in place of each layer's part of the "
                f"{sent_mib:,.1f} MiB, from step {settings.powersgd_start_step} on; it changes what is learnt"
            )
    lines.append(_describe_larger_batch(figures, "communicates less often per image"))
    if figures.hosts > 1:
        variable = "NCCL_SOCKET_IFNAME" if figures.device == "cuda" else "GLOO_SOCKET_IFNAME"
        lines.append(
            f"{variable} names the network between the {figures.hosts} hosts: is there a faster one than that which "
            f"left {figures.duration('communication')} of each step to wait for?"
        )
    return lines


def _advise_bucket(bucket_mib: int, sent_mib: float) -> str:
    """Return what to do about the size of the parts in which gradients are sent."""
    parts, name = max(1, math.ceil(sent_mib / bucket_mib)), f"train.bucket_mib = {bucket_mib}"
    if sent_mib < _SMALL_MIB:
        return f"{name} has no influence: {sent_mib:,.1f} MiB of gradients are sent as 1 part"
    if parts == 1:
        return (
            f"train.bucket_mib = {max(1, int(sent_mib / 4))} (now {bucket_mib}): {sent_mib:,.1f} MiB of gradients are "
            "sent as 1 part, at the end of the backward pass; smaller parts leave during it"
        )
    return (
        f"{name} sends {sent_mib:,.1f} MiB of gradients in about {parts} parts: {2 * bucket_mib} costs less latency, "
        f"{max(1, bucket_mib // 2)} hides more behind the backward pass; measure both"
    )


def advise_compute(figures: Figures) -> list[str]:
    """Return what may make computing faster."""
    settings, step = figures.settings, f"in a step of {format_seconds(figures.step_s)}"
    lines: list[str] = []
    lines += _advise_16_bits(settings, "is faster, where the device has units for them")
    if not settings.channels_last:
        lines.append(f"train.channels_last = true (now false): faster convolutions, {step}")
    if not figures.is_compiled:
        lines.append(f"train.compile = true (now not compiled): fused kernels, {step}")
    if figures.device == "cpu" and figures.threads < figures.cores:
        lines.append(f"OMP_NUM_THREADS = {figures.cores} (now {figures.threads}): each rank has {figures.cores} cores")
    if figures.device == "cuda" and figures.memory_share < _ROOMY:
        lines.append(_describe_larger_batch(figures, "fills the device better"))
    return lines + (_advise_fewer_parts(figures) if figures.memory_share < _ROOMY else [])


def _advise_memory(figures: Figures) -> list[str]:
    """Return what may make room in memory for a larger batch."""
    settings, share = figures.settings, f"{figures.memory_share:.0%}"
    lines: list[str] = []
    lines += _advise_16_bits(settings, "keeps less for the backward pass, where the device has units for them")
    parts, batch_size = settings.accumulation_steps, settings.batch_size
    if figures.shares["communication"] >= WORTH and settings.compile_mode == "default":
        lines.append(
            f"train.accumulation_steps = {2 * parts} (now {parts}) with train.batch_size = {2 * batch_size} (now "
            f"{batch_size}) needs no more memory, and communicates half as often per image"
        )
    if settings.backend == "resident":
        lines.append(f"data.backend = 'cpu' (now 'resident') keeps no images in memory, of which {share} is in use")
    if not figures.is_compiled:
        lines.append(f"train.compile = true (now not compiled) keeps fewer results between kernels: {share} is in use")
    lines.append(f"an input of fewer than {settings.size} px (data.size), or a device with more memory")
    return lines


def _advise_16_bits(settings: RecipeSettings, effect: str) -> list[str]:
    """By "auto", a run in float32 is on a device without such units."""
    if settings.precision not in ("off", "tf32"):
        return []
    return [f"train.precision = 'auto' (now '{settings.precision}'): computing in 16 bits {effect}"]


def _describe_larger_batch(figures: Figures, effect: str) -> str:
    """Propose twice the batch, or the largest that fits if memory grows with it; a multiple of the ranks' parts."""
    each, parts = figures.settings.batch_size // figures.world_size, figures.settings.accumulation_steps
    factor = min(2.0, _FULL / figures.memory_share)
    larger = max(each // parts + 1, int(each * factor) // parts) * parts * figures.world_size
    return (
        f"train.batch_size = {larger} (now {figures.settings.batch_size}, {each} per rank) {effect}; "
        f"{figures.memory_share:.0%} of the memory is in use"
    )


def _advise_fewer_parts(figures: Figures) -> list[str]:
    """Propose the next smaller number of equal parts, if a batch is in parts."""
    each, parts = figures.settings.batch_size // figures.world_size, figures.settings.accumulation_steps
    fewer = max((number for number in range(1, parts) if each % number == 0), default=None)
    if fewer is None:
        return []
    return [
        f"train.accumulation_steps = {fewer} (now {parts}): larger parts, and fewer kernels to start; "
        f"{figures.memory_share:.0%} of the memory is in use"
    ]


_ADVICE: dict[str, Callable[[Figures], list[str]]] = {
    "data": advise_data,
    "host": _advise_host,
    "communication": _advise_communication,
    "compute": advise_compute,
}
