"""The `dali` backend on a GPU, as far as it goes without one: what it asks of DALI, and when it lets memory go."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from datapipe.loaders import dali, open_loader
from tests.device_counts import DeviceCounts, fake_tensors

pytest.importorskip("nvidia.dali")


class Spy:
    """A pipeline, of which it keeps what was asked for, and which batches' memory was there then."""

    def __init__(self, delivery, pipeline=None):
        self.delivery, self.pipeline, self.asked = delivery, pipeline, []

    def __getattr__(self, name):
        return getattr(self.pipeline, name)

    def feed_input(self, name, values):
        if self.pipeline is not None:
            self.pipeline.feed_input(name, values)

    def schedule_run(self):
        if self.pipeline is not None:
            self.pipeline.schedule_run()

    def share_outputs(self, cuda_stream=None):
        self.asked.append((cuda_stream, len(self.delivery._scheduled)))
        return self.pipeline.share_outputs() if self.pipeline else [self]

    def release_outputs(self):
        if self.pipeline is not None:
            self.pipeline.release_outputs()


@pytest.fixture
def loader(packed_folders):
    with open_loader(packed_folders["tar"] / "train", 8, size=32, backend="dali", threads=2) as loader:
        yield loader


def test_a_batch_that_nobody_takes_keeps_its_memory_until_dali_is_done(loader):
    """DALI reads it where it lies."""
    delivery = loader.delivery
    delivery._pipelines[:] = [Spy(delivery, delivery._pipeline)]
    batches = list(islice(loader, 2))
    assert len(batches) == 2
    loader.set_epoch(1)  # ends the iteration, with batches under way
    asked = delivery._pipelines[0].asked
    assert asked[:2] == [(None, dali._DEPTH)] * 2 and asked[2:] == [(None, n) for n in range(dali._DEPTH - 1, 0, -1)]
    assert not delivery._scheduled and len(list(loader)) == len(loader)


def test_the_host_does_not_wait_for_what_a_gpu_decodes(loader, monkeypatch):
    """The stream waits, and the memory of the batch is kept until it is done."""
    delivery, stream, kept, copied = loader.delivery, object(), [], []
    delivery._device = torch.device("cuda", 0)
    delivery._pipelines[:] = [spy := Spy(delivery)]
    spy.as_tensor = lambda: "decoded"
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(delivery._decoding, "keep", lambda *what: kept.append(what))
    monkeypatch.setattr("nvidia.dali.plugin.pytorch.feed_ndarray", lambda *what, **where: copied.append((what, where)))
    slots = delivery.new_slots(np.arange(8), 8)
    delivery.begin(slots)
    with fake_tensors(), DeviceCounts() as counts:
        batch = delivery.finish(slots, loader)
    assert spy.asked == [(stream, 1)] and kept == [(stream, slots)] and not delivery._scheduled
    assert [what[0] for what, _ in copied] == ["decoded"] and copied[0][1] == {"cuda_stream": stream}
    assert batch.images.shape == (8, 3, 32, 32) and batch.images.device.type == batch.labels.device.type == "cuda"
    assert not counts.waits[""]
