"""Processes that were started together and are not connected: each would learn from its own batches alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import torch.distributed as dist

# Who started this process; its variables for this one's number and for how many there are; and, where others may have
# set such names, those of which one is there besides. Innermost first: each passes on the variables of those around it.
# Slurm's are those of a job step: a batch script, which runs once, has SLURM_NTASKS and SLURM_PROCID=0 as well.
LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", ("TORCHELASTIC_RUN_ID", "LOCAL_RANK")),
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", ()),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ()),
    ("MPICH/PMI", "PMI_RANK", "PMI_SIZE", ()),
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ()),
)


def require_connected(independent: bool, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ValueError where there are several processes and torch.distributed is not initialised.

    `independent`: each process trains a network of its own; then ValueError where torch.distributed connects several.
    """
    if dist.is_available() and dist.is_initialized():
        if independent and dist.get_world_size() > 1:
            raise ValueError(
                f"independent: True, but torch.distributed connects {dist.get_world_size()} processes; allowed: False"
            )
        return
    launcher, count = num_processes(environ)
    if count > 1 and not independent:
        raise ValueError(
            f"{launcher} started {count} processes, and torch.distributed, which alone K-FAC sends through, does not "
            "connect them: their weights would drift apart. Call torch.distributed.init_process_group() before "
            "building the preconditioner; or, where each process trains a network of its own, pass independent=True"
        )


def num_processes(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return who says how many processes belong together, and how many: ("", 1) where nobody does."""
    horovod = sys.modules.get("horovod.torch")  # it may have been told by MPI itself
    if horovod is not None and horovod.is_initialized():
        return "Horovod", horovod.size()
    for launcher, number, count, beside in LAUNCHERS:
        if environ.get(number, "").isdigit() and environ.get(count, "").isdigit():
            if beside and not environ.keys() & {*beside}:
                continue
            if launcher == "Slurm" and environ.get("SLURM_NTASKS", environ[count]) != environ[count]:
                continue  # left from the job step that submitted this job
            return launcher, int(environ[count])
    return "", 1
