"""The ranks: who they are, how they share cores and batches, how they fail together."""

import pytest
import torch

from datapipe.errors import SettingError
from trainer.connection import set_threads
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


def test_together_raises_what_was_raised():
    with pytest.raises(SettingError, match="mine"), together(World()):
        raise SettingError("mine")
