"""The ranks: who they are, how they share cores and batches, how they fail together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datapipe.errors import SettingError
from trainer.errors import TrainingError
from trainer.ranks import world
from trainer.ranks.connection import NCCL_ERRORS, _leave_errors_to_watch
from trainer.ranks.device import set_threads, share_cores
from trainer.ranks.world import World, together, wrap


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
    set_threads(World(world_size=4, local_world_size=4, host_cores=12, cores=3), env)
    assert chosen == ([3] if changes else [])


@pytest.mark.parametrize(
    ("allowed", "shares"),
    [
        ([range(12)] * 4, (3, 3, 3, 3)),  # as torchrun starts them
        ([range(8 * rank, 8 * rank + 8) for rank in range(4)], (8, 8, 8, 8)),  # as srun binds them
        ([range(4), range(4), range(4, 12)], (2, 2, 8)),
        ([range(6), range(3, 9)], (4, 4)),  # three of their own, and half of three
        ([range(2)] * 4, (1, 1, 1, 1)),  # more ranks than cores
    ],
)
def test_cores_are_shared_by_those_who_may_use_them(allowed, shares):
    num_cores = len({core for cores in allowed for core in cores})
    assert [share_cores(allowed, rank) for rank in range(len(allowed))] == [(num_cores, share) for share in shares]


@given(st.lists(st.sets(st.integers(0, 20), min_size=1), min_size=1, max_size=8))
def test_no_core_is_given_twice(allowed):
    shares = [share_cores(allowed, rank)[1] for rank in range(len(allowed))]
    assert sum(share for share in shares if share > 1) <= len(set().union(*allowed))
    assert all(1 <= share <= len(cores) for share, cores in zip(shares, allowed, strict=True))


def test_together_raises_what_was_raised():
    with pytest.raises(SettingError, match="mine"), together(World()):
        raise SettingError("mine")


@pytest.mark.parametrize(
    ("verdict", "kind"), [((True, "no such setting"), SettingError), ((False, "the disk is full"), TrainingError)]
)
def test_together_raises_what_another_rank_has(monkeypatch, verdict, kind):
    """A wrong setting is one on all ranks, which then end with the same exit code."""
    monkeypatch.setattr(world, "gather_everywhere", lambda world, own: [own, None, verdict])
    with pytest.raises(kind, match=f"^rank 2: {verdict[1]}$") as caught, together(World(world_size=3)):
        pass
    assert type(caught.value) is kind


@pytest.mark.parametrize("error", [SettingError("wrong"), TrainingError("wrong"), OSError("wrong")], ids=repr)
def test_together_tells_the_others_what_was_raised(monkeypatch, error):
    gathered = []

    def gather(world, own):
        gathered.append(own)
        return [own, None]

    monkeypatch.setattr(world, "gather_everywhere", gather)
    with pytest.raises(type(error), match="wrong"), together(World(world_size=2)):
        raise error
    assert gathered == [(isinstance(error, SettingError), "wrong")]


def test_the_model_is_wrapped_for_the_device_that_the_rank_has(monkeypatch):
    """Number 0 on every rank, where a scheduler shows each rank its own GPU alone."""
    given = []

    def note(model, device_ids, broadcast_buffers=None, **options):
        given.append(device_ids)

    monkeypatch.setattr(world, "DistributedDataParallel", note)
    cuda = torch.device("cuda", 0)
    for device in (cuda, torch.device("cpu")):
        wrap(torch.nn.Linear(1, 1), World(3, 3, 4, 4, device))
    assert given == [[cuda], None]


@pytest.mark.parametrize(("before", "after"), [(None, "0"), ("1", "0"), ("0", "0"), ("2", "2"), ("3", "3")])
def test_nccl_leaves_it_to_the_watch_to_end_a_run(before, after):
    """1 is torchrun's; what else a user sets stays."""
    environ = {} if before is None else {NCCL_ERRORS: before}
    _leave_errors_to_watch(environ)
    assert environ == {NCCL_ERRORS: after}
