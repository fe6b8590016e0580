"""What is summed of a layer's inputs and gradients, and what counts for nothing."""

from __future__ import annotations

import copy
import gc
import pickle
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.trainer.kfac.networks import EVERY_STEP, batch, close, gradients, run, small
from trainer.kfac import EKFAC, KFAC
from trainer.kfac.hooks import ForwardCall


def test_micro_batches_are_one_batch():
    """Batch normalisation is in evaluation mode, as its statistics are those of a micro-batch."""
    whole = small(dtype=torch.float64)
    parts = copy.deepcopy(whole)
    for model, accumulation in ((whole, 1), (parts, 4)):
        model[1].eval()
        preconditioner = KFAC(model, accumulation_steps=accumulation, skip=["BatchNorm"], kl_clip=None, **EVERY_STEP)
        x, y = batch(dtype=torch.float64)
        for part_x, part_y in zip(x.chunk(accumulation), y.chunk(accumulation), strict=True):
            (F.cross_entropy(model(part_x), part_y) / accumulation).backward()
        preconditioner.step()
    close(gradients(parts), gradients(whole), 1e-10)


def test_loss_scaling_changes_nothing():
    plain, scaled = small(), small()
    x, y = batch()
    found = []
    for model, scaler in ((plain, None), (scaled, torch.amp.GradScaler("cpu", init_scale=1000.0))):
        preconditioner = KFAC(model, damping=0.003, grad_scaler=scaler, **EVERY_STEP)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = F.cross_entropy(model(x), y)
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.unscale_(optimizer)
        preconditioner.step()
        found.append([*gradients(model), *preconditioner.factors("3")])
    close(found[1], found[0], 1e-5)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Conv2d(6, 8, 3, padding=1, bias=False), (6, 8, 8)), (nn.Conv2d(6, 8, 3, padding=1), (6, 8, 8)),
     (nn.Linear(20, 30), (20,)), (nn.BatchNorm2d(6), (6, 8, 8))],
    ids=repr,
)  # fmt: skip
def test_bfloat16_inputs_are_summed_in_float32(layer, shape, autocast):
    """The sums of the same inputs and gradients are as exact as in float32."""
    torch.manual_seed(0)
    x, found = 3 + torch.randn(64, *shape).bfloat16(), []
    weights = torch.randn(64, *layer(x.float()).shape[1:]).bfloat16()
    for dtype in (torch.bfloat16, torch.float64):
        module = copy.deepcopy(layer).to(torch.float32 if autocast and dtype == torch.bfloat16 else dtype)
        preconditioner = KFAC(module, damping=1.0, **EVERY_STEP)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and dtype == torch.bfloat16):
            out = module(x.to(dtype))
        (out * weights.to(out.dtype)).sum().backward()  # whose gradient is the weights
        preconditioner.step()
        found.append([factor.double() for factor in preconditioner.factors("")])
    close(*found, 1e-5)


def test_a_layer_used_twice_or_not_at_all():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.never, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.last(torch.tanh(self.shared(torch.tanh(self.shared(x)))))

    torch.manual_seed(0)
    model, x = Twice().double(), torch.randn(6, 4, dtype=torch.float64)
    preconditioner = KFAC(model, kl_clip=None, **EVERY_STEP)
    for _ in range(2):
        model(x).pow(2).sum(1).mean().backward()
        preconditioner.step()
    assert set(preconditioner.cosines()) == {"shared", "last"}
    a, _ = preconditioner.factors("shared")
    inner = torch.tanh(model.shared(x))
    rows = torch.cat([torch.cat([t, torch.ones(6, 1, dtype=t.dtype)], 1) for t in (x, inner)])
    close(a, (rows.T @ rows / 6)[None], 1e-10)  # each use is a position
    assert not preconditioner.factors("never")[0].any()


def test_other_hooks_of_a_layer():
    """They may return something else than the layer's output, and what is not a tensor."""
    found = []
    for before in (True, False):
        model = nn.Sequential(nn.Linear(4, 3))
        model.load_state_dict({"0.weight": torch.ones(3, 4).cumsum(1), "0.bias": torch.zeros(3)})
        hook = lambda module, args, output: (output * 10,)  # noqa: E731
        if before:
            model[0].register_forward_hook(hook)
        preconditioner = KFAC(model, kl_clip=None, **EVERY_STEP)
        if not before:
            model[0].register_forward_hook(hook)
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
        model(x)[0].square().sum(1).mean().backward()
        preconditioner.step()
        found.append((*preconditioner.factors("0"), *gradients(model)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_derivatives_by_functions_count_for_nothing():
    """They count neither for factors nor as micro-batches."""
    found = []
    for also in (False, True):
        model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        x, y = torch.randn(6, 4), torch.arange(6) % 3
        preconditioner = KFAC(model, **EVERY_STEP)
        if also:
            parameters = {name: 100 * parameter.detach() for name, parameter in model.named_parameters()}

            def loss(of, x, y, model=model):
                return F.cross_entropy(torch.func.functional_call(model, of, (x,)), y)

            torch.func.grad(loss)(parameters, x, y)
            torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x[:, None], y[:, None])
        F.cross_entropy(model(x), y).backward()
        preconditioner.step()
        found.append((*preconditioner.factors("0"), *preconditioner.factors("2"), *gradients(model)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_forward_passes_without_backward_count_for_nothing():
    model, other = small(dtype=torch.float64), small(dtype=torch.float64)
    found = []
    for one, more in ((model, False), (other, True)):
        one[1].eval()
        preconditioner = KFAC(one, skip=["Norm"], **EVERY_STEP)
        if more:
            one(batch(5, dtype=torch.float64)[0])
            with torch.no_grad():
                one(batch(6, dtype=torch.float64)[0])
        x, y = batch(dtype=torch.float64)
        F.cross_entropy(one(x), y).backward()
        preconditioner.step()
        found.append(gradients(one))
    close(found[1], found[0], 1e-12)


def test_evaluation_is_not_captured():
    model = small()
    preconditioner = KFAC(model, **EVERY_STEP)
    run(model, preconditioner, 1)
    before = preconditioner.factors("3")[0].clone()
    model.eval()
    x, y = batch(3)
    F.cross_entropy(model(x), y).backward()
    model.train()
    preconditioner.step()
    assert torch.equal(preconditioner.factors("3")[0], before)


@pytest.mark.parametrize(
    "backend", ["eager", *(pytest.param(name, marks=pytest.mark.slow) for name in ("aot_eager", "inductor"))]
)
def test_compiled_models(backend):
    if backend == "inductor" and not (shutil.which("g++") and Path(sysconfig.get_path("include"), "Python.h").exists()):
        pytest.skip("no g++ or no headers of Python here")
    found = []
    for compiled in (False, True):
        model = small()
        preconditioner = KFAC(model, factor_update_steps=2, inv_update_steps=2)
        if compiled:
            model.compile(backend=backend)
        run(model, preconditioner, 4)
        found.append([*model.state_dict().values()])
    close([value.double() for value in found[1]], [value.double() for value in found[0]], 1e-4)


def test_inputs_are_not_kept_as_long_as_the_loss():
    model = nn.Linear(4, 3)
    KFAC(model)
    loss = model(torch.randn(5, 4)).sum()
    loss.backward()
    uses = [of for of in gc.get_objects() if type(of) is ForwardCall]
    assert uses and all(use.x is None for use in uses) and loss.grad_fn is not None


def test_copies_of_a_model_leave_the_preconditioner_alone():
    model = small()
    size = len(pickle.dumps(model))
    preconditioner = KFAC(model)
    copied, unpickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert len(pickle.dumps(model)) < size + 2000
    x, y = batch()
    for other in (copied, unpickled):
        F.cross_entropy(other(x), y).backward()
    assert preconditioner.memory_usage()["captured"] == 0
    with pytest.raises(TypeError, match="a preconditioner belongs to its model"):
        copy.deepcopy(preconditioner)
    run(model, preconditioner, 1)
    assert preconditioner.cosines()


def test_hooks_can_be_taken_away():
    model = small()
    preconditioner = KFAC(model, **EVERY_STEP)
    preconditioner.remove()
    run(model, KFAC(model, **EVERY_STEP), 1)
    assert preconditioner.memory_usage()["captured"] == 0
    with pytest.raises(RuntimeError, match=r"taken away with remove\(\)"):
        preconditioner.step()


class _Constant(torch.autograd.Function):
    """A function that returns no gradient for its input."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


def test_a_layer_without_a_gradient_from_what_follows():
    """It has none in one of two uses, or in all."""
    torch.manual_seed(0)
    twice, never = nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.ModuleList([twice, never])
    preconditioner = KFAC(model, kl_clip=None, **EVERY_STEP)
    x = torch.randn(8, 3)
    (twice(x) + _Constant.apply(twice(2 * x)) + _Constant.apply(never(x))).square().mean().backward()
    preconditioner.step()
    a, _ = preconditioner.factors("0")
    ones = torch.cat([x, torch.ones(8, 1)], 1)
    close(a, (ones.T @ ones / 8)[None])
    assert not preconditioner.blocks["1"].has_factors
    assert preconditioner.cosines().keys() == {"0"}


def test_padding_of_an_embedding_enters_no_factor():
    x, model = torch.tensor([[1, 2, 0, 0, 0], [3, 1, 2, 0, 0]]), nn.Embedding(4, 3, padding_idx=0).double()
    preconditioner = KFAC(model)
    out = model(x)
    (out**3).sum(1).mean(0).sum().backward()
    g_NTm = 3 * out.detach() ** 2  # of each sample's own loss
    preconditioner.step()
    a, g = preconditioner.factors("")
    rows = g_NTm[x != 0]
    torch.testing.assert_close(g[0], rows.T @ rows / len(rows))
    assert a.tolist() == [[0, 1, 1, 0.5]]


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_a_batch_without_samples_is_left_out(kind):
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    preconditioner = kind(model, **EVERY_STEP)
    for number in (5, 0, 5):
        model.zero_grad()
        model(torch.randn(number, 4)).square().sum().backward()
        preconditioner.step()
        assert all(gradient.isfinite().all() for gradient in gradients(model))
    assert preconditioner.cosines().keys() == {"0", "2"}


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_batch_without_images_is_left_out(kind, stride):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride, padding=1, bias=False), nn.GroupNorm(2, 4), nn.Flatten(), nn.LazyLinear(4),
        nn.LayerNorm(4),
    )  # fmt: skip
    model(torch.randn(5, 3, 4, 4))
    preconditioner = kind(model, **EVERY_STEP)
    for number in (5, 0, 5):
        model.zero_grad()
        model(torch.randn(number, 3, 4, 4)).square().sum().backward()
        before = preconditioner.factors("0")[0]
        preconditioner.step()
        assert all(gradient.isfinite().all() for gradient in gradients(model))
        assert torch.equal(preconditioner.factors("0")[0], before) == (number == 0)
    assert preconditioner.cosines().keys() == {"0", "1", "3", "4"}
    assert preconditioner.skipped() == 0
