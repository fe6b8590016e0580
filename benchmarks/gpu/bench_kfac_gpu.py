"""What does K-FAC add to a training step on a GPU?

    python -m benchmarks.gpu.bench_kfac_gpu [--model resnet50 --size 224 --batch-size 128] [--periods 2]

Steps of SGD (fused) and of K-FAC with each solver take turns, in bf16 and channels-last, on random images, with factors
every 10 steps and solutions every 100, over whole periods after the first steps. Beside the times, what K-FAC's
operations by formula (factors by im2col, in bfloat16) would take at the speed of a large product and its bytes (all of
float32, but bfloat16 solutions) at that of a copy, both measured here. That is not a floor: the factors of 3×3
convolutions take a fifth of im2col's operations. A second table has the two ways to these factors.
Then ten more steps of each without a refresh, and ten in which all layers refresh, in which a synchronisation of the
host is an error (torch.linalg.eigh is one, as it looks whether it converged). Unattended;
prints one table and writes results/kfac_gpu.json. `--device cpu` runs all that does not need a GPU, and writes none.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.bench_kfac import operations
from benchmarks.gpu import hardware
from benchmarks.measure import command_line, environment, table, write_record
from trainer import models
from trainer.kfac import KFAC, factors

SGD = "SGD"
OURS = {
    "K-FAC, cholesky": {"solver": "cholesky"},
    "K-FAC, cholesky, bfloat16": {"solver": "cholesky", "inv_dtype": "bfloat16"},
    "K-FAC, eigen": {"solver": "eigen"},
}
SETTINGS = {"damping": 0.003, "factor_update_steps": 10, "inv_update_steps": 100, "factor_decay": 0.95,
            "kl_clip": 0.001, "lr": 0.1}  # fmt: skip
NUM_CLASSES = 1000
WARM_UP = 64  # steps; K-FAC then continues as in its second period
LONG = 10_000  # an interval with far more steps than layers, whose turns are at its beginning
SYNC_STEPS = 10


class Training:
    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self._device = arguments.device
        model = models.build(arguments.model, num_classes=NUM_CLASSES, in_channels=3)
        self.model = model.to(self._device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, fused=True)
        self.preconditioner = KFAC(self.model, **OURS[name], **SETTINGS) if name in OURS else None

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            logits = self.model(x)
        F.cross_entropy(logits.float(), y).backward()
        if self.preconditioner is not None:
            self.preconditioner.step()
        self.optimizer.step()

    def timed(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """Milliseconds on the device."""
        return elapsed_ms(self._device, lambda: self.step(x, y))


def elapsed_ms(device: torch.device, work: Callable[[], object]) -> float:
    """On the device."""
    if device.type == "cpu":
        began = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - began)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def ceilings(device: torch.device, n: int) -> dict[str, float]:
    """Operations a second of a product of two matrices [n, n], by type, and bytes a second of a copy of one."""
    a, b = (torch.randn(n, n, device=device) for _ in range(2))
    per_s = {"bytes": 8e3 * n * n / min(elapsed_ms(device, a.clone) for _ in range(5))}
    for dtype in ("float32", "bfloat16"):
        c, d = (matrix.to(getattr(torch, dtype)) for matrix in (a, b))
        per_s[dtype] = 2e3 * n**3 / min(elapsed_ms(device, lambda c=c, d=d: c @ d) for _ in range(5))
    return per_s


def offsets_ms(device: torch.device, batch_size: int) -> dict[str, dict[str, float]]:
    """Milliseconds of the two ways to the factor of a 3×3 convolution, by layer of ResNet-50, in bfloat16."""
    by_layer = {}
    for channels, size in ((64, 56), (128, 28), (256, 14), (512, 7)):
        x = torch.randn(batch_size, channels, size, size, device=device, dtype=torch.bfloat16)
        x = x.to(memory_format=torch.channels_last)
        ways = {
            "products": lambda x=x: factors._products_of_offsets(x),
            "convolution": lambda x=x: factors._convolved_offsets(factors.accumulating(x)),
        }
        layer = f"{channels} channels, {size} px"
        by_layer[layer] = {name: min(elapsed_ms(device, way) for _ in range(5)) for name, way in ways.items()}
    return by_layer


def waits(training: Training, x: torch.Tensor, y: torch.Tensor, inv_update_steps: int) -> str:
    """Does a step synchronise the host?"""
    if x.device.type == "cpu":
        return "no GPU"
    if training.preconditioner is not None:
        training.preconditioner.inv_update_steps = inv_update_steps
        training.preconditioner.steps = LONG + LONG // 2
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(SYNC_STEPS):
            training.step(x, y)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none"


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="resnet50", help="(default: %(default)s)")
    parser.add_argument("--size", type=int, default=224, help="pixels (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--periods", type=int, default=2, help="of 100 measured steps (default: %(default)s)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"), help="(default: %(default)s)")
    arguments = parser.parse_args()
    described = environment()
    torch.backends.cudnn.benchmark = True
    x = torch.randn(arguments.batch_size, 3, arguments.size, arguments.size, device=arguments.device)
    x = x.to(memory_format=torch.channels_last)
    y = torch.randint(NUM_CLASSES, (arguments.batch_size,), device=arguments.device)

    names = [SGD, *OURS]
    trainings = {name: Training(name, arguments) for name in names}
    times = {name: [] for name in names}
    for number in range(WARM_UP + arguments.periods * SETTINGS["inv_update_steps"]):
        for name in OURS if number == WARM_UP else ():
            trainings[name].preconditioner.steps = SETTINGS["inv_update_steps"]
        for name in names:
            ms = trainings[name].timed(x, y)
            if number >= WARM_UP:
                times[name].append(ms)
    flops = operations(arguments.model, arguments.size, arguments.batch_size, NUM_CLASSES)
    ceiling = ceilings(arguments.device, 512 if arguments.device.type == "cpu" else 8192)

    def formula_ms(name: str) -> float:
        if name not in OURS:
            return 0.0
        solver = OURS[name]["solver"]
        inv_dtype = OURS[name].get("inv_dtype", "float32")
        precondition_s = flops[f"precondition, {solver}"] / ceiling[inv_dtype]
        computing_s = flops["factors"] / ceiling["bfloat16"] + flops[solver] / ceiling["float32"] + precondition_s
        moved = flops["bytes" if inv_dtype == "float32" else "bytes, bfloat16"]
        return 1e3 * max(computing_s, moved / ceiling["bytes"])

    figures = {
        name: {
            "median_ms": statistics.median(all_ms),
            "mean_ms": statistics.mean(all_ms),
            "worst_over_median": max(all_ms) / statistics.median(all_ms),
            "added": sum(all_ms) / sum(times[SGD]) - 1,
            "formula_ms": formula_ms(name),
            "waits": waits(trainings[name], x, y, LONG),
            "waits_in_refreshes": waits(trainings[name], x, y, 1),
        }
        for name, all_ms in times.items()
    }
    rows = [
        [name, f"{its['median_ms']:.1f}", f"{its['mean_ms']:.1f}", f"{its['added']:+.1%}", f"{its['formula_ms']:.1f}",
         f"{its['worst_over_median']:.2f}", its["waits"], its["waits_in_refreshes"]]
        for name, its in figures.items()
    ]  # fmt: skip
    what = f"{arguments.model}, {arguments.size} px, batch {arguments.batch_size}"
    print(table([what, "median ms", "mean ms", "added", "K-FAC by formula ms", "worst ÷ median", "host waits",
                 "in refreshes"], rows))  # fmt: skip
    offsets = offsets_ms(arguments.device, arguments.batch_size)
    rows = [[layer, *(f"{ms:.2f}" for ms in by_way.values())] for layer, by_way in offsets.items()]
    print(table(["offsets of a 3×3 kernel", "products ms", "convolution ms"], rows))
    if arguments.device.type == "cpu":
        return 0
    settings = {**SETTINGS, **vars(arguments), "device": str(arguments.device)}
    record = {
        "environment": described | hardware(arguments.device),
        "settings": settings,
        "operations": flops,
        "ceilings_per_s": ceiling,
    }
    print(write_record("kfac_gpu", record | {"found": figures, "times_ms": times, "offsets_ms": offsets}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
