"""K-FAC's memory and traffic by formula, for a network on 1 to 1,024 ranks; a table for the README.

python -m benchmarks.kfac_costs [--model resnet50] [--solver cholesky]
"""

from __future__ import annotations

import sys

import torch

from benchmarks.measure import command_line, table
from trainer import models
from trainer.kfac.costs import costs
from trainer.kfac.settings import KFACSettings

RANKS = (1, 8, 64, 1024)
MB = 1e6


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="resnet50", help="(default: %(default)s)")
    parser.add_argument("--solver", default="cholesky", help="(default: %(default)s)")
    arguments = parser.parse_args()
    with torch.device("meta"):
        network = models.build(arguments.model, num_classes=1000, in_channels=3)
    rows = []
    for ranks in RANKS:
        for fraction in sorted({1.0, 0.5 if ranks > 1 else 1.0, 1 / ranks}, reverse=True):
            of_one = ("local_factors", "reduce_to_owners") if fraction == 1 / ranks and ranks > 1 else ()
            for option in (None, *of_one):
                settings = KFACSettings(
                    grad_worker_fraction=fraction, solver=arguments.solver, local_factors=option == "local_factors"
                )
                figures = costs(network, ranks, settings, reduce_to_owners=option == "reduce_to_owners")
                share = f"{round(fraction * ranks)}/{ranks}" + (f", {option}" if option else "")
                rows.append([share, *(f"{value / MB:,.1f}" for value in figures)])
    gradients = sum(parameter.numel() for parameter in network.parameters()) * 4 / MB
    header = ["workers a layer", "factors", "solutions", *(f"{what} sent" for what in ("factors", "solutions",
              "gradients")), "gradients reduced"]  # fmt: skip
    print(table(header, rows))
    print(f"MB a rank (kept: of the rank with most; sent: a step, in the mean); DDP's gradients: {gradients:,.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
