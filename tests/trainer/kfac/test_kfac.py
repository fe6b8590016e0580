"""K-FAC in a training loop: what is captured, when, and what goes wrong."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import pickle
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from trainer.kfac import EKFAC, KFAC, reduce_to_owners
from trainer.kfac.curvature_block import layer_cost
from trainer.kfac.hooks import ForwardCall
from trainer.kfac.registration import make_layer
from trainer.kfac.solvers import Cholesky, damp_factors, precondition_units
from trainer.models import build

EVERY_STEP = {"factor_update_steps": 1, "inv_update_steps": 1}


def small(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True),
        nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5),
    ).to(dtype)  # fmt: skip


def batch(number=0, N=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(N, 3, 8, 8, generator=generator, dtype=dtype)
    return x, torch.randint(5, (N,), generator=generator)


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def run(model, preconditioner, steps, first=0, lr=0.05):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for number in range(first, first + steps):
        x, y = batch(number)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        preconditioner.step()
        optimizer.step()
    return optimizer


def close(found, wanted, tolerance=1e-6):
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= tolerance * b.norm() + 1e-12


# --- use ---


@pytest.mark.parametrize("solver", ["eigen", "cholesky"])
@pytest.mark.parametrize("name", [torch.optim.SGD, torch.optim.AdamW])
def test_any_optimizer_learns(solver, name):
    model, losses, lr = small(), [], 0.05 if name is torch.optim.SGD else 0.01
    preconditioner, optimizer = KFAC(model, solver=solver, **EVERY_STEP), name(model.parameters(), lr=lr)
    for _ in range(30):
        x, y = batch()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        preconditioner.step()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_all_layers_are_found_and_the_others_named_once(caplog):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return x * self.scale

    model = nn.Sequential(small(), Own())
    preconditioner = KFAC(model)
    assert preconditioner.unsupported == ["1 (Own)"]
    assert preconditioner.layers() == {"0.0": 0, "0.1": -1, "0.3": 0, "0.7": 0}
    assert [record.message for record in caplog.records] == ["K-FAC leaves the gradients of these as they are: 1 (Own)"]
    assert list(KFAC(model, skip=["BatchNorm", "^0.7$"]).layers()) == ["0.0", "0.3"]
    model[0][0].requires_grad_(False)
    assert list(KFAC(model).layers()) == ["0.1", "0.3", "0.7"]
    preconditioner, (x, y) = KFAC(model, **EVERY_STEP), batch()
    F.cross_entropy(model(x), y).backward()
    raw, weight = model[1].scale.grad.clone(), model[0][3].weight.grad.clone()
    preconditioner.step()
    assert torch.equal(model[1].scale.grad, raw) and not torch.equal(model[0][3].weight.grad, weight)
    assert set(preconditioner.cosines()) == {"0.1", "0.3", "0.7"}


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device: numbers that are taken out of tensors."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*arguments, **(options or {}))


def test_cosines_of_all_layers_wait_for_the_device_once():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    preconditioner = KFAC(model)
    model(torch.randn(8, 4)).square().mean().backward()
    preconditioner.step()
    with Waits() as waits:
        assert len(preconditioner.cosines()) == 5
    assert waits.count <= 1


def test_it_preconditions():
    """The cosine with the raw gradient is not 1 in any layer: the scaling of convolutions' factors is KFC's."""
    torch.manual_seed(0)
    model = build("resnet8", num_classes=5, in_channels=3)
    preconditioner = KFAC(model, damping=0.003, **EVERY_STEP)
    run(model, preconditioner, 5)
    cosines = preconditioner.cosines()
    assert set(cosines) == set(preconditioner.layers())
    assert all(0 < cosine < 0.98 for cosine in cosines.values()), cosines


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


def test_micro_batches_are_one_batch():
    """In evaluation mode, batch normalisation apart."""
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
        preconditioner = KFAC(model, grad_scaler=scaler, **EVERY_STEP)
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
    """Of the same inputs and gradients, the sums are as exact as in float32."""
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


def test_other_hooks_of_a_layer():
    """That return something else than its output, or nothing that is a tensor."""
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


def test_a_forward_of_its_own_is_left_alone():
    model = small()
    inner = model[7].forward
    model[7].forward = lambda x: 10 * inner(x)
    assert KFAC(model).unsupported == ["7 (Linear)"]


def test_derivatives_by_functions_count_for_nothing():
    """Neither for factors nor for micro-batches."""
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


def test_names_are_those_of_the_model_itself():
    model = small()
    assert KFAC(torch.compile(model, backend="eager")).layers() == KFAC(model).layers()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
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


@pytest.mark.parametrize("way", ["compiled before", "evaluation"])
def test_what_is_never_seen_is_told_of(way, caplog):
    """And keeps its raw gradients."""
    model, other = small(), small()
    if way == "compiled before":
        model = torch.compile(model, backend="eager")
        model(batch()[0])
        other(batch()[0])
    else:
        model.eval(), other.eval()
    preconditioner = KFAC(model, **EVERY_STEP)
    for number in range(2):
        for of in (model, other):
            x, y = batch(number)
            of.zero_grad()
            F.cross_entropy(of(x), y).backward()
        preconditioner.step()
        close(gradients(model), gradients(other), 1e-5)
    told = [record.getMessage() for record in caplog.records if record.name.startswith("trainer")]
    assert [message.rpartition(": ")[2] for message in told] == ["0, 1, 3, 7"]
    assert preconditioner.cosines() == {}


def test_a_layer_that_is_first_used_later_has_its_turn_later():
    model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
    preconditioner = KFAC(model, factor_update_steps=3, inv_update_steps=3)
    found = []
    for step in range(9):
        model.zero_grad()
        x = torch.randn(6, 4)
        out = model[0](x) if step < 2 else model[0](x) + model[1](x)
        out.square().sum(1).mean().backward()
        preconditioner.step()
        found.append(set(preconditioner.cosines()))
    assert found[:2] == [{"0"}] * 2 and found[-1] == {"0", "1"}
    assert found.index({"0", "1"}) <= 4


# --- turns ---


def test_layers_take_turns():
    """Each factor once in ten steps and each solution once in twenty, at first in shorter periods, and no step does
    more than its share.
    """
    torch.manual_seed(0)
    model = build("resnet20", num_classes=5, in_channels=3)
    preconditioner = KFAC(model, factor_update_steps=10, inv_update_steps=20)
    updates, inverses = [], []
    names = list(preconditioner.layers())
    matrices = [name for name in names if len(preconditioner.factors(name)) == 2]
    run(model, preconditioner, 1)
    for number in range(1, 61):
        weights = {name: preconditioner.blocks[name].averages["a"].weight.item() for name in matrices}
        states = {name: preconditioner.blocks[name].solution for name in matrices}
        run(model, preconditioner, 1, first=number)
        updates.append({n for n in matrices if preconditioner.blocks[n].averages["a"].weight.item() != weights[n]})
        inverses.append({n for n in matrices if preconditioner.blocks[n].solution is not states[n]})
    update_costs = {name: preconditioner.blocks[name].factor_cost() for name in matrices}
    inverse_costs = {name: layer_cost(preconditioner.blocks[name].layer).inverse for name in matrices}
    of_work = (updates, update_costs, [1, 2, 4, 8, 10]), (inverses, inverse_costs, [1, 2, 4, 8, 16, 20])
    for done, costs, first in of_work:
        every = first[-1]
        for begin, end in itertools.pairwise([*first, *range(2 * every, 61, every)]):
            of_period = done[begin - 1 : end - 1]
            assert sorted(name for of_step in of_period for name in of_step) == sorted(matrices)
            most = max(sum(costs[name] for name in of_step) for of_step in of_period)
            assert most <= sum(costs.values()) / len(of_period) + max(costs.values())
    together = KFAC(build("resnet8", num_classes=5, in_channels=3), stagger=False)
    schedule = together._updates.schedule
    of_steps = [{schedule.updates_factors(name, step, 10) for name in together.layers()} for step in range(21)]
    assert [step for step, found in enumerate(of_steps) if found == {True}] == [0, 1, 2, 4, 8, 10, 20]
    assert all(len(found) == 1 for found in of_steps)


def test_settings_may_change_between_steps():
    model = small()
    preconditioner = KFAC(model, damping=0.01, **EVERY_STEP)
    run(model, preconditioner, 1)
    preconditioner.damping, preconditioner.lr, preconditioner.factor_update_steps = 0.1, 0.01, 5
    assert (preconditioner.damping, preconditioner.settings.factor_update_steps) == (0.1, 5)
    run(model, preconditioner, 7, first=1)
    with pytest.raises(ValueError, match="damping: -1 is out of range; allowed: above 0"):
        preconditioner.damping = -1
    for name in ("solver", "dampng"):  # one that cannot be changed, and a misspelt one
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            setattr(preconditioner, name, 0.1)


# --- state ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ekfac_in_bfloat16(dtype):
    model = small(dtype=dtype)
    preconditioner = EKFAC(model, inv_dtype="bfloat16", **EVERY_STEP)
    for number in range(3):
        x, y = batch(number, dtype=dtype)
        F.cross_entropy(model(x), y).backward()
        preconditioner.step()
    assert all(0 < cosine < 1 - 1e-6 for cosine in preconditioner.cosines().values())


@pytest.mark.parametrize("inv_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("solver", ["eigen", "cholesky", "EKFAC"])
def test_a_resumed_run_is_the_same_to_the_bit(solver, inv_dtype, tmp_path):
    kind = EKFAC if solver == "EKFAC" else KFAC
    settings = {"factor_update_steps": 3, "inv_update_steps": 5, "inv_dtype": inv_dtype}
    settings |= {} if kind is EKFAC else {"solver": solver}
    model = small()
    preconditioner = kind(model, **settings)
    optimizer = run(model, preconditioner, 7)
    torch.save([model.state_dict(), optimizer.state_dict(), preconditioner.state_dict()], tmp_path / "state")
    again = small(seed=9)
    other = kind(again, **settings)
    weights, _, state = torch.load(tmp_path / "state", weights_only=True)
    again.load_state_dict(weights)
    other.load_state_dict(state)
    run(model, preconditioner, 9, first=7)
    run(again, other, 9, first=7)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


@pytest.mark.parametrize(("before", "after"), [(None, "bfloat16"), ("bfloat16", None)])
def test_a_state_is_rounded_as_the_settings_say(before, after):
    model = small()
    preconditioner = KFAC(model, inv_dtype=before, **EVERY_STEP)
    run(model, preconditioner, 2)
    other = KFAC(small(), inv_dtype=after, **EVERY_STEP)
    other.load_state_dict(preconditioner.state_dict())
    for name, block in other.blocks.items():
        for key, tensor in block.solution.items():
            wanted = preconditioner.blocks[name].solution[key]
            assert tensor.dtype == (torch.bfloat16 if after and tensor.dim() == 3 else torch.float32)
            assert torch.equal(tensor, wanted.to(tensor.dtype))


def test_a_state_of_another_model_is_refused():
    preconditioner = KFAC(small())
    state = preconditioner.state_dict()
    with pytest.raises(ValueError, match=r"lack \['0', '1', '3', '7'\], and have \[\] besides"):
        KFAC(small()).load_state_dict({**state, "layers": {}})
    with pytest.raises(ValueError, match=r"lack \[\], and have \['7'\] besides"):
        KFAC(small(), skip="7").load_state_dict(state)
    wider = small()
    wider[7] = nn.Linear(6, 4)
    with pytest.raises(ValueError, match="layer 7: the state's factors are"):
        KFAC(wider).load_state_dict(state)
    linear, embedding = KFAC(nn.Sequential(nn.Linear(2, 4))), nn.Sequential(nn.Embedding(6, 4))
    with pytest.raises(ValueError, match="layer 0: the state's factors are"):  # as many elements
        KFAC(embedding).load_state_dict(linear.state_dict())
    with pytest.raises(ValueError, match="solver: the state is of eigen, not cholesky"):
        KFAC(small(), solver="cholesky").load_state_dict(state)


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


# --- bad input ---


@pytest.mark.parametrize(
    "settings",
    [{"damping": 0}, {"damping": float("nan")}, {"factor_update_steps": 0}, {"inv_update_steps": 1.5},
     {"factor_decay": 1.0}, {"kl_clip": 0}, {"lr": -1}, {"solver": "qr"}, {"stagger": 1}, {"damping": True},
     {"inv_dtype": "half"}, {"inv_dtype": torch.bfloat16}],
    ids=str,
)  # fmt: skip
def test_bad_settings_are_named(settings):
    with pytest.raises(ValueError, match=f"^{next(iter(settings))}: .* allowed: "):
        KFAC(small(), **settings)


def test_models_and_steps_that_make_no_sense():
    with pytest.raises(TypeError, match="unexpected keyword argument 'damp'"):
        KFAC(small(), damp=1)
    with pytest.raises(ValueError, match="no layer that K-FAC can precondition"):
        KFAC(nn.Sequential(nn.ReLU()))
    with pytest.raises(ValueError, match="no shape yet"):
        KFAC(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(RuntimeError, match=r"no layer has a gradient: call loss\.backward\(\) before step\(\)"):
        KFAC(small()).step()


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_a_step_without_a_backward_pass_is_refused(kind):
    """Gradients are not preconditioned twice."""
    model = small()
    preconditioner = kind(model, **EVERY_STEP)
    run(model, preconditioner, 2)
    with pytest.raises(RuntimeError, match=r"those that the last step\(\) left .*: call loss\.backward\(\)"):
        preconditioner.step()
    x, y = batch(3)
    F.cross_entropy(model(x), y).backward()  # added to them
    preconditioner.step()


def test_sharded_parameters_are_refused(tmp_path):
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model = fully_shard(nn.Sequential(nn.Linear(3, 2)), mesh=mesh)
        with pytest.raises(ValueError, match=r"0: its parameters are sharded \(FSDP\).*use DDP"):
            KFAC(model)
        model = nn.Sequential(nn.Linear(3, 2))
        preconditioner = KFAC(model)
        fully_shard(model, mesh=mesh)
        model(torch.randn(4, 3)).square().sum().backward()
        with pytest.raises(ValueError, match=r"0: its parameters are sharded \(FSDP\).*use DDP"):
            preconditioner.step()
    finally:
        torch.distributed.destroy_process_group()


def test_parameters_that_fsdp1_has_flattened_are_refused():
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].weight._fsdp_flattened = True  # it runs on GPUs only
    with pytest.raises(ValueError, match=r"0: its parameters are sharded \(FSDP\).*use DDP"):
        KFAC(model)


def test_a_module_added_later_is_told_of(caplog):
    model = small()
    preconditioner = KFAC(model, **EVERY_STEP)
    model.append(nn.Linear(5, 5))
    run(model, preconditioner, 2)
    told = [record.message for record in caplog.records if "build a new one" in record.message]
    assert len(told) == 1 and "8" not in preconditioner.cosines()


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


def test_a_first_decomposition_that_fails_leaves_no_diagonal_behind(monkeypatch):
    """EKFAC's, which then is as if the second one were the first."""
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
    """Where the curvature has one direction, and rounding is more than the damping in the other."""
    torch.manual_seed(0)
    for samples, size, damping in itertools.product((1, 2, 64), (1.0, 1e3, 1e5), (1e-8, 1e-4, 3e-3)):
        rows = size * torch.randn(256, 1, 2) * (1 + 1e-4 * torch.randn(256, samples, 2))
        factor = torch.einsum("uni,unj->uij", rows, rows) / samples
        gradient = rows.mean(1)
        folded = torch.stack([factor[:, 0, 0], factor[:, 0, 1], factor[:, 1, 1]], -1)
        found = precondition_units(folded, gradient, damping)
        assert (F.cosine_similarity(found.double(), gradient.double(), dim=-1) > 0).all()
        assert ((found * gradient.norm(dim=-1, keepdim=True)).norm(dim=-1) < 1000).all()  # 1 without rounding


def test_hooks_can_be_taken_away():
    model = small()
    preconditioner = KFAC(model, **EVERY_STEP)
    preconditioner.remove()
    run(model, KFAC(model, **EVERY_STEP), 1)
    assert preconditioner.memory_usage()["captured"] == 0
    with pytest.raises(RuntimeError, match=r"taken away with remove\(\)"):
        preconditioner.step()


# --- misuse ---


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


def test_a_second_backward_pass_is_refused():
    model = small()
    KFAC(model)
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward pass through the same forward pass"):
        loss.backward()


def test_an_input_modified_in_place_is_refused():
    model = nn.Linear(4, 3)
    KFAC(model)
    x = torch.randn(5, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    x.mul_(10)  # autograd keeps a copy in bfloat16
    with pytest.raises(RuntimeError, match="Linear: its input was modified in place"):
        out.sum().backward()


def test_a_layer_used_for_different_numbers_of_samples_is_refused():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, times):
            return self.layer(self.layer(x).repeat(times, 1))

    model = Twice()
    KFAC(model)
    model(torch.randn(5, 4), 1).sum().backward()
    KFAC(model := Twice())
    with pytest.raises(RuntimeError, match="Linear: used for 20 and for 5 samples in one forward pass"):
        model(torch.randn(5, 4), 4).sum().backward()
    EKFAC(model := Twice())
    with pytest.raises(RuntimeError, match="Linear: used twice in a forward pass, where EKFAC knows no diagonal"):
        model(torch.randn(5, 4), 1).sum().backward()


def test_more_micro_batches_than_told_are_warned_of(caplog):
    model = small()
    KFAC(model)
    for number in range(3):
        x, y = batch(number)
        F.cross_entropy(model(x), y).backward()
    assert [record.message for record in caplog.records] == [
        "K-FAC: more micro-batches than accumulation_steps = 1 before step(); the first ones count (call discard() "
        "after a backward pass that no step() follows, and remove() a preconditioner that is not used any more)"
    ]


def test_a_short_accumulation_is_nothing_to_warn_of(caplog):
    """Nor are layers that see batches of another size in one of its micro-batches."""
    torch.manual_seed(0)
    body, heads = nn.Linear(4, 4), [nn.Linear(4, 3), nn.Linear(4, 3)]
    preconditioner = KFAC(nn.ModuleList([body, *heads]), accumulation_steps=4)
    for number, head in zip((5, 7), heads, strict=True):
        (head(body(torch.randn(number, 4))).square().sum(1).mean() / 4).backward()
    preconditioner.step()
    assert not caplog.records


def test_a_layer_that_is_taken_out_is_left_alone(caplog):
    """Its last gradients stay with it, and neither change nor enter the clip."""
    model = nn.Sequential(small(), nn.Linear(5, 5))
    preconditioner = KFAC(model, **EVERY_STEP)
    run(model, preconditioner, 2)
    head, found = model.pop(1), []
    left = head.weight.grad.clone()
    for kept in (True, False):
        copied = copy.deepcopy(model) if kept else model
        other = KFAC(copied, **EVERY_STEP) if kept else preconditioner
        if kept:
            states = preconditioner.state_dict()
            layers = {name: of for name, of in states["layers"].items() if name != "1"}
            other.load_state_dict(states | {"layers": layers})
        caplog.clear()
        run(copied, other, 1, first=2)
        found.append(gradients(copied))
    close(found[1], found[0], 0)
    assert torch.equal(head.weight.grad, left) and "1" not in preconditioner.cosines()
    assert [record.message for record in caplog.records] == [
        "K-FAC leaves these alone, which are not in the model any more: 1"
    ]


def test_gradients_that_are_not_cleared_are_warned_of(caplog):
    """Of a head that is not used in the second step."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)])
    preconditioner = KFAC(model, **EVERY_STEP)
    for head in (0, 1, 1):
        model[0].zero_grad()
        model[1 + head](model[0](torch.randn(5, 4))).square().sum(1).mean().backward()
        preconditioner.step()
    (record,) = caplog.records
    assert "no backward pass has changed since the last step()" in record.message and record.message.endswith("here: 1")


def test_a_layer_that_learns_later_is_told_of(caplog):
    model = small()
    model[3].requires_grad_(False)
    preconditioner = KFAC(model, **EVERY_STEP)
    run(model, preconditioner, 1)
    model[3].requires_grad_(True)
    run(model, preconditioner, 2)
    (record,) = (record for record in caplog.records if "trainable parameters have changed" in record.message)
    assert record.message.endswith(": 3.bias, 3.weight")


def test_what_is_discarded_counts_for_nothing():
    """After a backward pass of another loss."""
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
    """Of zeros, which a solution would be made of."""
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


def test_a_forward_pass_without_backward_does_not_hide_checkpointed_ones():
    model, x = nn.Linear(4, 4), torch.randn(6, 4, requires_grad=True)
    preconditioner = KFAC(model, **EVERY_STEP)
    model(x)
    for _ in range(2):
        model.zero_grad()
        checkpoint(model, x, use_reentrant=True).square().sum(1).mean().backward()
        preconditioner.step()
    assert preconditioner.cosines().keys() == {""}


@pytest.mark.parametrize("sign", [1, -1])
def test_a_step_uphill_is_bounded_too(sign, monkeypatch):
    """As rounded inverses may lead to."""
    model = nn.Linear(4, 3)
    preconditioner = KFAC(model, solver="cholesky", kl_clip=1e-6, lr=1.0)
    model(torch.randn(6, 4)).square().sum(1).mean().backward()
    monkeypatch.setattr(KFAC, "_solve", lambda self, block, gradient: sign * gradient)
    raw = make_layer(model).gradient().clone()
    preconditioner.step()
    found = make_layer(model).gradient()
    assert (found * raw).sum().item() == pytest.approx(sign * 1e-3 * raw.norm().item(), rel=1e-4)


def run64(model, preconditioner):
    x, y = batch(0, dtype=torch.float64)
    F.cross_entropy(model(x), y).backward()
    preconditioner.step()


def test_a_layer_that_is_frozen_later_is_left_out(caplog):
    """Its gradient of before stays, which no optimizer clears any more."""
    model = small()
    preconditioner = KFAC(model, **EVERY_STEP)
    run(model, preconditioner, 2)
    model[3].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    stale = model[3].weight.grad.clone()
    for number in range(2):
        x, y = batch(number)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        preconditioner.step()
    assert torch.equal(model[3].weight.grad, stale) and preconditioner.cosines().keys() == {"0", "1", "7"}
    assert not any("some of whose parameters" in record.message for record in caplog.records)
    model[7].bias.requires_grad_(False)
    F.cross_entropy(model(x), y).backward()
    raw = model[7].weight.grad.clone()
    preconditioner.step()
    assert torch.equal(model[7].weight.grad, raw)
    assert next(of.message for of in caplog.records if "some of whose parameters" in of.message).endswith(": 7")


def test_inputs_are_not_kept_as_long_as_the_loss():
    model = nn.Linear(4, 3)
    KFAC(model)
    loss = model(torch.randn(5, 4)).sum()
    loss.backward()
    uses = [of for of in gc.get_objects() if type(of) is ForwardCall]
    assert uses and all(use.x is None for use in uses) and loss.grad_fn is not None


def test_layers_used_in_turns_are_all_preconditioned():
    """Each of two heads in every other step."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)])
    preconditioner = KFAC(model, factor_update_steps=10, inv_update_steps=10)
    weights = []
    for step in range(100):
        model.zero_grad()
        model[1 + step % 2](model[0](torch.randn(6, 4))).square().sum(1).mean().backward()
        preconditioner.step()
        weights.append([preconditioner.blocks[name].averages["a"].weight.item() for name in ("1", "2")])
    late = [weights[step] for step in (40, 60, 80, 99)]
    assert all(a[head] < b[head] for a, b in itertools.pairwise(late) for head in (0, 1))


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


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv2d(2, 3, 3), (2, 5, 5)),
        (nn.Conv1d(2, 3, 3), (2, 5)),
        (nn.Linear(4, 3), (4,)),
        (nn.LayerNorm((2, 4)), (2, 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_an_input_without_samples_is_refused(module, shape, kind):
    preconditioner = kind(module)
    with pytest.raises(RuntimeError, match=r"its input of shape \(.*\) has no dimension for the samples"):
        module(torch.randn(shape)).sum().backward()
    preconditioner.remove()


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


def test_what_is_no_parameter_is_not_taken():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 3))
    assert list(KFAC(model).layers()) == ["1"]


def test_what_learns_besides_the_layers_is_named():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class WithMore(nn.Linear):
        def __init__(self, *args):
            super().__init__(*args)
            self.more = nn.Parameter(torch.ones(()))

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Scaled(4, 4), WithMore(4, 4))
    model[1].weight = model[0].weight
    preconditioner = KFAC(model)
    assert list(preconditioner.layers()) == ["3"]
    assert preconditioner.unsupported == ["0 (Linear)", "1 (Linear)", "2 (Scaled)", "3.more"]  # of tied weights, all
    model[1].weight = nn.Parameter(torch.ones(4, 4))
    assert list(KFAC(model, skip=WithMore).layers()) == ["0", "1"]
    with pytest.raises(ValueError, match="no layer"):
        KFAC(model, skip=nn.Linear)  # with all its kinds


def test_attention_never_calls_its_projection():
    assert KFAC(nn.TransformerEncoderLayer(8, 2, 8)).unsupported == [
        "self_attn.in_proj_weight", "self_attn.in_proj_bias",
        "self_attn.out_proj (NonDynamicallyQuantizableLinear)",
    ]  # fmt: skip


@pytest.mark.parametrize("skip", ["BatchNorm", ["BatchNorm"], nn.BatchNorm2d, [nn.BatchNorm2d]])
def test_skip_by_name_or_type(skip):
    assert list(KFAC(small(), skip=skip).layers()) == ["0", "3", "7"]


def test_a_bad_pattern_is_named():
    with pytest.raises(ValueError, match=r"skip: '\(' is not a regular expression"):
        KFAC(small(), skip="(")
    with pytest.raises(ValueError, match="skip: 3 is not a regular expression and not a class"):
        KFAC(small(), skip=[3])


def test_what_is_no_model():
    with pytest.raises(TypeError, match=r"model: list is not a torch\.nn\.Module"):
        KFAC([nn.Linear(2, 2)])


def test_complex_layers_keep_their_gradients():
    assert KFAC(nn.Sequential(nn.Linear(3, 2, dtype=torch.complex64), nn.Linear(3, 2))).unsupported == ["0 (Linear)"]


def test_bare_parameters_are_named_by_themselves():
    model = nn.Sequential(nn.Linear(3, 3))
    model.token = nn.Parameter(torch.zeros(3))
    assert KFAC(model).unsupported == ["token"]


def test_a_state_replaces_all_that_was():
    """Also what was sent, and that a finite batch was seen."""
    model = small()
    preconditioner = KFAC(model, kl_clip=None, **EVERY_STEP)
    x, y = batch()
    (F.cross_entropy(model(x), y) * math.inf).backward()
    preconditioner.step()
    before = copy.deepcopy(preconditioner.state_dict())
    model.load_state_dict(small().state_dict())
    run(model, preconditioner, 2)
    preconditioner.communicator.bytes_sent["factors"] = 1000
    preconditioner.load_state_dict(before)
    model.zero_grad()
    F.cross_entropy(model.eval()(x), y).backward()  # nothing is captured
    raw = gradients(model)
    preconditioner.step()
    close(gradients(model), raw, 0.004)  # but for 1 + damping
    assert set(preconditioner.communication().values()) == {0}


def test_states_that_are_none():
    for states in ([], [{}]):
        with pytest.raises(ValueError, match="states: none, or not those of a preconditioner"):
            KFAC(small()).load_state_dict(*states)
    with pytest.raises(ValueError, match=r"states: not dictionaries; call load_state_dict\(\*states\)"):
        KFAC(small()).load_state_dict([KFAC(small()).state_dict()])
    state = KFAC(small()).state_dict()
    del state["layers"]["7"]["averages"]
    preconditioner = KFAC(small())
    with pytest.raises(ValueError, match="layer 7: the state lacks averages"):
        preconditioner.load_state_dict(state | {"steps": 5})
    assert preconditioner.steps == 0


def test_states_of_several_steps_are_refused():
    model, states = small(), []
    preconditioner = KFAC(model)
    for number in range(2):
        run(model, preconditioner, 1)
        state = copy.deepcopy(preconditioner.state_dict())
        some = list(state["layers"])[number::2]
        states.append(state | {"layers": {name: state["layers"][name] for name in some}})
    with pytest.raises(ValueError, match="states: of different runs or steps, with steps = 1, 2"):
        preconditioner.load_state_dict(*states)


def test_intervals_that_have_changed_resume_to_the_bit():
    """What the next step captures has been decided with those of before."""
    found = []
    for resumed in (False, True):
        model = small()
        preconditioner = KFAC(model, factor_update_steps=1, inv_update_steps=5)
        run(model, preconditioner, 6)
        preconditioner.factor_update_steps = 4
        run(model, preconditioner, 7, first=6)
        if resumed:
            state = copy.deepcopy(preconditioner.state_dict())
            preconditioner.remove()
            preconditioner = KFAC(model, factor_update_steps=1, inv_update_steps=5)  # as at first
            preconditioner.load_state_dict(state)
        for number in range(13, 20):
            x, y = batch(number)
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            preconditioner.factor_update_steps = 4  # as a schedule does, before the step
            preconditioner.step()
        found.append(gradients(model))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class _Constant(torch.autograd.Function):
    """For whose gradient it gives none."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


def test_a_layer_without_a_gradient_from_what_follows():
    """In one of two uses, or in all."""
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


def test_gradients_that_ddp_does_not_reduce_have_no_owners():
    model = small()
    with pytest.raises(ValueError, match="model: a Sequential; allowed: DistributedDataParallel"):
        reduce_to_owners(model, KFAC(model))


def test_layers_on_several_devices_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="its layers are on several devices: cpu, meta; allowed: one"):
        KFAC(model)


def test_an_embedding_costs_no_more_than_it_has_rows():
    blocks = KFAC(nn.Sequential(nn.Embedding(50_000, 4), nn.Linear(9, 4))).blocks
    for block in blocks.values():
        block.num_rows = 7
    assert [block.factor_cost() for block in blocks.values()] == [7 * (1 + 4 * 4), 7 * (10 * 10 + 4 * 4)]


def test_failures_are_counted_over_a_resume(monkeypatch):
    model = small()
    preconditioner = KFAC(model, **EVERY_STEP)
    with monkeypatch.context() as patch:
        patch.setattr("trainer.kfac.solvers._eigh", lambda _: None)
        run(model, preconditioner, 1)
    preconditioner.load_state_dict(preconditioner.state_dict())
    assert preconditioner.fallbacks() == 3
