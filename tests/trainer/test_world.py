"""The ranks: who they are, how they share cores and batches, how they fail together."""

import os
import subprocess
import sys

import pytest
import torch

from datapipe.errors import SettingError
from trainer.connection import keep_freed_memory, set_threads
from trainer.distributed import World, together


def test_global_batch_is_shared_equally_or_refused():
    assert World(world_size=4).batch_size(256) == 64
    with pytest.raises(SettingError, match=r"train\.batch_size = 256: must be a multiple of the world size, 3"):
        World(world_size=3).batch_size(256)


@pytest.mark.parametrize(
    ("env", "changes"),
    [
        ({}, True),
        ({"OMP_NUM_THREADS": "7"}, False),
        ({"OMP_NUM_THREADS": "1"}, False),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, True),  # torchrun's own doing
    ],
)
def test_threads(env, changes, monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)), raising=False)
    set_threads(World(world_size=4, local_world_size=4), env)
    assert chosen == ([3] if changes else [])


FREES = """
import resource, sys
import torch
from trainer.connection import keep_freed_memory

kept = keep_freed_memory(torch.device("cpu"))
for step in range(20):
    if step == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2**21 + 2**18 * number) for number in range(8)]
    del tensors
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_memory_that_a_step_frees_is_there_for_the_next():
    faults = {}
    for name, env in (("kept", {}), ("as chosen", {"MALLOC_TRIM_THRESHOLD_": "131072"})):
        command = [sys.executable, "-c", FREES]
        done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=True)
        kept, number = done.stdout.split()
        assert kept == str(name == "kept")
        faults[name] = int(number)
    assert 20 * faults["kept"] < faults["as chosen"]
    assert not keep_freed_memory(torch.device("cuda"))


def test_together_raises_what_was_raised():
    with pytest.raises(SettingError, match="mine"), together(World()):
        raise SettingError("mine")
