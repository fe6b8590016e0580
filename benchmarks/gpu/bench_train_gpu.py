"""How many images/s does ResNet-50 train on a GPU, and what share of the GPU's peak is that?

`imagenet-resnet50` in bfloat16 at 224 pixels: on random images in the GPU's memory, as it is, compiled, with CUDA
graphs and with K-FAC; and from packed JPEG, which DALI or the processor decodes. The first epoch is not counted. Peaks
are of dense bfloat16 without sparsity, from NVIDIA's data sheets; operations are those of the forward pass, counted by
torch, three times.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import corpus
from benchmarks.gpu import Conditions, Figures, Step
from benchmarks.measure import WORK, spread
from datapipe.packing import PackOptions
from trainer import models

RECIPE = "imagenet-resnet50"
PEAKS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}  # FLOP/s
NUM_CLASSES = 1000
VAL_IMAGES = 256
SYNTHETIC = ("data.backend=resident", "data.crop=none", "data.flip=false")
PLAIN, COMPILED = ("train.compile=false",), ("train.compile=true",)
GRAPHS = (*COMPILED, "train.compile_mode=reduce-overhead")
DALI = ("nvidia.dali",)
KFAC = (*SYNTHETIC, *PLAIN, "optimizer.preconditioner=kfac", "optimizer.lr=0.001", "kfac.factor_update_steps=10")


def make_noise(at: Conditions) -> Path:
    """Return the folder of packed random images of the input's size."""
    return corpus.noise(at.images, at.size, 3, min(VAL_IMAGES, at.images))


def make_pictures(at: Conditions) -> Path:
    """Return the folder of packed photographs, or of pictures like them."""
    pictures = corpus.pictures(at.images, min(VAL_IMAGES, at.images))
    corpus.packed_as(pictures, "tar", PackOptions(shard_mib=256))
    return pictures / "tar"


def run_recipe(name: str, data: Path, at: Conditions, *changes: str) -> list[dict]:
    """Train; return the events of metrics.jsonl, of which the last is the end."""
    from trainer.config.recipe import load_recipe
    from trainer.run.run import RunOptions, run

    out = WORK / "runs" / "gpu"
    shutil.rmtree(out, ignore_errors=True)
    run(load_recipe(name, changes), data, out, RunOptions(device=at.device))
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(out)
    return events


def describe_training(events: list[dict]) -> Figures:
    """Return the speed of the epochs, if there are several without the first, and what the whole run waited, compiled
    and kept."""
    rates = [event["images_per_s"] for event in events if event["event"] == "epoch"]
    end = events[-1]
    return {
        "images_per_s": spread(rates[1:] or rates),
        "wait_share": end["wait_share"],
        "gpu_memory_gib": end["ranks"][0].get("gpu_memory_bytes", 0) / 2**30,
        "compile_s": end["time_s"]["compile"],
    }


def large_recipe_changes(at: Conditions) -> tuple[str, ...]:
    """Return the settings that make the recipe one of a few epochs of these images."""
    return (
        f"train.epochs={at.epochs}", f"train.batch_size={at.batch_size}", f"data.size={at.size}",
        f"model.name={at.model}", f"model.num_classes={NUM_CLASSES}", 'schedule={name="constant"}',
        "train.target_accuracy=none", "train.checkpoint_every_steps=none", f"train.evaluate_every={at.epochs}",
        "train.precision=bf16",
    )  # fmt: skip


def train(at: Conditions, make_data: Callable[[Conditions], Path], changes: tuple[str, ...]) -> Figures:
    data = make_data(at)
    figures = describe_training(run_recipe(RECIPE, data, at, *large_recipe_changes(at), *changes))
    per_image = operations(at.model, at.size)
    peak = find_peak(at.device)
    rate = figures["images_per_s"]["median"]
    return figures | {"operations_per_image": per_image, "share_of_peak": rate * per_image / peak if peak else None}


def train_kfac(at: Conditions, changes: tuple[str, ...]) -> Figures:
    return train(at, make_noise, (*KFAC, f"kfac.inv_update_steps={at.period}", *changes))


def find_peak(device: str) -> float | None:
    """Return the operations per second of the GPU's data sheet; None for one that is not known, and a processor."""
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((flops for gpu, flops in PEAKS.items() if gpu in name), None)


def operations(model: str, size: int) -> float:
    """Floating-point operations to train on an image: a forward pass, and a backward pass of twice as many."""
    with torch.device("meta"):
        network, x = models.build(model, num_classes=NUM_CLASSES, in_channels=3), torch.empty(1, 3, size, size)
    with FlopCounterMode(display=False) as counter:
        network(x)
    return 3.0 * counter.get_total_flops()


def _train_step(
    name: str, make_data: Callable[[Conditions], Path], changes: tuple[str, ...], about_s: int, **settings: Any
) -> Step:
    measure = partial(train, make_data=make_data, changes=changes)
    return Step(f"ResNet-50: {name}", measure, about_s, 3 * about_s, **settings)


def _kfac_step(name: str, changes: tuple[str, ...], about_s: int) -> Step:
    return Step(f"ResNet-50: {name}", partial(train_kfac, changes=changes), about_s, 3 * about_s)


STEPS = [
    _train_step("synthetic", make_noise, SYNTHETIC + PLAIN, 60),
    _train_step("JPEG, processor", make_pictures, ("data.backend=cpu", *PLAIN), 60),
    _train_step("JPEG, DALI", make_pictures, ("data.backend=dali", *PLAIN), 60, needs=DALI),
    _train_step("synthetic, compiled", make_noise, SYNTHETIC + COMPILED, 120),
    _train_step("JPEG, DALI, compiled", make_pictures, ("data.backend=dali", *COMPILED), 90, needs=DALI),
    _train_step("JPEG, processor, compiled", make_pictures, ("data.backend=cpu", *COMPILED), 90),
    _train_step("synthetic, CUDA graphs", make_noise, SYNTHETIC + GRAPHS, 120, needs_gpu=True),
    _kfac_step("K-FAC, eigen", ("kfac.solver=eigen",), 120),
    _kfac_step("K-FAC, cholesky", ("kfac.solver=cholesky",), 60),
    _kfac_step("K-FAC, cholesky, without norms", ("kfac.solver=cholesky", 'kfac.skip=["BatchNorm"]'), 60),
]
