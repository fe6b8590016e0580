"""What to change after a run, from the figures that it wrote itself. Pure."""

from __future__ import annotations

import math
from typing import Any

from .formatting import format_duration
from .recipe_settings import RecipeSettings, read_settings
from .runlog import DATA_BOUND_SHARE, STEP_SECTIONS, Run, number, recipe_section
from .verdict import WORTH, Figures, advise_compute, advise_data, describe_full_memory

_NEARLY_ALL = 0.9  # the share of the steps from which on the clip decides their length
_HARDLY_TURNED = 0.95  # the median cosine from which on gradients are hardly more than scaled


def suggest_changes(run: Run) -> list[str]:
    """Return sentences on what to change, each with its number; none before the first steps are over.

    A run knows how long it waited for data, and not what of the rest is communication or the host's work.
    """
    figures = _read_figures(run)
    if figures is None:
        return []
    wait = figures.shares["data"]
    lines = advise_data(figures) if wait >= DATA_BOUND_SHARE else advise_compute(figures)
    lines += _advise_kfac(run) + describe_full_memory(figures) + _advise_beside_steps(run, figures.settings)
    rest_s = (1 - wait) * sum(run.time_s()[section] for section in STEP_SECTIONS)
    lines.append(
        f"trainer profile tells what of the other {1 - wait:.0%} of the steps' time ({format_duration(rest_s)}) is "
        "computing, communication and the host's work, and what to change about it"
    )
    return [f"{line}." for line in lines]


def _advise_kfac(run: Run) -> list[str]:
    """Return what to change where K-FAC did nothing but bound or scale the steps."""
    if not run.kfac:
        return []
    last = run.kfac[-1]
    clipped, clip_steps = (number(last.get(name), 0.0) for name in ("clipped", "clip_steps"))
    kl_clip, cosine = recipe_section(run.header, "kfac").get("kl_clip"), number(last["cosine"])
    return advise_kfac(clipped, clip_steps, cosine, kl_clip, number(last.get("damping")))


def describe_kfac(clipped: float, clip_steps: float, cosine: float) -> str:
    """Return what K-FAC did, as a clause.

    Args:
        clipped: Steps that `kl_clip` made shorter.
        clip_steps: Steps that had a clip.
        cosine: Median over the layers of the cosine between the raw and the preconditioned gradient.
    """
    clip = f"the clip bound {clipped:,.0f} of {clip_steps:,.0f} steps" if clip_steps else "no step had a clip"
    return f"K-FAC: {clip}; median cosine {cosine:.2f}"


def advise_kfac(clipped: float, clip_steps: float, cosine: float, kl_clip: Any, damping: float) -> list[str]:
    """Return what to change where the clip decides nearly every step, and where gradients keep their direction.

    Args:
        clipped: Steps that `kl_clip` made shorter.
        clip_steps: Steps that had a clip.
        cosine: Median over the layers of the cosine between the raw and the preconditioned gradient.
        kl_clip: The recipe's.
        damping: Damping at the end of the run.
    """
    lines = []
    if clip_steps and clipped >= _NEARLY_ALL * clip_steps:
        share = f"{clipped / clip_steps:.0%} of {clip_steps:,.0f} steps"
        lines.append(
            f"kfac.kl_clip (now {kl_clip}) bound {share}, so that it decided how long they were, and the learning rate "
            "and its schedule did not: a lower optimizer.lr, or a higher kl_clip, lets them"
        )
    if cosine >= _HARDLY_TURNED:
        lines.append(
            f"kfac.damping below {damping:.2g}: the median cosine between raw and preconditioned gradients was "
            f"{cosine:.2f}, so that K-FAC hardly did more than scale them"
        )
    return lines


def _advise_beside_steps(run: Run, settings: RecipeSettings) -> list[str]:
    """Return what to do about evaluations, checkpoints, compilation and staging that take much of a run's time."""
    time_s = run.time_s()
    whole_s = sum(time_s.values())
    every, minutes = settings.evaluate_every, settings.checkpoint_every_minutes
    advice = {
        "evaluation": f"train.evaluate_every = {2 * every} (now {every}) evaluates half as often, so that a target may "
        "be noticed later",
        "checkpoint": "--local-checkpoints saves on the node's own disk first, and copies while training continues; "
        f"train.checkpoint_every_minutes is {f'{minutes:g}' if minutes else 'none'} now",
        "compile": "train.compile = false may be faster for so short a run",
        "staging": "datapipe stage in the job script, or a copy that is kept, stages before the run begins",
    }
    if settings.evaluate_mirrored:
        advice["evaluation"] += "; train.evaluate_mirrored = false (now true) takes half as long"
    return [
        f"{text}: {section} took {time_s[section] / whole_s:.0%} of the run, {format_duration(time_s[section])}"
        for section, text in advice.items()
        if time_s[section] >= WORTH * whole_s
    ]


def _read_figures(run: Run) -> Figures | None:
    """Return what is known of a run's steps; None where there were none. Values in the file may be of any type."""
    header, known = run.header, run.figures()
    hardware = header.get("hardware") if isinstance(header.get("hardware"), dict) else {}
    settings = read_settings(header.get("recipe") or {})
    if not (known["images_per_s"] > 0 and known["wait_share"] >= 0 and settings.batch_size > 0):
        return None
    world_size, hosts = (_count(facts, name) for facts, name in ((header, "world_size"), (hardware, "hosts")))
    cores = _count(hardware, "cores") * hosts // world_size  # as far as the file of an earlier version tells
    cores = _count(header, "cores_per_rank", max(1, cores))
    return Figures(
        settings=settings,
        shares={"data": known["wait_share"]},
        step_s=settings.batch_size / known["images_per_s"],
        images_per_s=known["images_per_s"],
        memory_share=_memory_share(run, hardware, math.ceil(world_size / hosts)),
        device=str(header.get("device")).split(" ")[0],
        world_size=world_size,
        hosts=hosts,
        num_parameters=_count(header, "num_parameters"),
        threads=_count(header, "threads", cores),
        cores=cores,
        loader_threads=_count(header, "loader_threads", cores),
        is_staged=run.time_s()["staging"] > 0 or settings.cache != "",
        is_compiled=header.get("compiled") is True or run.time_s()["compile"] > 0,  # a file of an earlier version
    )


def _count(facts: Any, name: str, default: int = 1) -> int:
    """Return a whole number from 1 on; `default` where there is none, as in the file of an earlier version."""
    return max(1, int(number(facts.get(name), default)))


def _memory_share(run: Run, hardware: Any, ranks_per_host: int) -> float:
    """Return the share of a GPU's memory, or else of a host's, that was in use at most; NaN where it is not known."""
    name, ranks = ("gpu_memory_bytes", 1) if "gpu_memory_bytes" in hardware else ("memory_bytes", ranks_per_host)
    most = max((number(rank.get(name), 0.0) for rank in run.ranks()), default=0.0)
    return most * ranks / number(hardware.get(name)) if most and number(hardware.get(name)) else math.nan
