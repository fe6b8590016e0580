"""Evaluation and the loss: padding and bad samples."""

from types import SimpleNamespace

import pytest
import torch

from datapipe.loaders import Batch
from trainer.config.recipe import load_recipe
from trainer.errors import TrainingError
from trainer.ranks.world import World
from trainer.run.evaluate import evaluate
from trainer.run.objective import batch_loss
from trainer.step.precision import choose_precision

CPU = torch.device("cpu")


def batches_of(labels, valid, bad=()):
    images, valid = torch.zeros(len(labels), 1, 2, 2), torch.tensor(valid)
    samples = torch.arange(len(labels)).where(valid, -1)  # padding is not a sample
    samples[list(bad)] = 99
    return [SimpleNamespace(images=images, labels=torch.tensor(labels), samples=samples, valid=valid)]


def always_first(images):
    return torch.tensor([[2.0, 0.0]]).expand(len(images), 2)


class Constant(torch.nn.Module):
    def forward(self, images):
        return always_first(images)


def evaluated(batches, num_samples):
    return evaluate(
        Constant(),
        batches,
        num_samples=num_samples,
        world=World(),
        precision=choose_precision("off", CPU),
    )


def test_padding_does_not_count_whatever_its_label():
    result = evaluated(batches_of([0, 1, 0, -1], [True, True, False, False]), 2)
    right, wrong = torch.log(1 + torch.exp(torch.tensor([-2.0, 2.0], dtype=torch.float64)))
    assert result.accuracy == 0.5
    assert result.loss == pytest.approx(float(right + wrong) / 2, rel=1e-6)


def test_a_bad_sample_is_a_wrong_answer_and_no_loss():
    result = evaluated(batches_of([0, 0, 1, 0], [True, False, True, False], bad=[1]), 3)
    assert result.accuracy == 1 / 3
    assert result.loss == evaluated(batches_of([0, 1], [True, True]), 2).loss
    with pytest.raises(TrainingError, match="saw 0 samples of a set of 1, and 1 bad ones"):
        evaluated(batches_of([0], [False], bad=[0]), 1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_bad_sample_teaches_nothing_whatever_its_label(recipe_file, smoothing):
    """And the others as much as without it: they are 3 of 4, of which the loss is a mean."""
    recipe = load_recipe(str(recipe_file), [f"train.label_smoothing={smoothing}"])
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    precision = choose_precision("off", CPU)
    job = SimpleNamespace(recipe=recipe, model=model, precision=precision, world=World())
    images, samples = torch.rand(4, 1, 2, 2), torch.arange(4)

    def gradient(label, valid, kept=slice(None)):
        tensors = images, torch.tensor([0, label, 1, 2]), samples, torch.tensor(valid)
        batch = Batch(*(tensor[kept] for tensor in tensors))
        return torch.autograd.grad(batch_loss(job, batch, 0), model[1].weight)[0]

    expected = gradient(0, [True] * 4, kept=torch.tensor([0, 2, 3])) * 3 / 4
    for label in range(3):
        assert torch.allclose(gradient(label, [True, False, True, True]), expected, atol=1e-7)
    assert not torch.allclose(gradient(1, [True] * 4), expected, atol=1e-3)


def test_evaluation_must_see_every_sample():
    with pytest.raises(TrainingError, match="saw 2 samples of a set of 3"):
        evaluated(batches_of([0, 1], [True, True]), 3)


@pytest.mark.parametrize("with_mirrored", [False, True])
def test_a_mirrored_image_counts_as_much_as_the_image(with_mirrored):
    """Logits are the left and the right pixel: their mean over both images is the same for both classes."""
    images = torch.tensor([[3.0, 1.0], [1.0, 5.0]])[:, None, None]
    batch = Batch(images, torch.tensor([0, 0]), torch.arange(2), torch.tensor([True, True]))
    kwargs = {"num_samples": 2, "world": World(), "precision": choose_precision("off", CPU)}
    result = evaluate(torch.nn.Flatten(), [batch], **kwargs, with_mirrored=with_mirrored)
    chosen = [torch.tensor([2.0, 2.0]), torch.tensor([3.0, 3.0])] if with_mirrored else images.flatten(1)
    expected = sum(-torch.log_softmax(logits.double(), 0)[0].item() for logits in chosen) / 2
    assert result.loss == pytest.approx(expected, rel=1e-6)
