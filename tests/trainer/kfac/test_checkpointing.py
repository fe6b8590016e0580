"""Layers whose activations are recomputed in the backward pass."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.trainer.kfac.networks import EVERY_STEP, batch, close, gradients, small
from trainer.kfac import EKFAC, KFAC


def test_checkpointed_activations_count_once():
    found = []
    for reentrant in (None, False, True):
        model = small(dtype=torch.float64)
        preconditioner = KFAC(model, **EVERY_STEP)
        x, y = batch(dtype=torch.float64)
        x.requires_grad_()
        output = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
        F.cross_entropy(output, y).backward()
        preconditioner.step()
        found.append(gradients(model))
    close(found[1], found[0], 1e-10)
    close(found[2], found[0], 1e-10)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("segments", [1, 3])
def test_a_checkpointed_layer_that_is_used_often(segments, reentrant):
    """Counted as without checkpoints, and told of nothing; EKFAC refuses it as without."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).double()
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)

    def trained(kind, checkpointed):
        preconditioner = kind(layer, accumulation_steps=2, **EVERY_STEP)
        try:
            for _ in range(2):
                out = x
                for _ in range(segments):
                    uses = nn.Sequential(*[layer] * (3 // segments))
                    out = checkpoint(uses, out, use_reentrant=reentrant) if checkpointed else uses(out)
                (out.square().sum(1).mean() / 2).backward()
            preconditioner.step()
            return preconditioner.factors("")
        finally:
            preconditioner.remove()
            layer.zero_grad()

    close(trained(KFAC, True), trained(KFAC, False), 1e-12)
    for checkpointed in (False, True):
        with pytest.raises(RuntimeError, match="used twice in a forward pass"):
            trained(EKFAC, checkpointed)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("checkpointed", [(0,), (1,), (0, 2)], ids=str)
def test_a_layer_that_is_checkpointed_in_some_of_its_uses(checkpointed, reentrant):
    torch.manual_seed(0)
    first, layer = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    found = []
    for some in ((), checkpointed):
        model = nn.ModuleList([first, layer])
        preconditioner = KFAC(model, **EVERY_STEP)
        for _ in range(2):
            model.zero_grad()
            out = first(x)
            for use in range(3):
                through = lambda z: layer(z).tanh()  # noqa: E731
                out = checkpoint(through, out, use_reentrant=reentrant) if use in some else through(out)
            out.square().sum(1).mean().backward()
            preconditioner.step()
        found.append((*preconditioner.factors("1"), layer.weight.grad.clone()))
        preconditioner.remove()
    close(*reversed(found), 1e-10)


def test_a_forward_pass_without_backward_does_not_hide_checkpointed_ones():
    model, x = nn.Linear(4, 4), torch.randn(6, 4, requires_grad=True)
    preconditioner = KFAC(model, **EVERY_STEP)
    model(x)
    for _ in range(2):
        model.zero_grad()
        checkpoint(model, x, use_reentrant=True).square().sum(1).mean().backward()
        preconditioner.step()
    assert preconditioner.cosines().keys() == {""}
