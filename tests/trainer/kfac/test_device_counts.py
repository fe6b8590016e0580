"""What K-FAC costs a device, counted on fake tensors: ResNet-50 in bfloat16, with 256 images of 224 pixels."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.device_counts import DeviceCounts, fake_tensors, to_channels_last
from tests.trainer.kfac.networks import EVERY_STEP
from trainer import models
from trainer.kfac import EKFAC, KFAC, factors

FIRST = 150  # a step after the first periods; in half of the next ten a layer gets a solution


class Counted(NamedTuple):
    launches: Counter[str]
    bytes: Counter[str]
    waits: Counter[str]


@pytest.fixture(scope="module")
def as_on_a_gpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factors, "multiplies_halves", lambda tensor: tensor.dtype == torch.bfloat16)
        yield


@pytest.fixture(scope="module")
def counted(as_on_a_gpu):
    """Return what a step of SGD takes, and each of ten steps of K-FAC, in which all layers have their turn."""
    with fake_tensors():
        network = models.build("resnet50", num_classes=1000, in_channels=3)
        to_channels_last(network)
        sgd = count_step(network, None)
        preconditioner = KFAC(network, solver="cholesky", damping=0.001, kl_clip=0.001)
        count_step(network, preconditioner)  # makes what the next steps have
        preconditioner.steps = FIRST
        preconditioner.discard()
        return sgd, [count_step(network, preconditioner) for _ in range(10)]


def count_step(network, preconditioner):
    with DeviceCounts() as counts, torch.autograd.set_multithreading_enabled(False):
        images = torch.empty(256, 3, 224, 224).to(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16):
            logits = network(images)
        loss = F.cross_entropy(logits.float(), torch.zeros(256, dtype=torch.long))
        counts.phase = "backward"
        loss.backward()
        counts.phase = "step"
        if preconditioner is not None:
            preconditioner.step()
    network.zero_grad()
    return Counted(counts.launches, counts.bytes, counts.waits)


def test_a_step_launches_few_kernels(counted):
    """Norms are preconditioned together; two products precondition another layer, and two kernels compare it."""
    _, steps = counted
    assert max(step.launches["step"] for step in steps) < 500


def test_no_step_costs_much_more_than_another(counted):
    sgd, steps = counted
    moved = [step.bytes["backward"] / sgd.bytes["backward"] for step in steps]
    assert max(moved) < 1.35 and sum(moved) / len(moved) < 1.25


def test_no_step_waits_for_the_device(counted):
    assert not any(step.waits.total() for step in counted[1])


@pytest.mark.parametrize(("kind", "looks"), [(KFAC, 0), (EKFAC, 2)])
def test_eigenvectors_are_waited_for_and_nothing_else(kind, looks):
    """torch.linalg.eigh looks whether it converged; EKFAC looks once more for each layer, and the wait is over."""
    with fake_tensors():
        network = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 5))
        preconditioner = kind(network, **EVERY_STEP)
        with DeviceCounts() as counts:
            network(torch.randn(8, 3, 6, 6)).square().mean().backward()
            preconditioner.step()
    assert counts.operators["", "_linalg_eigh"] == 4
    assert counts.waits.total() == 4 + looks
