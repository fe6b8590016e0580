"""A loader in loops that are written for torch.utils.data.DataLoader."""

import copy
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from datapipe.dataset import DataSet
from datapipe.errors import SettingError
from datapipe.loaders import open_loader

NUM_SAMPLES = 61  # of the folder


@pytest.fixture
def loader(packed_folders):
    with open_loader(packed_folders["tar"] / "train", 8, size=16, threads=1, train=False) as loader:
        yield loader


def test_tuples_are_the_valid_slots_of_the_batches_as_dataloader_gives_them(loader):
    batches = list(loader)
    images = torch.cat([batch.images[batch.valid] for batch in batches])
    labels = torch.cat([batch.labels[batch.valid] for batch in batches])
    tuples = loader.as_tuples()
    theirs = DataLoader(TensorDataset(images, labels), batch_size=8)
    for pair, expected in zip(tuples, theirs, strict=True):  # the last one has five
        assert [tensor.shape for tensor in pair] == [tensor.shape for tensor in expected]
        assert all(mine.equal(its) for mine, its in zip(pair, expected, strict=True))
    assert (len(tuples), tuples.batch_size, tuples.drop_last, len(tuples.dataset)) == (8, 8, False, NUM_SAMPLES)
    assert len(theirs) == len(tuples) and len(theirs.dataset) == len(loader.dataset)


def test_a_rank_without_a_last_batch_has_an_empty_one(packed_folders):
    ranks = []
    for rank in range(2):  # the last global batch of 40 has 21 samples
        options = {"size": 16, "threads": 1, "train": False, "rank": rank, "world_size": 2}
        with open_loader(packed_folders["tar"] / "train", 20, **options) as loader:
            assert loader.drop_last is False
            ranks.append([len(labels) for _, labels in loader.as_tuples()])
    assert ranks == [[20, 20], [20, 1]]


def test_training_drops_and_continues_as_the_loader_does(packed_folders):
    loader = open_loader(packed_folders["tar"] / "train", 8, size=16, threads=1)
    with loader.as_tuples() as tuples:
        assert tuples.drop_last and len(tuples) == 7
        next(iter(tuples))
        assert tuples.state_dict()["step"] == 1
        assert [images.shape for images, _ in tuples] == 6 * [(8, 3, 16, 16)]
        tuples.set_epoch(3)
        assert loader.state_dict()["epoch"] == 3
    with pytest.raises(ValueError, match="closed"):
        next(iter(loader))


def test_a_batch_says_how_to_loop_over_pairs(loader):
    with pytest.raises(TypeError, match=r"loader\.as_tuples\(\)"):
        for _images, _labels in loader:
            pass


@pytest.mark.parametrize("epoch", [1.5, -1, "1", True, None])
def test_an_epoch_that_is_none_is_refused(loader, epoch):
    with pytest.raises(SettingError, match=f"epoch: {epoch!r} is out of range; allowed: whole numbers from 0"):
        loader.set_epoch(epoch)
    with pytest.raises(SettingError, match=r"^epoch"):
        loader.as_tuples().set_epoch(epoch)


@pytest.mark.parametrize("action", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_loader_cannot_be_sent_elsewhere(loader, action):
    for each in (loader, loader.as_tuples()):
        with pytest.raises(TypeError, match=r"a loader cannot be pickled or copied.* Call open_loader in the process"):
            action(each)


def test_a_data_set_opens_itself_where_it_is_sent(packed_folders):
    with DataSet(packed_folders["tar"] / "train", io="mmap", retries=2) as here:
        with pickle.loads(pickle.dumps(here)) as there:
            assert there.reader is not here.reader and there.read(40) == here.read(40)
            assert there.__reduce__() == here.__reduce__() == (DataSet, (here.folder, "mmap", 2, None))
        assert here.read(3)


def test_a_batch_goes_to_a_device_as_a_tensor_does(loader):
    batch = next(iter(loader))
    for moved in (batch.to("cpu"), batch.to(torch.device("cpu"), non_blocking=False), batch.to(device="meta")):
        assert moved.images.shape == batch.images.shape and moved.labels.dtype == torch.int64
    assert moved.valid.device.type == "meta"
    assert moved.pin_memory().images.device.type == "meta"  # only what is on the host can be pinned
    if not torch.accelerator.is_available():
        with pytest.raises(RuntimeError, match="accelerator"):
            batch.pin_memory()
    else:
        assert batch.pin_memory().images.is_pinned()
