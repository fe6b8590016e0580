"""Factors and preconditioned gradients against brute force in float64."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from tests.trainer.kfac.brute_force import (
    CONVOLUTIONS,
    DAMPING,
    MATRICES,
    close,
    damped_curvature,
    input_of,
    loss_of,
    randomised,
    stepped,
    truth,
)
from trainer.kfac import KFAC
from trainer.kfac.registration import make_layer

NORMS = [
    nn.BatchNorm2d(3), nn.BatchNorm1d(3), nn.LayerNorm(5), nn.LayerNorm((2, 3)), nn.GroupNorm(2, 4),
    nn.LayerNorm(5, bias=False),
]  # fmt: skip


@pytest.mark.parametrize(("fraction", "number"), [(1.0, 6), (0.5, 3), (0.4, 3), (0.01, 1)])
@pytest.mark.parametrize("name", ["3x3", "linear", "embedding"])
def test_factors_of_some_samples(name, fraction, number):
    """The first samples count; gradients are still those of each sample's own loss."""
    module = randomised(MATRICES[name])
    x = input_of(module)
    preconditioner, _, _ = stepped(module, x, factor_fraction=fraction)
    a, g = truth(module, x[:number])
    found = preconditioner.factors("0")
    close(torch.diag_embed(found[0]) if name == "embedding" else found[0], a)
    close(found[1], g)


@pytest.mark.parametrize("module", NORMS, ids=str)
def test_norms_of_some_samples(module):
    """The first samples count, as if a batch norm's batch were these; gradients are those of the whole batch."""
    x = input_of(module := randomised(module))
    output = module(x)
    (g,) = torch.autograd.grad(loss_of(output).sum(), output)
    rows = scale_and_shift(module, normalised(module, x[:3]), g[:3])
    preconditioner, _, _ = stepped(module, x, factor_fraction=0.5)
    close(preconditioner.factors("0")[0], torch.einsum("nuj,nuk->ujk", rows, rows) / 3)


@pytest.mark.parametrize(("dtype", "mean"), [(torch.float32, 1e3), (torch.bfloat16, 30.0)], ids=str)
@pytest.mark.parametrize("module", NORMS[:5], ids=str)
def test_norms_of_inputs_with_a_large_mean(module, dtype, mean):
    """The statistics are off by less than the rounding of the input itself, relative to its deviation."""
    module = randomised(module)
    x = (mean + 3 * input_of(module, N=40)).to(dtype)
    g = torch.randn_like(x)
    found = make_layer(module).sums(x, g).by_factor["unit"]
    rows = scale_and_shift(module, normalised(module, x.double()), g.double())
    close(found.double(), torch.einsum("nuj,nuk->ujk", rows, rows), mean / 3 * torch.finfo(dtype).eps)


def normalised(module, x):
    """Return what a norm multiplies with its scale."""
    plain = copy.deepcopy(module)
    nn.init.ones_(plain.weight)
    if plain.bias is not None:
        nn.init.zeros_(plain.bias)
    return plain(x).detach()


def scale_and_shift(module, normalised, g):
    """Return each sample's gradients of a norm's parameters [N, U, k], from those at its output."""
    parts = [normalised * g, g][: len(list(module.parameters()))]
    if isinstance(module, nn.LayerNorm):
        return torch.stack([part.reshape(len(g), -1, module.weight.numel()).sum(1) for part in parts], -1)
    return torch.stack([part.reshape(*part.shape[:2], -1).sum(2) for part in parts], -1)


@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
@pytest.mark.parametrize("name", MATRICES)
def test_a_layer_against_brute_force(name, solver):
    module = randomised(MATRICES[name])
    x = input_of(module)
    a, g = truth(module, x)
    preconditioner, raw, found = stepped(module, x, solver=solver)
    a_factor, g_factor = preconditioner.factors("0")
    close(torch.diag_embed(a_factor) if a_factor.dim() == 2 else a_factor, a)
    close(g_factor, g)
    for group, (A, G, D) in enumerate(zip(a, g, raw, strict=True)):
        close(found[group], torch.linalg.solve(damped_curvature(A, G, solver), D.flatten()).reshape(D.shape))


@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_spatially_uncorrelated(name, solver):
    """One block for all taps of a kernel: the mean of those that the exact factor has on its diagonal. Convolutions
    with groups, with bias or with one tap stay exact.
    """
    module = randomised(CONVOLUTIONS[name])
    x = input_of(module)
    a, g = truth(module, x)
    taps, C = module.weight[0, 0].numel(), module.in_channels
    if module.groups > 1 or module.bias is not None or taps == 1:
        preconditioner, _, _ = stepped(module, x, solver=solver, spatially_uncorrelated=True)
        close(preconditioner.factors("0")[0], a)
        if module.groups > 1 or taps == 1:
            return
        module = randomised(CONVOLUTIONS[name])
        module.bias = None
        a, g = truth(module, x)
    A, G = a[0].reshape(taps, C, taps, C).diagonal(dim1=0, dim2=2).mean(2), g[0]
    module.zero_grad()
    loss_of(module(x)).mean().backward()
    D = module.weight.grad.flatten(2).clone()  # [m, C, taps]
    module.zero_grad()
    preconditioner, _, _ = stepped(module, x, solver=solver, spatially_uncorrelated=True)
    close(preconditioner.factors("0")[0][0], A)
    close(preconditioner.factors("0")[1][0], G)
    found, curvature = module.weight.grad.flatten(2), damped_curvature(A, G, solver)
    for tap in range(taps):
        close(found[..., tap], torch.linalg.solve(curvature, D[..., tap].flatten()).reshape(D.shape[:2]))


@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
@pytest.mark.parametrize("kind", [nn.Linear(20, 7), nn.Conv2d(4, 6, 3, groups=2), nn.Embedding(9, 5)], ids=repr)
def test_solutions_in_bfloat16(kind, solver):
    """Rounded to 8 bits, their matrices and what is multiplied with them; eigenvalues and diagonals are not. (Far above
    the damping, where curvature is high, a solution is small, and the rounding of its largest elements is not.)
    """
    found = {}
    for inv_dtype in (None, "bfloat16"):
        module = randomised(kind)
        found[inv_dtype] = stepped(module, input_of(module), solver=solver, inv_dtype=inv_dtype, damping=10.0)
    (exact, _, wanted), (preconditioner, _, gradient) = found.values()
    assert gradient.dtype == torch.float64
    assert 1e-4 < (gradient - wanted).norm() / wanted.norm() < 2**-6
    for name, tensor in preconditioner.blocks["0"].solution.items():
        whole = exact.blocks["0"].solution[name]
        assert tensor.dtype == (torch.bfloat16 if tensor.dim() == 3 else torch.float64)
        assert torch.equal(tensor, whole.to(tensor.dtype))


@pytest.mark.parametrize("damping", [3e-3, 3e-5])
def test_rounded_eigenvectors_lead_downhill(damping):
    """They do so also where inputs have a large mean, and a factor has one large eigenvalue."""
    for seed in range(6):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(512, 4))
        preconditioner = KFAC(model, damping=damping, inv_dtype="bfloat16", factor_update_steps=1, inv_update_steps=1)
        F.cross_entropy(model(3 + 0.1 * torch.randn(64, 512)), torch.randint(4, (64,))).backward()
        preconditioner.step()
        assert preconditioner.cosines()["0"] > 0


def test_the_padding_of_an_embedding_counts_for_nothing():
    module = randomised(nn.Embedding(7, 3, padding_idx=2))
    x = torch.tensor([[2, 2, 1], [0, 2, 6]])
    preconditioner, _, found = stepped(module, x)
    assert preconditioner.factors("0")[0].tolist() == [[0.5, 0.5, 0, 0, 0, 0, 0.5]] and not found[0, :, 2].any()


@pytest.mark.parametrize("module", NORMS, ids=str)
def test_a_norm_against_brute_force(module):
    """Each unit's Fisher matrix from per-sample gradients, with the batch's statistics as they are."""
    module = randomised(module)
    x = input_of(module)
    shape = (1, -1, *[1] * (x.dim() - 2)) if not isinstance(module, nn.LayerNorm) else module.weight.shape
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def loss(parameters, sample):
        output = sample[None] * parameters["weight"].reshape(shape)
        output = output + parameters["bias"].reshape(shape) if "bias" in parameters else output
        return loss_of(output)[0]

    gradients = vmap(grad(loss), (None, 0))(parameters, normalised(module, x))
    rows = torch.stack([gradients[name].flatten(1) for name in parameters], -1)  # [N, U, k]
    wanted = torch.einsum("nuj,nuk->ujk", rows, rows) / len(x)
    preconditioner, raw, found = stepped(module, x)
    (unit_factor,) = preconditioner.factors("0")
    close(unit_factor, wanted)
    close(raw, rows.mean(0))
    damped = unit_factor + DAMPING * torch.eye(unit_factor.shape[-1], dtype=torch.float64)
    close(found, torch.linalg.solve(damped, raw))


def test_one_linear_layer_is_the_exact_fisher():
    """One input, and each class once with the probability that the model gives it: no approximation is left."""
    torch.manual_seed(0)
    classes, x = 4, torch.randn(5, dtype=torch.float64)
    module = nn.Linear(5, classes).double()
    nn.init.zeros_(module.weight), nn.init.zeros_(module.bias)
    labels = torch.arange(classes)
    model = nn.Sequential(module)
    preconditioner = KFAC(model, factor_update_steps=1, inv_update_steps=1, kl_clip=None, damping=DAMPING)
    F.cross_entropy(model(x.repeat(classes, 1)), labels).backward()
    preconditioner.step()
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def loss(parameters, label):
        return F.cross_entropy(functional_call(module, parameters, x[None]), label[None])

    gradients = vmap(grad(loss), (None, 0))(parameters, labels)
    rows = torch.cat([gradients["weight"], gradients["bias"][:, :, None]], 2).flatten(1)
    a, g = preconditioner.factors("0")
    close(torch.kron(g[0], a[0]), rows.T @ rows / classes, 1e-12)


@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
@pytest.mark.parametrize("module", [nn.Linear(4, 3, bias=False), nn.Conv2d(2, 3, 2, bias=False)], ids=str)
def test_rescaled_inputs_change_nothing(module, solver):
    """The natural gradient in the model's outputs does not depend on the units of a layer's inputs, nor on a change of
    basis (without damping).
    """
    module = randomised(module)
    x = input_of(module, N=40)
    mixed = torch.randn(x.shape[1], x.shape[1], dtype=torch.float64) + 2 * torch.eye(x.shape[1])
    _, _, found = stepped(module, x, damping=1e-14, solver=solver)
    other = copy.deepcopy(module)
    other.weight.data = torch.einsum("oi...,ij->oj...", module.weight.data, mixed.inverse())
    _, _, other_found = stepped(other, torch.einsum("ij,nj...->ni...", mixed, x), damping=1e-14, solver=solver)
    shape = module.weight.shape
    last = shape[0], *shape[2:], shape[1]
    close(torch.einsum("o...j,ji->o...i", other_found.reshape(last), mixed), found.reshape(last), 1e-5)
