"""EKFAC against the gradients of samples."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from tests.trainer.kfac.brute_force import (
    DAMPING,
    MATRICES,
    by_hand,
    close,
    input_of,
    loss_of,
    randomised,
)
from trainer.kfac import EKFAC, KFAC
from trainer.kfac.ekfac import sum_squares
from trainer.kfac.registration import make_layer


@pytest.mark.parametrize("chunk_bytes", [1, 64 << 20], ids=["chunks", "whole"])
@pytest.mark.parametrize("name", [name for name in MATRICES if name != "embedding"])
def test_ekfac_against_the_gradients_of_samples(name, chunk_bytes, monkeypatch):
    """In step 5 the eigenvectors are those of step 4, and the diagonal is that of the batch."""
    monkeypatch.setattr("trainer.kfac.ekfac._CHUNK_BYTES", chunk_bytes)
    module = randomised(MATRICES[name])
    x = input_of(module)
    model = nn.Sequential(module)
    preconditioner = EKFAC(model, damping=DAMPING, kl_clip=None, factor_update_steps=1, inv_update_steps=100,
                           factor_decay=0.0, stagger=False)  # fmt: skip
    for _ in range(6):
        module.zero_grad()
        loss_of(model(x)).mean().backward()
        raw = by_hand(module)
        preconditioner.step()
    state = preconditioner.state_dict()["layers"]["0"]["solution"]
    groups, m, n = raw.shape
    wanted = torch.zeros_like(raw)
    for sample in x:
        module.zero_grad()
        loss_of(module(sample[None])).sum().backward()
        wanted += (state["g_vectors"].mT @ by_hand(module) @ state["a_vectors"]) ** 2 / len(x)
    close(preconditioner.factors("0")[2], wanted)
    module.zero_grad()
    loss_of(model(x)).mean().backward()
    preconditioner.factor_update_steps = 50  # from here on, nothing is updated
    for block in preconditioner.blocks.values():
        block.hook.is_active = False
    preconditioner.step()
    for group in range(groups):
        basis = torch.kron(state["g_vectors"][group], state["a_vectors"][group])
        curvature = basis @ torch.diag(wanted[group].flatten() + DAMPING) @ basis.T
        close(by_hand(module)[group], torch.linalg.solve(curvature, raw[group].flatten()).reshape(m, n))


@pytest.mark.parametrize("T", [1, 2, 50], ids=["one position", "few positions", "many positions"])
def test_squares_of_the_samples_gradients(T):
    """They need no gradients, or rotate the rows, or rotate the gradients."""
    n, m, generator = 7, 5, torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    a, g, a_vectors, g_vectors = random(7, T, 2, n), random(7, T, 2, m), random(2, n, n), random(2, m, m)
    wanted = torch.zeros(2, m, n, dtype=torch.float64)
    for sample, group in itertools.product(range(7), range(2)):
        gradient = g[sample, :, group].T @ a[sample, :, group]
        wanted[group] += (g_vectors[group].T @ gradient @ a_vectors[group]) ** 2
    close(sum_squares(a, g, a_vectors, g_vectors), wanted)


def test_ekfac_starts_as_kfac():
    module = randomised(nn.Conv2d(3, 4, 3, padding=1))
    x, found = input_of(module), []
    for kind in (KFAC, EKFAC):
        model = nn.Sequential(copy.deepcopy(module))
        preconditioner = kind(model, damping=DAMPING, kl_clip=None)
        loss_of(model(x)).mean().backward()
        preconditioner.step()
        found.append(make_layer(model[0]).gradient())
    close(found[1], found[0])


def test_new_eigenvectors_of_ekfac_keep_the_curvature():
    """The diagonal in them is that of the curvature before; samples' gradients then count as in any average."""
    module = randomised(nn.Conv2d(4, 6, 3, padding=1, groups=2))
    x, model = input_of(module), nn.Sequential(module)
    preconditioner = EKFAC(model, damping=DAMPING, kl_clip=None, factor_decay=0.95,
                           factor_update_steps=1, inv_update_steps=1)  # fmt: skip
    block, weight = preconditioner.blocks["0"], 0.05
    for number, part in enumerate((x, x, 2 * x, x)):
        module.zero_grad()
        loss_of(model(part)).mean().backward()
        new = block.new.get("scale", torch.zeros(())).clone()
        before, diagonal = block.layer.basis, preconditioner.factors("0")[2].clone()
        preconditioner.step()
        scale = preconditioner.factors("0")[2]
        if number == 0:
            close(scale, block.solution["g_values"][:, :, None] * block.solution["a_values"][:, None])
            continue
        weight = 0.95 * weight + 0.05
        diagonal += 0.05 / weight * (new - diagonal)
        for group in range(2):
            old, now = (torch.kron(of["g_vectors"][group], of["a_vectors"][group]) for of in (before, block.solution))
            curvature = old @ torch.diag(diagonal[group].flatten()) @ old.T
            close(scale[group].flatten(), (now.T @ curvature @ now).diagonal())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"spatially_uncorrelated": True}, "spatially_uncorrelated: True is out of range; allowed with EKFAC: False"),
        ({"solver": "cholesky"}, "solver: 'cholesky' has no eigenvectors; allowed with EKFAC: eigen"),
    ],
)
def test_what_ekfac_refuses_leaves_the_model_as_it_was(setting, message):
    model = nn.Sequential(nn.Conv2d(3, 2, 3, bias=False))
    with pytest.raises(ValueError, match=message):
        EKFAC(model, **setting)
    assert not model[0]._forward_hooks
