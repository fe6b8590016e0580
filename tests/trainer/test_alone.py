"""Ranks that know only of their own node are refused as their launchers really start them, before anything begins."""

from __future__ import annotations

import shutil

import pytest

from tests.trainer.conftest import each_rank
from tests.trainer.runs import finish

STEP = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
STEP |= {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "n[1-2]"}
ALONE = {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_PROCID": "0"}


LAUNCHED = {"TORCHELASTIC_RUN_ID": "none"}  # what says that torchrun has started a rank
REFUSED_STEP = "error: this step has 2 tasks (SLURM_STEP_NUM_TASKS), and torchrun connects those of this"
REFUSED_JOB = "error: this job has 2 nodes (SLURM_JOB_NUM_NODES)"


@pytest.mark.ranks
def test_torchrun_in_a_step_of_one_task_trains(train):
    environ = STEP | ALONE | LAUNCHED
    code, _, err = finish(train("run", "train.epochs=1", "train.batch_size=64", ranks=2, env=environ))
    assert code == 0, err


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (STEP | LAUNCHED | each_rank(2, LOCAL_WORLD_SIZE="2")[1], REFUSED_STEP),
        ({"SLURM_JOB_NUM_NODES": "2", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, REFUSED_JOB),
    ],
    ids=["torchrun", "mpirun"],
)
def test_a_rank_of_a_launcher_that_connects_one_node_is_refused(train, tmp_path, environ, words):
    code, _, err = finish(train("run", env=environ))
    assert code == 2 and words in err and not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.ranks
def test_torchrun_on_one_node_of_a_step_of_two(train, tmp_path):
    """Both ranks say so."""
    code, out, err = finish(train("run", ranks=2, torchrun=True, env=STEP))
    assert code == 1 and not (tmp_path / "run").exists(), out
    assert err.count(REFUSED_STEP) == 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (Debian: openmpi-bin)")
def test_mpirun_of_one_process_in_a_job_of_two_nodes(train, tmp_path):
    env = {"SLURM_JOB_NUM_NODES": "2", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    code, _, err = finish(train("run", env=env, prefix=["mpirun", "-n", "1"]))
    assert code == 2 and not (tmp_path / "run").exists()
    assert REFUSED_JOB in err
