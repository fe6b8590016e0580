"""The loaders that are compared give the right images with their labels, and their benchmarks measure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import bench_loader, bench_reading, corpus
from benchmarks.bench_loader import CENTRES, SECTIONS, Child
from benchmarks.peers import EVERYWHERE, PEERS, Task, describe_decoder, imagefolder, open_peer
from benchmarks.peers.pack import tried
from benchmarks.peers.packing import STATUS, missing, python_with, versions
from benchmarks.peers.pillow import choose_window, prepare
from datapipe import native
from datapipe.dataset import DataSet
from datapipe.errors import MissingBackendError
from datapipe.sampling.augment import eval_crops

NUM_CLASSES, EACH = 4, 24


@pytest.fixture(scope="module")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make images of one brightness per class, in every format: what a peer says of an image can be checked."""
    folder = tmp_path_factory.mktemp("corpus")
    noise = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in range(NUM_CLASSES):
            (folder / "images" / split / str(label)).mkdir(parents=True)
            for i in range(EACH):
                pixels = noise.integers(0, 20, (150, 200, 3), np.uint8) + 60 * label
                path = folder / "images" / split / str(label) / f"{i:03}.jpg"
                Image.fromarray(pixels.astype(np.uint8)).save(path, quality=95)
    corpus._pack(folder / "images", folder, shard_mib=0.1)  # shards of few images
    return folder


def pack_in_other_ways(folder: Path) -> None:
    try:
        bench_loader.with_our_packs(folder, {peer.data for peer in PEERS.values()})
    except MissingBackendError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", EVERYWHERE)
def test_peer_gives_images_with_their_labels(name: str, small_corpus: Path) -> None:
    task = Task(size=64, channels=3, crop="random_resized", batch_size=8)
    epochs = open_peer(name, small_corpus, task)
    for epoch in range(2):
        count = 0
        for images_BCHW, labels_B in epochs(epoch):
            assert str(images_BCHW.dtype) == "torch.uint8"
            assert images_BCHW.shape == (len(labels_B), 3, 64, 64)
            seen = (images_BCHW.float().mean((1, 2, 3)) / 60).long()
            assert seen.tolist() == labels_B.tolist()
            count += len(labels_B)
        assert count == NUM_CLASSES * EACH


@pytest.mark.parametrize("name", EVERYWHERE)
def test_peer_evaluates_every_image_once(name: str, small_corpus: Path) -> None:
    task = Task(size=200, channels=1, crop="pad", batch_size=10, train=False)
    if name.startswith("datapipe"):
        pytest.skip("datapipe's own tests cover its evaluation")
    labels = [label for _, labels_B in open_peer(name, small_corpus, task)(0) for label in labels_B.tolist()]
    assert sorted(labels) == sorted(list(range(NUM_CLASSES)) * EACH)


COLOUR_ONLY = [name for name in PEERS if name not in EVERYWHERE]


@pytest.mark.slow
@pytest.mark.parametrize("name", COLOUR_ONLY)
def test_peer_trains_on_photographs(name: str, small_corpus: Path) -> None:
    """In processes of their own, as they are measured: some need libraries that this one does not have."""
    if reason := missing(PEERS[name]):
        pytest.skip(reason)
    pack_in_other_ways(small_corpus)
    task = Task(size=64, channels=3, crop="random_resized", batch_size=8)
    with Child(name, small_corpus, task) as child:
        for epoch in range(2):
            run = child.epoch(epoch)
            assert run["images"] == NUM_CLASSES * EACH and run["mean_label"] == (NUM_CLASSES - 1) / 2
            for brightness, label in zip(*child.last, strict=True):
                assert int(brightness / 60) == label  # each class has one of its own
        assert bool(child.decoder) == name.startswith("datapipe")


@pytest.mark.slow
@pytest.mark.parametrize("name", SECTIONS["validation"].loaders)
def test_peer_evaluates_centres_of_photographs(name: str, small_corpus: Path) -> None:
    if reason := missing(PEERS[name]):
        pytest.skip(reason)
    task = replace(CENTRES, size=64, batch_size=NUM_CLASSES * EACH)
    with Child(name, small_corpus, task) as child:
        assert child.epoch(0)["images"] == child.epoch(1)["images"] == NUM_CLASSES * EACH
        first = child.last
        assert child.epoch(2)["images"] == NUM_CLASSES * EACH and child.last == first  # in order, and nothing drawn
    assert [int(brightness / 60) for brightness in first[0]] == first[1]


def test_centres_are_ours() -> None:
    task = Task(size=224, channels=3, crop="centre", train=False)
    for width, height in ((500, 375), (375, 500), (256, 256), (301, 257)):
        boxes, _ = eval_crops(np.array([width]), np.array([height]), task.size)
        assert choose_window(task, width, height) == tuple(boxes[0].tolist()), (width, height)
    image = Image.new("RGB", (400, 300), "white")
    image.paste("black", (75, 25, 325, 275))  # its centre of 262 pixels has a white edge of 6 pixels
    pixels = prepare(image, task).float().mean(0) > 127
    assert pixels.shape == (224, 224) and pixels[3, 100] and pixels[100, 3] and not pixels[8:-8, 8:-8].any()


def test_peers_refuse_what_they_are_not_set_up_for() -> None:
    trains, evaluates = Task(size=224, channels=3, crop="random_resized"), CENTRES
    trains.need_photographs()
    trains.need_photographs(or_centre=True)
    evaluates.need_photographs(or_centre=True)
    for task in (evaluates, replace(trains, channels=1), replace(trains, train=False), replace(trains, crop="pad")):
        with pytest.raises(ValueError, match="RandomResizedCrop"):
            task.need_photographs()
    with pytest.raises(ValueError, match="centre"):
        replace(evaluates, train=True).need_photographs(or_centre=True)


def test_sections_name_peers() -> None:
    for section in SECTIONS.values():
        assert set(section.loaders) <= set(PEERS) and set(section.ratio or ()) <= set(section.loaders)


def test_decoder_of_our_rows_is_recorded() -> None:
    assert describe_decoder("datapipe, tar") == f"in C: {native.choose()}"
    assert describe_decoder("datapipe, dali") == "dali"
    assert describe_decoder("ImageFolder + Pillow") is None


def test_ratio_is_of_epochs_that_stood_beside_each_other() -> None:
    loaders = {name: {"runs": [{"images_per_s": s} for s in speeds]} for name, speeds in
               {"two": (200.0, 90.0, 380.0), "one": (100.0, 50.0, 200.0)}.items()}  # fmt: skip
    ratio = bench_loader.wall_ratio(loaders, ("two", "one"))
    assert ratio == {"of": ["two", "one"], "median": 1.9, "min": 1.8, "max": 2.0}


def test_library_with_an_environment_of_its_own(tmp_path: Path) -> None:
    own = tmp_path / "torchcodec" / "bin" / "python"
    assert python_with("torchcodec", tmp_path) == python_with("spdl", tmp_path) == str(tmp_path / "bin" / "python")
    own.parent.mkdir(parents=True)
    own.touch()
    assert python_with("torchcodec", tmp_path) == str(own)
    assert versions(tmp_path) == {}
    (tmp_path / STATUS).write_text("spdl\tinstalled\t0.8.0\nffcv\tmissing\terror: no compiler\n")
    assert versions(tmp_path) == {"spdl": "0.8.0"}


def test_trial_of_a_loader_compares_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [(None, torch.arange(20) % 3)]
    monkeypatch.setattr(imagefolder, "open_epochs", lambda _folder, _task: lambda _epoch: batches)
    assert tried("imagefolder", imagefolder) == {"labels": [0] * 7 + [1] * 7 + [2] * 6}
    batches[0] = (None, torch.arange(19) % 3)
    with pytest.raises(ValueError, match="read"):
        tried("imagefolder", imagefolder)


def test_photographs_of_a_quality(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = tmp_path / "original.png"
    Image.effect_noise((600, 520), 50).convert("RGB").save(original)
    monkeypatch.setattr(corpus, "WORK", tmp_path)
    monkeypatch.setattr(corpus, "find_originals", lambda: [original])
    folders = {quality: corpus.photographs(2, quality=quality) for quality in (90, 97)}
    for quality, folder in folders.items():
        described = corpus.describe(folder)
        assert folder.name == f"photographs-2-quality{quality}" and described["jpeg_quality"] == quality
        assert described["images"] == 2
    assert corpus.describe(folders[90])["mean_bytes"] < corpus.describe(folders[97])["mean_bytes"]


def test_small_images_are_stored_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "WORK", tmp_path)
    monkeypatch.setattr(bench_loader, "SMALL", 20)
    folder = SECTIONS["pixels-of-32"].prepare(6000)
    assert corpus.describe(folder)["images"] == 20 and "jpeg_quality" not in corpus.describe(folder)
    drawn = {np.asarray(Image.open(path)).tobytes() for path in folder.glob("images/train/*/*.png")}
    with DataSet(folder / "raw32" / "train") as data_set:
        assert {bytes(data_set.read(i)) for i in range(20)} == drawn


def test_padded_crop_of_grey_images() -> None:
    task = Task(size=28, channels=1, crop="pad", pad=2)
    image = Image.fromarray(np.full((28, 28), 7, np.uint8))
    pixels = np.stack([prepare(image, task).numpy() for _ in range(50)])
    assert pixels.shape == (50, 1, 28, 28)
    assert set(np.unique(pixels)) == {0, 7}
    assert (prepare(image, replace(task, train=False)).numpy() == 7).all()


@pytest.mark.slow
def test_reading_benchmark(small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_reading, "BATCH", 16)
    monkeypatch.setattr(bench_reading, "WORK", tmp_path)
    folder = small_corpus / "tar" / "train"
    for order in ("full", "blocks"):
        assert bench_reading.ours(folder, order, "cached")["samples_per_s"] > 0
    assert bench_reading.plain(folder, direct=False)["mb_per_s"] > 0
    target = bench_reading.long_index(folder, 1000)
    start = bench_reading.first_batch(target, 0)
    assert 0 < start["open_s"] < start["first_batch_s"] and start["index_private_dirty_kib"] == 0
