"""The exchange by MPI: what it does with the library, and once with a real mpirun."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from datapipe.cluster import Placement
from datapipe.jobgroup import mpi
from datapipe.jobgroup.store import CrewError
from tests.datapipe.staging.data_sets import CHUNK, make_data_set, same
from tests.ports import free_ports
from tests.waiting import limit_s

NODES = 3
OPEN_MPI = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(NODES)]
# mpirun may pass on a line of one process between another's line and its end: each has a file of its own.
ON_NODE = 'rank=$OMPI_COMM_WORLD_RANK; hostname "node$rank" && exec "$@" "$LOCAL$rank" > "$LOCAL$rank.out"'


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("mpirun") is None or os.geteuid() != 0,
    reason="needs Open MPI's mpirun (Debian: openmpi-bin), and root",
)
def test_a_node_that_fails_ends_all_and_the_next_call_continues(tmp_path):
    """Then each byte that none has is read once. A node is a process with a host name of its own."""
    pytest.importorskip("mpi4py")
    source = tmp_path / "source"
    size = make_data_set(source, [5 * CHUNK + 17, 3 * CHUNK, 100]).size_bytes

    def stage() -> subprocess.CompletedProcess:
        stage = f"{sys.executable} -m datapipe stage --master localhost --transport mpi --chunk-mib 1 --json".split()
        words = [*OPEN_MPI, "unshare", "--uts", "sh", "-c", ON_NODE, "sh", *stage, str(source)]
        env = os.environ | {"LOCAL": str(tmp_path / "local"), "MASTER_PORT": str(free_ports(2))}
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=limit_s())

    in_the_way = tmp_path / "local1" / ".shard-000001.tar.partial"  # which node 1 cannot write
    in_the_way.mkdir(parents=True)
    done = stage()
    assert done.returncode != 0 and "shard-000001.tar.partial: Is a directory" in done.stderr
    assert "(errno 21, on node1)" in done.stderr
    in_the_way.rmdir()
    done = stage()
    assert done.returncode == 0, done.stderr
    rows = [json.loads((tmp_path / f"local{node}.out").read_text())["data_sets"][0] for node in range(NODES)]
    assert all(same(source, tmp_path / f"local{node}") for node in range(NODES))
    assert sum(row["copied_bytes"] for row in rows) <= size
    assert all(row["received_bytes"] for row in rows)


class World:
    """MPI's communicator of processes of which this is one; `answers`: whether the others send their bytes."""

    def __init__(self, rank: int, size: int, answers: bool = True) -> None:
        self.rank, self.size, self.answers = rank, size, answers
        self.members: list[int] = []
        self.end = time.monotonic() + limit_s(60)
        self.aborted = 0

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Get_group(self) -> World:
        return self

    def Incl(self, ranks: list[int]) -> list[int]:
        return ranks

    def Create_group(self, ranks: list[int]) -> World:
        self.members = ranks
        return self

    def Iallgather(self, mine: np.ndarray, everyones: np.ndarray) -> World:
        everyones[:] = mine
        return self

    def Test(self) -> bool:
        assert time.monotonic() < self.end, "it waits for longer than it should"
        return self.answers

    def Abort(self, code: int) -> None:
        self.aborted = code
        raise SystemExit(code)


class Nodes:
    """What MpiGroup asks of the nodes; `left`: which have left."""

    def __init__(self, left: dict[int, str]) -> None:
        self.leaders, self.left = [0, 2], left

    def find_left(self, _: list[int]) -> dict[int, str]:
        return self.left

    def explain(self, error: BaseException) -> str:
        return f"node 1 is missing: {error}"


@pytest.fixture
def join(monkeypatch):
    """join(world, left) -> the connections between two nodes, of which process 0 and process 2 stage."""
    monkeypatch.setattr(mpi, "_LOOK_S", 0.01)

    def join(world: World, left: dict[int, str]) -> mpi.MpiGroup:
        monkeypatch.setattr(mpi, "load_mpi", lambda: SimpleNamespace(COMM_WORLD=world))
        return mpi.MpiGroup(Nodes(left), 0.05)

    return join


def test_bytes_go_to_the_processes_that_stage(join):
    world = World(0, 3)
    everyones = torch.zeros(2, 4, dtype=torch.uint8)
    join(world, {}).exchange(torch.arange(4, dtype=torch.uint8), everyones)
    assert world.members == [0, 2] and everyones.tolist() == [[0, 1, 2, 3]] * 2


def test_a_node_that_has_left_is_named(join):
    with pytest.raises(CrewError, match="node 1 is missing: it has left"):
        join(World(0, 3, answers=False), {2: "its disk is full"}).exchange(torch.zeros(1), torch.zeros(2, 1))


def test_a_silent_node_ends_all(join, caplog):
    world = World(0, 3, answers=False)
    with pytest.raises(SystemExit):
        join(world, {}).exchange(torch.zeros(1), torch.zeros(2, 1))
    assert world.aborted == 1 and "nothing came for 0.05 s (timeout_s): with MPI, nobody can continue" in caplog.text


@pytest.mark.parametrize(
    ("known", "problem"),
    [
        ((1, 2), ""),
        ((0, 1), "for MPI this is process 0 of 1, and as torchrun tells process 1 of 2; start it by mpirun"),
    ],
)
def test_processes_that_mpi_does_not_know_are_refused(monkeypatch, known, problem):
    monkeypatch.setattr(mpi, "load_mpi", lambda: SimpleNamespace(COMM_WORLD=World(*known)))
    refusal = mpi.find_mpi_problem(Placement(rank=1, world_size=2, launcher="torchrun"))
    assert problem in str(refusal) if problem else refusal is None


def test_without_mpirun_it_is_refused(tmp_path, command):
    pytest.importorskip("mpi4py")
    make_data_set(tmp_path / "source", [100])
    env = os.environ | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    line = "datapipe", "stage", tmp_path / "source", tmp_path / "local", "--transport", "mpi", "--timeout", "2"
    done = command(*line, env=env)
    assert done.returncode == 2, done.stderr
    assert "for MPI this is process 0 of 1, and as torchrun tells process 1 of 2" in done.stderr
