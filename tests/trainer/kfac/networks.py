"""A small network, its batches, and a training loop."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

EVERY_STEP = {"factor_update_steps": 1, "inv_update_steps": 1}


def small(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True),
        nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5),
    ).to(dtype)  # fmt: skip


def batch(number=0, N=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(N, 3, 8, 8, generator=generator, dtype=dtype)
    return x, torch.randint(5, (N,), generator=generator)


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def run(model, preconditioner, steps, first=0, lr=0.05):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for number in range(first, first + steps):
        x, y = batch(number)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        preconditioner.step()
        optimizer.step()
    return optimizer


def close(found, wanted, tolerance=1e-6):
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= tolerance * b.norm() + 1e-12
