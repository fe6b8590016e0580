"""The benchmarks' peers see the right images and labels, and their measures measure."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks/ is not installed

from benchmarks import corpus
from benchmarks.measure import cpu_s, spread
from benchmarks.peers import PEERS, Task, open_peer

NUM_CLASSES, EACH = 4, 24
SPIN = "import time\nwhile time.process_time() < 0.8: pass\nprint(flush=True)\ninput()"


@pytest.fixture(scope="module")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of one brightness a class, in every format: what a peer says of an image can be checked."""
    folder = tmp_path_factory.mktemp("corpus")
    noise = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in range(NUM_CLASSES):
            (folder / "images" / split / str(label)).mkdir(parents=True)
            for i in range(EACH):
                pixels = noise.integers(0, 20, (150, 200, 3), np.uint8) + 60 * label
                path = folder / "images" / split / str(label) / f"{i:03}.jpg"
                Image.fromarray(pixels.astype(np.uint8)).save(path, quality=95)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datapipe.plan.mean_bytes", lambda *_: 1 << 18)  # shards of few images
        corpus._pack(folder / "images", folder, shard_mib=2)
    return folder


@pytest.mark.parametrize("name", PEERS)
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


@pytest.mark.parametrize("name", PEERS)
def test_peer_evaluates_every_image_once(name: str, small_corpus: Path) -> None:
    task = Task(size=200, channels=1, crop="pad", batch_size=10, train=False)
    if name.startswith("datapipe"):
        pytest.skip("datapipe's own tests cover its evaluation")
    labels = [label for _, labels_B in open_peer(name, small_corpus, task)(0) for label in labels_B.tolist()]
    assert sorted(labels) == sorted(list(range(NUM_CLASSES)) * EACH)


def test_padded_crop_of_grey_images() -> None:
    from benchmarks.peers.pillow import prepare

    task = Task(size=28, channels=1, crop="pad", pad=2)
    image = Image.fromarray(np.full((28, 28), 7, np.uint8))
    pixels = np.stack([prepare(image, task).numpy() for _ in range(50)])
    assert pixels.shape == (50, 1, 28, 28)
    assert set(np.unique(pixels)) == {0, 7}
    assert (prepare(image, replace(task, train=False)).numpy() == 7).all()


def test_cpu_seconds_count_children_that_still_run() -> None:
    before = cpu_s()
    with subprocess.Popen([sys.executable, "-c", SPIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        while_running = cpu_s() - before
        child.communicate(b"\n")
    assert while_running > 0.7
    assert cpu_s() - before == pytest.approx(while_running, abs=0.3)


def test_first_items_of_an_idx_file() -> None:
    idx = b"\0\0\x08\3" + b"\0\0\0\5" + b"\0\0\0\2" * 2 + bytes(range(20))
    assert corpus._first(idx, 3) == b"\0\0\x08\3" + b"\0\0\0\3" + b"\0\0\0\2" * 2 + bytes(range(12))


def test_spread() -> None:
    assert spread([3.0, 1.0, 8.0]) == {"median": 3.0, "min": 1.0, "max": 8.0}
