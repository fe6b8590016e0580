"""K-FAC in processes that a launcher started together, and in DeepSpeed's.

Horovod and DeepSpeed are not installed here (they compile their own code against torch): small objects with the
documented functions and attributes stand for them.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.processes import clean_environment
from tests.waiting import limit_s
from trainer.kfac import EKFAC, KFAC
from trainer.kfac.usage_checks import num_processes

SCRIPT = Path(__file__).parent / "children" / "launched.py"
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
PMI = {"PMI_RANK": "0", "PMI_SIZE": "4"}
STEP = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"}
HOROVOD = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("", 1)),
        (TORCHRUN, ("torchrun", 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ("", 1)),  # anybody's names
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, ("", 1)),
        (TORCHRUN | {"WORLD_SIZE": "many"}, ("", 1)),
        (MPI, ("Open MPI", 2)),
        (PMI, ("MPICH/PMI", 4)),
        (STEP, ("Slurm", 8)),
        (HOROVOD, ("horovodrun", 2)),
        (BATCH_SCRIPT, ("", 1)),
        (STEP | {"SLURM_NTASKS": "1"}, ("", 1)),  # sbatch within a step
        (STEP | MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, ("Open MPI", 1)),  # the innermost counts
        (STEP | TORCHRUN, ("torchrun", 2)),
    ],
)
def test_who_says_how_many(environ, expected):
    assert num_processes(environ) == expected


@pytest.mark.parametrize("environ", [TORCHRUN, MPI, PMI, STEP, HOROVOD], ids=["torchrun", "mpi", "pmi", "slurm", "hvd"])
def test_processes_that_nothing_connects_are_refused(monkeypatch, environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"init_process_group\(\) before.*independent=True"):
        KFAC(nn.Linear(3, 2))
    KFAC(nn.Linear(3, 2), independent=True)


def test_a_batch_script_is_alone(monkeypatch):
    for name, value in BATCH_SCRIPT.items():
        monkeypatch.setenv(name, value)
    KFAC(nn.Linear(3, 2))


@pytest.mark.ranks
@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_connected_ranks_have_the_same_gradients(start, torchrun):
    """Unconnected they would not, and are refused."""
    child = start(SCRIPT, "connect", ranks=2, torchrun=torchrun)
    out, err = child.communicate(timeout=limit_s())
    assert child.returncode == 0, err
    first, second = (float(line.split()[1]) for line in out.splitlines() if line.startswith("trained"))
    assert first == pytest.approx(second, rel=1e-5)
    child = start(SCRIPT, ranks=2, torchrun=torchrun)
    out, err = child.communicate(timeout=limit_s())
    assert child.returncode == 1 and "refused: torchrun started 2 processes" in err and "trained" not in out
    child = start(SCRIPT, "connect", "independent", ranks=2, torchrun=torchrun)
    out, err = child.communicate(timeout=limit_s())
    assert child.returncode == 1 and "refused: independent: True" in err


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI's mpirun is not installed")
def test_mpirun():
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, str(SCRIPT)]
    options = {"env": clean_environment(), "capture_output": True, "text": True, "timeout": limit_s()}
    done = subprocess.run(command, **options)
    assert done.returncode == 1 and "refused: Open MPI started 2 processes" in done.stderr, done.stderr
    done = subprocess.run([*command, "independent"], **options)
    assert done.returncode == 0, done.stderr
    assert len({line for line in done.stdout.splitlines() if line.startswith("trained")}) == 2  # they differ, as asked


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
@pytest.mark.parametrize(("is_initialized", "size", "refused"), [(True, 2, True), (True, 1, False), (False, 2, False)])
def test_horovod(monkeypatch, kind, is_initialized, size, refused):
    """`horovod.torch` as it is after hvd.init(), which MPI may have told the number of processes."""
    horovod = SimpleNamespace(is_initialized=lambda: is_initialized, size=lambda: size)
    monkeypatch.setitem(sys.modules, "horovod.torch", horovod)
    if not refused:
        kind(nn.Linear(3, 2))
        return
    with pytest.raises(ValueError, match="Horovod started 2 processes"):
        kind(nn.Linear(3, 2))
    kind(nn.Linear(3, 2), independent=True)


@pytest.mark.parametrize(
    ("mark", "says"),
    [
        ({"ds_id": 0}, "DeepSpeed, ZeRO stage 3"),  # zero/partition_parameters.py
        ({"_hp_mapping": None}, "ZeRO stage 1 or 2"),  # utils/mixed_precision_linkage.py: of a part that others own
    ],
)
def test_deepspeed(mark, says):
    """Marked before, by deepspeed.initialize(), or after the preconditioner was built; gradients are gone then."""
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    preconditioner = KFAC(network)
    network(torch.randn(8, 4)).square().mean().backward()
    for parameter in network.parameters():
        parameter.grad = None
        vars(parameter).update(mark)
    with pytest.raises(ValueError, match=says):
        preconditioner.step()
    preconditioner.remove()
    with pytest.raises(ValueError, match=says) as caught:
        KFAC(network)
    assert "use ZeRO stage 0, or DDP" in str(caught.value)
