"""What forked processes cannot show: how an interpreter ends, and ranks whose sets have other orders."""

from pathlib import Path

import pytest

from tests.trainer.conftest import each_rank
from tests.trainer.runs import DISTURBED, KFAC, differing, finish, outcome

WITHOUT_REPORT = [Path(__file__).parent / "children" / "without_report.py"]
TRAINS_BY_DDP = Path(__file__).parents[1] / "datapipe" / "loaders" / "children" / "trains_by_ddp.py"
FIVE_STEPS = ["train.epochs=1", "train.batch_size=64", "train.checkpoint_every_steps=2"]
SHARDED = [*KFAC, "kfac.grad_worker_fraction=0"]  # each layer's state is on one rank only


def test_an_interpreter_ends_well_after_a_training(train, tmp_path, metrics):
    """All modules are taken down, and the threads that are left with them."""
    code, out, err = finish(train("run", "train.epochs=1", "train.batch_size=330", program=WITHOUT_REPORT, fresh=True))
    assert code == 0 and "Traceback" not in err and "Exception ignored" not in err, err
    assert "accuracy" in out and metrics(tmp_path / "run")[-1]["status"] == "completed"


@pytest.fixture
def seeded(train):
    """seeded("run", (1, 2), "train.epochs=1", …) -> how both ranks end, each with its order of sets."""

    def _seeded(name, seeds, *changes, **options):
        places = [env | {"PYTHONHASHSEED": str(seed)} for env, seed in zip(each_rank(2), seeds, strict=True)]
        return [*map(finish, [train(name, *changes, env=env, **options) for env in places])]

    return _seeded


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("changes", [[], KFAC, SHARDED], ids=["sgd", "kfac", "kfac, sharded"])
def test_an_order_of_sets_changes_nothing(seeded, tmp_path, changes):
    """It differs between ranks, which send their tensors in one order, and between a run and its continuation."""
    changes = [*FIVE_STEPS, *changes]
    for name, seeds in (("alike", (1, 1)), ("different", (1, 2))):
        ends = seeded(name, seeds, *changes, program=WITHOUT_REPORT)
        assert [code for code, _, _ in ends] == [0, 0], ends
    assert differing(outcome(tmp_path / "different"), outcome(tmp_path / "alike")) == []
    ends = seeded("killed", (3, 4), *changes, program=[DISTURBED, "kill", 4, "all"])
    assert [code for code, _, _ in ends] == [-9, -9], ends
    ends = seeded("killed", (5, 6), *changes, program=WITHOUT_REPORT, words=["--resume"])
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert differing(outcome(tmp_path / "killed"), outcome(tmp_path / "alike")) == []


@pytest.mark.slow
@pytest.mark.ranks
def test_a_loader_among_ranks_of_ddp_ends_well(start, packed_folders, tmp_path):
    """They see and learn what forked ranks do, whose end is another."""
    seen = []
    for is_fresh in (True, False):
        out = tmp_path / f"fresh {is_fresh}"
        out.mkdir()
        child = start(TRAINS_BY_DDP, packed_folders["tar"] / "train", out, ranks=2, fresh=is_fresh)
        code, _, err = finish(child)
        assert code == 0 and "Traceback" not in err and "Exception ignored" not in err, err
        seen.append([(out / f"{rank}.json").read_text() for rank in range(2)])
    assert seen[0] == seen[1]
