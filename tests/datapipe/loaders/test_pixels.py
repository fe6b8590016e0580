"""Pixels of the backends that read by the index, against a plain reference."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from datapipe.dataset import DataSet
from datapipe.dataset.index import ENCODINGS
from datapipe.errors import SettingError
from datapipe.loaders import normalise, open_loader
from datapipe.packing import PackOptions, pack
from datapipe.sampling.augment import Augment, eval_crops, train_crops
from datapipe.sampling.order import permutation

JPEG = ENCODINGS.index("jpeg")


def epoch(loader):
    """All that one epoch gives, batch by batch, as numpy arrays."""
    fields = ("images", "labels", "samples", "valid")
    return [tuple(getattr(batch, field).numpy().copy() for field in fields) for batch in loader]


def check(pixels, wanted, backend, scaled):
    """Of 255: DALI's own decoder and rounding; libjpeg-turbo's smaller scales instead of the filter."""
    difference = np.abs(pixels.astype(int) - wanted)
    if backend == "dali":
        assert difference.mean() <= 0.5 and difference.max() <= 16
    elif scaled:
        assert difference.mean() <= 2
    else:
        assert difference.max() <= 1


def reference(pixels, box, flip, size):
    """A window, cut from a black plane, scaled by torch in float32 and rounded, mirrored."""
    left, top, width, height = (int(n) for n in box)
    padded = np.pad(pixels, ((size, size), (size, size), (0, 0)))
    window = padded[size + top : size + top + height, size + left : size + left + width]
    planes = torch.from_numpy(np.ascontiguousarray(window)).permute(2, 0, 1)[None].float()
    scaled = F.interpolate(planes, size=(size, size), mode="bilinear", antialias=True)[0].round()
    return (scaled.flip(-1) if flip else scaled).numpy()


@pytest.fixture(scope="module")
def turned(tmp_path_factory, photo):
    """Photographs, wider than high, whose EXIF says to turn them; that of class `i` in the i-th of the eight ways."""
    root = tmp_path_factory.mktemp("turned")
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        folder = root / "raw" / "train" / str(orientation)
        folder.mkdir(parents=True)
        Image.fromarray(photo(90, 60, orientation)).save(folder / "a.jpg", quality=95, exif=exif)
    pack(root / "raw", root / "packed", PackOptions(workers=1))
    with DataSet(root / "packed" / "train") as data_set:
        assert all(b"Exif\0\0" in data_set.read(i) for i in range(8))
    return root / "packed" / "train"


@pytest.mark.parametrize("crop", ["random_resized", "none"])
def test_pixels_equal_a_plain_reference(folder, backend, crop):
    size, augment = 40, Augment(crop)
    with open_loader(folder, 61, backend=backend, size=size, seed=3, augment=augment) as loader:
        loader.set_epoch(2)
        ((images, _, samples, _),) = epoch(loader)
    with DataSet(folder) as data_set:
        np.testing.assert_array_equal(samples, permutation(61, 3, 2))
        records = data_set.index[samples]
        sizes = records["width"].astype(int), records["height"].astype(int)
        crops = train_crops(augment, *sizes, size, 3, 2, np.arange(61))
        assert crops.flips.any() and not crops.flips.all()
        for i, sample in enumerate(samples):
            pixels = data_set.pixels(int(sample), data_set.read(int(sample)))
            wanted = reference(pixels, crops.boxes[i], crops.flips[i], size)
            check(images[i], wanted, backend, records["encoding"][i] == JPEG and crops.boxes[i, 2:].min() >= 2 * size)


def test_pad_crop_pixels(tmp_path, sample_dir, backend):
    pack(sample_dir, tmp_path / "out", PackOptions(workers=1))
    folder = tmp_path / "out" / "val"
    with open_loader(folder, 300, backend=backend, size=28) as loader, DataSet(folder) as data_set:
        assert loader.channels == 1
        images, _, samples, _ = (np.concatenate(part) for part in zip(*epoch(loader), strict=True))
        sides = np.full(600, 28)
        crops = train_crops(Augment("pad"), sides, sides, 28, 0, 0, np.arange(600))
        for i, sample in enumerate(samples.tolist()):
            pixels = data_set.pixels(sample, data_set.read(sample))
            np.testing.assert_array_equal(images[i], reference(pixels, crops.boxes[i], crops.flips[i], 28))


def test_padding_may_exceed_the_output(packed_folders, backend):
    """A crop may then lie beyond the image, and be black."""
    augment = Augment(crop="pad", pad=40)
    with open_loader(packed_folders["tar"] / "train", 61, backend=backend, size=16, augment=augment) as loader:
        (batch,) = loader
        assert (batch.images.flatten(1).sum(1) == 0).any() and batch.images.any()


@pytest.mark.parametrize("train", [True, False])
def test_padding_where_windows_are_as_large_as_the_output(tmp_path, sample_dir, backend, train):
    """CIFAR and the MNIST family: "pad" crops, the last batch not full."""
    pack(sample_dir, tmp_path / "out", PackOptions(workers=1))
    with (
        open_loader(tmp_path / "out" / "val", 64, backend=backend, size=28, train=train, last="pad") as loader,
        open_loader(tmp_path / "out" / "val", 64, size=28, train=train, last="pad") as reference,
    ):
        for mine, wanted in zip(loader, reference, strict=True):
            assert torch.equal(mine.images, wanted.images) and torch.equal(mine.valid, wanted.valid)


def test_evaluation_cuts_the_centre(folder, backend):
    with open_loader(folder, 61, backend=backend, train=False, size=24) as loader, DataSet(folder) as data_set:
        ((images, _, samples, _),) = epoch(loader)
        boxes, _ = eval_crops(data_set.index["width"].astype(int), data_set.index["height"].astype(int), 24)
        for i in range(0, 61, 5):
            assert samples[i] == i
            wanted = reference(data_set.pixels(i, data_set.read(i)), boxes[i], False, 24)
            check(images[i], wanted, backend, data_set.index["encoding"][i] == JPEG and boxes[i, 2:].min() >= 48)


@pytest.mark.parametrize("crop", ["random_resized", "pad", "none"])
@pytest.mark.parametrize("train", [True, False])
def test_no_backend_turns_images_by_exif(turned, crop, train):
    pytest.importorskip("nvidia.dali")
    augment, batches = Augment(crop), []
    for backend in ("cpu", "dali"):
        with open_loader(turned, 8, backend=backend, size=48, train=train, augment=augment, seed=1) as loader:
            for number in range(3):
                loader.set_epoch(number)
                batches.append(next(iter(loader)))
    for cpu, dali in zip(batches[:3], batches[3:], strict=True):
        assert torch.equal(cpu.samples, dali.samples) and dali.valid.all()
        for i in range(8):
            check(dali.images[i].numpy(), cpu.images[i].numpy(), "dali", False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normalise(dtype):
    images = torch.randint(0, 256, (5, 3, 6, 7), dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    out = normalise(images, mean, std, dtype)
    exact = (images.double() / 255 - torch.tensor(mean).double().view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)
    assert out.dtype == dtype and out.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(out.double(), exact, rtol=1e-6 if dtype == torch.float32 else 4e-3, atol=1e-6)
    with pytest.raises(SettingError, match="mean"):
        normalise(images, (0.5,), (0.5,))
