"""What all tests share: the --slow option, the real sample, pictures, and how to run a command."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from PIL import Image

from tests.processes import ProcessServer, clean_environment, open_server
from tests.summary import Summary
from tests.waiting import limit_s

# Of this process and its children: threads of several processes on few cores wait for each other far longer than they
# compute.
os.environ["OMP_NUM_THREADS"] = "1"
_state = tempfile.TemporaryDirectory(prefix="state-")  # in place of the user's own, where processes share a secret
os.environ["XDG_STATE_HOME"] = _state.name
os.environ["OMP_WAIT_POLICY"] = "passive"  # where a test asks for more: threads that wait compute nothing

settings.register_profile("shared machine", deadline=None)  # a first call may be slow, and says nothing of the code
settings.load_profile("shared machine")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Summary())
    # A job in the background ignores Ctrl-C, and hands that down to what it starts: tests send it to their children.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")


# A test that uses the fixture has the marker, whether it says so or not.
IMPLIED = {"mounted": "testbed"}


def pytest_itemcollected(item: pytest.Item) -> None:
    for fixture, marker in IMPLIED.items():
        if fixture in getattr(item, "fixturenames", ()):
            item.add_marker(marker)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        _skip(items, "slow", "slow: run with --slow")
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            _skip(items, "gpu", "no GPU here")


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):  # the name of a folder is among an item's keywords, too
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def sample_dir() -> Path:
    """Folder of the real sample of Fashion-MNIST: four IDX files, 2,400 training and 600 test images."""
    return Path(__file__).parent / "data" / "fashion-mnist-sample"


def photo(width: int, height: int, seed: int, grey: bool = False) -> np.ndarray:
    """Something photograph-like, uint8[height, width, 3] (or [height, width]): smooth shapes and a little noise."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    planes = []
    for _ in range(1 if grey else 3):
        a, b, c, d = random.uniform(2, 9, 4)
        planes.append(np.sin(a * x + c) * np.cos(b * y + d))
    pixels = np.stack(planes, axis=-1) * 100 + 128 + random.normal(0, 6, (height, width, len(planes)))
    pixels = pixels.clip(0, 255).astype(np.uint8)
    return pixels[:, :, 0] if grey else pixels


def encoded(pixels: np.ndarray, kind: str = "JPEG", **options) -> bytes:
    """The bytes of an image file, as Pillow writes it."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ImageFolder with train (3 classes, 61 images) and val (10): sizes, kinds and names of all sorts."""
    root = tmp_path_factory.mktemp("raw") / "pictures"
    names = ["plain", "with space", "two.dots.in", "naïve-é", "日本", "plain_2"]
    seed = 0
    for split, counts in {"train": (30, 20, 11), "val": (5, 3, 2)}.items():
        for label, count in enumerate(counts):
            folder = root / split / f"class.{label} x"
            folder.mkdir(parents=True)
            for i in range(count):
                seed += 1
                random = np.random.default_rng(seed)
                width, height = (int(n) for n in random.integers(20, 300, 2))
                pixels = photo(width, height, seed, grey=seed % 7 == 0)
                kind, suffix = ("PNG", "png") if seed % 5 == 0 else ("JPEG", ("jpg", "JPEG")[seed % 2])
                (folder / f"{names[i % len(names)]}{i // len(names)}.{suffix}").write_bytes(encoded(pixels, kind))
    return root


@pytest.fixture(scope="session")
def packed_folders(image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`image_folder`, packed in each format of encoded images into several shards: format -> folder of the splits."""
    from datapipe.names import FORMATS
    from datapipe.packing import PackOptions, pack

    root = tmp_path_factory.mktemp("packed")
    formats = [name for name in FORMATS if name != "npy"]
    for name in formats:
        pack(image_folder, root / name, PackOptions(format=name, shard_mib=0.37, workers=1))  # three shards of train
    return {name: root / name for name in formats}


@pytest.fixture(scope="session")
def server() -> Iterator[ProcessServer]:
    """What starts processes in milliseconds: see `tests.processes`."""
    with open_server(clean_environment()) as server:
        yield server


@pytest.fixture
def patience_s() -> int:
    """A time-out for the product, in seconds: on this machine now, only what hangs takes longer."""
    return max(10, round(limit_s(4)))


@pytest.fixture(scope="session")
def command(server: ProcessServer) -> Callable[..., subprocess.CompletedProcess]:
    """command("datapipe" or "trainer", …, env={}) -> what the command has printed, and its exit code.

    `prefix`: the command that a new interpreter is run by. `fresh`: in a new interpreter.
    """

    def run(
        name: str, *arguments: object, prefix: Sequence[str] = (), fresh: bool = False, **options
    ) -> subprocess.CompletedProcess:
        options = {"timeout": 300, **options}
        if not fresh and not prefix and not server.differing_at_start(options.get("env") or os.environ):
            return server.run("-m", name, *arguments, **options)
        line = [*prefix, sys.executable, "-m", name, *map(str, arguments)]
        return subprocess.run(line, capture_output=True, text=True, **options)

    return run


@pytest.fixture(name="photo", scope="session")
def _photo():
    return photo


@pytest.fixture(name="encoded", scope="session")
def _encoded():
    return encoded
