"""The ranks: who they are, how they share cores and batches, how they fail together."""

import pytest
import torch

from datapipe.errors import SettingError
from trainer.distributed import World, set_threads, together, world_from_environment


def test_world():
    assert world_from_environment({}).world_size == 1
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    world = world_from_environment(env)
    assert (world.rank, world.world_size, world.local_world_size, world.is_main) == (5, 8, 4, False)
    with pytest.raises(SettingError, match="WORLD_SIZE not set"):
        world_from_environment({"RANK": "0", "LOCAL_RANK": "0"})
    with pytest.raises(SettingError, match="not a number"):
        world_from_environment(env | {"RANK": "x"})


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
