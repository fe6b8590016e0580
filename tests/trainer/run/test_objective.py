"""Losses, mixing, averages and precise statistics against their definitions, in float64."""

import contextlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from datapipe.loaders import Batch
from trainer.config.recipe import load_recipe
from trainer.ranks.world import World
from trainer.run import loop, objective
from trainer.run.job import build_network
from trainer.run.state import Losses, State
from trainer.step.ema import Average, EmaSettings
from trainer.step.losses import LOSSES, begin_bias, per_sample_loss
from trainer.step.mixing import MixedBatch, mix
from trainer.step.precise_bn import estimate_statistics
from trainer.step.precision import Precision

FLOAT32 = Precision("off", "cpu", None)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_are_those_of_the_smoothed_target(name, smoothing):
    torch.manual_seed(0)
    logits = torch.randn(6, 5, dtype=torch.float64) * 3
    labels = torch.tensor([0, 4, 2, 2, 1, 3])
    target = torch.full((6, 5), smoothing / 5, dtype=torch.float64)
    target[torch.arange(6), labels] += 1 - smoothing
    if name == "bce":
        expected = nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="none").sum(1)
    else:
        expected = -(target * logits.log_softmax(1)).sum(1)
    torch.testing.assert_close(per_sample_loss(name, logits, labels, smoothing), expected)


def test_large_logits_have_a_finite_loss_and_gradient():
    for name in LOSSES:
        logits = torch.tensor([[300.0, -300.0, 0.0]], requires_grad=True)
        loss = per_sample_loss(name, logits, torch.tensor([1]))
        loss.sum().backward()
        assert loss.isfinite().all()
        assert logits.grad.isfinite().all()


def test_bce_begins_with_the_odds_of_a_class():
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 50))
    before = module[2].bias.clone()
    begin_bias("cross_entropy", module)
    assert torch.equal(module[2].bias, before)
    begin_bias("bce", module)
    torch.testing.assert_close(module[2].bias.sigmoid(), torch.full((50,), 1 / 50))
    begin_bias("bce", nn.Sequential(nn.Linear(3, 1)))  # one class, whose odds are infinite


def mixed(mixup, cutmix, seed=(0, 1, 2), count=4, valid=None):
    images = torch.randn(count, 3, 8, 6, generator=torch.Generator().manual_seed(0))
    valid = torch.ones(count, dtype=torch.bool) if valid is None else valid
    batch = MixedBatch(images, torch.arange(count), valid)
    return batch, mix(batch, mixup, cutmix, seed)


def test_nothing_is_mixed_without_alpha():
    batch, result = mixed(0, 0)
    assert result is batch


@given(seed=st.tuples(st.integers(0, 2**31), st.integers(0, 10**6), st.integers(0, 4095)), alpha=st.floats(0.01, 10))
def test_mixup_is_a_weighted_sum_of_images_and_labels(seed, alpha):
    batch, result = mixed(alpha, 0, seed)
    assert 0 <= result.weight <= 1
    partners = result.others  # a label is its image's number here
    assert sorted(partners.tolist()) == [0, 1, 2, 3]
    assert (partners != batch.labels).all()
    expected = result.weight * batch.images + (1 - result.weight) * batch.images[partners]
    torch.testing.assert_close(result.images, expected)


@given(seed=st.tuples(st.integers(0, 2**31), st.integers(0, 10**6)), alpha=st.floats(0.01, 10))
def test_cutmix_replaces_one_rectangle_and_weighs_by_what_is_left(seed, alpha):
    batch, result = mixed(0, alpha, seed)
    assert torch.equal(batch.images, mixed(0, 0)[0].images)  # not changed
    replaced = (result.images != batch.images).any(1)
    assert torch.equal(result.images.where(~replaced[:, None], 0), batch.images.where(~replaced[:, None], 0))
    for image, other in enumerate(result.others.tolist()):
        assert torch.equal(result.images[image][:, replaced[image]], batch.images[other][:, replaced[image]])
    assert (replaced == replaced[0]).all()  # the same rectangle
    rows, columns = replaced[0].any(1), replaced[0].any(0)
    assert torch.equal(replaced[0], rows[:, None] & columns[None, :])
    assert math.isclose(result.weight, 1 - replaced[0].float().mean().item(), abs_tol=1e-6)


def test_draws_depend_on_the_seed_alone_and_have_the_distribution():
    assert torch.equal(mixed(0.5, 1.0)[1].images, mixed(0.5, 1.0)[1].images)
    weights = np.array([mixed(0.4, 0, (7, step))[1].weight for step in range(2000)])
    assert abs(weights.mean() - 0.5) < 0.03
    assert abs(weights.var() - 0.25 / 1.8) < 0.01  # of Beta(α, α): 1 / (4 (2 α + 1))
    both = [mixed(0.4, 1.0, (7, step)) for step in range(200)]
    cut = sum(bool((result.images == batch.images).any()) for batch, result in both)
    assert 60 < cut < 140


def test_an_image_mixed_with_a_bad_one_is_not_learnt_from():
    valid = torch.tensor([True, False, True, True])
    _, result = mixed(1.0, 0, valid=valid)
    assert (~result.valid).sum() == 2
    assert not result.valid[1]
    assert not result.valid[result.others == 1].any()


def test_a_single_image_is_mixed_with_itself():
    batch, result = mixed(1.0, 0, count=1)
    torch.testing.assert_close(result.images, batch.images)


def test_the_average_is_an_exponential_one():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
    average = Average(module, EmaSettings(half_life_steps=4, update_every_steps=2))
    assert not average.is_on
    states = []
    for step in range(1, 8):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter))
        module(torch.randn(5, 2, dtype=torch.float64))
        states.append({name: value.clone() for name, value in module.state_dict().items()})
        average.update(step)
    expected = states[0]
    for step in (2, 4, 6):
        weight = 1 - 0.5 ** (2 / 4)
        expected = {
            name: torch.lerp(expected[name].double(), states[step - 1][name].double(), weight) for name in expected
        }
    with average.in_place():
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                torch.testing.assert_close(value, expected[name])
        module[0].bias.data.zero_()  # what changes in the block is the average
        saved = {name: value.clone() for name, value in module.state_dict().items()}
    for name, value in module.state_dict().items():
        assert torch.equal(value, states[-1][name])
    other = Average(module, EmaSettings(half_life_steps=4))
    other.load_state_dict(saved)
    with other.in_place():
        assert not module[0].bias.any()
    other.load_state_dict(None)
    assert not other.is_on
    with pytest.raises(KeyError):
        other.load_state_dict({"0.weight": module[0].weight})


def test_without_a_half_life_there_is_no_average():
    module = nn.Linear(2, 2)
    average = Average(module, EmaSettings())
    average.update(1)
    average.load_state_dict(module.state_dict())
    with average.in_place():
        assert not average.is_on


def batches(count):
    for i in range(count):
        images = (
            torch.full((4, 2, 3, 3), i, dtype=torch.uint8) + torch.arange(4, dtype=torch.uint8)[:, None, None, None]
        )
        nothing = torch.zeros(4, dtype=torch.int64)
        yield Batch(images, nothing, nothing, nothing.bool())


@pytest.mark.parametrize("count", [1, 3])
def test_precise_statistics_are_means_over_batches(count):
    module = nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)).eval()
    module.register_forward_pre_hook(lambda _, inputs: inputs[0].float())
    weights = [parameter.clone() for parameter in module.parameters()]
    for _ in range(2):  # what was before has no effect
        estimate_statistics(module, batches(9), count, FLOAT32)
        torch.testing.assert_close(module[0].running_mean, torch.full((2,), 1.5 + (count - 1) / 2))
        variance = torch.arange(4).float().repeat_interleave(9).var()
        torch.testing.assert_close(module[0].running_var, variance.expand(2))
    assert module[0].momentum == module[2].momentum == 0.1
    assert all(torch.equal(*pair) for pair in zip(module.parameters(), weights, strict=True))


@pytest.mark.parametrize("channels_last", [True, False])
def test_a_network_normalises_its_input_in_its_graph(channels_last, recipe_file):
    changes = [
        "data.mean=[0.1, 0.2, 0.3]",
        "data.std=[0.4, 0.5, 0.6]",
        f"train.channels_last={str(channels_last).lower()}",
    ]
    recipe = load_recipe(str(recipe_file), changes)
    module, _ = build_network(recipe, World(), SimpleNamespace(channels=3, num_classes=4))
    inputs, graphs = [], []
    module.conv1.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    torch.manual_seed(0)
    images = torch.randint(0, 256, (4, 16, 16, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    mean, std = (
        torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1) for values in (recipe.data.mean, recipe.data.std)
    )
    expected = ((images.double() / 255 - mean) / std).float()
    format_ = torch.channels_last if channels_last else torch.contiguous_format
    for pixels in (images, images.float()):  # as they are, and once mixed
        kept = pixels.clone()
        logits = module(pixels)
        torch.testing.assert_close(inputs[-1], expected, rtol=1e-5, atol=1e-6)
        assert inputs[-1].is_contiguous(memory_format=format_)
        assert torch.equal(pixels, kept)
    module.conv1._forward_pre_hooks.clear()

    def keep(graph, examples):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()  # else sizes that earlier tests had would make these variables
    module.compile(backend=keep)
    torch.testing.assert_close(module(images), logits, rtol=1e-4, atol=1e-4)
    (graph,) = graphs
    inputs = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    assert [tensor.dtype for tensor in inputs if tensor.shape == images.shape] == [torch.uint8]


def as_shares(_module, inputs):
    return inputs[0].double() / 255


def job_of(module, scaler=None, optimizer=None, **its):
    """Return what a step needs of a job."""
    data = SimpleNamespace(mixup=its.pop("mixup", 0), cutmix=its.pop("cutmix", 0))
    settings = {"loss": "cross_entropy", "label_smoothing": 0.0, "accumulation_steps": 1}
    train = SimpleNamespace(seed=0, compile_mode="default", **(settings | its))
    return SimpleNamespace(
        recipe=SimpleNamespace(data=data, train=train, optimizer=optimizer), model=module, module=module, world=World(),
        precision=SimpleNamespace(autocast=contextlib.nullcontext),
        scaler=scaler or torch.amp.GradScaler("cpu", enabled=False),
    )  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0), (0, 1.0), (0.4, 1.0)])
def test_mixed_images_have_mixed_targets(loss, mixup, cutmix):
    """Both losses against a target that is a vector, in float64."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 6, 5)).double()
    module.register_forward_pre_hook(as_shares)
    images, labels = torch.randint(0, 256, (4, 3, 8, 6), dtype=torch.uint8), torch.tensor([0, 3, 4, 1])
    batch = Batch(images, labels, torch.arange(4), torch.ones(4, dtype=torch.bool))
    weights = []
    for step in range(6):
        result = mix(MixedBatch(images, labels, batch.valid), mixup, cutmix, (0, step, 0))
        target = result.weight * nn.functional.one_hot(labels, 5)
        target = 0.9 * (target + (1 - result.weight) * nn.functional.one_hot(result.others, 5)) + 0.1 / 5
        logits = module(result.images)
        if loss == "bce":
            terms = target * logits.sigmoid().log() + (1 - target) * (1 - logits.sigmoid()).log()
        else:
            terms = target * logits.log_softmax(1)
        job = job_of(module, loss=loss, label_smoothing=0.1, mixup=mixup, cutmix=cutmix)
        computed = objective.batch_loss(job, batch, step, answers := []).double()
        assert answers == []  # an image of two labels is neither right nor wrong
        torch.testing.assert_close(computed, -terms.sum(1).mean(), rtol=1e-5, atol=0)
        weights.append(result.weight)
    assert max(abs(weight - 0.5) for weight in weights) > 0.1  # a half would weigh both alike


class Tenfold:
    """A preconditioner that only makes gradients longer."""

    def __init__(self, module):
        self.module = module

    def step(self):
        for parameter in self.module.parameters():
            parameter.grad *= 10


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_the_optimizers_gradients_are_clipped_as_a_whole(max_norm, monkeypatch):
    """After they are unscaled and preconditioned: they have at most that norm, and their direction."""
    monkeypatch.setattr(loop, "set_for_step", lambda *_: None)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    batch = Batch(torch.randn(8, 6), torch.arange(8) % 3, torch.arange(8), torch.ones(8, dtype=torch.bool))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    job = job_of(module, scaler=scaler, optimizer=SimpleNamespace(max_grad_norm=max_norm))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    job.optimizer, job.preconditioner, job.adaptive_damping = optimizer, Tenfold(module), None
    job.learning_rate = lambda step: 1.0
    job.recipe.kfac, job.steps_per_epoch, job.average = None, 1, SimpleNamespace(update=lambda step: None)
    before = [parameter.detach().double() for parameter in module.parameters()]
    loss = objective.backward(job, state := State(Losses()), batch)
    gradients = [10 * parameter.grad.double() / 1024 for parameter in module.parameters()]
    norm = sum((gradient**2).sum() for gradient in gradients).sqrt()
    assert norm > 0.5
    loop._update(job, state, batch, loss)
    for parameter, old, gradient in zip(module.parameters(), before, gradients, strict=True):
        expected = old - gradient * min(1.0, max_norm / norm.item())
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_gradients_of_parts_are_those_of_the_whole(count):
    """In float64, of a network without batch normalisation; invalid samples lie in one part only."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    images = torch.randint(0, 256, (8, 3, 2, 2), dtype=torch.uint8)
    batch = Batch(images, torch.arange(8) % 3, torch.arange(8), torch.tensor([True] * 6 + [False] * 2))
    module.register_forward_pre_hook(as_shares)
    batch.labels[6:] = module(images)[6:].argmax(1)  # right by chance, and not to be counted
    job = job_of(module, label_smoothing=0.1, accumulation_steps=count)
    loss = objective.backward(job, state := State(Losses()), batch)
    found = [parameter.grad.clone() for parameter in module.parameters()]
    logits = module(images)
    right = sum(logits[i].argmax() == batch.labels[i] for i in range(6))  # bad images are no answers
    ((_, _, answers),) = state.losses._pending
    assert len(answers) == count and sum(answers).tolist() == [right, 6] and 0 < right < 6
    # The logits are rounded to float32, as in training.
    losses = nn.functional.cross_entropy(logits.float(), batch.labels, label_smoothing=0.1, reduction="none")
    expected_loss = (losses * batch.valid).sum() / 8
    expected = torch.autograd.grad(expected_loss, [*module.parameters()])
    torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-6, atol=0)
    assert objective.whole_loss(job, batch, 0) == loss
    for gradient, its in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, its, rtol=1e-6, atol=1e-9)


def test_the_whole_loss_is_of_the_parts_that_a_step_sees():
    """Batch normalisation sees a part at a time: the loss of the same images in one piece is another."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 3))
    images = torch.arange(8 * 12).view(8, 3, 2, 2).sin()
    batch = Batch(images, torch.arange(8) % 3, torch.arange(8), torch.ones(8, dtype=torch.bool))
    with torch.no_grad():
        parts, whole = (
            objective.whole_loss(job_of(module, mixup=0.4, accumulation_steps=count), batch, 0) for count in (2, 1)
        )
    job, state = job_of(module, mixup=0.4, accumulation_steps=2), State(Losses())
    torch.testing.assert_close(objective.backward(job, state, batch), parts)
    assert abs(parts - whole) > 1e-3
    losses = []
    job = job_of(module, mixup=0.4, accumulation_steps=2, optimizer=SimpleNamespace(max_grad_norm=None))
    job.optimizer, job.preconditioner = torch.optim.SGD(module.parameters(), lr=0.0), None
    job.adaptive_damping = SimpleNamespace(end=lambda compute_loss: losses.append(compute_loss()))
    job.average = SimpleNamespace(update=lambda step: None)
    job.learning_rate = lambda step: 0.0
    loop._update(job, state, batch, parts)
    torch.testing.assert_close(losses[0], parts)  # after a step of no length
