"""A state, saved and loaded."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.device_counts import fake_tensors
from tests.trainer.kfac.networks import EVERY_STEP, batch, close, gradients, run, small
from trainer import models
from trainer.kfac import EKFAC, KFAC


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


@pytest.mark.parametrize(
    ("kind", "every"), [(KFAC, 1), (KFAC, 5), (EKFAC, 5)], ids=["every step", "every 5 steps", "EKFAC"]
)
def test_a_state_without_solutions(kind, every):
    """They are those of the factors again; EKFAC's diagonal needs the eigenvectors that it has."""
    both, preconditioners = [small(), small(seed=9)], []
    for model in both:
        preconditioners.append(kind(model, factor_update_steps=3, inv_update_steps=every))
    run(both[0], preconditioners[0], 7)
    whole, state = (copy.deepcopy(preconditioners[0].state_dict(with_solutions)) for with_solutions in (True, False))
    solutions = [layer["solution"] for layer in state["layers"].values()]
    assert any(solutions) is (kind is EKFAC) and any(layer["solution"] for layer in whole["layers"].values())
    both[1].load_state_dict(both[0].state_dict())
    preconditioners[1].load_state_dict(state)
    for model, preconditioner in zip(both, preconditioners, strict=True):
        run(model, preconditioner, 1, first=7)
    first, second = (preconditioner.blocks for preconditioner in preconditioners)
    assert all(torch.equal(a, b) for name in first for a, b in zip(*_factors(first[name], second[name]), strict=True))
    weights = (model.state_dict().values() for model in both)
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True)) is (every == 1 or kind is EKFAC)
    if kind is KFAC:
        for block in second.values():
            if not block.is_norm:
                a_factor, g_factor, before = block.factor("a"), block.factor("g"), block.solution
                wanted = block.solver.update_inverse(a_factor, g_factor, preconditioner.damping, before)
                assert all(torch.equal(before[name], tensor) for name, tensor in wanted.items())


def _factors(*blocks):
    return [[average.value for average in block.averages.values()] for block in blocks]


def test_a_state_without_solutions_takes_a_third_of_the_bytes():
    found = []
    with fake_tensors():
        preconditioner = KFAC(models.build("resnet50", num_classes=1000, in_channels=3))
        for block in preconditioner.blocks.values():
            if not block.is_norm:
                shapes = (block.layer.shapes()[name] for name in ("a", "g"))
                block.solution, block.has_solution = block.solver.identity(*map(torch.empty, shapes)), True
        for with_solutions in (True, False):
            leaves = torch.utils._pytree.tree_leaves(preconditioner.state_dict(with_solutions))
            found.append(sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor)) // 10**6)
    assert found == [923, 308]


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


def test_a_state_replaces_all_that_was():
    """It also replaces the bytes sent, and that a finite batch was seen."""
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
    close(gradients(model), raw, 0.004)  # except for the factor 1 + damping
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
    """Which layers the next step sums was decided by the intervals before the change."""
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


def test_failures_are_counted_over_a_resume(monkeypatch):
    model = small()
    preconditioner = KFAC(model, **EVERY_STEP)
    with monkeypatch.context() as patch:
        patch.setattr("trainer.kfac.solvers._eigh", lambda _: None)
        run(model, preconditioner, 1)
    preconditioner.load_state_dict(preconditioner.state_dict())
    assert preconditioner.fallbacks() == 3
