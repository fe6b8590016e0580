"""Packing by many tasks, as the launchers really start them: Slurm on four nodes with a slow shared filesystem, mpirun,
torchrun, and by hand. Whatever the launcher and whatever was killed, the result is that of one process, byte for byte.

Slurm and the filesystem come from a testbed beside the checkout; what needs them is skipped where that is not.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from datapipe.cluster import Task, detect
from datapipe.dataset.index import read_keys
from datapipe.dataset.manifest import Manifest
from datapipe.errors import SettingError
from datapipe.packing import PackOptions, pack
from datapipe.packing.out_folder import FINISHING, NEW, STATE
from tests.datapipe.slurm import ROOT, STALL_S, needs_testbed, wait_until
from tests.ports import free_ports
from tests.processes import clean_environment
from tests.waiting import limit_s

NUM_SHARDS = 18  # of 1 MiB: 0 to 15 of train, 16 and 17 of val

needs_open_mpi = pytest.mark.skipif(
    "Open MPI" not in subprocess.run("mpirun --version || true", shell=True, capture_output=True, text=True).stdout,
    reason="needs Open MPI's mpirun (Debian: openmpi-bin)",
)
AS_ROOT = ["--allow-run-as-root"] if os.geteuid() == 0 else []


@pytest.fixture(scope="module")
def raw(tmp_path_factory, photo, encoded) -> Path:
    """An ImageFolder of 300 JPEGs, 60 kB each."""
    root = tmp_path_factory.mktemp("raw") / "photos"
    photos = [photo(320, 240, seed) for seed in range(10)]
    for split, count in (("train", 265), ("val", 35)):
        for i in range(count):
            path = root / split / f"class {i % 5}" / f"{i:03d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(np.roll(photos[i % 10], i + 270 * (split == "val"), axis=1), quality=99))
    return root


@pytest.fixture(scope="module")
def packed(raw, tmp_path_factory) -> dict[str, Path]:
    """What one process makes of `raw`, by format."""
    root = tmp_path_factory.mktemp("packed")
    for format in ("tar", "hdf5"):
        pack(raw, root / format, PackOptions(shard_mib=1, format=format))
    assert len(list(root.glob("tar/*/shard-*.tar"))) == NUM_SHARDS
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="module")
def alone(packed) -> dict[str, dict[str, str]]:
    """The contents of that."""
    return {format: contents(path) for format, path in packed.items()}


def contents(folder: Path) -> dict[str, str]:
    """Every file's checksum by its name: a file left over differs as well."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def finished(out: Path) -> set[int]:
    """The finished shards of an unfinished pack."""
    first = {"train": 0, "val": 16}
    return {first[path.parent.name] + int(path.stem) for path in out.glob(".pack/*/[0-9]*.npz")}


def without_image(raw: Path, name: str, to: Path) -> None:
    """Copy `raw`, but make one file no image, although as large: the plan stays the same."""
    shutil.copytree(raw, to)
    (to / name).write_bytes(bytes((to / name).stat().st_size))


@pytest.fixture(scope="module")
def shared_raw(cluster, raw) -> Path:
    shutil.copytree(raw, cluster.backing / "raw")
    return cluster.shared / "raw"


@pytest.fixture(scope="module")
def late_image(packed, raw) -> str:
    """Name of an image in shard 10: of four tasks, number 2 packs that, after 2 and 6, and with or before 14."""
    train = packed["tar"] / "train"
    key = read_keys(train)[sum(shard.num_samples for shard in Manifest.read(train).shards[:10])]
    (path,) = raw.glob(f"train/*/{Path(key).name}.jpg")
    return str(path.relative_to(raw))


class TestSlurm:
    pytestmark = needs_testbed

    def test_job_of_four_tasks(self, cluster, shared_raw, alone):
        out = cluster.shared / "job"
        line = ["-N4", ROOT / "tools/slurm/pack.sbatch", shared_raw, out, "--shard-mib", 1]
        job = cluster.submit(*line, check=0)
        log = cluster.logs(job)
        assert contents(out) == alone["tar"]
        assert log.count(f"{out}/train: 265 images of 5 classes in 16 shards") >= 1, log
        assert log.count("is done; other tasks have") + log.count("300 images in") == 4, log
        again = cluster.submit(*line, check=0)
        assert "is complete" in cluster.logs(again)
        assert contents(out) == alone["tar"]

    def test_requeued_job_goes_on(self, cluster, shared_raw, late_image, alone):
        out = cluster.shared / "requeued"
        with cluster.stalled(shared_raw / late_image):
            job = cluster.submit("-N4", ROOT / "tools/slurm/pack.sbatch", shared_raw, out, "--shard-mib", 1)
            wait_until(lambda: finished(out) >= set(range(NUM_SHARDS)) - {10, 14})
            cluster.run("scontrol", "requeue", job)
        new = out / STATE / NEW
        paths = [path for path in new.glob("*/shard-*") if path.stem not in ("shard-000010", "shard-000014")]
        before = {out / path.relative_to(new): path.stat().st_mtime_ns for path in paths}
        assert len(before) == 2 * (NUM_SHARDS - 2)
        cluster.start_again(job)
        assert cluster.exit_code(job) == "0:0"
        assert contents(out) == alone["tar"]
        assert all(path.stat().st_mtime_ns == then for path, then in before.items())  # packed once

    def test_job_requeued_while_it_finishes(self, cluster, shared_raw, alone):
        """All shards are there, and the task that writes the manifests is killed at it."""
        out, control = cluster.shared / "finisher", cluster.shared / ".slowfs"
        control.write_text(json.dumps({"faults": [f"mkdir:*/finisher/.pack/manifest-*:1+:stall={STALL_S}"]}))
        try:
            job = cluster.submit("-N4", ROOT / "tools/slurm/pack.sbatch", shared_raw, out, "--shard-mib", 1)
            wait_until((cluster.backing / "finisher" / STATE / FINISHING).exists)
            cluster.run("scontrol", "requeue", job)
        finally:
            control.write_text(json.dumps({"faults": []}))
        assert finished(out) == set(range(NUM_SHARDS))
        cluster.start_again(job)
        assert cluster.exit_code(job) == "0:0"
        assert contents(out) == alone["tar"]

    def test_job_array(self, cluster, shared_raw, alone):
        out = cluster.shared / "array"
        script = ROOT / "tools/slurm/pack-array.sbatch"
        cluster.submit("--array=1-9:2", script, shared_raw, out, "--shard-mib", 1, "--format", "hdf5", check=0)
        assert contents(out) == alone["hdf5"]

    def test_killed_element_is_run_again(self, cluster, shared_raw, late_image, alone, run):
        out = cluster.shared / "killed"
        script, arguments = ROOT / "tools/slurm/pack-array.sbatch", [shared_raw, out, "--shard-mib", 1]
        with cluster.stalled(shared_raw / late_image):
            job = cluster.submit("--array=0-3", script, *arguments)
            wait_until(lambda: finished(out) >= set(range(NUM_SHARDS)) - {10, 14})
            wait_until(lambda: not any(cluster.is_running(f"{job}_{i}") for i in (0, 1, 3)))
            cluster.run("scancel", "--signal=KILL", f"{job}_2")
        assert [cluster.exit_code(f"{job}_{i}") for i in (0, 1, 3)] == ["0:0"] * 3
        assert cluster.exit_code(f"{job}_2") != "0:0"
        missing = run("datapipe", "pack", *arguments, "--finish", check=1).stderr
        assert re.search(rf"[12] of {NUM_SHARDS} shards are missing, the first is number 10:", missing)
        assert not (out / "train/manifest.json").exists()
        cluster.submit("--array=2", script, *arguments, "--task", "2/4", check=0)
        assert contents(out) == alone["tar"]

    def test_bad_image_stops_its_own_task_only(self, cluster, raw, late_image):
        bad, out = cluster.shared / "bad", cluster.shared / "bad-out"
        without_image(raw, late_image, cluster.backing / "bad")
        job = cluster.submit("-N4", ROOT / "tools/slurm/pack.sbatch", bad, out, "--shard-mib", 1, check=1)
        log = cluster.logs(job)
        assert f"{bad / late_image}, shard shard-000010.tar: cannot be packed" in log
        assert log.count("is done; other tasks have") == 3
        assert f"datapipe pack {bad} {out} --shard-mib 1 --finish" in log
        assert finished(out) >= {number for number in range(NUM_SHARDS) if number % 4 != 2}
        assert not list(out.rglob("*.partial"))

    def test_what_processes_find_in_their_environment(self, cluster):
        """The real thing behind the tables of ../test_cluster.py."""
        there = cluster.shared / "environments"
        there.mkdir()
        script = there / "script.sh"

        def found(name: str) -> Task:
            pairs = (there / name).read_text().rstrip("\0").split("\0")
            return detect(dict(pair.split("=", 1) for pair in pairs))

        def submit(*line: str, body: str) -> None:
            script.write_text(f"#!/bin/bash\nset -e\ncd {shlex.quote(str(there))}\n{body}\n")
            cluster.submit(*line, script, check=0)

        step = "sh -c 'env -0 >step$SLURM_ARRAY_TASK_ID.$SLURM_PROCID'"
        torchrun = f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 2 --master-addr 127.0.0.1"
        torchrun += f" --master-port {free_ports(1)} --node-rank $SLURM_NODEID --no-python"
        submit("-N2", "--ntasks-per-node=2", body=f"env -0 >batch; srun {step}")
        assert found("batch") == Task(0, 1, "")
        assert [found(f"step.{i}") for i in range(4)] == [Task(i, 4, "Slurm job step") for i in range(4)]

        body = f"srun sh -c '{torchrun} sh -c \"env -0 >torchrun.\\$RANK\"'"
        submit("-N2", "--ntasks-per-node=1", body=body)
        assert [found(f"torchrun.{i}") for i in range(4)] == [Task(i, 4, "torchrun") for i in range(4)]

        submit("-n2", "--array=3-7:2", body=f"env -0 >element$SLURM_ARRAY_TASK_ID; srun {step}")
        for i in range(3):
            assert found(f"element{3 + 2 * i}") == Task(i, 3, "Slurm job array")
            for k in range(2):
                assert found(f"step{3 + 2 * i}.{k}") == Task(2 * i + k, 6, "Slurm job array, Slurm job step")

        submit("-n1", "--array=1,5,9", body="env -0 >hole$SLURM_ARRAY_TASK_ID")
        with pytest.raises(SettingError, match=r"SLURM_ARRAY_TASK_ID: 5 .*--task"):
            found("hole5")

        # What a step submits has the step's variables, but is in no step; with srun it has its own.
        inner = there / "inner.sh"
        inner.write_text(f"#!/bin/bash\ncd {shlex.quote(str(there))}\nenv -0 >inner; srun sh -c 'env -0 >inner.step'\n")
        submit("-n2", body="srun sh -c '[ $SLURM_PROCID = 0 ] || sbatch --wait -n1 inner.sh'")
        with pytest.raises(SettingError, match=r"SLURM_STEP_NUM_TASKS: 2 .*--task"):
            found("inner")
        assert found("inner.step") == Task(0, 1, "Slurm job step")

    @needs_open_mpi
    def test_mpirun_in_a_job(self, cluster, shared_raw, alone):
        """Its processes have Slurm's variables as well, on the second node those of the step that started them."""
        out = cluster.shared / "mpirun"
        line = shlex.join(["bash", str(ROOT / "tools/mpi/pack.sh"), *AS_ROOT, "--", str(shared_raw), str(out)])
        job = cluster.submit("-N2", "--ntasks-per-node=2", f"--wrap={line} --shard-mib 1", check=0)
        assert contents(out) == alone["tar"]
        # Who finds all packed says what is there: the last, and those that waited for it; and then --finish.
        assert cluster.logs(job).count("is done; other tasks have") + cluster.logs(job).count("300 images in") == 5


# --- one machine ------------------------------------------------------------------------------------


def test_tasks_one_after_the_other(raw, alone, tmp_path, command):
    out = tmp_path / "out"

    def pack(*options: object, check: int = 0) -> str:
        done = command("datapipe", "pack", raw, out, "--shard-mib", 1, *options)
        assert done.returncode == check, done.stderr
        return done.stdout + done.stderr

    assert "task 0 of 3 is done; other tasks have 12 shards to write" in pack("--task", "0/3")
    assert f"12 of {NUM_SHARDS} shards are missing, the first is number 1:" in pack("--finish", check=1)
    said = json.loads(pack("--task", "1/3", "--json").splitlines()[0])  # what follows is the log
    assert (said["complete"], said["missing_shards"]) == (False, 6)
    assert "300 images" in pack("--task", "2/3")
    assert contents(out) == alone["tar"]


def test_tasks_all_at_once(raw, alone, tmp_path, server):
    line = "-m", "datapipe", "pack", raw, tmp_path / "out", "--shard-mib", 1
    tasks = [server.start(*line, "--task", f"{i}/3") for i in range(3)]
    said = [task.communicate(timeout=limit_s()) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0, 0], said
    assert contents(tmp_path / "out") == alone["tar"]


def test_a_requeued_task_of_slurm_finishes(raw, alone, tmp_path, server):
    """As its variables say, after the task that finished was killed at it: `finishing` is what that leaves."""
    out = tmp_path / "out"
    line = "pack", raw, out, "--shard-mib", 1, "--resume"
    for task in ("0", "1"):
        env = clean_environment(SLURM_PROCID=task, SLURM_STEP_NUM_TASKS="2", SLURM_NTASKS="2")
        if task == "1":
            done = server.run(Path(__file__).parent / "children" / "dies_at_the_manifest.py", *line, env=env)
            assert done.returncode == -signal.SIGKILL, done.stderr
            assert (out / STATE / FINISHING).exists() and finished(out) == set(range(NUM_SHARDS))
        server.run("-m", "datapipe", *line, env=env, check=True)
    assert contents(out) == alone["tar"]


@pytest.mark.slow  # test_mpirun_with_a_bad_image starts the same by default
@needs_open_mpi
def test_mpirun(raw, alone, tmp_path, run):
    launch = ["bash", ROOT / "tools/mpi/pack.sh", *AS_ROOT, "--oversubscribe", "-n", 3, "--"]
    done = run(*launch, raw, tmp_path / "out", "--shard-mib", 1)
    assert contents(tmp_path / "out") == alone["tar"]
    assert done.stdout.count("is done; other tasks have") + done.stdout.count("300 images in") == 4  # and --finish


@needs_open_mpi
def test_mpirun_with_a_bad_image(raw, late_image, tmp_path, run):
    bad, out = tmp_path / "raw", tmp_path / "out"
    without_image(raw, late_image, bad)
    launch = ["bash", ROOT / "tools/mpi/pack.sh", *AS_ROOT, "--oversubscribe", "-n", 3, "--"]
    done = run(*launch, bad, out, "--shard-mib", 1, check=1)
    assert "this task ended with 1" in done.stderr
    assert f"of {NUM_SHARDS} shards are missing" in done.stderr
    assert done.stdout.count("is done; other tasks have") == 2
    assert finished(out) >= {number for number in range(NUM_SHARDS) if number % 3 != 1}
    assert not list(out.rglob("*.partial"))


@needs_open_mpi
@pytest.mark.slow
def test_pbs_script(raw, alone, tmp_path, run, environ):
    """Without PBS: in the environment that it gives to a job on two nodes, and to the elements of an array."""
    script = ROOT / "tools/pbs/pack.pbs"
    (tmp_path / "nodes").write_text("localhost\nlocalhost\n")
    job = environ | {"PBS_O_WORKDIR": str(tmp_path), "PBS_JOBID": "12.head", "PBS_NODEFILE": str(tmp_path / "nodes")}
    job |= {"SOURCE": str(raw), "OUT": "job", "OPTIONS": "--shard-mib 1"}
    job |= {"MPIRUN": shlex.join(["mpirun", *AS_ROOT, "--oversubscribe"])}
    said = run("bash", script, env=job, cwd="/").stdout
    assert (
        said.count("is done; other tasks have") + said.count("300 images in") == 3
    )  # each task, and --finish after them
    assert contents(tmp_path / "job") == alone["tar"]

    element = job | {"OUT": "array", "PBS_ARRAY_INDEX": "1"}
    assert "TASKS" in run("bash", script, env=element, check=1).stderr
    for index in ("1", "0"):
        run("bash", script, env=element | {"PBS_ARRAY_INDEX": index, "TASKS": "2"})
    assert contents(tmp_path / "array") == alone["tar"]


@pytest.mark.slow  # what torchrun sets is a row of ../test_cluster.py
def test_torchrun(raw, alone, tmp_path, run, environ):
    pytest.importorskip("torch")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_ports(1)]
    env = environ | {"PYTHONPATH": str(ROOT)}
    run(*launch, "-m", "datapipe", "pack", raw, tmp_path / "out", "--shard-mib", 1, env=env)
    assert contents(tmp_path / "out") == alone["tar"]
