"""Where a process is in its job, as launchers tell."""

from __future__ import annotations

import pytest

from datapipe.cluster import (
    Placement,
    ended_job,
    first_host,
    job_end,
    lonely,
    num_nodes,
    placement,
    rank_placement,
)
from datapipe.cluster.launchers import LAUNCHERS
from datapipe.errors import SettingError

SLURM = {
    "SLURM_JOB_ID": "17", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "gpu[03-06]", "SLURM_JOB_NODELIST": "gpu[01-09]", "SLURM_JOB_NUM_NODES": "4",
}  # fmt: skip
TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a1", "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
}  # fmt: skip
# What the sources of Torque and of OpenPBS give to a process that pbsdsh has started: src/resmom/start_exec.c of both.
TORQUE = {
    "PBS_JOBID": "12.head", "PBS_NODENUM": "1", "PBS_VNODENUM": "1", "PBS_TASKNUM": "3", "PBS_NUM_NODES": "2",
    "PBS_NUM_PPN": "1",
}  # fmt: skip
OPENPBS = {"PBS_JOBID": "12.head", "PBS_NODENUM": "1", "PBS_TASKNUM": "00000002"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1, "", "")),
        (SLURM, (2, 4, "gpu03", "Slurm job step")),
        (TORCHRUN, (5, 8, "a1", "torchrun")),
        (SLURM | TORCHRUN, (5, 8, "a1", "torchrun")),  # the inner one
        (OPEN_MPI, (1, 2, "", "Open MPI")),
        (OPEN_MPI | {"MASTER_ADDR": "n7"}, (1, 2, "n7", "Open MPI")),
        (SLURM | OPEN_MPI, (1, 2, "gpu01", "Open MPI")),  # the step is of mpirun's helpers
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 4, "", "MPICH/PMI")),
        ({name: SLURM[name] for name in ("SLURM_JOB_ID", "SLURM_PROCID")}, (0, 1, "", "")),  # a batch script
        (TORQUE, (1, 2, "", "pbsdsh")),
        (TORQUE | {"PBS_NODENUM": "0", "PBS_VNODENUM": "0", "PBS_TASKNUM": "1"}, (0, 1, "", "")),  # a job's script
        (TORQUE | {"PBS_NUM_PPN": "4"}, (0, 1, "", "")),  # several processes of a host have one number
        (TORQUE | OPEN_MPI, (1, 2, "", "Open MPI")),
        (OPENPBS, (0, 1, "", "")),  # of how many, it does not tell
    ],
)
def test_launchers(environ, expected):
    place = placement(environ)
    assert (place.rank, place.world_size, place.master, place.launcher) == expected
    assert place.port == 29501 if "MASTER_PORT" in environ else 20000 <= place.port < 30000


def test_the_store_of_torchrun_is_used_where_there_is_one():
    place = placement(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (place.port, place.has_store) == (29500, True)


def test_processes_of_mpirun_on_all_nodes_of_a_job_meet():
    """Those on mpirun's own node have no step, or the batch script's; the others that of mpirun's helpers."""
    job = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "gpu[01-02]"}
    step = {"SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "gpu02", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    first, second = placement(job | OPEN_MPI), placement(job | step | OPEN_MPI)
    assert (first.master, first.port) == (second.master, second.port) and first.master == "gpu01"


def test_the_user_has_the_last_word():
    place = placement(SLURM | TORCHRUN, "1/3", "head")
    assert (place.rank, place.world_size, place.master, place.launcher, place.job) == (1, 3, "head", "--node", "17")


def test_all_processes_of_a_job_have_one_port_and_other_jobs_another():
    ports = {placement(SLURM | {"SLURM_PROCID": str(i)}).port for i in range(4)}
    assert len(ports) == 1
    others = {placement(SLURM | {"SLURM_JOB_ID": str(job)}).port for job in range(50)}
    assert len(others) > 45


PLAIN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "7000"}  # as Kubernetes sets them
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
ON_ONE_HOST = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1, "", "")),
        (PLAIN, (1, 2, "n0", "torchrun")),
        (SLURM, (2, 4, "gpu03", "Slurm job step")),
        (ON_ONE_HOST | {"PMIX_NAMESPACE": "9"}, (1, 2, "localhost", "Open MPI")),
        (MPICH | {"MASTER_PORT": "7000"}, (1, 2, "localhost", "MPICH/PMI")),
        (MPICH | {"PMI_JOBID": "a"}, (1, 2, "localhost", "MPICH/PMI")),
        (SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"},
         (0, 1, "gpu03", "Slurm job step")),  # srun -n1, on one of the job's nodes
    ],
)  # fmt: skip
def test_the_rank_of_a_training(environ, expected):
    place = rank_placement(environ)
    assert (place.rank, place.world_size, place.master, place.launcher) == expected


def test_training_and_staging_have_ports_of_their_own():
    assert rank_placement(PLAIN).train_port == 7000 != rank_placement(PLAIN).port
    store = rank_placement(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert store.train_port == store.port == 29500


def test_who_numbers_the_nodes_by_hand_need_set_no_port():
    assert placement({}, "1/4", "n0").find_port_problem() == ""
    assert placement(MPICH, "1/4", "n0").find_port_problem() == "" != placement(MPICH).find_port_problem()


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "WORLD_SIZE: is 2 in the environment, and MASTER_ADDR is not set"),
        ({"RANK": "0", "LOCAL_RANK": "0"}, "RANK: is set in the environment, and WORLD_SIZE is not"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "MASTER_ADDR: Open MPI does not tell the host of rank 0"),
        ({"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2"}, "this job has 2 nodes"),
        (OPENPBS, "this is node 1 of a job"),
        (MPICH, "MASTER_PORT: is not set, and MPICH/PMI does not tell a name of the job.*export MASTER_PORT="),
        (ON_ONE_HOST, "MASTER_PORT: is not set, and Open MPI does not"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n0"}, "MASTER_PORT: is not set"),
    ],
)
def test_nobody_trains_alone_by_mistake(environ, words):
    with pytest.raises(SettingError, match=words):
        rank_placement(environ)


PMI = {"PMI_RANK": "1", "PMI_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        (OPEN_MPI, ""),
        (OPEN_MPI | {"PMIX_NAMESPACE": "333512705", "OMPI_MCA_ess_base_jobid": "333512705"}, "333512705"),
        (OPEN_MPI | {"PMIX_NAMESPACE": "prterun-n1-4711@1"}, "prterun-n1-4711@1"),  # Open MPI 5
        (OPEN_MPI | {"OMPI_MCA_ess_base_jobid": "7"}, "7"),
        (PMI | {"PMI_JOBID": "a-b"}, "a-b"),
        (PMI | {"PMIX_NAMESPACE": "9"}, ""),  # of an Open MPI around it
        (OPEN_MPI | {"PMIX_NAMESPACE": "9", "SLURM_JOB_ID": "17"}, "17"),  # the scheduler's comes first
        ({"PMIX_NAMESPACE": "9"}, ""),
    ],
)
def test_the_name_of_a_job(environ, job):
    assert placement(environ).job == job


def test_two_jobs_without_a_scheduler_have_ports_of_their_own():
    """The same in all processes of one. Two mpiruns in one job of a scheduler have, too."""
    for environ, name in ((OPEN_MPI, "PMIX_NAMESPACE"), (PMI, "PMI_JOBID"), (SLURM | OPEN_MPI, "PMIX_NAMESPACE")):
        rank = next(variable for variable in ("OMPI_COMM_WORLD_RANK", "PMI_RANK") if variable in environ)
        port = placement(environ | {name: "1"}).port
        assert port == placement(environ | {name: "1", rank: "0"}).port
        assert port != placement(environ | {name: "2"}).port


@pytest.mark.parametrize(
    ("environ", "count"),
    [({}, 1), ({"SLURM_JOB_NUM_NODES": "4"}, 4), ({"SLURM_NNODES": "3"}, 3), (TORQUE, 2), (OPENPBS, 1),
     ({"SLURM_JOB_NUM_NODES": "4", "SLURM_NNODES": "1"}, 4), ({"PBS_NUM_NODES": "x"}, 1), ({"PBS_NUM_NODES": "0"}, 1)],
)  # fmt: skip
def test_how_many_nodes_a_job_has(environ, count):
    assert num_nodes(environ) == count


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "1"}, "RANK: is set in the environment, and WORLD_SIZE is not"),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, "OMPI_COMM_WORLD_SIZE: is set"),
        ({"PMI_RANK": "x", "PMI_SIZE": "2"}, "PMI_RANK: 'x' in the environment is not a number"),
        (SLURM | {"SLURM_PROCID": "4"}, "SLURM_PROCID: 4 is out of range"),
        (SLURM | {"SLURM_NTASKS": "2"}, "SLURM_STEP_NUM_TASKS: 4 is not SLURM_NTASKS"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT: 'http'"),
    ],
)
def test_a_half_set_or_wrong_environment_is_refused(environ, words):
    with pytest.raises(SettingError, match=words):
        placement(environ)


@pytest.mark.parametrize("value", ["2/2", "1", "-1/2", "a/b", ""])
def test_a_wrong_number_is_refused(value):
    with pytest.raises(SettingError, match=r"--node: .* allowed: I/N"):
        placement({}, value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[007-009,12],login1", "gpu007"), ("a1,a2", "a1"), ("rack[1-2]node[3-4]-ib", "rack1node3-ib"), ("n", "n"),
     ("n[3,5-9]", "n3")],
)  # fmt: skip
def test_the_first_host(nodes, first):
    assert first_host(nodes) == first


def test_who_believes_to_be_alone_is_told():
    assert "this job has 4 nodes (SLURM_JOB_NUM_NODES)" in lonely({"SLURM_JOB_NUM_NODES": "4"}, Placement())
    assert "this is node 1 of a job (PBS_NODENUM)" in lonely(OPENPBS, placement(OPENPBS))
    assert lonely(OPENPBS, placement(OPENPBS, "0/1")) == "" == lonely(TORQUE, placement(TORQUE))
    assert lonely(OPENPBS | {"PBS_NODENUM": "0"}, Placement()) == ""
    assert lonely(SLURM, placement(SLURM)) == "" == lonely({"SLURM_JOB_NUM_NODES": "1"}, Placement())


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_END_TIME": "1700000000"}, 1700000000),
        ({"SLURM_JOB_END_TIME": "0"}, None),
        ({"SLURM_JOB_END_TIME": "soon"}, None),
        ({"PBS_WALLTIME": "3600"}, 1600003600),  # from now, since it does not say since when
        ({"PBS_WALLTIME": ""}, None),
    ],
)
def test_when_a_job_ends(environ, expected):
    assert job_end(environ, 1600000000) == expected


def test_which_job_has_ended():
    assert ended_job(SLURM) == ended_job({"SLURM_SCRIPT_CONTEXT": "prolog_slurmd"} | SLURM) == ended_job({}) == ""
    assert ended_job(SLURM | {"SLURM_SCRIPT_CONTEXT": "epilog_slurmd"}) == "17"


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_an_empty_variable_counts_as_unset(launcher):
    """As in `RANK= trainer train`."""
    alone = placement({})
    for names in ({launcher.index}, {launcher.count}, {launcher.index, launcher.count}):
        assert placement(dict.fromkeys((*names, *launcher.beside), "")) == alone, names
