"""Every optimizer of a recipe learns, continues from a checkpoint with the same bits, and does what its paper says."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from datapipe.errors import SettingError
from tests.trainer.kfac.networks import EVERY_STEP
from trainer import optim
from trainer.checkpoints.file import load_checkpoint, save_checkpoint
from trainer.config.recipe import load_recipe
from trainer.kfac import KFAC

LR = {"sgd": 0.2, "lars": 5.0, "lamb": 0.05, "muon": 0.05, "soap": 0.01}
NAMES = sorted(optim.REGISTRY)


def test_every_optimizer_has_a_learning_rate():
    assert LR.keys() == optim.REGISTRY.keys()


def settings(name, **changes):
    return optim.REGISTRY[name].Settings(**{"name": name, "lr": LR[name]} | changes)


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True),
        nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5),
    ).to(dtype, memory_format=torch.channels_last)  # fmt: skip


def batch(N=16):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 3, 8, 8, generator=generator), torch.randint(5, (N,), generator=generator)


def run(model, optimizer, steps, preconditioner=None, lr=None):
    x, y = batch()
    losses = []
    for _ in range(steps):
        if lr is not None:
            optim.set_lr(optimizer, lr)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if preconditioner is not None:
            preconditioner.step()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kfac", [False, True], ids=["alone", "kfac"])
@pytest.mark.parametrize("name", NAMES)
def test_learns(name, kfac):
    model = network()
    preconditioner = KFAC(model, damping=0.003, kl_clip=0.001, lr=LR[name], **EVERY_STEP) if kfac else None
    losses = run(model, optim.build(settings(name, weight_decay=1e-4), model), 40, preconditioner)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_goes_on_from_a_checkpoint_with_the_same_bits(name, tmp_path):
    whole, model = network(), network()
    run(whole, optim.build(settings(name), whole), 25)
    optimizer = optim.build(settings(name), model)
    run(model, optimizer, 12)
    save_checkpoint(tmp_path / "saved", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    saved, resumed = load_checkpoint(tmp_path / "saved"), network()
    optimizer = optim.build(settings(name), resumed)
    resumed.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    run(resumed, optimizer, 13)
    wanted = whole.state_dict()
    assert [key for key, value in resumed.state_dict().items() if not torch.equal(value, wanted[key])] == []


@pytest.mark.parametrize("name", NAMES)
def test_nothing_moves_at_a_rate_of_zero(name):
    model, wanted = network(), network()
    run(model, optim.build(settings(name, weight_decay=0.1), model), 3, lr=0.0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted.parameters(), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_vectors_do_not_decay(name):
    """With gradients of zero, only matrices shrink."""
    model, before = network(), network()
    optimizer = optim.build(settings(name, weight_decay=0.1), model)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for old, new in zip(before.parameters(), model.parameters(), strict=True):
        if old.ndim > 1:
            assert new.norm() < old.norm()
        else:
            assert torch.equal(old, new)


def one_step(name, number=1, **changes):
    """Weights before, the gradient of each step, and weights after `number` steps."""
    model = network(torch.float64)
    optimizer = optim.build(settings(name, **changes), model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    generator, gradients = torch.Generator().manual_seed(1), []
    for _ in range(number):
        gradients.append([torch.randn(w.shape, generator=generator, dtype=w.dtype) for w in before])
        for parameter, gradient in zip(model.parameters(), gradients[-1], strict=True):
            parameter.grad = torch.empty_like(parameter).copy_(gradient)  # autograd's lie as the parameters do
        optimizer.step()
    return before, [list(of) for of in zip(*gradients, strict=True)], [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["rows", "pixels"])
@pytest.mark.parametrize("fused", [True, False])
def test_sgd_is_its_formula_whatever_the_order_of_gradients_in_memory(fused, memory_format, monkeypatch):
    """In float64. By itself torch's fused kernel takes weights and gradients of different orders for the same."""
    monkeypatch.setattr(optim.sgd, "GRAIN_SIZE", 1 if fused else 10**9)
    model = network(torch.float64)
    optimizer = optim.build(settings("sgd", lr=0.3, momentum=0.9, nesterov=True, weight_decay=0.1), model)
    assert bool(optimizer.param_groups[0]["fused"]) is fused
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    momentum = [torch.zeros_like(w) for w in expected]
    generator = torch.Generator().manual_seed(1)
    for number in range(3):
        for w, v, parameter in zip(expected, momentum, model.parameters(), strict=True):
            raw = torch.randn(w.shape, generator=generator, dtype=w.dtype)
            parameter.grad = raw.clone(memory_format=memory_format if raw.ndim == 4 else torch.contiguous_format)
            g = raw + (0.1 * w if w.ndim > 1 else 0)
            v.mul_(0.9).add_(g)
            w.sub_(0.3 * (g + 0.9 * v))
        if number == 2:  # a resumed run, whose momentum lay in memory in another order
            state = optimizer.state_dict()
            for its in state["state"].values():
                its["momentum_buffer"] = its["momentum_buffer"].contiguous()
            optimizer.load_state_dict(state)
        optimizer.step()
    for w, parameter in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach(), w)


def test_sgd_is_fused_where_tensors_are_large():
    from trainer import models

    for name, is_fused in (("resnet8", False), ("resnet50", True)):
        optimizer = optim.build(settings("sgd"), models.build(name, num_classes=10, in_channels=3))
        assert bool(optimizer.param_groups[0]["fused"]) is is_fused


@pytest.mark.parametrize("name", ["lars", "lamb", "muon"])
def test_a_step_has_as_many_kernels_whatever_the_number_of_layers(name):
    """All tensors, or all of one shape, at once."""
    counts = []
    for layers in (3, 6):
        model = nn.Sequential(*(nn.Conv2d(4, 4, 3) for _ in range(layers)), nn.Linear(4, 2))
        optimizer = optim.build(settings(name), model)
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            with Kernels() as kernels:
                optimizer.step()
        counts.append(kernels.count)
    assert counts[1] <= counts[0]


class Kernels(TorchDispatchMode):
    """Counts operators that are not views."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **kwargs or {})


def test_lars_is_what_its_paper_says():
    for w, (g,), new in zip(*one_step("lars", lr=2.0, weight_decay=0.1, trust_coefficient=0.01), strict=True):
        if w.ndim > 1:
            g = (g + 0.1 * w) * 0.01 * w.norm() / (g.norm() + 0.1 * w.norm())
        torch.testing.assert_close(new, w - 2.0 * g)


def test_lamb_is_what_its_paper_says():
    """Its algorithm 2, without the correction of the averages' bias, which the trust ratio takes out of matrices."""
    for w, (g,), new in zip(*one_step("lamb", lr=0.1, weight_decay=0.01), strict=True):
        update = 0.1 * g / ((0.001 * g**2).sqrt() + 1e-6) + (0.01 if w.ndim > 1 else 0) * w
        ratio = w.norm().clamp(max=10) / update.norm() if w.norm() > 0 else 1
        torch.testing.assert_close(new, w - 0.1 * ratio * update, rtol=1e-4, atol=1e-6)


def test_muon_makes_hidden_layers_steps_orthogonal():
    weights = list(zip(*one_step("muon", lr=0.1, adam_lr=0.003), strict=True))
    for i, (w, (g,), new) in enumerate(weights):
        step = (w - new) / 0.1
        if w.ndim > 1 and i < len(weights) - 2:
            step, g = step.flatten(1), g.flatten(1)
            assert ((torch.linalg.svdvals(step) > 0.5) & (torch.linalg.svdvals(step) < 1.5)).all()
            assert (step * g).sum() / step.norm() / g.norm() > 0.8  # U Vᵀ is the nearest one
        else:
            torch.testing.assert_close(new, w - 0.003 * g.sign())  # Adam's first step


def test_soap_is_adam_in_the_eigenvectors_of_its_factors():
    """The second step, the first that moves: Q_G, Q_A of the first gradient, whose average holds 1 - β of it."""
    for w, (first, g), new in zip(*one_step("soap", 2, lr=0.1), strict=True):
        basis = [
            torch.linalg.eigh(first.movedim(i, 0).flatten(1) @ first.movedim(i, 0).flatten(1).T)[1]
            for i in range(w.ndim if w.ndim > 1 else 0)
        ]
        rotated = g
        for matrix in basis:
            rotated = torch.tensordot(rotated, matrix, ([0], [0]))
        rotated = rotated.sign()  # Adam's first step, its bias corrected
        for matrix in basis:
            rotated = torch.tensordot(rotated, matrix, ([0], [1]))
        torch.testing.assert_close(new, w - 0.1 * rotated, rtol=1e-3, atol=1e-4)  # Adam's eps


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ('{name="adam", lr=1}', "optimizer.name = 'adam': allowed: sgd, lars, lamb, muon, soap"),
        (
            '{name="lamb", lr=1, nesterov=true}',
            "optimizer.nesterov = True: unknown setting for lamb; sgd, lars, muon have it (",
        ),
        ('{name="lamb", lr=1, betas=[0.9, 1.0]}', "optimizer.betas[1] = 1.0: must be less than 1"),
        ('{name="lars", lr=1, trust_coeff=1}', "did you mean trust_coefficient?"),
        ('{name="lars", lr=1, momentum=0, nesterov=true}', "nesterov = true needs momentum above 0"),
        ('{name="soap", lr=0}', "optimizer.lr = 0: must be greater than 0"),
        ('{name="muon"}', "optimizer.lr is missing"),
        ("3", "optimizer = 3: must be an object"),
    ],
)
def test_bad_settings_are_named(section, message):
    with pytest.raises(SettingError, match=re.escape(message)):
        load_recipe("fashion-mnist-resnet8", [f"optimizer={section}"])
