"""Stored pixels: the batched operation of a device, against the one of the processor."""

import numpy as np
import pytest
import torch

from datapipe.dataset import DataSet
from datapipe.images.recode import RecodeOptions
from datapipe.loaders import open_loader
from datapipe.loaders.cpu import holds_pixels_of_one_size, make_pixels_loader
from datapipe.loaders.resize import crop_resize_flip, crop_resize_flip_batch
from datapipe.packing import PackOptions, pack
from datapipe.sampling.augment import Augment, train_crops
from tests.device_counts import DeviceCounts


def compare(images, boxes, flips, size):
    wanted = np.empty((len(images), size, size, images.shape[3]), np.uint8)
    for i, image in enumerate(images):
        crop_resize_flip(image, tuple(boxes[i]), bool(flips[i]), wanted[i])
    batch = (torch.from_numpy(array) for array in (images, boxes, flips))
    return np.abs(crop_resize_flip_batch(*batch, size).numpy().astype(int) - wanted)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [17, 64, 100])
def test_boxes_of_all_sizes(channels, size):
    images = np.random.default_rng(0).integers(0, 256, (40, 70, 90, channels), np.uint8)
    sides = np.full(40, 90), np.full(40, 70)
    boxes, flips = train_crops(Augment("random_resized"), *sides, size, 0, 0, np.arange(40))
    assert flips.any() and not flips.all()
    difference = compare(images, boxes.astype(np.int32), flips, size)
    assert difference.max() <= 1  # torch rounds after each of its two passes
    assert difference.mean() < 0.25


def test_boxes_beyond_the_image():
    images = np.random.default_rng(1).integers(1, 256, (30, 32, 32, 3), np.uint8)
    sides = np.full(30, 32), np.full(30, 32)
    boxes, flips = train_crops(Augment("pad", pad=4), *sides, 32, 0, 0, np.arange(30))
    assert compare(images, boxes.astype(np.int32), flips, 32).max() == 0


@pytest.mark.parametrize("format", ["npy", "tar"])
def test_a_loader_that_leaves_all_to_the_device(image_folder, tmp_path, format):
    pack(image_folder, tmp_path, PackOptions(format=format, workers=1, recode=RecodeOptions(store="raw", size=48)))
    with DataSet(tmp_path / "train") as data_set:
        assert holds_pixels_of_one_size(data_set)
        with open_loader(tmp_path / "train", 61, size=32, augment=Augment("random_resized")) as reference:
            loader = make_pixels_loader(data_set, reference.options)
            ((mine,), (wanted,)) = list(loader), list(reference)
            assert loader.stages()["copy"] > 0
            loader.close()
    assert mine.images.is_contiguous(memory_format=torch.channels_last)
    assert (mine.images.int() - wanted.images.int()).abs().max() <= 1
    for name in ("labels", "samples", "valid"):
        assert torch.equal(getattr(mine, name), getattr(wanted, name))


def test_encoded_images_do_not_fit(packed_folders):
    with DataSet(packed_folders["tar"] / "train") as data_set:
        assert not holds_pixels_of_one_size(data_set)


@pytest.mark.parametrize("flip", [False, True])
def test_windows_of_every_shape_in_a_larger_image(flip):
    """Against torch in float32, on windows that are views: one pixel wide or high, as large as the output, larger."""
    pixels = np.random.default_rng(2).integers(0, 256, (90, 120, 3), np.uint8)
    room = np.empty(90 * 60 * 3, np.uint8)
    for side in (1, 7, 32):
        for width in (1, 2, 7, 31, 32, 33, 100):
            for height in (1, 2, 7, 31, 32, 33, 80):
                out = np.empty((side, side, 3), np.uint8)
                crop_resize_flip(pixels, (11, 9, width, height), flip, out, room)
                planes = torch.from_numpy(pixels[9 : 9 + height, 11 : 11 + width].copy()).permute(2, 0, 1)[None].float()
                wanted = torch.nn.functional.interpolate(planes, size=(side, side), mode="bilinear", antialias=True)[0]
                wanted = (wanted.flip(-1) if flip else wanted).permute(1, 2, 0).round().numpy()
                assert np.abs(out - wanted).max() <= 1, (side, width, height)


@pytest.mark.parametrize(("num_images", "most_bytes", "most_launches"), [(256, 0.3e9, 120), (1024, 0.6e9, 480)])
def test_what_cropping_a_batch_costs_a_device(num_images, most_bytes, most_launches):
    """On tensors without content, so that the half precision of a GPU is counted."""
    with DeviceCounts() as counts:
        images = torch.empty(num_images, 256, 256, 3, dtype=torch.uint8, device="meta")
        boxes = torch.empty(num_images, 4, dtype=torch.int32, device="meta")
        flips = torch.empty(num_images, dtype=torch.bool, device="meta")
        counts.clear()
        assert crop_resize_flip_batch(images, boxes, flips, 224).shape == (num_images, 224, 224, 3)
    assert counts.peak[""] <= most_bytes and counts.launches[""] <= most_launches
    assert counts.bytes[""] <= 12e6 * num_images and not counts.waits[""]
