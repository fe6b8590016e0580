"""Which task of how many: what Slurm, MPI, torchrun and PBS put into a process's environment.

The Slurm, Open MPI, MPICH and torchrun tables are copies of real environments (Slurm 22.05, Open MPI 4.1, MPICH 4.0,
torch 2.13); packing/test_cluster.py asks the programs themselves. The tables of PALS and PBS are from their manuals.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datapipe.cluster import Task, detect
from datapipe.errors import SettingError


def variables(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.split())


# sbatch -N2 --ntasks-per-node=2: the script itself.
BATCH = variables("SLURM_JOB_ID=1 SLURM_LOCALID=0 SLURM_NNODES=2 SLURM_NODEID=0 SLURM_NPROCS=4 SLURM_NTASKS=4 "
                  "SLURM_PROCID=0 SLURM_TASKS_PER_NODE=2(x2) SLURM_GTIDS=0")  # fmt: skip
# srun in it, the last task.
STEP = BATCH | variables("SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_PROCID=3 SLURM_STEPID=0 SLURM_STEP_ID=0 "
                         "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2) "
                         "SLURM_GTIDS=2,3")  # fmt: skip
# salloc -n3: the shell it starts.
SALLOC = variables("SLURM_JOB_ID=17 SLURM_NNODES=1 SLURM_NPROCS=3 SLURM_NTASKS=3 SLURM_TASKS_PER_NODE=3")
# sbatch -n2 --array=2-6:2, the second element: its script, and the second task of srun in it.
ARRAY = variables("SLURM_ARRAY_JOB_ID=3 SLURM_ARRAY_TASK_COUNT=3 SLURM_ARRAY_TASK_ID=4 SLURM_ARRAY_TASK_MAX=6 "
                  "SLURM_ARRAY_TASK_MIN=2 SLURM_ARRAY_TASK_STEP=2 SLURM_JOB_ID=5 SLURM_LOCALID=0 SLURM_NTASKS=2 "
                  "SLURM_PROCID=0")  # fmt: skip
ARRAY_STEP = ARRAY | variables("SLURM_LOCALID=1 SLURM_PROCID=1 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2")
# mpirun in sbatch -N2 --ntasks-per-node=2. On the first node it starts its processes itself, on the second by srun.
OPEN_MPI = variables("OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=1 "
                     "OMPI_COMM_WORLD_SIZE=4 OMPI_UNIVERSE_SIZE=4")  # fmt: skip
OPEN_MPI_FIRST = BATCH | OPEN_MPI | variables("OMPI_COMM_WORLD_RANK=1 PMIX_RANK=1 PMIX_NAMESPACE=52232193")
OPEN_MPI_SECOND = BATCH | OPEN_MPI | variables("OMPI_COMM_WORLD_RANK=3 PMIX_RANK=3 SLURM_NNODES=1 SLURM_NTASKS=1 "
                                               "SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1")  # fmt: skip
MPICH = variables("HYDI_CONTROL_FD=7 MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 PMI_FD=8 PMI_RANK=1 PMI_SIZE=2")
MPICH_IN_SLURM = BATCH | variables("MPI_LOCALNRANKS=1 PMI_FD=5 PMI_RANK=3 PMI_SIZE=4 SLURM_NODEID=1 SLURM_PROCID=1 "
                                   "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2")  # fmt: skip
PMI2 = STEP | variables("PMI_FD=13 PMI_JOBID=41.0 PMI_RANK=3 PMI_SIZE=4")  # srun --mpi=pmi2
PALS = variables("PALS_RANKID=5 PALS_NODEID=1 PALS_LOCAL_RANKID=1 PMI_RANK=5 PMI_SIZE=8 PBS_JOBID=12.head")
# torchrun --nnodes 2 --nproc-per-node 2; by srun -N2 -n2.
TORCHRUN = variables("GROUP_RANK=1 GROUP_WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 RANK=3 ROLE_RANK=3 "
                     "ROLE_WORLD_SIZE=4 TORCHELASTIC_RUN_ID=none WORLD_SIZE=4")  # fmt: skip
TORCHRUN_IN_SLURM = TORCHRUN | variables("SLURM_NTASKS=2 SLURM_PROCID=1 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2")
PBS_JOB = variables("PBS_JOBID=12.head PBS_NODEFILE=/var/spool/aux/12 PBS_TASKNUM=2 PBS_VNODENUM=1 PBS_NODENUM=1")


@pytest.mark.parametrize(
    ("environ", "task"),
    [
        pytest.param({}, Task(0, 1, ""), id="nothing"),
        pytest.param(BATCH, Task(0, 1, ""), id="batch script, which runs once"),
        pytest.param(SALLOC, Task(0, 1, ""), id="salloc's shell"),
        pytest.param(PBS_JOB, Task(0, 1, ""), id="PBS job script, or pbsdsh"),
        pytest.param(STEP, Task(3, 4, "Slurm job step"), id="srun"),
        pytest.param(BATCH | {"SLURM_STEP_NUM_TASKS": "1"}, Task(0, 1, "Slurm job step"), id="srun -n1 --preserve-env"),
        pytest.param(ARRAY, Task(1, 3, "Slurm job array"), id="array"),
        pytest.param(ARRAY_STEP, Task(3, 6, "Slurm job array, Slurm job step"), id="srun in an array"),
        pytest.param(
            ARRAY | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"},
            Task(1, 3, "Slurm job array"),
            id="srun -n1 in an array",
        ),
        pytest.param(ARRAY | OPEN_MPI_FIRST, Task(5, 12, "Slurm job array, Open MPI"), id="mpirun in an array"),
        pytest.param(OPEN_MPI_FIRST, Task(1, 4, "Open MPI"), id="mpirun in a batch script"),
        pytest.param(OPEN_MPI_SECOND, Task(3, 4, "Open MPI"), id="mpirun in a batch script, other node"),
        pytest.param(MPICH, Task(1, 2, "MPICH/PMI"), id="mpirun of MPICH"),
        pytest.param(MPICH_IN_SLURM, Task(3, 4, "MPICH/PMI"), id="mpirun of MPICH in a batch script"),
        pytest.param(PMI2, Task(3, 4, "MPICH/PMI"), id="srun --mpi=pmi2: not counted twice"),
        pytest.param(PALS, Task(5, 8, "MPICH/PMI"), id="Cray mpiexec"),
        pytest.param(TORCHRUN, Task(3, 4, "torchrun"), id="torchrun"),
        pytest.param(TORCHRUN_IN_SLURM, Task(3, 4, "torchrun"), id="torchrun, started by srun"),
        pytest.param(TORCHRUN | OPEN_MPI_FIRST, Task(3, 4, "torchrun"), id="torchrun, started by mpirun"),
        pytest.param({"WORLD_SIZE": "8"}, Task(0, 1, ""), id="a batch script's own WORLD_SIZE"),
        pytest.param({"RANK": "1", "WORLD_SIZE": "2"}, Task(0, 1, ""), id="somebody's RANK"),
    ],
)
def test_environments(environ, task):
    assert detect(environ) == task


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        (STEP | {"SLURM_PROCID": "4"}, ["SLURM_PROCID: 4", "SLURM_STEP_NUM_TASKS", "4"]),
        (STEP | {"SLURM_PROCID": "three"}, ["SLURM_PROCID: 'three'"]),
        (STEP | {"SLURM_PROCID": "-1"}, ["SLURM_PROCID: '-1'"]),
        (STEP | {"SLURM_STEP_NUM_TASKS": ""}, ["SLURM_STEP_NUM_TASKS: ''"]),
        # sbatch within a step of seven tasks: its variables are in the new job's script, too.
        (BATCH | {"SLURM_STEP_NUM_TASKS": "7"}, ["SLURM_STEP_NUM_TASKS: 7", "SLURM_NTASKS", "4", "srun", "--task"]),
        (OPEN_MPI_FIRST | {"OMPI_COMM_WORLD_SIZE": "1"}, ["OMPI_COMM_WORLD_RANK: 1", "OMPI_COMM_WORLD_SIZE"]),
        (MPICH | {"PMI_SIZE": "0"}, ["PMI_RANK: 1", "PMI_SIZE", "0"]),
        (TORCHRUN | {"RANK": "²"}, ["RANK: '²'"]),
        (TORCHRUN | {"WORLD_SIZE": "9" * 5000}, ["WORLD_SIZE"]),
        ({"PBS_ARRAY_INDEX": "3"}, ["PBS_ARRAY_INDEX: 3", "--task $PBS_ARRAY_INDEX/N"]),
        ({"PBS_ARRAYID": "3"}, ["PBS_ARRAYID: 3", "--task $PBS_ARRAYID/N"]),
        ({"PBS_ARRAY_INDEX": "3", **PALS}, ["PBS_ARRAY_INDEX: 3"]),
        ({"SLURM_ARRAY_TASK_ID": "3"}, ["SLURM_ARRAY_TASK_MIN: ''"]),
    ],
)
def test_contradictions(environ, names):
    with pytest.raises(SettingError) as raised:
        detect(environ)
    for name in names:
        assert name in str(raised.value)
    assert detect(environ, "1/4") == Task(1, 4, "--task")  # what the messages advise


def array(number: int, first: int, last: int, step: int, count: int) -> dict[str, str]:
    values = {"ID": number, "MIN": first, "MAX": last, "STEP": step, "COUNT": count}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param(array(9, 1, 9, 1, 3), id="1,5,9"),
        pytest.param(array(2, 0, 7, 2, 5), id="0-6:2,7"),
        pytest.param(array(4, 0, 6, 2, 5), id="0-6:2,3"),
        pytest.param(array(2, 1, 9, 1, 4), id="1-3,9"),
        pytest.param(array(3, 0, 12, 4, 4), id="3,0-4:4,12: as many as in a range, but not its numbers"),
        pytest.param(array(7, 0, 6, 1, 7), id="beyond the end"),
    ],
)
def test_arrays_with_holes(environ):
    with pytest.raises(SettingError, match=r"SLURM_ARRAY_TASK_ID.*--task I/N"):
        detect(environ)
    assert detect(environ, "2/3") == Task(2, 3, "--task")


@given(st.integers(0, 1000), st.integers(1, 9), st.integers(1, 12), st.integers(1, 5))
def test_elements_and_their_tasks_are_each_there_once(first, step, count, tasks):
    last = first + (count - 1) * step
    found = [
        detect(array(number, first, last, step, count) | OPEN_MPI | {"OMPI_COMM_WORLD_RANK": str(rank)}
               | {"OMPI_COMM_WORLD_SIZE": str(tasks)})
        for number in range(first, last + 1, step)
        for rank in range(tasks)
    ]  # fmt: skip
    assert [task.index for task in found] == list(range(count * tasks))
    assert {task.count for task in found} == {count * tasks}


NAMES = sorted(
    {name for environ in (ARRAY_STEP, OPEN_MPI_SECOND, MPICH, TORCHRUN) for name in environ} | {"SLURM_STEP_NUM_TASKS"}
)


VALUES = ["-1", "0", "1", "2", "3", "4", "", "x", "²", "1.0", "9" * 5000]


@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(VALUES)))
def test_any_values_give_a_task_or_a_setting_error(environ):
    try:
        task = detect(environ)
    except SettingError:
        return
    assert 0 <= task.index < task.count


@pytest.mark.parametrize(("value", "task"), [("0/1", (0, 1)), ("0/3", (0, 3)), ("2/3", (2, 3)), ("07/10", (7, 10))])
def test_explicit_goes_before_everything(value, task):
    assert detect(ARRAY | OPEN_MPI_FIRST | TORCHRUN, value) == Task(*task, "--task")


@pytest.mark.parametrize("value", ["", "1", "3/3", "4/3", "0/0", "-1/3", "1/3/5", "a/b", "1 / 3", "1/", "١/٣", "1.0/3"])
def test_explicit_is_checked(value):
    with pytest.raises(SettingError) as raised:
        detect({}, value)
    assert "--task" in str(raised.value) and repr(value) in str(raised.value) and "I/N" in str(raised.value)
