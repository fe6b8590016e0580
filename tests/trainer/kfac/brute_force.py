"""Factors and gradients by definition, in float64."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from trainer.kfac import KFAC
from trainer.kfac.norms import Norm
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
    """A linear layer whose inputs have several positions."""


MATRICES = {
    **CONVOLUTIONS,
    "linear": nn.Linear(5, 3),
    "linear without bias": nn.Linear(5, 3, bias=False),
    "sequence": Sequence(5, 3),
    "embedding": nn.Embedding(7, 3),
}


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
    """Return each sample's loss, whose gradient is different for every element of the output."""
    weights = torch.linspace(-1, 1, output[0].numel(), dtype=output.dtype).reshape(output[0].shape)
    return ((output * weights).flatten(1).sum(1)).tanh() + 0.1 * (output**2).flatten(1).sum(1)


def by_hand(module):
    """Return the gradient as [G, m, n]: inputs of a patch by row, column and channel, and the bias last."""
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
    """Return the preconditioner after one step, the raw gradient and the preconditioned one."""
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
    """Return (a_factor, g_factor) by definition: from the rows of each position."""
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


def damped_curvature(A, G, solver):
    identity = lambda of: torch.eye(len(of), dtype=of.dtype)  # noqa: E731
    if solver == "eigen":
        product = torch.kron(G, A)
        return product + DAMPING * identity(product)
    pi = ((A.trace() / len(A)) / (G.trace() / len(G))).sqrt()
    return torch.kron(G + DAMPING**0.5 / pi * identity(G), A + pi * DAMPING**0.5 * identity(A))


def close(found, wanted, tolerance=1e-10):
    """Assert that they are close, relative to the norm of the second."""
    assert (found - wanted).norm() <= tolerance * wanted.norm()
