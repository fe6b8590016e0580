"""How a rank ends: the ranks' connections are taken down after a training that worked, and only then."""

import shutil
import signal
from pathlib import Path

import pytest

from tests.trainer.conftest import each_rank
from tests.trainer.runs import finish
from tests.waiting import read_until
from trainer.ranks.connection import _removing

LEAVING = Path(__file__).parent / "children" / "leaving.py"
ONE_EPOCH = ["train.epochs=1", "train.batch_size=64"]


@pytest.fixture
def damaged(packed, tmp_path):
    """The same data set, as far as its manifest goes, with training images that another node's disk has spoilt."""
    folder = tmp_path / "damaged"
    shutil.copytree(packed, folder)
    for shard in (folder / "train").glob("shard-*"):
        if shard.suffix == ".tar":
            content = bytearray(shard.read_bytes())
            content[512 : len(content) // 2] = bytes(len(content) // 2 - 512)
            shard.write_bytes(content)
    return folder


@pytest.fixture
def two(train, packed):
    """two("blocks", what="surprise", data=…) -> both ranks, without a launcher that would end the other.

    `what` disturbs rank 1, whose data set is `data`; the first word: what taking the connections down does.
    """

    def _two(destroy: str, what: str = "nothing", data: Path = packed) -> list:
        program = [LEAVING, destroy, what, 3, 1]
        places = zip((packed, data), each_rank(2), strict=True)
        return [train("run", *ONE_EPOCH, program=program, data=folder, env=env) for folder, env in places]

    return _two


def test_a_rank_that_cannot_read_an_image_says_so_and_is_gone(two, damaged, metrics, tmp_path):
    """Rank 0 waits in a collective operation meanwhile."""
    first, second = two("blocks", data=damaged)
    code, out, err = finish(second)
    assert code == 1, err
    assert "error: " in err and str(damaged) in err and "Traceback" not in err
    assert "destroying" not in out
    code, out, err = finish(first)  # its connection was closed, also without a launcher
    assert code == 1, err
    assert "lost contact with another rank" in err and "destroying" not in out
    last = metrics(tmp_path / "run")[-1]
    assert (last["event"], last["status"]) == ("end", "failed")


@pytest.mark.parametrize(
    ("what", "expected", "says"),
    [
        ("surprise", 1, "ZeroDivisionError: a surprise"),
        ("second Ctrl-C", 130, "interrupted"),
        ("exit", 143, "terminated"),
    ],
)
def test_other_ways_out(two, what, expected, says):
    first, second = two("blocks", what)
    code, out, err = finish(second)
    assert code == expected
    assert says in err and ("Traceback" in err) == (expected == 1) and "destroying" not in out
    assert finish(first)[0] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_waits_for_one_that_never_comes_can_be_stopped(train, tmp_path, number):
    child = train("run", env=each_rank(2)[0])
    read_until("waiting for 2 ranks", child.stderr, child)
    child.send_signal(number)  # its own handlers run, since torch waits in a thread: it tells the others that it leaves
    assert finish(child)[0] == 128 + number
    assert not (tmp_path / "run").exists()


def test_what_is_stopped_before_it_has_a_secret_leaves_no_folder(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt), _removing(run / ".secret", run):
        run.mkdir()
        raise KeyboardInterrupt
    assert not run.exists()


def test_success_takes_the_connections_down(two):
    for child in two("works"):
        code, out, err = finish(child)
        assert code == 0, err
        assert out.count("destroying") == 1
