"""Staging and training in jobs of a real Slurm, whose nodes have a disk each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from datapipe.dataset.manifest import Manifest
from tests.datapipe.slurm import ROOT, Cluster, needs_testbed
from tests.datapipe.staging.data_sets import CHUNK, make_data_set, same

NETWORK = "dpslurm"
pytestmark = needs_testbed


@pytest.fixture
def source(cluster: Cluster) -> Path:
    folder = cluster.backing / "data"
    if not folder.exists():
        make_data_set(folder, [5 * CHUNK, 4 * CHUNK, *[1000] * 20])
    return cluster.shared / "data"


def test_four_nodes_stage_together_and_find_their_copies(cluster, source):
    """Who they are they know from Slurm."""
    local = cluster.folder / "local" / "data"
    command = f"srun --ntasks-per-node=1 datapipe stage {source} {local} --chunk-mib 1 --json"
    job = cluster.submit("-N4", "--ntasks-per-node=1", f"--wrap={command}", check=0)
    size = Manifest.read(source).size_bytes
    assert sum(copied_bytes(cluster, job)) == size
    for node in range(1, 5):
        assert same(source, cluster.folder / "nvme" / f"node{node}" / "data")
    again = cluster.submit("-N4", "--ntasks-per-node=1", f"--wrap={command}", check=0)
    assert copied_bytes(cluster, again) == [0] * 4
    alone = cluster.submit("-N2", "--ntasks-per-node=1", f"--wrap={command.partition('=1 ')[2]}", check=0)
    assert "this job has 2 nodes" in cluster.logs(alone), cluster.logs(alone)  # the batch script runs on the first only


def copied_bytes(cluster: Cluster, job: str) -> list[int]:
    rows = [json.loads(line) for line in cluster.logs(job).splitlines() if line.startswith("{")]
    return [row["data_sets"][0]["copied_bytes"] for row in rows]


def test_a_job_that_stages_and_trains(cluster, run, sample_dir):
    """On two nodes; submitted again, it finds its copies and its run."""
    pytest.importorskip("torch")
    data, out = cluster.shared / "fashion", cluster.shared / "run"
    run("datapipe", "pack", sample_dir, cluster.backing / "fashion", "--shard-mib", 1)
    settings = ["--set", "train.epochs=1", "--set", "train.target_accuracy=none", "--set", "data.threads=1"]
    script = ROOT / "tools/slurm/stage_and_train.sbatch"
    local = cluster.folder / "local" / "fashion"
    exported = f"--export=ALL,LOCAL={local}"
    line = ["-N2", exported, script, "fashion-mnist-resnet8", data, out, "--device", "cpu", *settings]
    job = cluster.submit(*line, check=0)
    log = cluster.logs(job)
    assert "2 rank(s)" in log or "2 ranks" in log, log
    assert (cluster.backing / "run" / "report.html").exists()
    again = cluster.logs(cluster.submit(*line, check=0))
    assert again.count("0.0 MiB copied") == 4, again
