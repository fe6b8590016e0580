"""Images that stay on the device: the same batches as from the `cpu` backend, to the bit."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from datapipe.errors import SettingError, ShardCorruptError
from datapipe.loaders import Batch, open_loader
from datapipe.packing import PackOptions, pack
from datapipe.sampling.augment import Augment

NUM, SIDE = 53, 12  # not a multiple of any batch size here


@pytest.fixture(scope="module", params=["grey", "colour"])
def small(request, tmp_path_factory):
    """Return a packed data set of 53 images of 12 × 12 pixels."""
    folder = tmp_path_factory.mktemp("small")
    random = np.random.default_rng(0)
    shape = (SIDE, SIDE, 3) if request.param == "colour" else (SIDE, SIDE)
    for i in range(NUM):
        path = folder / "raw" / "train" / f"class{i % 3}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8)).save(path)
    pack(folder / "raw", folder / "packed", PackOptions(workers=1))
    return folder / "packed" / "train"


def is_equal(a: Batch, b: Batch) -> bool:
    """Also in the strides of images, for which a network is compiled."""
    are_equal = all(torch.equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(Batch))
    return are_equal and a.images.stride() == b.images.stride()


@pytest.mark.parametrize("augment", [Augment("pad"), Augment("pad", pad=1, flip="alternate"), Augment("none")])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("world_size", [1, 3])
def test_batches_are_those_of_the_cpu_backend(small, augment, train, world_size):
    for rank in range(world_size):
        settings = {"size": SIDE, "train": train, "augment": augment, "rank": rank, "world_size": world_size}
        last = "pad" if rank else None
        with (
            open_loader(small, 8, last=last, **settings) as cpu,
            open_loader(small, 8, last=last, backend="resident", **settings) as resident,
        ):
            for epoch in range(3):
                cpu.set_epoch(epoch)
                resident.set_epoch(epoch)
                pairs = list(zip(cpu, resident, strict=True))
                assert pairs
                assert all(is_equal(a, b) for a, b in pairs)


def test_it_continues_from_the_state_of_another_backend(small):
    with open_loader(small, 8, size=SIDE) as cpu, open_loader(small, 8, size=SIDE, backend="resident") as resident:
        batches = iter(cpu)
        next(batches)
        resident.load_state_dict(cpu.state_dict())
        assert all(is_equal(a, b) for a, b in zip(batches, resident, strict=True))


def test_a_batch_may_be_changed(small):
    with open_loader(small, 8, size=SIDE, train=False, backend="resident") as loader:
        first = next(iter(loader)).images
        kept = first.clone()
        first.zero_()
        assert torch.equal(next(iter(loader)).images, kept)


@pytest.mark.parametrize(
    "settings",
    [
        {"size": 10},
        {"augment": Augment("random_resized")},
        {"order": "blocks"},
        {"io": "mmap"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_it_cannot_do_is_refused(small, settings):
    with pytest.raises(SettingError, match=rf"^{'crop' if 'augment' in settings else next(iter(settings))}: "):
        open_loader(small, 8, backend="resident", **({"size": SIDE} | settings))


def test_images_of_different_sizes_are_refused(packed_folders):
    with pytest.raises(SettingError, match=r"^size: 24 with images of different sizes"):
        open_loader(packed_folders["tar"] / "train", 8, size=24, backend="resident")


def test_another_size_is_refused(small):
    with (
        open_loader(small, 8, size=SIDE, augment=Augment("none"), backend="resident") as loader,
        pytest.raises(SettingError, match=r"^size: 8 "),
    ):
        loader.set_size(8)


def test_bad_samples_have_a_budget(small, tmp_path):
    damaged = tmp_path / "train"
    shutil.copytree(small, damaged)
    (shard,) = damaged.glob("*.tar")
    content = bytearray(shard.read_bytes())
    at = content.index(b"IDAT") + 12
    content[at] ^= 255
    shard.write_bytes(content)
    with pytest.raises(ShardCorruptError, match="not the ones that were packed"):
        open_loader(damaged, 8, size=SIDE, backend="resident")
    with open_loader(damaged, 8, size=SIDE, backend="resident", max_bad=1, last="pad") as loader:
        for epoch in range(2):
            loader.set_epoch(epoch)
            batches = list(loader)
            assert sum(int(batch.valid.sum()) for batch in batches) == NUM - 1
            assert sum(int((batch.samples >= 0).sum()) for batch in batches) == NUM
            for batch in batches:
                assert not batch.images[~batch.valid].any()
