"""Which processes log what, by whatever launcher they were started."""

from __future__ import annotations

import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datapipe.cluster import name_rank, name_task
from tests.waiting import limit_s

LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", {"MASTER_ADDR": "localhost"}),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", {}),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", {}),
}


def variables(launcher: str, index: object, count: object) -> dict[str, str]:
    number, size, more = LAUNCHERS[launcher]
    return {number: str(index), size: str(count), **more}


@given(st.sampled_from(sorted(LAUNCHERS)), st.integers(1, 40), st.data())
def test_each_process_has_its_number_and_the_first_informs(launcher, count, data):
    index = data.draw(st.integers(0, count - 1))
    environ = variables(launcher, index, count)
    assert name_rank(environ) == (("", True) if count == 1 else (f"rank {index}", index == 0))
    assert name_task(environ) == ("" if count == 1 else f"task {index}")


@given(st.sampled_from(sorted(LAUNCHERS)), st.text(max_size=3), st.text(max_size=3))
def test_a_wrong_environment_ends_no_command(launcher, index, count):
    for name in (name_rank(variables(launcher, index, count))[0], name_task(variables(launcher, index, count))):
        assert re.fullmatch(r"((rank|task) \d+)?", name)
    assert name_rank({LAUNCHERS[launcher][0]: index}) == ("", True)
    assert name_task({"PBS_ARRAY_INDEX": "3"}) == ""  # of how many, PBS does not tell


@pytest.mark.ranks
@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_of_the_ranks_of_a_training_the_first_informs(start, packed, recipe_file, tmp_path, port, launcher):
    line = ["-m", "trainer", "train", recipe_file, "--data", packed, "--out", tmp_path / "run"]
    line += ["--set", "train.epochs=1"]
    meet = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "SLURM_JOB_END_TIME": "1"}  # which is over: it warns
    children = [start(*line, env=meet | variables(launcher, rank, 2)) for rank in range(2)]
    said = [child.communicate(timeout=limit_s())[1] for child in children]
    assert [child.returncode for child in children] == [75, 75], said
    assert re.search(r"^\d\d:\d\d:\d\d rank 0 INFO .*2 ranks", said[0], re.MULTILINE), said[0]
    assert "rank 0 WARNING 0 s are left" in said[0] and " INFO " not in said[1]


def test_each_task_of_a_pack_informs(command, sample_dir, tmp_path):
    """It packs its own share. Whoever is last finishes the data set."""
    for index in range(2):
        env = os.environ | variables("srun", index, 2)
        done = command("datapipe", "pack", sample_dir, tmp_path / "out", env=env)
        assert done.returncode == 0, done.stderr
    again = command("datapipe", "pack", sample_dir, tmp_path / "out", "--resume", env=env)
    assert "task 1 INFO" in again.stderr and "is complete" in again.stderr, again.stderr
    assert " INFO " in command("datapipe", "pack", sample_dir, tmp_path / "out", "--resume").stderr
