"""`trainer repeat`: a recipe trained once per seed, each time in a process of its own."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from datapipe import watched
from datapipe.checks import check_name, checked_int
from datapipe.cluster import num_nodes, placement, rank_placement
from datapipe.dataset.manifest import SPLITS, Manifest
from datapipe.errors import SettingError
from datapipe.fsio import atomic_write, make_folder
from datapipe.locks import locked
from datapipe.watched import TIMEOUT_S

from ..config.recipe import Recipe, load_recipe
from ..reporting.runlog import NAME as METRICS
from .runs import ATTEMPTS, RunGroup, read_group, read_outcome, read_outcomes, settings_alike
from .tables import group_values, to_json

logger = logging.getLogger(__name__)
_NAME = "repeat.json"
_MAX_SEED = 2**31 - 1  # of a recipe
_LAUNCHERS = ("torchrun", "srun")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_WRONG_USE, _TIME_IS_OVER = 2, 75  # exit codes of `trainer train` after which other seeds would fare no better


@dataclass(frozen=True)
class Repeats:
    """What is trained, and how often. Raises SettingError for a setting out of its range.

    Attributes:
        recipe: Name of a built-in recipe, or path of a .toml file.
        data: Packed data set: the folder that holds train/ and val/.
        out: Folder of the runs, each in seed-K.
        num_seeds: Number of seeds, from the recipe's own seed on.
        changes: Settings of the recipe to change, such as "train.epochs=3".
        device: Device of the training: auto, cpu or cuda.
        stage: Folder on each node's own disk, to which the data set is staged first; None: it is not staged.
        ranks: Number of processes of each training.
        launcher: Program that starts them: torchrun on this host, or srun in a Slurm job; alone, a rank needs no
            torchrun.
    """

    recipe: str
    data: Path
    out: Path
    num_seeds: int = 5
    changes: tuple[str, ...] = ()
    device: str = "auto"
    stage: Path | None = None
    ranks: int = 1
    launcher: str = "torchrun"

    def __post_init__(self) -> None:
        checked_int("--seeds", self.num_seeds, 1)
        checked_int("--ranks", self.ranks, 1)
        check_name("--launcher", self.launcher, _LAUNCHERS)

    def command(self, seed: int) -> list[str]:
        """Return the command that trains with a seed, or continues that."""
        ranks = str(self.ranks)
        start = [sys.executable]
        if self.launcher == "srun":
            # srun does not take the second, which is the job's, by itself.
            cpus = os.environ.get("SRUN_CPUS_PER_TASK") or os.environ.get("SLURM_CPUS_PER_TASK")
            start = ["srun", "--ntasks", ranks, *(["--cpus-per-task", cpus] if cpus else []), sys.executable]
        elif self.ranks > 1:
            start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        changes = [word for change in (*self.changes, f"train.seed={seed}") for word in ("--set", change)]
        stage = ["--stage", str(self.stage)] if self.stage else []
        where = ["--data", str(self.data), "--out", str(self.folder(seed)), "--device", self.device]
        return [*start, "-m", "trainer", "train", self.recipe, *where, "--resume", *stage, *changes]

    def folder(self, seed: int) -> Path:
        """Return the folder of the run with a seed."""
        return self.out / f"seed-{seed}"


class Training(Protocol):
    """What is needed of a process that trains."""

    def wait(self) -> int: ...
    def send_signal(self, sig: int) -> None: ...


def repeat(plan: Repeats, index: int | None = None) -> tuple[RunGroup, int]:
    """Train with each seed that is not done yet, one after another; write OUT/repeat.json.

    A run that has finished stays as it is. All others are resumed, those that failed as well; how often is told.

    Args:
        plan: Description of the trainings.
        index: Number of the only seed to train with, from 0; None: all of them.

    Returns:
        All runs of the folder, and the exit code. 0: those that were to be trained have all reached their target, or
        have none; 1: not all have; 2 and 75: as `trainer train`; 128 + number: after a signal.

    Raises:
        SettingError: A setting is wrong, or OUT holds the repeats of another recipe or data set.
        DatapipeError: There is no data set, or a run's metrics cannot be read.
    """
    recipe = load_recipe(plan.recipe, plan.changes)
    seeds = _choose_seeds(plan, recipe, index)
    find = placement if plan.launcher == "srun" else rank_placement  # srun itself takes all nodes of the job
    if find(os.environ).world_size > 1:
        raise SettingError("this is one of several processes of a launcher; start it once, and give it --ranks")
    facts = _describe_data(plan.data)
    _check_out(plan, recipe, facts)
    for seed in range(recipe.train.seed, recipe.train.seed + plan.num_seeds):
        make_folder(plan.folder(seed))
    code = 0
    for seed in seeds:
        before = read_outcome(plan.folder(seed))
        if before.is_finished:
            logger.info("seed %d is complete", seed)
            continue
        logger.info("seed %d: %s", seed, plan.folder(seed))
        ended, number = _train(plan, seed, facts)
        after = read_outcome(plan.folder(seed))
        is_interrupted = after.status == "interrupted" and after.end != before.end  # that may be of an earlier attempt
        if number:
            ended = 128 + number
        elif is_interrupted and ended == 1 and after.end.get("stopped_by") == "time":
            ended = _TIME_IS_OVER  # torchrun has made 1 of it
        if number or ended in (_WRONG_USE, _TIME_IS_OVER) or is_interrupted:
            code = ended
            break
    with locked(plan.out, wait=True):  # elements of an array job may end at the same time
        group = read_group(plan.out)
        _write(plan, group)
    reached = {outcome.name for outcome in group.outcomes if outcome.status in ("target_reached", "completed")}
    return group, code or int(not {plan.folder(seed).name for seed in seeds} <= reached)


def _choose_seeds(plan: Repeats, recipe: Recipe, index: int | None) -> list[int]:
    """Return the seeds to train with. Raises SettingError where the recipe cannot have them, or so many ranks."""
    seeds = [recipe.train.seed + number for number in range(plan.num_seeds)]
    if seeds[-1] > _MAX_SEED:
        raise SettingError(f"--seeds {plan.num_seeds}: the last seed would be {seeds[-1]}; allowed: up to {_MAX_SEED}")
    if not 0 <= (index or 0) < plan.num_seeds:
        raise SettingError(f"--index {index}: is out of range; allowed: 0 to {plan.num_seeds - 1}, as --seeds says")
    if plan.ranks > recipe.train.batch_size or recipe.train.batch_size % plan.ranks:
        raise SettingError(
            f"--ranks {plan.ranks}: train.batch_size, {recipe.train.batch_size}, is not a multiple of it"
        )
    return seeds if index is None else [seeds[index]]


def _describe_data(data: Path) -> dict[str, Any]:
    manifests = watched.call(lambda: [Manifest.read(data / split) for split in SPLITS], TIMEOUT_S, data)
    sums = [manifest.index_checksum for manifest in manifests]
    return {"num_classes": manifests[0].num_classes, "data_sets": sums}


def _check_out(plan: Repeats, recipe: Recipe, facts: dict[str, Any]) -> None:
    """Raise SettingError where OUT cannot hold these repeats, such as where it holds others."""
    out = plan.out
    if out.exists() and not out.is_dir():
        raise SettingError(f"--out {out}: is a file; it must be a folder, or not exist yet")
    if (out / METRICS).exists():
        raise SettingError(f"--out {out}: is the folder of a run; use one of its own for the repeats")
    if out.resolve().is_relative_to(plan.data.resolve()):
        raise SettingError(f"--out {out}: lies in the data set, --data {plan.data}; use a folder of its own")
    settings = settings_alike(recipe.model_dump(mode="json"))
    for outcome in read_outcomes(out):
        if outcome.run and outcome.settings != settings:
            raise SettingError(f"--out {out}: {outcome.name} is a run of another recipe, or of other settings")
        if any(outcome.header.get(key, value) != value for key, value in facts.items()):
            raise SettingError(f"--out {out}: {outcome.name} was trained on another data set")


def _train(plan: Repeats, seed: int, facts: dict[str, Any]) -> tuple[int, int]:
    """Train with a seed, and record it; return the exit code, and the number of the signal that came meanwhile or 0."""
    command, began = plan.command(seed), time.monotonic()
    line: dict[str, Any] = {"began": datetime.now(UTC).isoformat(timespec="seconds"), "command": command}
    line["load"] = os.getloadavg()[0]  # of others, before it
    with _pass_on_signals(command) as (child, received):
        code = child.wait()
    line |= {
        "exit_code": code if code >= 0 else 128 - code,  # as a shell has it
        "wall_s": time.monotonic() - began,
        "ranks": plan.ranks,
        "nodes": num_nodes(os.environ) if plan.launcher == "srun" else 1,
        "host": platform.node(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        **facts,
    }
    make_folder(plan.folder(seed))  # to a rank on another node it may have seemed new: then it has removed it
    with open(plan.folder(seed) / ATTEMPTS, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return line["exit_code"], received[0] if received else 0


@contextmanager
def _pass_on_signals(command: Sequence[str]) -> Iterator[tuple[Training, list[int]]]:
    """Start a training, and send it SIGTERM for each signal; yield it, and the signals that have come.

    A second Ctrl-C ends it at once. srun and torchrun pass SIGTERM on, and not all of the others.
    """
    received: list[int] = []
    child: Training | None = None

    def pass_on(number: int, _frame: object) -> None:
        is_impatient = number == signal.SIGINT and len(received) > 0
        received.append(number)
        if child is not None:
            child.send_signal(signal.SIGINT if is_impatient else signal.SIGTERM)

    previous = {number: signal.signal(number, pass_on) for number in _SIGNALS}
    try:
        child = start_training(command)
        if received:  # before there was a child
            child.send_signal(signal.SIGTERM)
        yield child, received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def start_training(command: Sequence[str]) -> Training:
    """Start a training in a process group of its own, as the terminal's Ctrl-C would reach it as well.

    What it prints goes to standard error: it is not the result.
    """
    environ = os.environ | {"PYTHONSAFEPATH": "1"}  # a user's own trainer.py in this folder is not meant
    return subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=2, process_group=0, preexec_fn=_end_with_parent
    )


def _end_with_parent() -> None:
    """Let this process get SIGTERM when the one that has started it is gone, were it by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _write(plan: Repeats, group: RunGroup) -> None:
    settings = {
        "recipe": plan.recipe,
        "set": list(plan.changes),
        "num_seeds": plan.num_seeds,
        "ranks": plan.ranks,
        "launcher": plan.launcher,
        "device": plan.device,
        "stage": plan.stage and str(plan.stage),
    }
    text = to_json({"settings": settings, **group_values(group)})
    with atomic_write(plan.out / _NAME) as file:
        file.write(text.encode(errors="backslashreplace") + b"\n")
