"""How many collectives a step has, for one of many ranks: counted, nothing is sent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.device_counts import DeviceCounts, fake_tensors
from trainer.kfac import KFAC, agreement, communication

RANKS = 64
SENT = {"broadcast_", "allreduce_", "reduce_", "alltoall_base_", "_allgather_base_"}


@pytest.fixture
def one_of_many(monkeypatch):
    """This process is rank 0 of RANKS, of which there are no others."""
    monkeypatch.setattr(agreement, "_gather", lambda value: [value])
    monkeypatch.setattr(communication.Communicator, "maximum", lambda self, numbers, device: [*numbers])
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("workers", "most", "layers"), [(1, 4, 54), (2, 6, 4), (RANKS, 4, 4)])
def test_collectives_of_a_step_are_few_whatever_the_number_of_layers(one_of_many, workers, most, layers):
    """Also in a step in which each layer's factors and solution are sent. 54 layers, each with an owner: ResNet-50."""
    settings = {"solver": "cholesky", "factor_update_steps": 1, "inv_update_steps": 1}
    with fake_tensors():
        network = nn.Sequential(nn.LayerNorm(4), *(nn.Linear(4, 4) for _ in range(layers)))
        preconditioner = KFAC(network, grad_worker_fraction=workers / RANKS, **settings)
        for _ in range(2):
            with DeviceCounts() as counts:
                counts.phase = "backward"
                with torch.autograd.set_multithreading_enabled(False):
                    network(torch.empty(8, 4)).square().mean().backward()
                counts.phase = "step"
                preconditioner.step()
            sent = {phase: [name for of, name in counts.operators.elements() if of == phase and name in SENT]
                    for phase in ("backward", "step")}  # fmt: skip
            assert not sent["backward"] and 2 <= len(sent["step"]) <= most, sent
            network.zero_grad()
