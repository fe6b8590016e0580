"""What `trainer launch` writes, on a real Slurm: a job that is preempted comes to its end."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

import pytest

from tests.datapipe import conftest as shared_fixtures
from tests.datapipe.slurm import Cluster, needs_testbed, wait_until
from trainer.launching import Launch

NETWORK = "ktslurm"  # of the nodes, a prefix of their names
SETTINGS = (
    "train.batch_size=60", "train.evaluate_every=100", "train.target_accuracy=0.5", "train.log_every=1",
    "train.checkpoint_every_steps=20", "data.threads=1",
)  # fmt: skip
NUM_EPOCHS, STEPS_PER_EPOCH = 8, 40  # long enough for Slurm to preempt the job meanwhile
END_S = 400  # of a job with its restarts, whatever else the machine does

pytestmark = [*needs_testbed, pytest.mark.ranks]
environ, run, cluster = shared_fixtures.environ, shared_fixtures.run, shared_fixtures.cluster


@pytest.fixture
def launch(cluster, run, sample_dir):
    """launch("run", epochs, time="5") -> (job, folder) of a training on two nodes, which share their cores.

    `exported`: more variables, each with a comma before it.
    """

    def _launch(name: str, epochs: int, exported: str = "", **options: str) -> tuple[str, Path]:
        if not (cluster.backing / "data").exists():
            run("datapipe", "pack", sample_dir, cluster.backing / "data", "--shard-mib", 1)
        changes = (*SETTINGS, f"train.epochs={epochs}")
        data, out, local = cluster.shared / "data", cluster.shared / name, cluster.folder / "local" / "data"
        script = Launch("fashion-mnist-resnet8", data, out, nodes=2, stage=local, changes=changes, **options).write()
        job = cluster.run("sbatch", "--parsable", f"--export=ALL,OMP_NUM_THREADS=1{exported}", script).strip()
        return job, cluster.backing / name

    return _launch


def read_lines(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def show(cluster: Cluster, job: str, name: str) -> str:
    return re.search(rf"\b{name}=(\S+)", cluster.run("scontrol", "show", "job", job))[1]


def finish(cluster: Cluster, job: str) -> str:
    """Return the state in which a job ends. Whenever it was requeued, it is started soon."""
    deadline, asked_at = time.monotonic() + END_S, 0.0
    while (state := show(cluster, job, "JobState")) in ("PENDING", "RUNNING", "COMPLETING", "PREEMPTED", "REQUEUED"):
        assert time.monotonic() < deadline, cluster.run("scontrol", "show", "job", job)
        if state == "PENDING" and time.monotonic() - asked_at > 10:  # again, in case that Slurm held it back only then
            cluster.start_soon(job)
            asked_at = time.monotonic()
        time.sleep(0.5)
    return state


def check(cluster: Cluster, job: str, folder: Path, state: str, num_steps: int) -> list[dict]:
    """The job has reached the target, and done each step; return the lines about its resumes."""
    log = "".join(path.read_text() for path in folder.glob("slurm-*.log"))
    assert (state, show(cluster, job, "ExitCode")) == ("COMPLETED", "0:0"), log
    lines = read_lines(folder)
    assert lines[-1]["status"] == "target_reached", log
    assert [line["step"] for line in lines if line["event"] == "train"] == [*range(1, num_steps + 1)]
    assert (folder / "report.html").exists(), log
    resumes = [line for line in lines if line["event"] == "resume"]
    assert [line["world_size"] for line in resumes] == [2] * len(resumes)
    return resumes


@pytest.mark.parametrize("options", [(), ("--signal=USR1@30",)], ids=["TERM", "USR1"])
def test_a_job_that_is_preempted(cluster, launch, options):
    """With --signal, it gets that first. Either way it saves a checkpoint, lets the other in, and then continues."""
    name = f"preempted{len(options)}"
    job, folder = launch(name, NUM_EPOCHS, time="5", options=options)
    wait_until(lambda: len(read_lines(folder)) > 5, 180, lambda: cluster.run("squeue"))
    urgent = cluster.submit("--partition=urgent", "--nodes=4", "--exclusive", "--wrap=sleep 1")
    wait_until(lambda: not cluster.is_running(urgent), 120, lambda: cluster.run("squeue"))
    resumes = check(cluster, job, folder, finish(cluster, job), NUM_EPOCHS * STEPS_PER_EPOCH)
    assert len(resumes) == 1 and resumes[0]["repeated_steps"] == 0


def test_a_job_whose_time_is_over(cluster, launch, tmp_path):
    """It saves in time, and requeues itself until all is done; no step is done twice."""
    shutil.copy(Path(__file__).parent / "children" / "slow_steps.py", tmp_path / "sitecustomize.py")
    job, folder = launch("timed", NUM_EPOCHS, f",PYTHONPATH={tmp_path}", time="1")
    resumes = check(cluster, job, folder, finish(cluster, job), NUM_EPOCHS * STEPS_PER_EPOCH)
    assert resumes and all(line["repeated_steps"] == 0 for line in resumes)
    log = "".join(path.read_text() for path in folder.glob("slurm-*.log"))
    assert "TIME LIMIT" not in log
