"""What does K-FAC add to a training step on a GPU?

Periods of steps of SGD (fused) and of K-FAC take turns, in bf16 and channels-last, on random images, with factors every
10 steps and solutions every 100. The host is not synchronised between the steps, as in a training: events on the
device time each step, and a period's wall time without the last wait is the host's. Beside them stands what K-FAC's
operations by formula (factors by im2col, in bfloat16) would take at the speed of a large product and its bytes (all of
float32, but bfloat16 solutions) at that of a copy, both measured here. That is not a floor: the factors of 3×3
convolutions take a fifth of im2col's operations; the two ways to these factors are timed by themselves. Then ten more
steps without a refresh, and ten in which all layers refresh, in which a synchronisation of the host is an error
(torch.linalg.eigh is one, as it looks whether it converged).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F

from benchmarks.bench_kfac import operations
from benchmarks.gpu import Conditions, Figures, Step
from trainer import models
from trainer.kfac import KFAC, factors

OURS = {
    "cholesky": {"solver": "cholesky"},
    "cholesky, bfloat16": {"solver": "cholesky", "inv_dtype": "bfloat16"},
    "cholesky, without norms": {"solver": "cholesky", "skip": ["BatchNorm"]},
    "eigen": {"solver": "eigen"},
}
SETTINGS = {"damping": 0.003, "factor_update_steps": 10, "factor_decay": 0.95, "kl_clip": 0.001, "lr": 0.1}
NUM_CLASSES = 1000
LONG = 10_000  # an interval with far more steps than layers, whose turns are at its beginning
SYNC_STEPS = 10


class Training:
    """A network, its optimizer, and K-FAC with the named settings of `OURS`, or without it."""

    def __init__(self, at: Conditions, name: str | None) -> None:
        torch.manual_seed(0)
        self._device = torch.device(at.device)
        model = models.build(at.model, num_classes=NUM_CLASSES, in_channels=3)
        self.model = model.to(self._device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, fused=True)
        kfac = {} if name is None else {**OURS[name], **SETTINGS, "inv_update_steps": at.period}
        self.preconditioner = KFAC(self.model, **kfac) if kfac else None

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            logits = self.model(x)
        F.cross_entropy(logits.float(), y).backward()
        if self.preconditioner is not None:
            self.preconditioner.step()
        self.optimizer.step()


def time_in_a_row(device: torch.device, work: Callable[[], object], count: int) -> tuple[list[float], float]:
    """Do some work again and again, without a wait between.

    Returns:
        Milliseconds on the device of each time, and of the host for one on average. The host waits, too, where more
        launches are queued than the driver takes (about 1,000): its time is then that of the device.
    """
    if device.type == "cpu":
        marks = [time.perf_counter()]
        for _ in range(count):
            work()
            marks.append(time.perf_counter())
        times = [1e3 * (end - begin) for begin, end in pairwise(marks)]
        return times, statistics.mean(times)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    host_ms = 1e3 * (time.perf_counter() - began) / count
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) for begin, end in pairwise(events)], host_ms


def ceilings(device: torch.device, n: int) -> dict[str, float]:
    """Operations a second of a product of two matrices [n, n], by type, and bytes a second of a copy of one."""

    def least_ms(work: Callable[[], object]) -> float:
        return min(time_in_a_row(device, work, 5)[0])

    a, b = (torch.randn(n, n, device=device) for _ in range(2))
    per_s = {"bytes": 8e3 * n * n / least_ms(a.clone)}
    for dtype in ("float32", "bfloat16"):
        c, d = (matrix.to(getattr(torch, dtype)) for matrix in (a, b))
        per_s[dtype] = 2e3 * n**3 / least_ms(partial(torch.matmul, c, d))
    return per_s


def waits(training: Training, x: torch.Tensor, y: torch.Tensor, inv_update_steps: int) -> str:
    """Does a step synchronise the host?"""
    if x.device.type == "cpu":
        return "needs a GPU"
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


def formula_ms(name: str, at: Conditions) -> float:
    """Return the milliseconds of K-FAC's operations per step at the speeds that `ceilings` measures."""
    device = torch.device(at.device)
    ceiling = ceilings(device, 512 if device.type == "cpu" else 8192)
    flops = operations(at.model, at.size, at.batch_size, NUM_CLASSES)
    solver, inv_dtype = OURS[name]["solver"], OURS[name].get("inv_dtype", "float32")
    precondition_s = flops[f"precondition, {solver}"] / ceiling[inv_dtype]
    computing_s = flops["factors"] / ceiling["bfloat16"] + flops[solver] / ceiling["float32"] + precondition_s
    moved = flops["bytes" if inv_dtype == "float32" else "bytes, bfloat16"]
    return 1e3 * max(computing_s, moved / ceiling["bytes"])


def compare_with_sgd(at: Conditions, name: str) -> Figures:
    """Return the milliseconds of steps with K-FAC and without, over whole periods."""
    device = torch.device(at.device)
    torch.backends.cudnn.benchmark = True
    x = torch.randn(at.batch_size, 3, at.size, at.size, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(NUM_CLASSES, (at.batch_size,), device=device)
    trainings = {"SGD": Training(at, None), "K-FAC": Training(at, name)}
    for training in trainings.values():  # the first steps; K-FAC then continues as in its second period
        time_in_a_row(device, partial(training.step, x, y), 1 + at.period // 2)
    trainings["K-FAC"].preconditioner.steps = at.period
    times: dict[str, list[float]] = {way: [] for way in trainings}
    hosts: dict[str, list[float]] = {way: [] for way in trainings}
    for _ in range(at.rounds):
        for way, training in trainings.items():
            in_ms, host_ms = time_in_a_row(device, partial(training.step, x, y), at.period)
            times[way] += in_ms
            hosts[way].append(host_ms)
    ours = times["K-FAC"]
    return {
        "ms": statistics.mean(ours),
        "sgd_ms": statistics.mean(times["SGD"]),
        "added": sum(ours) / sum(times["SGD"]) - 1,
        "worst_over_median": max(ours) / statistics.median(ours),
        "host_ms": statistics.mean(hosts["K-FAC"]),
        "sgd_host_ms": statistics.mean(hosts["SGD"]),
        "formula_ms": formula_ms(name, at),
        "waits": waits(trainings["K-FAC"], x, y, LONG),
        "waits_in_refreshes": waits(trainings["K-FAC"], x, y, 1),
        "times_ms": times,
    }


def compare_small_batches(at: Conditions) -> Figures:
    """Compare at 32 images per GPU, where launches bound a step."""
    return compare_with_sgd(replace(at, batch_size=min(32, at.batch_size)), "cholesky")


def time_offsets(at: Conditions, channels: int, size: int) -> Figures:
    """Return the milliseconds of the two ways to the factor of a 3×3 convolution, in bfloat16."""
    device = torch.device(at.device)
    x = torch.randn(at.batch_size, channels, size, size, device=device, dtype=torch.bfloat16)
    x = x.to(memory_format=torch.channels_last)
    ways = {
        "products_ms": partial(factors._products_of_offsets, x),
        "convolution_ms": lambda: factors._convolved_offsets(factors.accumulating(x)),
    }
    for work in ways.values():  # the first time, kernels are chosen
        work()
    return {name: min(time_in_a_row(device, work, 5)[0]) for name, work in ways.items()}


STEPS = [
    *(Step(f"K-FAC's step: {name}", partial(compare_with_sgd, name=name), 75, 225) for name in OURS),
    Step("K-FAC's step: cholesky, 32 images", compare_small_batches, 40, 120),
    *(  # the layers of ResNet-50
        Step(f"3×3 factor: {channels} channels, {size} px", partial(time_offsets, channels=channels, size=size), 10, 60)
        for channels, size in ((64, 56), (128, 28), (256, 14), (512, 7))
    ),
]
