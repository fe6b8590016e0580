"""tools/scaling.sh on a real Slurm: its jobs train by srun, as many ranks as each was given, and one draws the plot."""

from __future__ import annotations

import csv
import json

import pytest

from tests.datapipe import conftest as shared_fixtures
from tests.datapipe.slurm import ROOT, needs_testbed, wait_until
from trainer.measuring.runs import ATTEMPTS

NETWORK = "ktscale"  # of the nodes, a prefix of their names

pytestmark = [*needs_testbed, pytest.mark.ranks]
environ, run, cluster = shared_fixtures.environ, shared_fixtures.run, shared_fixtures.cluster


def test_a_job_for_each_number_of_ranks(cluster, run, sample_dir):
    run("datapipe", "pack", sample_dir, cluster.backing / "data", "--shard-mib", 1)
    data, out = cluster.shared / "data", cluster.shared / "scaling"
    settings = ("train.batch_size=60", "train.epochs=1", "data.threads=1", "train.log_every=5")
    words = [word for change in settings for word in ("--set", change)]
    sizes = ("OMP_NUM_THREADS=1", f"PYTHONPATH={ROOT}", "SBATCH=sbatch --time=5 --cpus-per-task=2")
    line = ("bash", ROOT / "tools" / "scaling.sh", "fashion-mnist-resnet8", "--data", data, "--out", out)
    said = cluster.run("env", *sizes, *line, "--ranks", "1 2", "--times", "2", "--slurm", "--device", "cpu", *words)
    *jobs, table = said.partition(";")[0].removeprefix("jobs ").split()
    assert len(jobs) == 2
    folder = cluster.backing / "scaling"

    def logs() -> str:
        return "".join(path.read_text() for path in folder.glob("slurm-*.log"))

    wait_until(lambda: not cluster.is_running(table), 300, logs)
    assert (folder / "scaling.csv").exists(), logs()
    rows = list(csv.DictReader((folder / "scaling.csv").read_text().splitlines()))
    assert [(row["ranks"], row["runs"], row["note"]) for row in rows] == [("1", "2", ""), ("2", "2", "")], logs()
    assert all(float(row["images_per_s"]) > 0 and row["nodes"] == "1" for row in rows)
    first = json.loads((folder / "ranks-2" / "seed-1" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["world_size"] == 2
    attempt = json.loads((folder / "ranks-2" / "seed-1" / ATTEMPTS).read_text())
    assert attempt["command"][:5] == ["srun", "--ntasks", "2", "--cpus-per-task", "2"]  # the job's, per task
    assert (folder / "scaling.png").exists()
