"""Decompositions that fail, and rounding."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.trainer.kfac.networks import EVERY_STEP, batch, close, gradients, run, small
from trainer.kfac import EKFAC, KFAC
from trainer.kfac.curvature_block import CurvatureBlock
from trainer.kfac.registration import make_layer
from trainer.kfac.solvers import Cholesky, Eigen, damp_factors, precondition_units


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ekfac_in_bfloat16(dtype):
    model = small(dtype=dtype)
    preconditioner = EKFAC(model, inv_dtype="bfloat16", **EVERY_STEP)
    for number in range(3):
        x, y = batch(number, dtype=dtype)
        F.cross_entropy(model(x), y).backward()
        preconditioner.step()
    assert all(0 < cosine < 1 - 1e-6 for cosine in preconditioner.cosines().values())


def test_a_decomposition_that_fails_leaves_the_one_before(monkeypatch, caplog):
    model = small()
    preconditioner = KFAC(model, **EVERY_STEP)
    run(model, preconditioner, 1)
    before = preconditioner.state_dict()["layers"]["3"]["solution"]

    def fail(matrix):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    run(model, preconditioner, 1, first=1)
    after = preconditioner.state_dict()["layers"]["3"]["solution"]
    assert all(torch.equal(after[name], before[name]) for name in before) and preconditioner.fallbacks() == 3
    assert any("no eigenvectors of a factor (1, 55, 55)" in record.getMessage() for record in caplog.records)
    fresh = small()
    other = KFAC(fresh, **EVERY_STEP)
    run(fresh, other, 1)  # without one before, gradients keep their direction
    assert {name for name, cosine in other.cosines().items() if cosine > 1 - 1e-5} == {"0", "3", "7"}


def test_a_decomposition_that_fails_in_float32_is_tried_in_float64(monkeypatch, caplog):
    model, found, eigh = small(), [], torch.linalg.eigh

    def fail(matrix):
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return eigh(matrix)

    for of in (eigh, fail):
        monkeypatch.setattr(torch.linalg, "eigh", of)
        other = copy.deepcopy(model)
        preconditioner = KFAC(other, **EVERY_STEP)
        run(other, preconditioner, 1)
        found.append(gradients(other))
    close(*found, 1e-3)
    assert preconditioner.fallbacks() == 0
    assert "K-FAC: the eigenvectors of a factor (1, 55, 55) took float64" in [of.getMessage() for of in caplog.records]


def test_eigenvalues_that_are_not_numbers_leave_the_decomposition_before(monkeypatch):
    solver, a, g = Eigen(), torch.eye(4)[None] + 1, torch.eye(3)[None] + 1
    before = solver.update_inverse(a, g, 1.0, solver.identity(a, g))
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: (eigh(matrix)[0] * torch.nan, eigh(matrix)[1]))
    after = solver.update_inverse(2 * a, g, 1.0, before)
    assert all(torch.equal(after[name], before[name]) for name in before) and int(solver.fallbacks) == 1


def test_a_first_decomposition_that_fails_leaves_no_diagonal_behind(monkeypatch):
    """EKFAC then continues as if the second decomposition were the first."""
    model, found = small(), []
    for failing in (True, False):
        preconditioner = EKFAC(model, kl_clip=None, factor_decay=0.0, factor_update_steps=1, inv_update_steps=1)
        with monkeypatch.context() as patch:
            if failing:
                patch.setattr("trainer.kfac.solvers._eigh", lambda _: None)
                run(model, preconditioner, 1)
                assert preconditioner.fallbacks() > 0
        model.load_state_dict(small().state_dict())
        model.zero_grad()
        F.cross_entropy(model(batch(1)[0]), batch(1)[1]).backward()
        preconditioner.step()
        found.append(gradients(model))
        preconditioner.remove()
    close(*found)


def test_a_matrix_that_has_no_inverse_leaves_the_one_before():
    model = small()
    preconditioner = KFAC(model, solver="cholesky", damping=1e-12, **EVERY_STEP)
    run(model, preconditioner, 1)
    before = preconditioner.blocks["3"].solution["a_inverse"].clone()
    preconditioner.blocks["3"].averages["a"].value.fill_(-1)
    preconditioner.factor_update_steps = 100
    for block in preconditioner.blocks.values():
        block.hook.is_active = False
    run(model, preconditioner, 1, first=1)
    assert torch.equal(preconditioner.blocks["3"].solution["a_inverse"], before) and preconditioner.fallbacks() >= 1


def test_factors_without_full_rank_fall_back():
    """A pivot of exactly zero is another error than a negative one."""
    solver, failed = Cholesky(), 0
    for seed in range(20):
        rows = torch.randint(-3, 4, (4, 8), generator=torch.Generator().manual_seed(seed)).float()
        a, g = (rows.T @ rows)[None], torch.eye(3)[None]
        before = solver.identity(a, g)
        after = solver.update_inverse(a, g, 1e-20, before)
        fell_back = torch.linalg.cholesky_ex(damp_factors(a, g, 1e-20)[0]).info.item() != 0
        failed += fell_back
        assert torch.equal(after["a_inverse"], before["a_inverse"]) == fell_back
        assert all(tensor.isfinite().all() for tensor in after.values())
    assert int(solver.fallbacks) == failed > 10


def test_gradients_of_units_are_not_made_of_rounding():
    """The curvature has one direction, and in the other, rounding is more than the damping."""
    torch.manual_seed(0)
    for samples, size, damping in itertools.product((1, 2, 64), (1.0, 1e3, 1e5), (1e-8, 1e-4, 3e-3)):
        rows = size * torch.randn(256, 1, 2) * (1 + 1e-4 * torch.randn(256, samples, 2))
        factor = torch.einsum("uni,unj->uij", rows, rows) / samples
        gradient = rows.mean(1)
        folded = torch.stack([factor[:, 0, 0], factor[:, 0, 1], factor[:, 1, 1]], -1)
        found = precondition_units(folded, gradient, damping)
        assert (F.cosine_similarity(found.double(), gradient.double(), dim=-1) > 0).all()
        assert ((found * gradient.norm(dim=-1, keepdim=True)).norm(dim=-1) < 1000).all()  # 1 without rounding


@pytest.mark.parametrize("sign", [1, -1])
def test_a_step_uphill_is_bounded_too(sign, monkeypatch):
    """Rounded inverses may lead uphill."""
    model = nn.Linear(4, 3)
    preconditioner = KFAC(model, solver="cholesky", kl_clip=1e-6, lr=1.0)
    model(torch.randn(6, 4)).square().sum(1).mean().backward()
    monkeypatch.setattr(CurvatureBlock, "precondition", lambda self, gradient, damping: sign * gradient)
    raw = make_layer(model).gradient().clone()
    preconditioner.step()
    found = make_layer(model).gradient()
    assert (found * raw).sum().item() == pytest.approx(sign * 1e-3 * raw.norm().item(), rel=1e-4)
