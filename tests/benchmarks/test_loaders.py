"""The loaders that are compared give the right images with their labels, and their benchmarks measure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import bench_reading, corpus
from benchmarks.bench_loader import Child
from benchmarks.gpu import bench_loader_gpu
from benchmarks.peers import EVERYWHERE, PEERS, Task, open_peer
from benchmarks.peers.packing import missing
from benchmarks.peers.pillow import prepare
from datapipe.errors import MissingBackendError
from datapipe.images.recode import RecodeOptions
from datapipe.packing import PackOptions

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
        corpus.packed_as(folder, "restart8", PackOptions(recode=RecodeOptions(restart=8)))
    except MissingBackendError as error:
        pytest.skip(str(error))
    corpus.packed_as(folder, "raw256", PackOptions(format="npy", recode=RecodeOptions(store="raw", size=256)))


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


def test_padded_crop_of_grey_images() -> None:
    task = Task(size=28, channels=1, crop="pad", pad=2)
    image = Image.fromarray(np.full((28, 28), 7, np.uint8))
    pixels = np.stack([prepare(image, task).numpy() for _ in range(50)])
    assert pixels.shape == (50, 1, 28, 28)
    assert set(np.unique(pixels)) == {0, 7}
    assert (prepare(image, replace(task, train=False)).numpy() == 7).all()


@pytest.mark.slow
def test_gpu_benchmark_without_a_gpu(small_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to the device, with the processor in its place; torchvision may be missing."""
    pack_in_other_ways(small_corpus)
    monkeypatch.setattr(bench_loader_gpu, "BATCH", 16)
    monkeypatch.setattr(bench_loader_gpu, "SIZE", 64)
    device, names = torch.device("cpu"), set()
    for name, opened in bench_loader_gpu.ways(small_corpus, device).items():
        try:
            run = bench_loader_gpu.measure(opened(), 0, device)
        except (ImportError, RuntimeError):
            continue
        assert run["images"] == NUM_CLASSES * EACH and run["images_per_s"] > 0
        names.add(name)
    assert len(names) >= 6, names


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
