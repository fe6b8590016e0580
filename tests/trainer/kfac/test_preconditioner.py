"""A step in a training loop."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.trainer.kfac.networks import EVERY_STEP, batch, close, gradients, run, small
from tests.trainer.waits import waits
from trainer.kfac import EKFAC, KFAC, reduce_to_owners
from trainer.models import build


@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
@pytest.mark.parametrize("name", [torch.optim.SGD, torch.optim.AdamW])
def test_any_optimizer_learns(solver, name):
    model, losses, lr = small(), [], 0.05 if name is torch.optim.SGD else 0.01
    preconditioner = KFAC(model, solver=solver, kl_clip=0.001, **EVERY_STEP)  # it has few samples, and few steps
    optimizer = name(model.parameters(), lr=lr)
    for _ in range(30):
        x, y = batch()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        preconditioner.step()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_cosines_of_all_layers_wait_for_the_device_once():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    preconditioner = KFAC(model)
    model(torch.randn(8, 4)).square().mean().backward()
    preconditioner.step()
    with waits() as names:
        assert len(preconditioner.cosines()) == 5
    assert len(names) <= 1


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_steps_between_solutions_never_wait_for_the_device(kind):
    """Although they average factors."""
    model = small()
    preconditioner = kind(model, factor_update_steps=1, inv_update_steps=1000, stagger=False)
    run(model, preconditioner, 9)  # solutions are computed in steps 0, 1, 2, 4 and 8, and next in 16
    with waits() as names:
        run(model, preconditioner, 3)
    assert not names


def test_it_preconditions():
    """The cosine with the raw gradient is not 1 in any layer: the scaling of convolutions' factors is KFC's."""
    torch.manual_seed(0)
    model = build("resnet8", num_classes=5, in_channels=3)
    preconditioner = KFAC(model, damping=0.003, **EVERY_STEP)
    run(model, preconditioner, 5)
    cosines = preconditioner.cosines()
    assert set(cosines) == set(preconditioner.layers())
    assert all(0 < cosine < 0.98 for cosine in cosines.values()), cosines


@pytest.mark.parametrize(("parts", "fraction"), [(1, 1.0), (4, 1.0), (4, 0.5)])
def test_the_clip_of_its_own_accord_grows_with_the_samples_of_a_step(parts, fraction):
    by_setting = []
    for kl_clip in ("auto", 3e-7 * parts * len(batch()[0])):
        model = small()
        preconditioner = KFAC(
            model, kl_clip=kl_clip, accumulation_steps=parts, factor_fraction=fraction, lr=0.5, **EVERY_STEP
        )
        for _ in range(parts):
            x, y = batch()
            (F.cross_entropy(model(x), y) / parts).backward()
        preconditioner.step()
        by_setting.append(gradients(model))
    assert all(torch.equal(a, b) for a, b in zip(*by_setting, strict=True))
    state = preconditioner.state_dict()
    model.zero_grad()
    preconditioner.remove()
    resumed = KFAC(model, accumulation_steps=parts)
    resumed.load_state_dict(state)
    assert resumed.state_dict()["batch_size"] == parts * len(batch()[0])


def test_the_clip_bounds_the_step_and_nothing_else():
    raw = small()
    found = {}
    for kl_clip in (None, 1e-4):
        model = copy.deepcopy(raw)
        preconditioner = KFAC(model, kl_clip=kl_clip, lr=0.5, **EVERY_STEP)
        x, y = batch()
        F.cross_entropy(model(x), y).backward()
        before = gradients(model)
        preconditioner.step()
        found[kl_clip] = gradients(model)
    product = sum((a * b).sum() for a, b in zip(before, found[None], strict=True))
    scale = (1e-4 / (0.25 * product)).sqrt()
    assert scale < 0.5
    close(found[1e-4], [scale * gradient for gradient in found[None]])


def test_the_steps_that_the_clip_bound_are_counted():
    model = small()
    preconditioner = KFAC(model, lr=0.5, **EVERY_STEP)
    for kl_clip, lr in ((None, 0.5), (1e-4, 0.5), (1e4, 0.5), (1e-4, 0.5), (1e-4, 0.0)):
        preconditioner.kl_clip, preconditioner.lr = kl_clip, lr
        model.zero_grad()
        F.cross_entropy(model(batch()[0]), batch()[1]).backward()
        preconditioner.step()
    assert preconditioner.clipped() == (2, 3)  # without a bound, or a rate, there is nothing to clip


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_never_enters_a_factor(bad):
    model = small()
    preconditioner = KFAC(model, **EVERY_STEP)
    run(model, preconditioner, 2)
    before = [factor.clone() for name in preconditioner.layers() for factor in preconditioner.factors(name)]
    weights = copy.deepcopy(model.state_dict())
    x, y = batch(7)
    x[0, 0, 0, 0] = bad
    F.cross_entropy(model(x), y).backward()
    preconditioner.step()
    after = [factor for name in preconditioner.layers() for factor in preconditioner.factors(name)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert preconditioner.skipped() == len(after)
    model.load_state_dict(weights)
    run(model, preconditioner, 1, first=9)
    assert all(gradient.isfinite().all() for gradient in gradients(model))
    assert preconditioner.skipped() == len(after)


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_a_first_batch_that_is_not_finite_does_not_last(kind):
    """No solution is made of factors of zero, and the second batch is like a first one."""
    model, found = small(), []
    model[1].track_running_stats = False
    for first in (0, 1):
        preconditioner = kind(model, kl_clip=None)
        for number in range(first, 2):
            x, y = batch(number)
            model.zero_grad()
            F.cross_entropy(model(x * (1 if number else math.nan)), y).backward()
            preconditioner.step()
        found.append(gradients(model))
        assert all(0 < cosine < 0.9999 for cosine in preconditioner.cosines().values())
        preconditioner.remove()
    close(*found)


def test_overflowed_gradients_at_first_are_repaired():
    model = small()
    preconditioner = KFAC(model, kl_clip=None)
    for scale in (math.inf, 1.0):
        x, y = batch()
        model.zero_grad()
        (F.cross_entropy(model(x), y) * scale).backward()
        preconditioner.step()
        if scale == math.inf:
            assert all(
                (factor == 0).all() for name in preconditioner.layers() for factor in preconditioner.factors(name)
            )
    assert preconditioner.skipped() == 7  # of three layers two, and of the norm one
    assert all(0 < cosine < 0.9999 for cosine in preconditioner.cosines().values())


def test_memory_is_told():
    model = nn.Sequential(nn.Linear(9, 4, bias=False))
    preconditioner = KFAC(model, **EVERY_STEP)
    model(torch.randn(3, 9)).sum().backward()
    factors = 4 * (45 + 10)  # triangles
    assert preconditioner.memory_usage() == {"factors": factors, "solutions": 0, "captured": factors}
    preconditioner.step()
    assert preconditioner.memory_usage() == {"factors": factors, "solutions": 4 * (81 + 16 + 13), "captured": 0}
    preconditioner.remove()
    preconditioner = KFAC(model, inv_dtype="bfloat16", **EVERY_STEP)
    model(torch.randn(3, 9)).sum().backward()
    preconditioner.step()
    assert preconditioner.memory_usage()["solutions"] == 2 * (81 + 16) + 4 * 13


def test_gradients_that_ddp_does_not_reduce_have_no_owners():
    model = small()
    with pytest.raises(ValueError, match="model: a Sequential; allowed: DistributedDataParallel"):
        reduce_to_owners(model, KFAC(model))


def run64(model, preconditioner):
    x, y = batch(0, dtype=torch.float64)
    F.cross_entropy(model(x), y).backward()
    preconditioner.step()


def test_what_is_discarded_counts_for_nothing():
    """The statistics of another loss are discarded."""
    found = []
    for more in (False, True):
        model = small(dtype=torch.float64)
        preconditioner = KFAC(model, **EVERY_STEP)
        if more:
            model[1].eval()
            (100 * model(batch(1, dtype=torch.float64)[0])).sum().backward()
            model[1].train()
            model.zero_grad()
            preconditioner.discard()
        run64(model, preconditioner)
        found.append(gradients(model))
    close(*found, 1e-12)


def test_what_is_discarded_before_a_layer_is_used_leaves_no_factors():
    """Factors would be zeros, and a solution would be made of them."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3)])
    preconditioner = KFAC(model, kl_clip=None, **EVERY_STEP)
    model[1](model[0](torch.randn(6, 4))).sum().backward()
    preconditioner.discard()
    for step in range(3):
        model.zero_grad()
        out = model[0](torch.randn(6, 4))
        (model[1](out) if step == 2 else out).square().sum(1).mean().backward()
        preconditioner.step()
        assert preconditioner.cosines().keys() == ({"0", "1"} if step == 2 else {"0"})
    assert 0 < preconditioner.cosines()["1"] < 0.9999
