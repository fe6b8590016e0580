"""Adaptive damping: what the model foretells, against explicit matrices, and the rule."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainer.kfac import EKFAC, KFAC, AdaptiveDamping


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 4, 1, groups=1, bias=False),
        nn.Flatten(), nn.PReLU(), nn.Linear(64, 5),
    ).double()  # fmt: skip


def batch():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 2, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(5, (8,), generator=generator)


def steps(preconditioner, adaptive, model, optimizer, number):
    x, y = batch()
    for _ in range(number):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        adaptive.begin(loss)
        preconditioner.step()
        optimizer.step()
        adaptive.end(lambda: F.cross_entropy(model(x), y))


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_foretold_change_against_explicit_matrices(kind, optimizer):
    model, (x, y) = network(), batch()
    preconditioner = kind(model, damping=0.02, factor_update_steps=1, inv_update_steps=1)
    adaptive = AdaptiveDamping(preconditioner, damping_update_steps=1)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    raw = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    running = [buffer.clone() for buffer in model.buffers()]
    adaptive.begin(loss)
    preconditioner.step()
    optimizer(model.parameters(), lr=0.01).step()
    adaptive.end(lambda: F.cross_entropy(model(x), y))

    assert all(torch.equal(old, new) for old, new in zip(running, model.buffers(), strict=True))
    step = {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}
    foretold = sum((raw[name] * step[name]).sum() for name in raw)
    for name in ("0", "3", "6"):
        a, g = (factor[0] for factor in preconditioner.factors(name)[:2])
        weight = step[f"{name}.weight"]
        rows = (weight.permute(0, 2, 3, 1) if weight.dim() == 4 else weight).flatten(1)
        if f"{name}.bias" in step:
            rows = torch.cat([rows, step[f"{name}.bias"][:, None]], 1)
        d = rows.flatten()
        foretold += d @ (torch.kron(g, a) + 0.02 * torch.eye(len(d), dtype=d.dtype)) @ d / 2
    for unit, factor in enumerate(preconditioner.factors("1")[0]):
        d = torch.stack([step["1.weight"][unit], step["1.bias"][unit]])
        foretold += d @ (factor + 0.02 * torch.eye(2, dtype=d.dtype)) @ d / 2
    change = F.cross_entropy(model(x), y) - loss
    assert adaptive.ratio == pytest.approx((change / foretold).item(), rel=1e-10)


def test_a_layer_frozen_in_part_is_foretold_by_its_gradient():
    """It is treated as a layer that K-FAC does not know."""
    ratios = []
    for skip in ((), "^6$"):
        model = network()
        preconditioner = KFAC(model, skip=skip, damping=0.02, factor_update_steps=1, inv_update_steps=1)
        adaptive = AdaptiveDamping(preconditioner, damping_update_steps=1)
        model[6].bias.requires_grad_(False)
        steps(preconditioner, adaptive, model, torch.optim.SGD(model.parameters(), lr=0.01), 1)
        ratios.append(adaptive.ratio)
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-12)


@pytest.mark.parametrize(
    ("change", "foretold", "wanted"),
    [
        (-0.8, -1, 0.1 * 0.9**4),
        (-0.5, -1, 0.1),
        (-0.25, -1, 0.1),
        (-0.2, -1, 0.1 / 0.9**4),
        (+0.5, -1, 0.1 / 0.9**4),
        (math.nan, -1, 0.1 / 0.9**4),
        (math.inf, +1, 0.1 / 0.9**4),
        (-0.5, +1, 0.1),  # a step of momentum, against the gradient
        (0.0, 0.0, 0.1),  # a step that mixed precision has left out
    ],
)
def test_the_rule(change, foretold, wanted):
    preconditioner = KFAC(network(), damping=0.1)
    adaptive = AdaptiveDamping(preconditioner, damping_update_steps=4, decay=0.9)
    adaptive._adapt(change, foretold)
    assert preconditioner.damping == pytest.approx(wanted)


def test_it_is_due_every_so_often_and_stays_in_its_bounds():
    model = network()
    preconditioner = KFAC(model, damping=50.0, factor_update_steps=1, inv_update_steps=1)
    adaptive = AdaptiveDamping(preconditioner, damping_update_steps=3, decay=0.1, bounds=(1.0, 100.0))
    optimizer, found = torch.optim.SGD(model.parameters(), lr=1.0), []
    for _ in range(9):
        steps(preconditioner, adaptive, model, optimizer, 1)
        found.append(preconditioner.damping)
    assert found == [50, 50] + [1.0] * 7  # so much damping that the loss is linear
    restored = KFAC(network())
    AdaptiveDamping(restored).load_state_dict(adaptive.state_dict())
    assert restored.damping == 1.0


def test_steps_that_are_too_long_raise_the_damping():
    model = network()
    preconditioner = KFAC(model, damping=1e-6, kl_clip=None, factor_update_steps=1, inv_update_steps=1)
    adaptive = AdaptiveDamping(preconditioner, damping_update_steps=1)
    steps(preconditioner, adaptive, model, torch.optim.SGD(model.parameters(), lr=1.5), 3)
    assert preconditioner.damping == pytest.approx(1e-6 / 0.95**3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"damping_update_steps": 0}, "damping_update_steps: 0 is out of range; allowed: from 1"),
        ({"damping_update_steps": 2.5}, "damping_update_steps: 2.5 is out of range; allowed: from 1"),
        ({"decay": 1.0}, "decay: 1.0 is out of range"),
        ({"bounds": (1.0,)}, r"bounds: \(1.0,\) are out of range"),
        ({"bounds": (1.0, 0.1)}, r"bounds: \(1.0, 0.1\) are out of range"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveDamping(KFAC(network()), **settings)
