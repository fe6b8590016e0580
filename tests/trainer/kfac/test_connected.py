"""K-FAC in processes that a launcher started together, and in DeepSpeed's.

Horovod and DeepSpeed are not installed here (they compile their own code against torch): small objects with the
documented functions and attributes stand for them.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainer.kfac import EKFAC, KFAC
from trainer.kfac.usage_checks import num_processes

ROOT = Path(__file__).parents[3]
# Each process learns from batches of its own, and prints the sum of its weights.
SCRIPT = """
import os, sys
import torch
from torch import nn
from trainer.kfac import KFAC
if "connect" in sys.argv:
    torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
torch.manual_seed(sum(int(os.environ.get(name, 0)) for name in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")))
try:
    preconditioner = KFAC(network, independent="independent" in sys.argv)
except ValueError as error:
    sys.exit(f"refused: {error}")
model = nn.parallel.DistributedDataParallel(network) if "connect" in sys.argv else network
model(torch.randn(8, 4)).square().mean().backward()
preconditioner.step()
total = sum(parameter.grad.sum().item() for parameter in network.parameters())
os.write(1, f"trained {total}\\n".encode())  # in one piece: torchrun has print() write each word by itself
os._exit(0)  # gloo's threads may abort a process that ends while their group is there
"""
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


@pytest.fixture
def script(start, tmp_path):
    """script("connect", …, ranks=1, env={}) -> Popen."""
    (tmp_path / "script.py").write_text(SCRIPT)
    return lambda *words, **options: start(tmp_path / "script.py", *words, **options)


@pytest.mark.parametrize("environ", [TORCHRUN, MPI, PMI, STEP, HOROVOD], ids=["torchrun", "mpi", "pmi", "slurm", "hvd"])
def test_processes_that_nothing_connects_are_refused(script, environ):
    child, free = script(env=environ), script("independent", env=environ)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 1
    assert "refused: " in err and "init_process_group() before" in err and "independent=True" in err
    out, err = free.communicate(timeout=120)
    assert free.returncode == 0 and "trained" in out, err


def test_a_batch_script_is_alone(script):
    child = script(env=BATCH_SCRIPT)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0 and "trained" in out, err


@pytest.mark.ranks
def test_torchrun(script):
    """Connected, the ranks' gradients are the same; unconnected they would not be, and are refused."""
    child = script("connect", ranks=2, torchrun=True)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    first, second = (float(line.split()[1]) for line in out.splitlines() if line.startswith("trained"))
    assert first == pytest.approx(second, rel=1e-5)
    child = script(ranks=2, torchrun=True)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 1 and "refused: torchrun started 2 processes" in err and "trained" not in out
    child = script("connect", "independent", ranks=2, torchrun=True)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 1 and "refused: independent: True" in err


@pytest.mark.ranks
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI's mpirun is not installed")
def test_mpirun(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environ = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environ["PYTHONPATH"] = str(ROOT)
    command = [
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "-n",
        "2",
        sys.executable,
        str(tmp_path / "script.py"),
    ]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "refused: Open MPI started 2 processes" in done.stderr, done.stderr
    done = subprocess.run([*command, "independent"], env=environ, capture_output=True, text=True, timeout=120)
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
