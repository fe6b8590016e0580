"""How many images/s does ResNet-50 train on a GPU, and what share of the GPU's peak is that?

    python -m benchmarks.gpu.bench_train_gpu [--images 12800] [--rounds 3] [--batch-size 256]

`trainer train imagenet-resnet50` in bfloat16 at 224 pixels: on random images in the GPU's memory, as it is, compiled,
and with CUDA graphs; then from packed JPEG, which DALI or the processor decodes. Every run is a process of its own, and
the runs alternate; the first epoch of each is not counted. Peaks are of dense bfloat16 without sparsity, from NVIDIA's
data sheets; operations are those of the forward pass, counted by torch, three times. Needs one GPU, and for DALI's line
the extra `dali`; what a way lacks is said, and the others continue. Prints one table, writes results/train_gpu.json.
`--device cpu` runs all that does not need a GPU, for a test.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import corpus
from benchmarks.gpu import hardware
from benchmarks.measure import WORK, command_line, environment, interleaved, process, shown, spread, table, write_record
from datapipe.packing import PackOptions
from trainer import models

RECIPE = "imagenet-resnet50"
PEAKS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}  # FLOP/s
# Images/s of ResNet-50 on one H100, as published.
GOALS = {"PyTorch's published figure": 2790, "MLPerf's best stack": 7155}
NUM_CLASSES = 1000
VAL_IMAGES = 256
SYNTHETIC = ("data.backend=resident", "data.crop=none", "data.flip=false")
COMPILED = ("train.compile=true",)
WAYS = {  # what is trained on, and what is changed
    "synthetic": ("noise", SYNTHETIC),
    "synthetic, compiled": ("noise", SYNTHETIC + COMPILED),
    "synthetic, CUDA graphs": ("noise", (*SYNTHETIC, *COMPILED, "train.compile_mode=reduce-overhead")),
    "JPEG, DALI": ("jpeg", ("data.backend=dali",)),
    "JPEG, DALI, compiled": ("jpeg", ("data.backend=dali", *COMPILED)),
    "JPEG, processor, compiled": ("jpeg", ("data.backend=cpu", *COMPILED)),
}
FIGURES = ("images_per_s", "wait_share", "gpu_memory_gib", "compile_s")


def folders(arguments: argparse.Namespace) -> dict[str, Path]:
    """What is trained on: packed random images of the input's size, and packed photographs, or pictures like them."""
    pictures = corpus.pictures(arguments.images, VAL_IMAGES)
    corpus.packed_as(pictures, "tar", PackOptions(shard_mib=256))
    return {"noise": corpus.noise(arguments.images, arguments.size, 3, VAL_IMAGES), "jpeg": pictures / "tar"}


def train(data: Path, arguments: argparse.Namespace, changes: tuple[str, ...]) -> dict[str, float]:
    """Train for some epochs; what metrics.jsonl says of those after the first, and of the memory."""
    out = WORK / "runs" / "train-gpu"
    shutil.rmtree(out, ignore_errors=True)
    settings = (
        f"train.epochs={arguments.epochs}", f"train.batch_size={arguments.batch_size}", f"data.size={arguments.size}",
        f"model.name={arguments.model}", f"model.num_classes={NUM_CLASSES}", 'schedule={name="constant"}',
        "train.target_accuracy=none", "train.checkpoint_every_steps=none", f"train.evaluate_every={arguments.epochs}",
        "train.precision=bf16", *changes,
    )  # fmt: skip
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "trainer", "train", RECIPE, "--data", str(data), "--out", str(out)]
    process([*command, "--device", arguments.device, *words])
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rates = [event["images_per_s"] for event in events if event["event"] == "epoch"][1:]
    end = events[-1]
    memory = end["ranks"][0].get("gpu_memory_bytes", 0) / 2**30
    return {
        "images_per_s": spread(rates)["median"],
        "wait_share": end["wait_share"],
        "gpu_memory_gib": memory,
        "compile_s": end["time_s"]["compile"],
    }


def operations(model: str, size: int) -> float:
    """Floating-point operations to train on an image: a forward pass, and a backward pass of twice as many."""
    with torch.device("meta"):
        network, x = models.build(model, num_classes=NUM_CLASSES, in_channels=3), torch.empty(1, 3, size, size)
    with FlopCounterMode(display=False) as counter:
        network(x)
    return 3.0 * counter.get_total_flops()


def report(ways: dict[str, dict], per_image: float, peak: float | None) -> str:
    header = ["", "images/s", "of the peak", "waiting", "GPU GiB", "compiling, s"]
    rows = []
    for name, its in ways.items():
        rate = its["images_per_s"]
        share = f"{rate['median'] * per_image / peak:.0%}" if peak else "unknown"
        medians = (its[figure]["median"] for figure in FIGURES[1:])
        waiting, memory, compiling = medians
        rows.append([name, shown(rate), share, f"{waiting:.0%}", f"{memory:.1f}", f"{compiling:.0f}"])
    return table(header, rows)


def main() -> int:
    parser = command_line(__doc__, rounds=3)
    parser.add_argument("--images", type=int, default=12_800, help="to train on (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=4, help="of each run, at least 2 (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--model", default="resnet50", help="(default: %(default)s)")
    parser.add_argument("--size", type=int, default=224, help="side of the input in pixels (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="default: %(default)s; cpu writes no record")
    arguments = parser.parse_args()
    if arguments.epochs < 2:
        parser.error(f"--epochs {arguments.epochs}: at least 2, as the first is not counted")
    is_gpu = arguments.device == "cuda"
    if is_gpu and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu runs what needs none")

    described, data, absent = environment(), folders(arguments), {}

    def run(name: str, _: int) -> dict:
        kind, changes = WAYS[name]
        return train(data[kind], arguments, changes)

    for name in WAYS:  # also fills the compiler's cache
        try:
            run(name, 0)
        except ChildProcessError as error:
            absent[name] = str(error).strip().splitlines()[-1]
            print(f"without {name}: {absent[name]}", flush=True)
    if len(absent) == len(WAYS):
        return 1
    runs = interleaved([name for name in WAYS if name not in absent], arguments.rounds, run)
    ways = {name: {key: spread(run[key] for run in its) for key in FIGURES} for name, its in runs.items()}
    gpu = hardware(torch.device("cuda")) if is_gpu else {}
    peak = next((flops for name, flops in PEAKS.items() if name in gpu.get("gpu", "")), None)
    per_image = operations(arguments.model, arguments.size)
    print("\n" + report(ways, per_image, peak))
    best = max(its["images_per_s"]["median"] for its in ways.values())
    for name, goal in GOALS.items():
        print(f"{best / goal:.2f} of {name}, {goal:,} images/s")
    if is_gpu:
        settings = {**vars(arguments), "operations_per_image": per_image, "peak": peak, "goals": GOALS}
        record = {"environment": described | gpu, "settings": settings, "ways": ways, "absent": absent}
        print(write_record("train_gpu", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
