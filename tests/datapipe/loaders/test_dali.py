"""What DALI is asked for, what a GPU would be waited for, and in which order its work and memory end."""

from __future__ import annotations

import threading

import pytest
import torch

from datapipe.errors import DecodeError
from datapipe.loaders import dali, open_loader
from datapipe.packing import PackOptions, pack
from tests.device_counts import DeviceCounts
from tests.waiting import limit_s

nvidia_dali = pytest.importorskip("nvidia.dali")
Pipeline = nvidia_dali.Pipeline


@pytest.fixture
def train(packed_folders):
    return packed_folders["tar"] / "train"


def note_calls(monkeypatch, owner, name, note):
    """Have `note` called before each call of a function of DALI's, with the same arguments."""
    function = getattr(owner, name)

    def call(*args, **settings):
        note(*args, **settings)
        return function(*args, **settings)

    monkeypatch.setattr(owner, name, call)


def test_the_decoder_is_asked_for_the_pixels_of_the_other_backends(train, monkeypatch):
    decoding, fed = [], []
    note_calls(monkeypatch, nvidia_dali.fn.decoders, "image_slice", lambda *_, **settings: decoding.append(settings))
    note_calls(monkeypatch, nvidia_dali.fn, "external_source", lambda **settings: fed.append(settings))
    monkeypatch.setattr(dali, "HW_DECODER_LOAD", 0.9)  # as benchmarks do
    with open_loader(train, 4, backend="dali", size=24):
        (settings,) = decoding
    assert settings["adjust_orientation"] is False and settings["jpeg_fancy_upsampling"] is True
    assert settings["hw_decoder_load"] == 0.9
    assert settings["preallocate_width_hint"] > 90 and settings["preallocate_height_hint"] > 60
    assert len(fed) == 4 and all(source["no_copy"] for source in fed)


def test_nvjpeg_gets_no_surplus_data_until_it_is_known_to_take_it(train, monkeypatch):
    gpu = torch.device("cuda", 0)
    assert not dali.takes_late_ends(gpu)
    monkeypatch.setattr(dali, "MAY_END_LATE_ON_GPU", True)
    assert dali.takes_late_ends(gpu)
    with open_loader(train, 32, backend="dali", size=24) as loader:
        assert loader.decoder._may_end_late
        expected = next(iter(loader))
    monkeypatch.setattr(dali, "takes_late_ends", lambda device: device.type != "cpu")
    with open_loader(train, 32, backend="dali", size=24) as loader:
        assert not loader.decoder._may_end_late
        assert torch.equal(next(iter(loader)).images, expected.images)


def test_a_gpu_is_not_waited_for(train, monkeypatch):
    """A device without content takes the place of a GPU behind DALI's pipeline; copies to it are the same."""
    streams, stream, kept = [], object(), []
    share_outputs = Pipeline.share_outputs

    def share(pipeline, cuda_stream=None):
        streams.append(cuda_stream)
        return share_outputs(pipeline)

    monkeypatch.setattr(Pipeline, "share_outputs", share)
    monkeypatch.setattr("nvidia.dali.plugin.pytorch.feed_ndarray", lambda *_, cuda_stream: streams.append(cuda_stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    with open_loader(train, 32, backend="dali", size=24, train=False) as loader, DeviceCounts() as counts:
        loader.delivery._device = torch.device("meta")
        monkeypatch.setattr(loader.delivery._decoding, "keep", lambda *what: kept.append(what))
        first, last = loader  # of which some slots are padding
        assert first.images.shape == last.images.shape == (32, 3, 24, 24) and last.images.is_meta
        assert streams == [stream] * 4 and counts.launches[""] and not counts.waits[""]
        assert [on for on, _ in kept] == [stream] * 2  # until that is done, DALI may read the memory of the slots
        loader.delivery._device = torch.device("cpu")


def run_ahead(loader, batches):
    """Take batches, each when the following ones have been read."""
    for _ in range(4):
        next(batches)
        loader.threads.fill.submit(int).result(limit_s())  # behind what the only thread has to read


def test_batches_are_scheduled_ahead(train):
    """DALI works on the next two batches while the consumer has one."""
    with open_loader(train, 4, backend="dali", size=24, threads=1) as loader:
        batches = iter(loader)
        run_ahead(loader, batches)
        assert len(loader.delivery._scheduled) == 2


def test_no_batch_waits_for_a_later_one_to_be_read(train, monkeypatch):
    gate = threading.Event()
    with open_loader(train, 4, backend="dali", size=24, threads=1) as loader:
        put, wait = loader.decoder.put, loader._wait_until_full

        def put_late(slots, chunk):
            if slots.positions[0] >= 12:
                assert gate.wait(2 * limit_s())
            return put(slots, chunk)

        def note(slots):
            if slots.positions[0] == 12:
                gate.set()
            wait(slots)

        monkeypatch.setattr(loader.decoder, "put", put_late)
        monkeypatch.setattr(loader, "_wait_until_full", note)
        batches = iter(loader)
        first = [next(batches).samples for _ in range(3)]
        assert not gate.is_set()  # nobody has waited for the fourth, which cannot be read until then
        assert len(torch.cat([*first, *(batch.samples for batch in batches)]).unique()) == 60


@pytest.mark.parametrize("ends", ["break", "error", "close"])
def test_memory_outlives_what_reads_it(train, monkeypatch, ends):
    """DALI has given a batch, or has ended, before the slots are let go that it reads."""
    with open_loader(train, 4, backend="dali", size=24, threads=1) as loader:
        batches, kept = iter(loader), loader.delivery._scheduled
        run_ahead(loader, batches)
        counts: list[tuple[str, int]] = []

        def give(pipeline, **settings):
            counts.append(("give", len(kept)))
            if ends == "error":
                raise RuntimeError("mine")

        note_calls(monkeypatch, Pipeline, "share_outputs", give)
        note_calls(monkeypatch, Pipeline, "_shutdown", lambda pipeline: counts.append(("end", len(kept))))
        (loader.delivery if ends == "close" else batches).close()
        expected = {"break": [("give", 2), ("give", 1)], "error": [("give", 2), ("end", 2)], "close": [("end", 2)]}
        assert counts[: len(expected[ends])] == expected[ends]
        assert not kept


def test_a_pipeline_that_failed_has_ended(tmp_path, photo, encoded):
    """The exception refers to it, and may live on."""
    good = encoded(photo(64, 64, 1))
    scan = good.index(b"\xff\xda")
    broken = good[:scan] + b"\xff\xda\x00\x0c\x03\x01\x77\x02\x77\x03\x77\x00\x3f\x00" + bytes(20) + b"\xff\xd9"
    (tmp_path / "raw" / "a").mkdir(parents=True)
    for i in range(6):
        (tmp_path / "raw" / "a" / f"{i}.jpg").write_bytes(broken if i == 2 else good)
    pack(tmp_path / "raw", tmp_path / "out", PackOptions(workers=1))
    with (
        open_loader(tmp_path / "out" / "train", 6, backend="dali", size=24) as loader,
        pytest.raises(DecodeError, match="key a/2: ") as caught,
    ):
        list(loader)
    pipelines = [pipeline for ref in Pipeline._pipes if (pipeline := ref()) is not None]
    assert not any(pipeline._pipe for pipeline in pipelines) and caught.value.__context__
