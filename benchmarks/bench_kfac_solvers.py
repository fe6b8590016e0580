"""Which way to solve a factor is fastest, and does it pay to solve factors of one size together?

    python -m benchmarks.bench_kfac_solvers [--rounds 5]

Factors are averages of outer products, as in training: one, and the same after ten more updates (`factor_decay` 0.95),
from whose inverse Newton's iteration starts. Three dampings, in units of the mean eigenvalue: the smaller, the more the
inverse moves. Then stacks of factors of one size, in one call and one by one. Writes results/kfac-solvers.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

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
        times.append(time.perf_counter() - began)
    return spread(times)


def compared(rounds: int) -> list[dict]:
    found = []
    for n in SIZES:
        first, later = factors(n)
        one = torch.eye(1)[None]  # a g_factor that costs nothing
        for damping in DAMPINGS:
            line = {"size": n, "damping": damping}
            for solver in (Eigen(), Cholesky(), Newton()):
                before = solver.refresh(first, one, damping, solver.empty(first, one))
                work = lambda solver=solver, before=before: solver.refresh(later, one, damping, before)  # noqa: E731
                line[type(solver).__name__.lower()] = seconds(work, rounds)
            found.append(line)
            print(f"  {n}, {damping}", file=sys.stderr, flush=True)
    return found


def stacked(rounds: int) -> list[dict]:
    found = []
    for n, count in STACKS:
        stack = torch.cat([factors(n, seed)[1] for seed in range(count)]) + 0.1 * torch.eye(n)
        for name, solve in (("eigen", torch.linalg.eigh), ("cholesky", lambda a: torch.cholesky_inverse(torch.linalg.cholesky(a)))):
            found.append({
                "size": n, "count": count, "solver": name,
                "together": seconds(lambda solve=solve, stack=stack: solve(stack), rounds),
                "one by one": seconds(lambda solve=solve, stack=stack: [solve(a) for a in stack], rounds),
            })  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="of each (default: %(default)s)")
    arguments = parser.parse_args()
    described = environment()
    solvers, stacks = compared(arguments.rounds), stacked(arguments.rounds)
    ms = lambda times: f"{times['median'] * 1e3:.1f}"  # noqa: E731
    names = ("eigen", "cholesky", "newton")
    print(table(["size", "damping", *(f"{name}, ms" for name in names)],
                [[str(line["size"]), str(line["damping"]), *(ms(line[name]) for name in names)] for line in solvers]))  # fmt: skip
    ways = ("together", "one by one")
    print(table(["size", "number", "solver", *(f"{way}, ms" for way in ways)],
                [[str(line["size"]), str(line["count"]), line["solver"], *(ms(line[way]) for way in ways)] for line in stacks]))  # fmt: skip
    ratios = [line["together"]["median"] / line["one by one"]["median"] for line in stacks]
    print(f"together ÷ one by one: {statistics.median(ratios):.2f} in the median")
    print(write_record("kfac-solvers", {"environment": described, "threads": torch.get_num_threads(),
                                        "rounds": arguments.rounds, "solvers": solvers, "stacks": stacks}))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
