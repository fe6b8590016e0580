"""Which way to solve a factor is fastest, and does it pay to solve factors of one size together?

    python -m benchmarks.bench_kfac_solvers [--rounds 5] [--device cpu]

Factors are averages of outer products, as in training: one, and the same after ten more updates (`factor_decay` 0.95),
from whose inverse Newton's iteration starts. Three dampings, in units of the mean eigenvalue: the smaller, the more the
inverse moves. Then stacks of factors of one size, in one call and one by one. Writes results/kfac-solvers.json, or
kfac-solvers-gpu.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product

import torch

from benchmarks.measure import environment, spread, table, write_record
from trainer.kfac.solvers import Cholesky, Eigen, Newton

SIZES = (64, 144, 288, 576, 1152, 2304)
DAMPINGS = (1.0, 0.1, 0.01)
DECAY, UPDATES, ROWS = 0.95, 10, 4096
STACKS = ((64, 16), (144, 16), (288, 8), (576, 4))


def factors(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """An average of many updates, and that with ten more: [1, n, n]. Inputs are as correlated as pixels are."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(n, n, generator=generator) * torch.linspace(1, 0.05, n) ** 2

    def moment() -> torch.Tensor:
        x = torch.randn(ROWS, n, generator=generator) @ mixing.T
        return (x.T @ x / ROWS)[None]

    first = sum(moment() for _ in range(4)) / 4
    later = first
    for _ in range(UPDATES):
        later = DECAY * later + (1 - DECAY) * moment()
    scale = first.diagonal(dim1=1, dim2=2).mean()
    return first / scale, later / scale


def seconds(work: Callable[[], object], rounds: int) -> dict[str, float]:
    work()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return spread(times)


def compared(rounds: int, device: str) -> list[dict]:
    found = []
    one = torch.eye(1, device=device)[None]  # a g_factor that costs nothing
    for n, damping in product(SIZES, DAMPINGS):
        first, later = (factor.to(device) for factor in factors(n))
        line = {"size": n, "damping": damping}
        for solver in (Eigen(), Cholesky(), Newton()):
            before = solver.refresh(first, one, damping, solver.empty(first, one))
            line[type(solver).__name__.lower()] = seconds(partial(solver.refresh, later, one, damping, before), rounds)
        found.append(line)
        print(f"  {n}, {damping}", file=sys.stderr, flush=True)
    return found


def cholesky_inverse(factor: torch.Tensor) -> torch.Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky(factor))


def one_by_one(solve: Callable, stack: torch.Tensor) -> list:
    return [solve(factor) for factor in stack]


def stacked(rounds: int, device: str) -> list[dict]:
    found = []
    for (n, count), solve in product(STACKS, (torch.linalg.eigh, cholesky_inverse)):
        stack = (torch.cat([factors(n, seed)[1] for seed in range(count)]) + 0.1 * torch.eye(n)).to(device)
        ways = {"together": partial(solve, stack), "one by one": partial(one_by_one, solve, stack)}
        times = {way: seconds(work, rounds) for way, work in ways.items()}
        found.append({"size": n, "count": count, "solver": solve.__name__} | times)
    return found


def milliseconds(lines: list[dict], labels: tuple[str, ...], ways: tuple[str, ...]) -> str:
    rows = [[str(line[of]) for of in labels] + [f"{line[way]['median'] * 1e3:.1f}" for way in ways] for line in lines]
    return table([*labels, *(f"{way}, ms" for way in ways)], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="of each (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    arguments = parser.parse_args()
    described = environment()
    solvers, stacks = (work(arguments.rounds, arguments.device) for work in (compared, stacked))
    print(milliseconds(solvers, ("size", "damping"), ("eigen", "cholesky", "newton")))
    print(milliseconds(stacks, ("size", "count", "solver"), ("together", "one by one")))
    ratios = [line["together"]["median"] / line["one by one"]["median"] for line in stacks]
    print(f"together ÷ one by one: {statistics.median(ratios):.2f} in the median")
    record = {"environment": described, "threads": torch.get_num_threads(), "settings": vars(arguments)}
    name = "kfac-solvers" + ("-gpu" if arguments.device == "cuda" else "")
    print(write_record(name, record | {"solvers": solvers, "stacks": stacks}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
