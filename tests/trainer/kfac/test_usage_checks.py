"""What a training loop may do wrong."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.trainer.kfac.networks import EVERY_STEP, batch, close, gradients, run, small
from trainer.kfac import EKFAC, KFAC


def test_models_and_steps_that_make_no_sense():
    with pytest.raises(TypeError, match=r"^KFAC.* unexpected keyword argument 'damp'"):
        KFAC(small(), damp=1)
    with pytest.raises(ValueError, match=r"^grad_scaler: 3 scales nothing; allowed: "):
        KFAC(small(), grad_scaler=3)
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


@pytest.mark.parametrize("way", ["compiled before", "evaluation"])
def test_what_is_never_seen_is_told_of(way, caplog):
    """It also keeps its raw gradients."""
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


def test_a_module_added_later_is_told_of(caplog):
    model = small()
    preconditioner = KFAC(model, **EVERY_STEP)
    model.append(nn.Linear(5, 5))
    run(model, preconditioner, 2)
    told = [record.message for record in caplog.records if "build a new one" in record.message]
    assert len(told) == 1 and "8" not in preconditioner.cosines()


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
    """Layers may also see a batch of another size in one of the micro-batches."""
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
    """The head that is not used in the second step is named."""
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


def test_a_layer_that_is_frozen_later_is_left_out(caplog):
    """Its last gradient stays, as no optimizer clears it."""
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
