"""Two ranks that are disturbed at chosen moments and resumed end with the same bits as two that were left alone.

`benchmarks/bench_random_kills.py` disturbs them at random.
"""

import signal

import pytest

from tests.trainer.conftest import each_rank
from tests.trainer.runs import DISTURBED, KFAC, differing, finish, outcome
from tests.waiting import limit_s

FIFTEEN_STEPS = ["train.epochs=3", "train.batch_size=64", "train.log_every=3", "train.checkpoint_every_steps=3"]
AVERAGED = ["ema.half_life_steps=4", "train.precise_bn_batches=1", "data.mixup=0.2"]
SHARDED = [*KFAC, "kfac.grad_worker_fraction=0"]  # each layer's state is on one rank only
# What is done, in which step and to which rank; and the exit codes of both. 1: the other one is gone.
DISTURBANCES = [
    ("kill", 4, 1, {1, -signal.SIGKILL}),
    ("part", 6, 1, {1, -signal.SIGKILL}),  # the other one's thread waits for its part
    ("part", 6, 0, {1, -signal.SIGKILL}),
    ("file", 6, 0, {1, -signal.SIGKILL}),
    ("terminate", 8, 0, {143}),
    ("kill", 10, "all", {1, -signal.SIGKILL}),  # or only the second: both may be in this step
    ("best", 0, 0, {1, -signal.SIGKILL}),  # at the end of an epoch
    ("stop", 13, 1, {1, -signal.SIGKILL}),
]

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.mark.parametrize("changes", [AVERAGED, SHARDED], ids=["sgd", "kfac"])
def test_two_ranks_that_are_disturbed_end_with_the_same_bits(train, tmp_path, changes, patience_s):
    changes = [*FIFTEEN_STEPS, *changes]
    code, _, err = finish(train("whole", *changes, ranks=2))
    assert code == 0, err
    for what, step, rank, codes in DISTURBANCES:
        program, words = [DISTURBED, what, step, rank], ["--resume"]
        if what == "stop":
            words += ["--rank-timeout", patience_s]
        both = [train("run", *changes, program=program, words=words, env=env) for env in each_rank(2)]
        if what == "stop":
            both[0].wait(limit_s())
            both[1].kill()
        ends = [*map(finish, both)]
        ended = {code for code, _, _ in ends}
        assert ended == codes or (rank == "all" and ended == codes - {1}), ends
        assert not any("Traceback" in err for _, _, err in ends), ends
    code, _, err = finish(train("run", *changes, words=["--resume"], ranks=2))
    assert code == 0, err
    assert differing(outcome(tmp_path / "run"), outcome(tmp_path / "whole")) == []
