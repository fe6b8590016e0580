"""Nodes, which are processes that each have a host name of their own, and data sets that a loader can read."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from datapipe.packing import PackOptions, pack
from tests.datapipe.staging.data_sets import CHILDREN, NUM_IMAGES
from tests.processes import Process, ProcessServer

COMMENT_BYTES = 50_000


@pytest.fixture
def begin(server: ProcessServer, request: pytest.FixtureRequest) -> Callable[..., Process]:
    """begin(name, *arguments, host="", **settings) -> what runs children/NAME.py, ended with the test."""
    begun: list[Process] = []

    def begin_child(name: str, *arguments: object, **settings) -> Process:
        path = ("-m", "datapipe") if name == "datapipe" else (CHILDREN / f"{name}.py",)
        begun.append(server.start(*path, *arguments, **settings))
        return begun[-1]

    def end() -> None:
        for process in begun:
            with process:
                process.kill()

    request.addfinalizer(end)
    return begin_child


@pytest.fixture
def start(begin: Callable[..., Process]) -> Callable[..., Process]:
    """start(*arguments, host="", **settings) -> a `datapipe stage` in the background, ended with the test."""
    return lambda *arguments, **settings: begin("datapipe", "stage", *arguments, **settings)


@pytest.fixture
def as_nobody(server: ProcessServer) -> Callable[..., subprocess.CompletedProcess]:
    """as_nobody(name, *arguments) -> what children/NAME.py, or "datapipe", has said to the user nobody."""
    return functools.partial(server.run, CHILDREN / "as_nobody.py")


@pytest.fixture
def disk(request) -> Iterator[Path]:
    """A small disk, of 24 MiB."""
    folder = Path(tempfile.mkdtemp(prefix="disk-"))
    request.addfinalizer(folder.rmdir)
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m,mode=755", "tmpfs", folder], capture_output=True
    ).returncode:
        pytest.skip("nothing can be mounted here: needs root")
    request.addfinalizer(lambda: subprocess.run(["umount", "--lazy", folder], check=True))
    return folder


@pytest.fixture
def public(packed_folders: dict[str, Path]) -> Iterator[Path]:
    """A folder with a data set, `source`, that any user can read; pytest's own are closed."""
    folder = Path(tempfile.mkdtemp(prefix="stage-"))
    folder.chmod(0o755)
    shutil.copytree(packed_folders["tar"], folder / "source")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def big_images(tmp_path_factory: pytest.TempPathFactory, encoded) -> Path:
    """Data sets of images that take 50 kB each and are decoded at once.

    train: 24 blocks of 1 MiB in 4 shards; val: a single image.
    """
    folder = tmp_path_factory.mktemp("big")
    random = np.random.default_rng(0)
    for i in range(NUM_IMAGES + 1):
        path = folder / "raw" / ("val" if i == NUM_IMAGES else "train") / str(i % 3) / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        jpeg = encoded(random.integers(0, 256, (16, 16, 3), np.uint8))
        comment = b"\xff\xfe" + (2 + COMMENT_BYTES).to_bytes(2, "big") + random.bytes(COMMENT_BYTES)
        path.write_bytes(jpeg[:2] + comment + jpeg[2:])  # behind the start of the image
    for label in "12":
        (folder / "raw" / "val" / label).mkdir()
    pack(folder / "raw", folder / "packed", PackOptions(shard_mib=6, workers=1))
    return folder / "packed"
