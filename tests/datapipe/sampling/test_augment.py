"""Crops and flips: the same at the same position, inside the image, and distributed as published."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datapipe.errors import SettingError
from datapipe.sampling.augment import Augment, eval_crops, scales, snap, train_crops
from datapipe.sampling.order import slice_positions

RESIZED = Augment("random_resized")
sizes = st.integers(1, 700)


def crops(augment, widths, heights, positions, seed=0, epoch=0, size=32):
    return train_crops(augment, np.asarray(widths), np.asarray(heights), size, seed, epoch, np.asarray(positions))


@given(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=30), st.integers(0, 2**63 - 1), st.integers(0, 99))
def test_random_resized_windows_lie_inside(shapes, seed, epoch):
    widths, heights = np.array(shapes).T
    boxes, flips = crops(RESIZED, widths, heights, np.arange(len(shapes)), seed, epoch)
    left, top, w, h = boxes.T
    assert (left >= 0).all() and (top >= 0).all() and (w >= 1).all() and (h >= 1).all()
    assert (left + w <= widths).all() and (top + h <= heights).all()
    assert flips.dtype == bool


@pytest.mark.parametrize("augment", [RESIZED, Augment("pad"), Augment("none")])
def test_same_crops_at_the_same_positions_for_any_world_size(augment):
    widths = heights = np.full(240, 32)
    whole = crops(augment, widths, heights, np.arange(240), seed=5, epoch=3)
    for world_size in (1, 2, 3, 8):
        batch_size = 24 // world_size
        for step in range(10):
            for rank in range(world_size):
                p = slice_positions(step, batch_size, rank, world_size)
                part = crops(augment, widths[p], heights[p], p, seed=5, epoch=3)
                np.testing.assert_array_equal(part.boxes, whole.boxes[p])
                np.testing.assert_array_equal(part.flips, whole.flips[p])


def test_random_resized_has_the_published_distribution():
    """Area uniform in 8 to 100 %, aspect log-uniform in 3/4 to 4/3 where it always fits (Szegedy et al. 2015)."""
    n = 40_000
    augment = Augment("random_resized", scale=(0.1, 0.5))
    boxes, flips = crops(augment, np.full(n, 500), np.full(n, 500), np.arange(n), size=500)
    left, top, w, h = boxes.T
    for values, low, high in ((w * h / 500**2, 0.1, 0.5), (np.log(w / h), np.log(3 / 4), np.log(4 / 3))):
        counts = np.histogram(values, 8, (low, high))[0] / n
        assert np.abs(counts - 1 / 8).max() < 0.008, counts
    assert abs((left / (500 - w)).mean() - 0.5) < 0.01 and abs((top / (500 - h)).mean() - 0.5) < 0.01
    assert abs(flips.mean() - 0.5) < 0.01


def test_random_resized_falls_back_to_the_centre():
    boxes, _ = crops(RESIZED, [1000], [10], [0])
    assert boxes.tolist() == [[493, 0, 13, 10]] or 0 < boxes[0, 3] <= 10
    impossible = Augment("random_resized", scale=(1, 1), ratio=(1, 1))
    assert crops(impossible, [1000, 10], [10, 1000], [0, 1]).boxes.tolist() == [[495, 0, 10, 10], [0, 495, 10, 10]]


def test_pad_windows_reach_beyond_the_image_by_at_most_the_padding():
    n = 5000
    boxes, _ = crops(Augment("pad", pad=4), np.full(n, 32), np.full(n, 32), np.arange(n))
    assert (boxes[:, 2:] == 32).all()
    assert sorted(set(boxes[:, 0])) == sorted(set(boxes[:, 1])) == list(range(-4, 5))
    counts = np.bincount(boxes[:, 0] + 4) / n
    assert np.abs(counts - 1 / 9).max() < 0.02


def test_pad_needs_images_that_are_large_enough():
    with pytest.raises(SettingError, match="pad: 1 "):
        crops(Augment("pad", pad=1), [20], [40], [0])


def test_flip_can_be_turned_off():
    assert not crops(Augment("none", flip=False), np.full(99, 40), np.full(99, 40), np.arange(99)).flips.any()


def test_evaluation_cuts_the_centre():
    boxes, flips = eval_crops(np.array([32, 500, 375, 1]), np.array([32, 375, 500, 7]), 224)
    assert boxes.tolist() == [[2, 2, 28, 28], [86, 23, 328, 328], [23, 86, 328, 328], [0, 3, 1, 1]]
    assert not flips.any()


def test_auto_is_decided_by_the_data_set():
    assert Augment().resolve(32, 32, 32).crop == "pad"
    assert Augment().resolve(32, 32, 224).crop == "random_resized"
    assert Augment().resolve(None, None, 32).crop == "random_resized"
    assert Augment("none").resolve(32, 32, 32).crop == "none"


@pytest.mark.parametrize(
    "settings", [{"crop": "zoom"}, {"pad": -1}, {"scale": (0.0, 1.0)}, {"scale": (0.5, 0.4)}, {"ratio": (0, 1)}]
)
def test_bad_settings_are_named(settings):
    with pytest.raises(SettingError, match=next(iter(settings))):
        Augment(**settings)
    assert eval_crops(np.array([32]), np.array([32]), 32).boxes.tolist() == [[0, 0, 32, 32]]


@given(st.lists(st.tuples(*[st.integers(1, 5000)] * 2), min_size=1, max_size=30), st.integers(1, 300))
def test_boxes_that_may_be_decoded_smaller_lie_on_the_smaller_grid(shapes, size):
    widths, heights = np.array(shapes).T
    exact = np.stack([widths // 5, heights // 3, 1 + widths // 2, 1 + heights // 2], axis=1)
    boxes, scale = snap(exact, size), scales(exact, size)
    for n, (box, before) in zip(scale, zip(boxes, exact, strict=True), strict=True):
        assert not (box % n).any() and (before >= box).all() and (before - box < n).all()
        assert n == 1 or (box[2:] >= n * size).all()
        assert n == 8 or before[2:].min() < 2 * n * size


def test_alternating_flips_mirror_each_image_in_every_other_epoch():
    augment, sizes, samples = Augment("none", flip="alternate"), np.full(1000, 32), np.arange(1000)
    order = np.random.default_rng(0).permutation(1000)

    def flips(epoch, samples):
        return train_crops(augment, sizes, sizes, 32, 5, epoch, np.arange(1000), samples).flips

    first = flips(0, samples)
    assert 0.45 < first.mean() < 0.55
    for epoch in range(5):
        assert (flips(epoch, samples) == first ^ (epoch % 2)).all()
        assert (flips(epoch, order) == flips(epoch, samples)[order]).all()  # by the sample, not by its position
    assert (train_crops(augment, sizes, sizes, 32, 6, 0, samples, samples).flips != first).any()


@pytest.mark.parametrize("flip", ["random", 1, None])
def test_other_flips_are_refused(flip):
    with pytest.raises(SettingError, match=r"^flip: "):
        Augment(flip=flip)
