"""How soon does a GPU train small images to an accuracy, and what bounds a step of ResNet-50?

`fashion-mnist-speedrun` trains on the whole data set until its target if it was carried, else on the tests' sample.
`cifar10-speedrun` trains on random images in CIFAR-10's shape: its seconds mean something, its accuracy does not. Then
the trace that `trainer profile` writes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks import corpus
from benchmarks.gpu import Conditions, Figures, Step
from benchmarks.gpu.bench_train_gpu import (
    PLAIN,
    RECIPE,
    SYNTHETIC,
    describe_training,
    large_recipe_changes,
    make_noise,
    run_recipe,
)
from benchmarks.measure import ROOT, WORK
from datapipe.packing import PackOptions, pack

FASHION_MNIST = WORK / "fashion-mnist-idx"  # where `datapipe fetch` puts it for the other benchmarks
SAMPLE = ROOT / "tests" / "data" / "fashion-mnist-sample"
PROFILED_STEPS = 20


def train_fashion_mnist(at: Conditions) -> Figures:
    is_whole = at.device == "cuda" and FASHION_MNIST.exists()
    packed = WORK / ("fashion-mnist-packed" if is_whole else "fashion-mnist-sample")
    if not packed.exists():
        temporary = packed.with_suffix(".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        pack(FASHION_MNIST if is_whole else SAMPLE, temporary, PackOptions(format="tar"))
        temporary.rename(packed)
    changes = () if is_whole else ("train.target_accuracy=none",)
    if at.device == "cpu":
        changes = ("train.target_accuracy=none", "train.epochs=1", "train.batch_size=1024", "model.name=resnet8")
    data = "60,000 images" if is_whole else "a sample of 2,400"
    return {"data": data} | _run("fashion-mnist-speedrun", packed, at, changes)


def train_cifar_shape(at: Conditions) -> Figures:
    noise = corpus.noise(at.small_images, 32, 3, at.small_images // 5)
    changes = ("train.target_accuracy=none",)
    if at.device == "cpu":
        changes += ("train.epochs=1", "train.compile=false", "train.batch_size=128", "model.name=resnet8")
    return {"data": f"{at.small_images:,} random"} | _run("cifar10-speedrun", noise, at, changes)


def _run(recipe: str, data: Path, at: Conditions, changes: Sequence[str]) -> Figures:
    events = run_recipe(recipe, data, at, *changes)
    end = events[-1]
    names = ("status", "time_to_target_s", "best_accuracy")
    return describe_training(events) | {name: end.get(name) for name in names} | {"time_s": end["time_s"]}


def profile_step(at: Conditions) -> Figures:
    """Return what `trainer profile` finds; its trace is in the folder `trace` of the run."""
    from trainer.config.recipe import load_recipe
    from trainer.run.profile import profile

    out = at.out / "trace"
    shutil.rmtree(out, ignore_errors=True)
    recipe = load_recipe(RECIPE, [*large_recipe_changes(at), *SYNTHETIC, *PLAIN])
    print(profile(recipe, make_noise(at), out, PROFILED_STEPS if at.device == "cuda" else 1, at.device))
    return json.loads((out / "profile.json").read_text())


STEPS = [
    Step("accuracy: Fashion-MNIST speedrun", train_fashion_mnist, 40, 180),
    Step("accuracy: CIFAR's shape", train_cifar_shape, 90, 300),
    Step("profile: ResNet-50, synthetic", profile_step, 40, 120),
]
