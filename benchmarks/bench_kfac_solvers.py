"""Which way to solve a factor is fastest, and does it pay to solve factors of one size together?

    python -m benchmarks.bench_kfac_solvers [--rounds 5] [--device cpu]

A factor is an average of outer products, as in training, and damped. First each solver alone, then stacks of factors of
one size, in one call and one by one. Writes results/kfac-solvers.json, or kfac-solvers-gpu.json.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product

import torch

from benchmarks.measure import command_line, environment, spread, table, write_record
from trainer.kfac.solvers import Cholesky, Eigen

SIZES = (64, 144, 288, 576, 1152, 2304)
DAMPING, ROWS = 0.1, 16384
STACKS = ((64, 16), (144, 16), (288, 8), (576, 4))


def random_factor(n: int, seed: int = 0) -> torch.Tensor:
    """Return an average of outer products, [1, n, n], of inputs that are as correlated as pixels are; its mean
    eigenvalue is 1.
    """
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(n, n, generator=generator) * torch.linspace(1, 0.05, n) ** 2
    x = torch.randn(ROWS, n, generator=generator) @ mixing.T
    factor = (x.T @ x)[None]
    return factor / factor.diagonal(dim1=1, dim2=2).mean()


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
    lines = []
    trivial = torch.eye(1, device=device)[None]  # a g_factor that costs nothing
    for n in SIZES:
        factor = random_factor(n).to(device)
        line = {"size": n}
        for solver in (Eigen(), Cholesky()):
            invert = partial(solver.update_inverse, factor, trivial, DAMPING, solver.identity(factor, trivial))
            line[type(solver).__name__.lower()] = seconds(invert, rounds)
        lines.append(line)
        print(f"  {n}", file=sys.stderr, flush=True)
    return lines


def cholesky_inverse(factor: torch.Tensor) -> torch.Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky(factor))


def one_by_one(solve: Callable, stack: torch.Tensor) -> list:
    return [solve(factor) for factor in stack]


def stacked(rounds: int, device: str) -> list[dict]:
    lines = []
    for (n, count), solve in product(STACKS, (torch.linalg.eigh, cholesky_inverse)):
        stack = (torch.cat([random_factor(n, seed) for seed in range(count)]) + DAMPING * torch.eye(n)).to(device)
        ways = {"together": partial(solve, stack), "one by one": partial(one_by_one, solve, stack)}
        times = {way: seconds(work, rounds) for way, work in ways.items()}
        lines.append({"size": n, "count": count, "solver": solve.__name__} | times)
    return lines


def milliseconds(lines: list[dict], labels: tuple[str, ...], ways: tuple[str, ...]) -> str:
    rows = [
        [str(line[label]) for label in labels] + [f"{line[way]['median'] * 1e3:.1f}" for way in ways] for line in lines
    ]
    return table([*labels, *(f"{way}, ms" for way in ways)], rows)


def main() -> int:
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    arguments = parser.parse_args()
    described = environment()
    solvers, stacks = (work(arguments.rounds, arguments.device) for work in (compared, stacked))
    print(milliseconds(solvers, ("size",), ("eigen", "cholesky")))
    print(milliseconds(stacks, ("size", "count", "solver"), ("together", "one by one")))
    ratios = [line["together"]["median"] / line["one by one"]["median"] for line in stacks]
    print(f"together ÷ one by one: {statistics.median(ratios):.2f} in the median")
    record = {"environment": described, "threads": torch.get_num_threads(), "settings": vars(arguments)}
    name = "kfac-solvers" + ("-gpu" if arguments.device == "cuda" else "")
    print(write_record(name, record | {"solvers": solvers, "stacks": stacks}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
