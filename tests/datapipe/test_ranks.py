"""Nobody trains alone by mistake: parts of a job that do not know of each other are refused, on each of their ranks."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datapipe.cluster import placement, rank_placement
from datapipe.errors import SettingError

BATCH = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2", "SLURM_PROCID": "0"}  # sbatch -N2
INTERACTIVE = {
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NUM_NODES": "1",
}  # salloc's shell
LEFT_OVER = {"SLURM_NNODES": "1", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "7", "SLURM_PROCID": "0"}
ONE_NODE = r"srun -N1 -n1"


def step(tasks: int, nodes: int, index: int = 0) -> dict[str, str]:
    """What srun gives to a task of a step."""
    return {
        "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_NTASKS": str(tasks), "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(index), "SLURM_STEP_NODELIST": f"n[1-{nodes}]",
    }  # fmt: skip


def torchrun(agents: int, local: int, rank: int = 0) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(agents * local), "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local), "GROUP_WORLD_SIZE": str(agents), "GROUP_RANK": str(rank // local),
        "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "n1", "MASTER_PORT": "29500",
    }  # fmt: skip


def open_mpi(size: int, local: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": str(size), "OMPI_COMM_WORLD_LOCAL_SIZE": str(local),
        "MASTER_ADDR": "n1",
    }  # fmt: skip


def mpich(size: int, local: int) -> dict[str, str]:
    return {"PMI_RANK": "0", "PMI_SIZE": str(size), "MPI_LOCALNRANKS": str(local), "MASTER_ADDR": "n1"}


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (BATCH | step(2, 2) | torchrun(1, 1), r"step has 2 tasks \(SLURM_STEP_NUM_TASKS\).*--nnodes=2.*" + ONE_NODE),
        (BATCH | step(2, 2) | torchrun(1, 4, 3), r"torchrun connects those of this node.*--rdzv-endpoint"),
        (BATCH | torchrun(1, 4), r"this job has 2 nodes \(SLURM_JOB_NUM_NODES\).*--nnodes=2.*" + ONE_NODE),
        (BATCH | step(2, 2) | open_mpi(4, 4), "this step has 2 tasks.*Open MPI connects those of this node"),
        (BATCH | open_mpi(1, 1), "this job has 2 nodes.*this process knows of one: let one mpirun"),
        (BATCH | open_mpi(4, 4), "this job has 2 nodes.*Open MPI connects those of this node"),
        (BATCH | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, "this job has 2 nodes"),
        (BATCH | step(2, 2) | mpich(1, 1), "this step has 2 tasks"),
        (open_mpi(2, 1) | torchrun(1, 4), r"this job has 2 tasks \(OMPI_COMM_WORLD_SIZE\).*unset OMPI_COMM_WORLD_SIZE"),
        (BATCH | INTERACTIVE, "this job has 2 nodes.*as by srun"),
        (BATCH | INTERACTIVE | torchrun(1, 1), "this job has 2 nodes"),
        # The submitting shell was in a step of one task; this script is in none.
        (BATCH | {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "5"}, "this job has 2 nodes"),
        ({"PBS_NUM_NODES": "2"} | torchrun(1, 4), r"this job has 2 nodes \(PBS_NUM_NODES\).*unset PBS_NUM_NODES"),
        ({"PBS_NODENUM": "1"} | torchrun(1, 4), "this is node 1 of a job"),
    ],
)  # fmt: skip
def test_what_knows_only_of_its_own_node_is_refused(environ, words):
    with pytest.raises(SettingError, match=words) as raised:
        rank_placement(environ)
    assert "\n" not in str(raised.value) and "--node I/N" not in str(raised.value)  # which `trainer` does not have


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        (BATCH | step(1, 1), 1),  # srun -N1 -n1 is meant
        (BATCH | step(1, 1) | torchrun(1, 4), 4),
        (BATCH | step(1, 1) | open_mpi(4, 4), 4),
        (BATCH | step(4, 1), 4),  # as of `trainer launch`, where a node has failed and is left out
        (BATCH | step(2, 2) | torchrun(2, 4, 5), 8),
        (BATCH | step(3, 3) | torchrun(2, 4), 8),  # elastic, when one agent has gone
        (BATCH | open_mpi(4, 2), 4),
        (BATCH | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}, 1),
        # Variables of another job's step: this one has a single node.
        (LEFT_OVER | torchrun(1, 4), 4),
        ({"SLURM_NNODES": "1"} | torchrun(1, 4), 4),
        ({"SLURM_STEP_NUM_TASKS": "x", "SLURM_PROCID": "0"} | torchrun(1, 4), 4),
        ({"RANK": "", "WORLD_SIZE": ""}, 1),
        ({"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": "", "MASTER_ADDR": ""}, 1),
        (step(2, 2) | {"OMPI_COMM_WORLD_RANK": "", "OMPI_COMM_WORLD_SIZE": ""}, 2),
    ],
)  # fmt: skip
def test_what_is_meant_is_not_refused(environ, size):
    assert rank_placement(environ).world_size == size


@given(nodes=st.integers(2, 9), local=st.integers(1, 8), data=st.data())
def test_a_world_is_refused_exactly_where_it_lacks_the_other_nodes(nodes, local, data):
    """By any launcher, in a batch script or in a step of a task per node: the node's own world is, that of all not."""
    job = BATCH | {"SLURM_JOB_NUM_NODES": str(nodes), "SLURM_NNODES": str(nodes)}
    around = job | data.draw(st.sampled_from([{}, step(nodes, nodes, data.draw(st.integers(0, nodes - 1)))]))
    rank = data.draw(st.integers(0, local - 1))
    parts = [torchrun(1, local, rank), open_mpi(local, local), mpich(local, local)]
    wholes = [torchrun(nodes, local, rank), open_mpi(nodes * local, local), mpich(nodes * local, local)]
    for part, whole in zip(parts, wholes, strict=True):
        assert rank_placement(around | whole).world_size == nodes * local
        with pytest.raises(SettingError, match=rf"this (step|job) has {nodes} (tasks|nodes)"):
            rank_placement(around | part)
        assert rank_placement(job | step(1, 1) | part).world_size == local


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": ""}, "RANK: is set in the environment, and WORLD_SIZE is not; set both, or unset"),
        ({"RANK": "0"}, "set both, or unset RANK"),
        (step(4, 4) | {"SLURM_NTASKS": "2"}, "Run this by srun, or unset SLURM_STEP_NUM_TASKS"),
        ({"PBS_NODENUM": "1"}, "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or give torchrun --nnodes"),
    ],
)
def test_the_advice_names_only_what_every_command_knows(environ, words):
    with pytest.raises(SettingError, match=words) as raised:
        rank_placement(environ)
    assert "--node I/N" not in str(raised.value) and "--task" not in str(raised.value)


@given(st.dictionaries(st.sampled_from(sorted(BATCH | step(2, 2) | torchrun(2, 2) | open_mpi(2, 2) | INTERACTIVE)),
                       st.sampled_from(["", "0", "1", "2", "3", "x"])))  # fmt: skip
def test_no_environment_ends_in_another_error(environ):
    """A place, or a message without blank names."""
    try:
        place = rank_placement(environ)
    except SettingError as error:
        assert "  " not in str(error) and not str(error).startswith(":")
    else:
        assert 0 <= place.rank < place.world_size
        assert placement(environ) == place


def test_who_stages_alone_is_told_of_the_option(command, packed_folders, tmp_path):
    """Staging only warns: a node may be staged to at a time."""
    env = os.environ | BATCH
    done = command("datapipe", "stage", packed_folders["tar"], tmp_path / "local", env=env)
    assert done.returncode == 0, done.stderr
    assert "this job has 2 nodes" in done.stderr and "; or give --node I/N" in done.stderr
