"""Staging and training in jobs of a real Slurm, whose nodes have a disk each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from datapipe.dataset.manifest import Manifest
from tests.datapipe.slurm import ROOT, TESTBED, Cluster, needs_testbed, wait_until
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
    """On two nodes; submitted again, it finds its copies and its run. The summary is said last."""
    pytest.importorskip("torch")
    from trainer.launching import Launch

    out, local = cluster.shared / "run", cluster.folder / "local" / "fashion"
    run("datapipe", "pack", sample_dir, cluster.backing / "fashion", "--shard-mib", 1)
    changes = "train.epochs=1", "train.target_accuracy=none", "data.threads=1"
    script = Launch(
        "fashion-mnist-resnet8", cluster.shared / "fashion", out, nodes=2, stage=local, changes=changes
    ).write()
    job = cluster.submit(script)
    assert cluster.exit_code(job) == "0:0"
    log = (out / f"slurm-{job}.log").read_text()
    assert "2 ranks" in log and "Traceback" not in log and "Exception raised" not in log, log
    assert log.splitlines()[-1].startswith("report "), log
    assert (cluster.backing / "run" / "report.html").exists()
    again = cluster.submit(script)
    assert cluster.exit_code(again) == "0:0"
    assert (out / f"slurm-{again}.log").read_text().count("0.0 MiB read from DIR") == 4


@pytest.fixture
def site(cluster: Cluster, environ: dict[str, str]) -> Iterator[Callable[[str], None]]:
    """site(free) has the nodes run tools/slurm's prolog and epilog, edited as an administrator would."""
    own = {name: (cluster.folder / name).read_text() for name in ("prolog.sh", "epilog.sh")}

    def install(free: str) -> None:
        edits = {
            "caches=/local/datapipe": f"caches={cluster.folder}/local/datapipe",
            "PATH=/opt/datapipe/bin:": f"PATH={environ['PATH'].partition(':')[0]}:",
            "free=200GiB": f"free={free}",
            "logger -t datapipe-epilog": f"cat >>{cluster.folder}/local/epilog.log",
        }
        for name, before in own.items():
            text = (ROOT / "tools/slurm" / name).read_text()
            for old, new in edits.items():
                text = text.replace(old, new)
            script = cluster.folder / f"site-{name}"
            script.write_text(text)
            script.chmod(0o755)
            (cluster.folder / name).write_text(f"{before}exec {script}\n")

    yield install
    for name, before in own.items():
        (cluster.folder / name).write_text(before)


def test_a_prolog_and_an_epilog(cluster, source, site):
    """A job keeps its copies, its epilog keeps them no more, and the same job finds them, unless room was needed."""
    local = cluster.folder / "local/datapipe/root/data"
    nodes = [cluster.folder / "nvme" / f"node{node}" for node in (1, 2)]
    copies = [node / "datapipe/root/data" for node in nodes]
    stage_it = f"datapipe stage {source} {local} --chunk-mib 1 --json && ls -A {local}"
    line = ["-N2", "--nodelist=node[1-2]", "--ntasks-per-node=1", f"--wrap=srun --ntasks-per-node=1 sh -c '{stage_it}'"]
    size = Manifest.read(source).size_bytes
    for free, copied in (("1KB", size), ("1000TB", 0), ("1KB", size)):
        site(free)
        job = cluster.submit(*line, check=0)
        said = cluster.logs(job)
        assert sum(copied_bytes(cluster, job)) == copied and said.count(f".keep-{job}.json") == 2, said
        wait_until(lambda job=job: not any((copy / f".keep-{job}.json").exists() for copy in copies))
        if free == "1KB":
            assert all(same(source, copy) for copy in copies), (nodes[0] / "epilog.log").read_text()
        else:
            wait_until(lambda: not any(copy.exists() for copy in copies))
        assert all((node / "datapipe/root").is_dir() for node in nodes)


def test_what_launch_writes_trains_and_goes_on(cluster, run, sample_dir):
    """Two nodes; after SIGUSR1, as before a time limit, the script requeues its job, which continues the run."""
    pytest.importorskip("torch")
    from trainer.launching import Launch

    out, local = cluster.shared / "launched", cluster.folder / "local" / "launched"
    run("datapipe", "pack", sample_dir, cluster.backing / "to-launch", "--shard-mib", 1)
    changes = "train.epochs=6", "train.target_accuracy=none", "data.threads=1", "train.log_every=1"
    script = Launch(
        "fashion-mnist-resnet8", cluster.shared / "to-launch", out, nodes=2, stage=local, time="5", changes=changes
    ).write()
    job = cluster.submit(script)
    metrics = cluster.backing / "launched" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"train"' in metrics.read_text(), 180, lambda: cluster.run("squeue"))
    cluster.run("scancel", "--signal=USR1", job)
    cluster.start_again(job)
    log = "".join(path.read_text() for path in out.glob("slurm-*.log"))
    assert "resuming at step" in log and "2 ranks" in log, log
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line["step"] for line in lines if line["event"] == "train"]
    assert steps == list(range(1, steps[-1] + 1)) and lines[-1]["status"] == "completed"
    (resumed,) = [line for line in lines if line["event"] == "resume"]
    assert resumed["waited_s"] > 0 and resumed["world_size"] == 2
    assert (cluster.backing / "launched" / "report.html").exists()


@pytest.fixture
def launch(cluster, run, sample_dir):
    """launch(name) -> (job, its metrics.jsonl): submit what `trainer launch` writes, and wait for a checkpoint."""
    pytest.importorskip("torch")
    from trainer.launching import Launch

    if not (cluster.backing / "to-train").exists():
        run("datapipe", "pack", sample_dir, cluster.backing / "to-train", "--shard-mib", 1)

    def submit(name: str) -> tuple[str, Path]:
        changes = "train.epochs=3", "train.target_accuracy=none", "data.threads=1", "train.log_every=1"
        data, out = cluster.shared / "to-train", cluster.shared / name
        script = Launch("fashion-mnist-resnet8", data, out, nodes=2, changes=changes).write()
        text = script.read_text().replace("--resume", "--resume --rank-timeout 15").replace("--wait=60", "--wait=30")
        script.write_text(text)  # as a user would, who has no time
        job = cluster.submit(script)
        wait_until((cluster.backing / name / "checkpoint.pt").exists, 180)
        return job, cluster.backing / name / "metrics.jsonl"

    return submit


def read_end(cluster: Cluster, metrics: Path) -> tuple[str, dict]:
    """The log of a run that has completed, after one resume, and that line."""
    log = "".join(path.read_text() for path in metrics.parent.glob("slurm-*.log"))
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    (resumed,) = [line for line in lines if line["event"] == "resume"]
    assert lines[-1]["status"] == "completed" and (metrics.parent / "report.html").exists()
    return log, resumed


def test_training_continues_without_the_node_of_a_rank_that_fails(cluster, launch):
    """The batch is as large as before, and the first node has all of it."""
    job, metrics = launch("stopped")
    os.kill(_rank_on("node2", cluster.shared / "stopped"), signal.SIGSTOP)
    assert cluster.exit_code(job) == "0:0"
    log, resumed = read_end(cluster, metrics)
    assert "left out: node2; training continues on 1 of 2 nodes" in log and "rank 1 (node2)" in log, log
    assert resumed["world_size"] == 1


def test_training_continues_on_another_node_where_one_is_down(cluster, launch):
    job, metrics = launch("cut")
    subprocess.run([TESTBED / "netns-hosts.sh", "link", NETWORK, "node2", "down"], check=True)
    try:
        cluster.start_again(job)
    finally:
        subprocess.run([TESTBED / "netns-hosts.sh", "link", NETWORK, "node2", "up"], check=True)
        cluster.run("scontrol", "update", "nodename=node2", "state=resume")
    log, resumed = read_end(cluster, metrics)
    assert "rank 1 (node2) has given no sign of life" in log, log
    assert resumed["world_size"] == 2


def _rank_on(node: str, out: Path) -> int:
    """The process of the rank on a node: processes on all nodes are this machine's."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        is_python = b"python" in words[0] and os.fsencode(out) in words
        if is_python and f"SLURMD_NODENAME={node}".encode() in variables:
            return int(process.name)
    raise AssertionError(f"no rank on {node}")
