"""What tests of trainings ask of them: how processes ended, and what runs and checkpoints hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.processes import Process, Ranks
from tests.waiting import limit_s, wait_until
from trainer.checkpoints.file import load_checkpoint
from trainer.reporting.runlog import read_run

DISTURBED = Path(__file__).parent / "children" / "disturbed.py"
KFAC = ["optimizer.preconditioner=kfac", "kfac.factor_update_steps=3", "kfac.inv_update_steps=5"]
KFAC += ["kfac.damping_update_steps=2"]


def setting(changes: Sequence[str]) -> list[str]:
    """Return the words of a command that change settings of a recipe."""
    return [word for change in changes for word in ("--set", change)]


def finish(child: Process | Ranks) -> tuple[int | None, str, str]:
    """Return the exit code of a process that ends by itself, its output and its errors."""
    out, err = child.communicate(timeout=limit_s())
    return child.returncode, out, err


def wait_for_step(run: Path, step: int, *children: Process | Ranks) -> None:
    """Wait until a training has done a step."""
    path = run / "metrics.jsonl"
    wait_until(lambda: path.exists() and f'"step": {step},' in path.read_text(), *children)


def train_losses(run: Path) -> list[float]:
    """Return the losses of a run's steps."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["event"] == "train"]


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each leaf of nested dictionaries and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield name, value
        return
    for key, item in items:
        yield from flat(item, f"{name}.{key}")


def same(a: Any, b: Any) -> bool:
    """Return whether two leaves are equal, of tensors bit by bit."""
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def weights_at(path: Path) -> int:
    """Return where a checkpoint has some weights."""
    return path.read_bytes().index(load_checkpoint(path)["model"]["fc.weight"].numpy().tobytes())


def damage(path: Path, place: Callable[[Path], int] = weights_at) -> None:
    """Flip a bit of a checkpoint."""
    content, at = bytearray(path.read_bytes()), place(path)
    content[at] ^= 1
    path.unlink()  # best.pt may be another name of it
    path.write_bytes(content)


def differing(first: Any, second: Any) -> list[str]:
    """Return the names of leaves that two contents do not have alike."""
    left, right = dict(flat(first)), dict(flat(second))
    common = left.keys() & right.keys()
    return [*(left.keys() ^ right.keys()), *(name for name in common if not same(left[name], right[name]))]


def outcome(run: Path) -> dict[str, Any]:
    """Return all that the last and the best checkpoint of a run hold, and the lines of its metrics, except times."""
    values = {}
    for file in ("checkpoint.pt", "best.pt"):
        content = load_checkpoint(run / file)
        for part in content.keys() - {"clock", "metrics_bytes", "metrics_digest"}:
            values |= {f"{file} {part}{key}": value for key, value in flat(content[part])}
    metrics = read_run(run)
    for line in (*metrics.train, *metrics.epochs):
        values |= {f"{line['event']} {line['step']} {key}": value for key, value in line.items()}
    times = "elapsed_s", "time_s", "images_per_s", "written_at"
    return {key: value for key, value in values.items() if not key.endswith(times)}
