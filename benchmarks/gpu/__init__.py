"""Benchmarks that run unattended on a machine with one GPU: `bash benchmarks/gpu/run_all.sh OUT`.

Each `bench_*.py` has a list `STEPS`. A step is a function of `Conditions` that returns figures, and is run by
`run_steps` in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = dict[str, Any]


@dataclass(frozen=True)
class Conditions:
    """What all steps of a run measure under.

    Attributes:
        out: Folder of the run, for what a step leaves beside its figures.
        device: "cuda" or "cpu".
        model: Network that is trained on images like ImageNet's.
        size: Side of its input in pixels.
        batch_size: Images per step of a training.
        images: Images that are trained on and loaded, a multiple of `batch_size`.
        epochs: Epochs of each training, at least 2, because the first is not counted.
        period: Steps from one refresh of K-FAC's solutions to the next.
        rounds: Repetitions within a step.
        small_images: Images of 32 pixels, a training set in CIFAR's shape.
    """

    out: Path
    device: str = "cuda"
    model: str = "resnet50"
    size: int = 224
    batch_size: int = 256
    images: int = 6400
    epochs: int = 6
    period: int = 100
    rounds: int = 3
    small_images: int = 50_000

    @classmethod
    def tiny(cls, out: Path) -> Conditions:
        """Return those under which a processor does all steps in seconds, and no figure means anything."""
        return cls(out, "cpu", "resnet8", 16, 8, 16, 2, 2, 1, 256)


@dataclass(frozen=True)
class Step:
    """A measurement.

    Attributes:
        name: What is measured, "GROUP: WAY", on the page and in the name of the record.
        measure: Function that returns the figures.
        about_s: Seconds that it takes on a fast GPU.
        limit_s: Seconds after which it is ended.
        needs: Packages without which it is left out.
        needs_gpu: Whether a processor cannot do it even at a tiny size.
    """

    name: str
    measure: Callable[[Conditions], Figures]
    about_s: int
    limit_s: int
    needs: tuple[str, ...] = ()
    needs_gpu: bool = False
