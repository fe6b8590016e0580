"""How far does one step of K-FAC get, by damping and step length, next to one of gradient descent?

    python -m benchmarks.bench_kfac_damping [--steps 8] [--samples 2048]

ResNet-8 on Fashion-MNIST, after a few steps of SGD with batches of 4,096. From there, one step from the gradient of
`samples` images, with K-FAC's factors (and EKFAC's diagonal) of the same images: the loss afterwards on these, and on
as many others. Also, by layer, the trace of the curvature from the samples' own gradients over that of the product of
the factors, for images of 28 pixels and of 14. Writes results/kfac-damping.json.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

from benchmarks.measure import command_line, environment, table, write_record
from benchmarks.optimizer_run import PART, PRECONDITIONERS, Run, Training
from trainer.kfac import EKFAC, KFAC

DAMPINGS = (0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
LENGTHS = {
    "gradient": (0.03, 0.1, 0.3, 1.0),
    "kfac": (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0),
    "ekfac": (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0),
}
LATE = 10**6 + 1  # a step in which no solution is due
SGD = {"name": "sgd", "lr": 0.5, "momentum": 0.9, "nesterov": True}


class Place:
    """Where a network is, with its gradient."""

    def __init__(self, steps: int, samples: int, shrink: int = 1) -> None:
        self.training = Training(Run("resnet8", 4096, 8, SGD))
        self.training.images = F.avg_pool2d(self.training.images, shrink)
        images = torch.randperm(len(self.training.images))
        for step in range(steps):
            self.training.step(step, images[step * 4096 :][:4096])
        self.model = self.training.model
        self.parts = samples // PART
        self.here, self.others = images[-samples:], images[-2 * samples : -samples]
        self.weights = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.backward()
        self.gradient = [parameter.grad.clone() for parameter in self.model.parameters()]

    def loss(self, samples: torch.Tensor, backward: bool = False) -> float:
        self.training.parts = self.parts
        flips = torch.zeros(len(samples), dtype=torch.bool)
        with torch.set_grad_enabled(backward):
            return self.training._loss(samples, flips, backward).item()

    def backward(self) -> None:
        self.model.zero_grad()
        self.loss(self.here, backward=True)

    @torch.no_grad()
    def step(self, direction: list[torch.Tensor], length: float) -> dict[str, float]:
        for parameter, weight, along in zip(self.model.parameters(), self.weights, direction, strict=True):
            parameter.copy_(weight - length * along)
        return {"length": length, "loss": self.loss(self.here), "loss_of_others": self.loss(self.others)}


def preconditioned(place: Place, kind: str) -> tuple[KFAC, dict[str, float]]:
    """With the factors of the place; and the traces by layer, of EKFAC."""
    preconditioner = PRECONDITIONERS[kind](
        place.model, factor_update_steps=1, inv_update_steps=10**6, kl_clip=None, factor_decay=0.0, stagger=False,
        accumulation_steps=place.parts,
    )  # fmt: skip
    place.step(place.gradient, 0.0)
    place.backward()
    preconditioner.step()
    traces = {}
    if isinstance(preconditioner, EKFAC):  # the diagonal needs the eigenvectors, and the samples once more
        place.backward()
        preconditioner.steps = LATE
        preconditioner.step()
        for name in (name for name, owner in preconditioner.layers().items() if owner >= 0):
            a, g, scale = preconditioner.factors(name)
            traces[name] = (scale.sum() / (a.diagonal(dim1=1, dim2=2).sum() * g.diagonal(dim1=1, dim2=2).sum())).item()
    preconditioner.factor_update_steps = 10**6
    return preconditioner, traces


def directions(place: Place, kind: str) -> tuple[dict[float, list[torch.Tensor]], dict[str, float]]:
    """By damping; and the traces by layer, of EKFAC."""
    if kind == "gradient":
        return {0.0: place.gradient}, {}
    preconditioner, traces = preconditioned(place, kind)
    gradients = {}
    for damping in DAMPINGS:
        preconditioner.damping = damping
        for parameter, gradient in zip(place.model.parameters(), place.gradient, strict=True):
            parameter.grad = gradient.clone()
        preconditioner.step()
        gradients[damping] = [parameter.grad.clone() for parameter in place.model.parameters()]
    preconditioner.remove()
    return gradients, traces


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=8, help="of SGD before (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=2048, help="a multiple of 512 (default: %(default)s)")
    arguments = parser.parse_args()
    described = environment()
    place = Place(arguments.steps, arguments.samples)
    before = place.step(place.gradient, 0.0)
    small = preconditioned(Place(arguments.steps, arguments.samples, shrink=2), "ekfac")[1]
    best_steps, traces, rows = [], {}, []
    for kind, lengths in LENGTHS.items():
        along, of_kind = directions(place, kind)
        traces |= of_kind
        for damping, direction in along.items():
            steps = [place.step(direction, length) for length in lengths]
            best = min(steps, key=lambda step: step["loss_of_others"])
            best_steps.append({"kind": kind, "damping": damping, "steps": steps})
            cells = (damping, best["length"], best["loss"], best["loss_of_others"])
            rows.append([kind, *(f"{cell:.4g}" for cell in cells)])
    print(table(["best step", "damping", "length", "loss", "loss of others"], rows))
    print(f"before: {before['loss']:.4g}, of others {before['loss_of_others']:.4g}")
    traces = {"28 pixels": traces, "14 pixels": small}
    cells = [[name, *(f"{layers[name]:.1f}" for layers in traces.values())] for name in small]
    print(table(["trace of samples' gradients ÷ product", *traces], cells))
    record = {
        "environment": described,
        "settings": vars(arguments),
        "before": before,
        "found": best_steps,
        "traces": traces,
    }
    print(write_record("kfac-damping", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
