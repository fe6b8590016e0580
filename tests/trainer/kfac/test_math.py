"""Factors and preconditioned gradients against brute force in float64."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from trainer.kfac import EKFAC, KFAC, factors
from trainer.kfac.ekfac import sum_squares
from trainer.kfac.layers import Norm
from trainer.kfac.registration import make_layer

DAMPING = 0.01
CONVOLUTIONS = {
    "3x3": nn.Conv2d(3, 4, 3, padding=1, bias=False),
    "3x3 with bias": nn.Conv2d(3, 4, 3, padding=1),
    "1x1": nn.Conv2d(3, 4, 1),
    "5x5 stride 2": nn.Conv2d(3, 4, 5, stride=2, padding=2),
    "uneven": nn.Conv2d(3, 4, (1, 3), stride=(2, 1), padding=(0, 2), dilation=(1, 2)),
    "dilated": nn.Conv2d(3, 4, 3, padding=2, dilation=2),
    "same": nn.Conv2d(3, 4, (2, 4), padding="same"),
    "valid": nn.Conv2d(3, 4, 3, padding="valid"),
    "circular": nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
    "reflect": nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect", bias=False),
    "replicate": nn.Conv2d(3, 4, 3, padding=(2, 1), padding_mode="replicate"),
    "groups": nn.Conv2d(4, 6, 3, padding=1, groups=2),
    "depthwise": nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False),
    "depthwise, two each": nn.Conv2d(4, 8, 3, stride=2, groups=4, dilation=2),
    "one dimension": nn.Conv1d(3, 4, 3, stride=2, padding=1),
    "one dimension, same": nn.Conv1d(4, 4, 4, padding="same", padding_mode="circular", groups=2),
}


class Sequence(nn.Linear):
    """Of several positions."""


def randomised(module, seed=0):
    torch.manual_seed(seed)
    module = copy.deepcopy(module).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def input_of(module, N=6):
    torch.manual_seed(1)
    if isinstance(module, nn.Linear):
        shape = (N, 3, 2) if isinstance(module, Sequence) else (N,)
        return torch.randn(*shape, module.in_features, dtype=torch.float64)
    if isinstance(module, nn.Embedding):
        return torch.randint(module.num_embeddings, (N, 4))
    if isinstance(module, nn.Conv1d):
        return torch.randn(N, module.in_channels, 9, dtype=torch.float64)
    if isinstance(module, nn.LayerNorm):
        return torch.randn(N, 3, *module.normalized_shape, dtype=torch.float64)
    channels = getattr(module, "in_channels", None) or getattr(module, "num_features", None) or module.num_channels
    if isinstance(module, nn.BatchNorm1d):
        return torch.randn(N, channels, dtype=torch.float64)
    return torch.randn(N, channels, 7, 6, dtype=torch.float64)


def loss_of(output):
    """Of each sample: something with a different gradient everywhere."""
    weights = torch.linspace(-1, 1, output[0].numel(), dtype=output.dtype).reshape(output[0].shape)
    return ((output * weights).flatten(1).sum(1)).tanh() + 0.1 * (output**2).flatten(1).sum(1)


def by_hand(module):
    """The gradient as [G, m, n]: inputs of a patch by row, column and channel, and the bias last."""
    weight = module.weight.grad
    if isinstance(module, nn.Embedding):
        return weight.T[None].clone()
    if isinstance(module, nn.Conv2d):
        weight = torch.einsum("ocyx->oyxc", weight)
    elif isinstance(module, nn.Conv1d):
        weight = torch.einsum("ocx->oxc", weight)
    columns = [weight.reshape(len(weight), -1)]
    columns += [module.bias.grad[:, None]] if module.bias is not None else []
    return torch.cat(columns, 1).unflatten(0, (getattr(module, "groups", 1), -1))


def stepped(module, x, **settings):
    """The preconditioner after one step, the raw gradient and the preconditioned one."""
    model = nn.Sequential(module)
    options = {"damping": DAMPING, "kl_clip": None, "factor_update_steps": 1, "inv_update_steps": 1} | settings
    preconditioner = KFAC(model, **options)
    loss_of(model(x)).mean().backward()
    layer = make_layer(module)
    gradient = (lambda: layer.gradient().clone()) if isinstance(layer, Norm) else (lambda: by_hand(module))
    raw = gradient()
    preconditioner.step()
    return preconditioner, raw, gradient()


def truth(module, x):
    """(a_factor, g_factor) by definition: from the rows of each position."""
    output = module(x)
    (g,) = torch.autograd.grad(loss_of(output).sum(), output)
    N, groups = len(x), getattr(module, "groups", 1)
    if isinstance(module, nn.Linear):
        rows, g = x.reshape(-1, 1, x.shape[-1]), g.reshape(-1, 1, g.shape[-1])
    elif isinstance(module, nn.Embedding):
        rows = F.one_hot(x, module.num_embeddings).double().reshape(-1, 1, module.num_embeddings)
        g = g.flatten(0, 1)[:, None]
    else:
        # A convolution whose outputs are its patches, one input of a patch each, channels last.
        n = module.weight[0].numel()
        taker = type(module)(
            module.in_channels, groups * n, module.kernel_size, module.stride, module.padding, module.dilation, groups,
            bias=False, padding_mode=module.padding_mode,
        ).double()  # fmt: skip
        eye = torch.eye(n, dtype=torch.float64).reshape(n, *taker.weight.shape[2:], -1).movedim(-1, 1)
        taker.weight.data = eye.repeat(groups, *[1] * (eye.dim() - 1))
        rows = taker(x).flatten(2).mT.reshape(-1, groups, n)
        g = g.flatten(2).mT.reshape(-1, groups, len(module.weight) // groups)
    if getattr(module, "bias", None) is not None:
        rows = torch.cat([rows, torch.ones_like(rows[..., :1])], -1)
    a = torch.einsum("rgi,rgj->gij", rows, rows) / N
    return a, torch.einsum("rgi,rgj->gij", g, g) / len(g)


def close(found, wanted, tolerance=1e-10):
    assert (found - wanted).norm() <= tolerance * wanted.norm()


def damped_curvature(A, G, solver):
    identity = lambda of: torch.eye(len(of), dtype=of.dtype)  # noqa: E731
    if solver == "eigen":
        product = torch.kron(G, A)
        return product + DAMPING * identity(product)
    pi = ((A.trace() / len(A)) / (G.trace() / len(G))).sqrt()
    return torch.kron(G + DAMPING**0.5 / pi * identity(G), A + pi * DAMPING**0.5 * identity(A))


MATRICES = {
    **CONVOLUTIONS,
    "linear": nn.Linear(5, 3),
    "linear without bias": nn.Linear(5, 3, bias=False),
    "sequence": Sequence(5, 3),
    "embedding": nn.Embedding(7, 3),
}


@pytest.mark.parametrize(("fraction", "number"), [(1.0, 6), (0.5, 3), (0.4, 3), (0.01, 1)])
@pytest.mark.parametrize("name", ["3x3", "linear", "embedding"])
def test_factors_of_some_samples(name, fraction, number):
    """The first ones; gradients are still those of each sample's own loss."""
    module = randomised(MATRICES[name])
    x = input_of(module)
    preconditioner, _, _ = stepped(module, x, factor_fraction=fraction)
    a, g = truth(module, x[:number])
    found = preconditioner.factors("0")
    close(torch.diag_embed(found[0]) if name == "embedding" else found[0], a)
    close(found[1], g)


@pytest.mark.parametrize("module", [nn.BatchNorm2d(3), nn.LayerNorm([4])], ids=str)
def test_norms_take_all_samples(module):
    x = input_of(module := randomised(module))
    some, _, _ = stepped(copy.deepcopy(module), x, factor_fraction=0.5)
    assert torch.equal(some.factors("0")[0], stepped(module, x)[0].factors("0")[0])


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
    """Also where inputs have a large mean, and a factor one large eigenvalue."""
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


@pytest.mark.parametrize(
    "module",
    [nn.BatchNorm2d(3), nn.BatchNorm1d(3), nn.LayerNorm(5), nn.LayerNorm((2, 3)), nn.GroupNorm(2, 4),
     nn.LayerNorm(5, bias=False)],
    ids=str,
)  # fmt: skip
def test_a_norm_against_brute_force(module):
    """Each unit's Fisher matrix from per-sample gradients, with the batch's statistics as they are."""
    module = randomised(module)
    x = input_of(module)
    normalised = Norm(module).normalise(x)  # of which the gradients below are taken
    shape = (1, -1, *[1] * (x.dim() - 2)) if not isinstance(module, nn.LayerNorm) else module.weight.shape
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def loss(parameters, sample):
        output = sample[None] * parameters["weight"].reshape(shape)
        output = output + parameters["bias"].reshape(shape) if "bias" in parameters else output
        return loss_of(output)[0]

    gradients = vmap(grad(loss), (None, 0))(parameters, normalised)
    rows = torch.stack([gradients[name].flatten(1) for name in parameters], -1)  # [N, U, k]
    wanted = torch.einsum("nuj,nuk->ujk", rows, rows) / len(x)
    preconditioner, raw, found = stepped(module, x)
    (unit_factor,) = preconditioner.factors("0")
    close(unit_factor, wanted)
    close(raw, rows.mean(0))
    damped = unit_factor + DAMPING * torch.eye(unit_factor.shape[-1], dtype=torch.float64)
    close(found, torch.linalg.solve(damped, raw))


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (2, 2), (3, 2), (7, 6)], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_offsets_instead_of_patches(size, layout):
    """The same moments, by correlations of the image with itself."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, *size, dtype=torch.float64).to(memory_format=layout)
    taken = factors.extract_patches(factors.pad_image(x, (1, 1, 1, 1), "zeros"), (3, 3), (1, 1), (1, 1), 1)
    close(factors.conv3x3_factor(x), factors.patch_factor(taken, False), 1e-13)


def test_chunks_of_patches(monkeypatch):
    x = torch.randn(5, 3, 6, 6, dtype=torch.float64)
    taken = factors.extract_patches(x, (3, 3), (1, 1), (1, 1), 1)
    whole = factors.patch_factor(taken, True)
    monkeypatch.setattr(factors, "CHUNK_BYTES", 2 * 16 * 27 * 8)
    close(factors.patch_factor(taken, True), whole, 1e-13)


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


# --- EKFAC ---


@pytest.mark.parametrize("chunk_bytes", [1, 64 << 20], ids=["chunks", "whole"])
@pytest.mark.parametrize("name", [name for name in MATRICES if name != "embedding"])
def test_ekfac_against_the_gradients_of_samples(name, chunk_bytes, monkeypatch):
    """In step 5 the eigenvectors are those of step 4, and the diagonal is that of the batch."""
    monkeypatch.setattr("trainer.kfac.ekfac.CHUNK_BYTES", chunk_bytes)
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


@pytest.mark.parametrize(("T", "n", "m"), [(1, 7, 5), (50, 7, 5)], ids=["few positions", "many positions"])
def test_squares_of_the_samples_gradients(T, n, m):
    """Whichever is rotated."""
    generator = torch.Generator().manual_seed(0)
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
    """The diagonal in them is that of what was there before; samples' gradients then count as in any average."""
    module = randomised(nn.Conv2d(4, 6, 3, padding=1, groups=2))
    x, model = input_of(module), nn.Sequential(module)
    preconditioner = EKFAC(model, damping=DAMPING, kl_clip=None, factor_update_steps=1, inv_update_steps=1)
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
