"""What does K-FAC add to a step of SGD, ours and the published algorithm?

    python -m benchmarks.bench_kfac [--model resnet32 --size 32 --batch-size 128] [--periods 2] [--without NAME]

Steps of SGD (fused), of K-FAC with each solver, with factors of a quarter of the samples (and pixels taken as spatially
uncorrelated, SUA) or of an eighth (and solutions in bfloat16), and of the algorithm as published
(benchmarks/peers/kfac_published.py) take turns in one process, on the same random images, with factors every 10 steps
and solutions every 100, over whole periods of 100 like the second: in the first, ours does more. The published
algorithm knows no norms, so ours leaves them out here. Beside the times, what the operations would take by formula.
Each one's peak memory is that of a process of its own. Writes results/kfac-MODEL.json, after each period.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.measure import command_line, environment, process, table, write_record
from benchmarks.peers.kfac_published import PublishedKFAC
from trainer import models
from trainer.kfac import KFAC

SGD, PUBLISHED = "SGD", "K-FAC as published"
OURS = {
    "K-FAC, eigen": {"solver": "eigen"},
    "K-FAC, cholesky": {"solver": "cholesky"},
    "K-FAC, cholesky, ¼": {"solver": "cholesky", "factor_fraction": 0.25},
    "K-FAC, cholesky, ⅛, bfloat16": {"solver": "cholesky", "factor_fraction": 0.125, "inv_dtype": "bfloat16"},
    "K-FAC, cholesky, SUA, ¼": {"solver": "cholesky", "factor_fraction": 0.25, "spatially_uncorrelated": True},
}
NAMES = (SGD, *OURS, PUBLISHED)
SETTINGS = {"damping": 0.003, "factor_update_steps": 10, "inv_update_steps": 100, "factor_decay": 0.95,
            "kl_clip": 0.001, "lr": 0.1}  # fmt: skip
FIRST_STEPS = 3  # not measured; in them all is computed


class Training:
    """A network of its own, an optimizer, and what preconditions."""

    def __init__(self, name: str, model: str) -> None:
        torch.manual_seed(0)
        self.model = models.build(model, num_classes=10, in_channels=3).to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, fused=True)
        self.preconditioner = None
        if name in OURS:
            self.preconditioner = KFAC(self.model, **OURS[name], skip=["BatchNorm"], **SETTINGS)
        elif name == PUBLISHED:
            self.preconditioner = PublishedKFAC(self.model, **SETTINGS)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
        cpu_began, began = time.process_time(), time.perf_counter()
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        if self.preconditioner is not None:
            self.preconditioner.step()
        self.optimizer.step()
        return {"s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_began}


def batch(number: int, arguments: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(arguments.batch_size, 3, arguments.size, arguments.size, generator=generator)
    return x.to(memory_format=torch.channels_last), torch.randint(10, (arguments.batch_size,), generator=generator)


def operations(model: str, size: int, batch_size: int, num_classes: int = 10) -> dict[str, float]:
    """Floating-point operations a step by formula: training, factors by im2col (of a part of the samples that part
    of it), solutions, preconditioning. And the bytes of float32 that K-FAC cannot but move: it reads what is
    captured, averages (triangles), solutions and gradients, and writes averages, solutions and gradients; and those
    with solutions in bfloat16.
    """
    network = models.build(model, num_classes=num_classes, in_channels=3)
    work = (
        "training", "factors", "factors, SUA", "eigen", "cholesky", "cholesky, SUA", "precondition, eigen",
        "precondition, cholesky", "precondition, SUA", "bytes", "bytes, bfloat16",
    )  # fmt: skip
    work_done = dict.fromkeys(work, 0)
    hooks = []

    def count(module, args, output):
        n, m = module.weight[0].numel() + (module.bias is not None), len(module.weight)
        rows = batch_size * (output[0, 0].numel() if output.dim() == 4 else 1)
        work_done["training"] += 6 * rows * n * m
        sua_rows = (
            module.in_channels if output.dim() == 4 else n
        )  # by one tap; no convolution here has groups or a bias
        work_done["factors"] += 2 * rows * (n * n + m * m) / SETTINGS["factor_update_steps"]
        work_done["factors, SUA"] += 2 * rows * (n * sua_rows + m * m) / SETTINGS["factor_update_steps"]
        work_done["eigen"] += 9 * (n**3 + m**3) / SETTINGS["inv_update_steps"]
        work_done["cholesky"] += (n**3 + m**3) / SETTINGS["inv_update_steps"]
        work_done["cholesky, SUA"] += (sua_rows**3 + m**3) / SETTINGS["inv_update_steps"]
        work_done["precondition, cholesky"] += 2 * (m * m * n + m * n * n)
        work_done["precondition, SUA"] += 2 * m * n * (m + sua_rows)
        work_done["precondition, eigen"] += 4 * (m * m * n + m * n * n)
        captured, factors = batch_size * args[0][0].numel() + rows * m, n * n + m * m
        others = (captured + factors) / SETTINGS["factor_update_steps"] + factors / 2 / SETTINGS["inv_update_steps"]
        solutions = factors / SETTINGS["inv_update_steps"] + factors
        work_done["bytes"] += 4 * (others + solutions + 2 * m * n)
        work_done["bytes, bfloat16"] += 4 * (others + solutions / 2 + 2 * m * n)

    for module in network.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
            hooks.append(module.register_forward_hook(count))
    with torch.no_grad():
        network.eval()(torch.zeros(1, 3, size, size))
    return work_done


def peak_bytes() -> int:
    """Of this process; getrusage would give that of the process which started it, if it was larger."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def memory(name: str, arguments: argparse.Namespace) -> float:
    """Peak bytes of a process that does the first steps, in which all is computed."""
    command = [sys.executable, "-m", "benchmarks.bench_kfac", "--memory", name, "--model", arguments.model,
               "--size", str(arguments.size), "--batch-size", str(arguments.batch_size)]  # fmt: skip
    output, _ = process(command)
    return json.loads(output)


def summary(steps: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, float]:
    """`worst_repeated`: the worst step of a period, each with its fastest repetition in another. What K-FAC does in a
    step, it does in those; what other programs do, not.
    """
    seconds, plain = ([step["s"] for step in records] for records in (steps, base))
    every = SETTINGS["inv_update_steps"]
    periods = [seconds[start : start + every] for start in range(0, len(seconds), every)]
    return {
        "median_s": statistics.median(seconds),
        "mean_s": statistics.mean(seconds),
        "worst_over_median": max(seconds) / statistics.median(seconds),
        "worst_repeated_over_median": max(map(min, zip(*periods, strict=True))) / statistics.median(seconds),
        "added": sum(seconds) / sum(plain) - 1,  # refreshes and all
        "added_cpu": sum(step["cpu_s"] for step in steps) / sum(step["cpu_s"] for step in base) - 1,
    }


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="resnet32", help="(default: %(default)s)")
    parser.add_argument("--size", type=int, default=32, help="pixels (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--periods", type=int, default=2, help="of 100 measured steps (default: %(default)s)")
    parser.add_argument("--without", default=[], choices=list(OURS), action="append", help="leave one of them out")
    parser.add_argument("--memory", metavar="NAME", help="only the peak memory of one of them")
    arguments = parser.parse_args()
    if arguments.memory:
        training = Training(arguments.memory, arguments.model)
        for number in range(FIRST_STEPS):
            training.step(*batch(number, arguments))
        print(peak_bytes())
        return 0

    described, flops = environment(), operations(arguments.model, arguments.size, arguments.batch_size)
    names = [name for name in NAMES if name not in arguments.without]
    peaks = {name: memory(name, arguments) for name in names}
    trainings = {name: Training(name, arguments.model) for name in names}
    every = SETTINGS["inv_update_steps"]
    steps = {name: [] for name in names}
    settings = {**SETTINGS, "model": arguments.model, "size": arguments.size, "batch_size": arguments.batch_size,
                "threads": torch.get_num_threads()}  # fmt: skip
    for number in range(FIRST_STEPS + arguments.periods * every):
        x, y = batch(number, arguments)
        for name in set(names) & OURS.keys():
            if number == FIRST_STEPS - 1:
                trainings[name].preconditioner.steps = every - 1  # the last one of its first period
            elif (number - FIRST_STEPS) % every == 0:
                trainings[name].preconditioner.steps = every  # solutions' turns would come a step later in each
        for name in names[number % len(names) :] + names[: number % len(names)]:
            step = trainings[name].step(x, y)
            if number >= FIRST_STEPS:
                steps[name].append(step)
        if number % 20 == 0:
            print(f"  step {number} of {FIRST_STEPS + arguments.periods * every}", file=sys.stderr, flush=True)
        if steps[SGD] and len(steps[SGD]) % every == 0:
            figures = {name: summary(its, steps[SGD]) | {"peak_bytes": peaks[name]} for name, its in steps.items()}
            of_settings = settings | {"periods": len(steps[SGD]) // every}
            record = {"environment": described, "settings": of_settings, "operations": flops, "found": figures}
            path = write_record(f"kfac-{arguments.model}", record | {"steps": steps})
    rows = [
        [name, f"{its['median_s'] * 1e3:.0f}", f"{its['mean_s'] * 1e3:.0f}", f"{its['added']:+.1%}",
         f"{its['added_cpu']:+.1%}", f"{its['worst_over_median']:.2f}", f"{its['worst_repeated_over_median']:.2f}",
         f"{its['peak_bytes'] / 2**20:,.0f}"]
        for name, its in figures.items()
    ]  # fmt: skip
    header = [f"{arguments.model}, {arguments.size} px, batch {arguments.batch_size}", "median ms", "mean ms", "added",
              "added CPU", "worst ÷ median", "repeated", "peak MiB"]  # fmt: skip
    print(table(header, rows))
    shares = {k: f"{v / flops['training']:.1%}" for k, v in flops.items() if "bytes" not in k}
    print("by formula, of training: " + ", ".join(f"{k} {share}" for k, share in shares.items()))
    print(f"and {flops['bytes'] / 2**20:.0f} MiB moved by K-FAC")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
