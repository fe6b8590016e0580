"""The exchange by MPI: mpirun is real, and its processes have a host name of their own each, as if on several nodes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.datapipe.staging.data_sets import CHUNK, make_data_set, same
from tests.ports import free_ports

pytest.importorskip("mpi4py")
needs_nodes = pytest.mark.skipif(
    shutil.which("mpirun") is None or os.geteuid() != 0,
    reason="needs Open MPI's mpirun (Debian: openmpi-bin), and root",
)
NODES = 3
OPEN_MPI = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(NODES)]
# mpirun may pass on a line of one process between another's line and its end: each has a file of its own.
ON_NODE = 'rank=$OMPI_COMM_WORLD_RANK; hostname "node$rank" && exec "$@" "$LOCAL$rank" > "$LOCAL$rank.out"'


def run(source: Path, tmp_path: Path, *options: object) -> subprocess.CompletedProcess:
    """Stage from `source` to tmp_path/local0, local1 and so on; what each prints is in local0.out and so on."""
    stage = f"{sys.executable} -m datapipe stage --master localhost --transport mpi --chunk-mib 1".split()
    words = [*OPEN_MPI, "unshare", "--uts", "sh", "-c", ON_NODE, "sh", *stage, *options, source]
    env = os.environ | {"LOCAL": str(tmp_path / "local"), "MASTER_PORT": str(free_ports(2))}
    return subprocess.run([*map(str, words)], env=env, capture_output=True, text=True, timeout=120)


@needs_nodes
def test_each_byte_is_read_once(tmp_path):
    source = tmp_path / "source"
    size = make_data_set(source, [5 * CHUNK + 17, 3 * CHUNK, 100]).size_bytes
    done = run(source, tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads((tmp_path / f"local{node}.out").read_text())["data_sets"][0] for node in range(NODES)]
    assert all(same(source, tmp_path / f"local{node}") for node in range(NODES))
    assert sum(row["copied_bytes"] for row in rows) == size
    assert all(row["copied_bytes"] + row["received_bytes"] == size for row in rows)


@needs_nodes
def test_a_node_that_fails_ends_all_and_the_next_call_continues(tmp_path):
    source = tmp_path / "source"
    make_data_set(source, [9 * CHUNK, 9 * CHUNK])
    in_the_way = tmp_path / "local1" / ".shard-000001.tar.partial"  # which node 1 cannot write
    in_the_way.mkdir(parents=True)
    done = run(source, tmp_path)
    assert done.returncode != 0 and "shard-000001.tar.partial: Is a directory" in done.stderr
    assert "(errno 21, on node1)" in done.stderr
    in_the_way.rmdir()
    done = run(source, tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(same(source, tmp_path / f"local{node}") for node in range(NODES))


def test_without_mpirun_it_is_refused(tmp_path, command):
    make_data_set(tmp_path / "source", [100])
    env = os.environ | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    line = "datapipe", "stage", tmp_path / "source", tmp_path / "local", "--transport", "mpi", "--timeout", "2"
    done = command(*line, env=env)
    assert done.returncode == 2, done.stderr
    assert "for MPI this is process 0 of 1, and as torchrun tells process 1 of 2" in done.stderr
