"""Ranks that know only of their own node are refused as their launchers really start them, before anything begins."""

from __future__ import annotations

import shutil

import pytest

STEP = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
STEP |= {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "n[1-2]"}
ALONE = {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_PROCID": "0"}
ONE_EPOCH = ("--set", "train.epochs=1")


@pytest.fixture
def line(packed, recipe_file, tmp_path):
    return ["trainer", "train", recipe_file, "--data", packed, "--out", tmp_path / "run", *ONE_EPOCH]


@pytest.mark.ranks
def test_torchrun_on_one_node_of_a_step_of_two(start, line, tmp_path):
    """Both ranks say so; as a step of one task it trains."""
    child = start("-m", *line, ranks=2, torchrun=True, env=STEP)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 1 and not (tmp_path / "run").exists(), out
    assert err.count("error: this step has 2 tasks (SLURM_STEP_NUM_TASKS), and torchrun connects those of this") == 2
    child = start("-m", *line, ranks=2, torchrun=True, env=STEP | ALONE)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (Debian: openmpi-bin)")
def test_mpirun_of_one_process_in_a_job_of_two_nodes(start, line, tmp_path):
    env = {"SLURM_JOB_NUM_NODES": "2", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    child = start("-m", *line, env=env, prefix=["mpirun", "-n", "1"])
    _, err = child.communicate(timeout=120)
    assert child.returncode == 2 and not (tmp_path / "run").exists()
    assert "error: this job has 2 nodes (SLURM_JOB_NUM_NODES)" in err
