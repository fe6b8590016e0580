"""What tests of the loaders share: backends that read by the index, packed data sets, and ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from datapipe.names import BACKENDS
from tests.ports import free_ports
from tests.processes import ProcessServer, Ranks, clean_environment

# Two backends have tests of their own: one streams, and the other takes images of one size only.
INDEXED = [name for name in BACKENDS if name not in ("webdataset", "resident")]
FOLDERS = ("tar", "hdf5", "lmdb")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test each backend and each format that it asks for. Most pairs of both are slow."""
    match [name for name in ("backend", "folder") if name in metafunc.fixturenames]:
        case ["backend", "folder"]:
            for_each = [
                pytest.param(*pair, marks=[pytest.mark.slow] if pair[0] != "cpu" and pair[1] != "tar" else [])
                for pair in itertools.product(INDEXED, FOLDERS)
            ]
            metafunc.parametrize(("backend", "folder"), for_each, indirect=True)
        case ["backend"]:
            metafunc.parametrize("backend", INDEXED, indirect=True)
        case ["folder"]:
            metafunc.parametrize("folder", FOLDERS, indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "dali":
        pytest.importorskip("nvidia.dali")
    return request.param


@pytest.fixture
def folder(request: pytest.FixtureRequest, packed_folders: dict[str, Path]) -> Path:
    """A data set of 61 images in three shards."""
    return packed_folders[request.param] / "train"


@pytest.fixture
def start_ranks(server: ProcessServer) -> Iterator[Callable[..., Ranks]]:
    """start_ranks(number, program, argument…) -> the ranks of a job, each started with the same command."""
    started = []

    def start(count: int, *arguments: object) -> Ranks:
        job = {"WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_ports())}
        for rank in range(count):
            env = clean_environment(RANK=str(rank), LOCAL_RANK=str(rank), **job)
            started.append(server.start(*arguments, env=env))
        return Ranks(started)

    yield start
    for rank in started:
        rank.kill()
