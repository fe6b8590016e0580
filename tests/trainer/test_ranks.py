"""Two ranks train as one, in whichever way they send their gradients, and fail as one."""

import json
import os
from pathlib import Path

import pytest
import torch

from datapipe.dataset.verify import verify
from datapipe.packing import PackOptions, pack
from tests.processes import clean_environment
from tests.trainer.conftest import each_rank
from tests.trainer.runs import KFAC, finish, setting, train_losses
from trainer.checkpoints.file import load_checkpoint
from trainer.errors import TrainingError
from trainer.ranks.world import _pack, _unpack

CHILDREN = Path(__file__).parent / "children"
FIVE_STEPS = ["train.epochs=1", "train.batch_size=64"]

pytestmark = pytest.mark.ranks


@pytest.fixture
def losses(train, tmp_path):
    """losses("run", "train.static_graph=true", …, ranks=2) -> losses of the five steps of such a training."""

    def _losses(name, *changes, ranks=2, **options):
        code, _, err = finish(train(name, *FIVE_STEPS, *changes, ranks=ranks, **options))
        assert code == 0 and "not compiled" not in err, err
        found = train_losses(tmp_path / name)
        assert len(found) == 5
        return found

    return _losses


@pytest.fixture(scope="module")
def plain_losses(server, packed, recipe_file, tmp_path_factory):
    """Losses of two ranks that send their gradients as they are."""
    run = tmp_path_factory.mktemp("plain") / "run"
    line = ["-m", "trainer", "train", recipe_file, "--data", packed, "--out", run, *setting(FIVE_STEPS)]
    ranks = [server.start(*line, env=clean_environment(**environ)) for environ in each_rank(2)]
    for code, _, err in map(finish, ranks):
        assert code == 0, err
    return train_losses(run)


@pytest.mark.parametrize("method", ["sgd", pytest.param("kfac", marks=pytest.mark.slow)])
def test_parts_of_a_batch_are_as_good_as_ranks(losses, method):
    """Four parts on one rank, two on two: batch normalisation sees the same images. A static graph changes nothing."""
    changes = ["data.order=full", *(KFAC if method == "kfac" else [])]
    one = losses("one", "train.accumulation_steps=4", *changes, ranks=1)
    two = losses("two", "train.accumulation_steps=2", *changes)
    assert one == pytest.approx(two, rel=2e-2)
    assert losses("static", "train.accumulation_steps=2", "train.static_graph=true", *changes) == two


class Evil:
    """What runs code where it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("unpickled"),)


def test_what_a_stranger_sends_runs_no_code(tmp_path, monkeypatch):
    """Tensors travel as checkpoints do."""
    monkeypatch.chdir(tmp_path)
    tensors = {"a": [torch.arange(3), (1, None, "é")]}
    assert str(_unpack(_pack(tensors))) == str(tensors)
    with pytest.raises(TrainingError, match="another rank has sent what no rank sends"):
        _unpack(_pack(Evil()))
    assert not Path("unpickled").exists()


@pytest.mark.slow
def test_a_stranger_in_place_of_a_rank_is_refused(server, packed, recipe_file, tmp_path):
    """The stranger cannot read the folder of the run, where the secret is; of the run nothing is left."""
    ranks = []
    for name, environ in zip(("run", "another"), each_rank(2), strict=True):
        line = ["-m", "trainer", "train", recipe_file, "--data", packed, "--out", tmp_path / name]
        ranks.append(server.start(*line, env={**os.environ, **environ}))
    (code, _, errors), (_, _, other) = map(finish, ranks)
    assert code == 1 and "was not written by a process of this job" in errors + other, errors + other
    assert not (tmp_path / "run").exists()


def test_a_graph_that_is_said_to_be_static_learns_the_same(losses, plain_losses):
    assert losses("static", "train.static_graph=true") == plain_losses


@pytest.mark.slow
def test_a_compiled_network_whose_graph_is_static_learns_the_same(losses):
    """The graph is cut so that gradients are sent early."""
    program = [CHILDREN / "compiled_eagerly.py"]
    plain = losses("plain", program=program)
    compiled = losses("compiled", "train.compile=true", "train.static_graph=true", program=program)
    assert compiled == pytest.approx(plain, rel=1e-2)


@pytest.mark.slow
def test_ranks_compile_one_network(losses, plain_losses):
    """The losses are those of networks that are not compiled, with a static graph and without."""
    compiled = losses("compiled", "train.compile=true", "train.precision=off")
    assert compiled == losses("static", "train.compile=true", "train.precision=off", "train.static_graph=true")
    assert compiled == pytest.approx(losses("plain", "train.precision=off"), rel=1e-2)


@pytest.mark.slow
def test_a_rank_that_cannot_compile_leaves_nobody_waiting(train):
    """Also where the network is compiled for several sizes, and K-FAC sends its statistics in each pass."""
    changes = ["train.epochs=2", "train.batch_size=330", "train.compile=true", *KFAC]
    changes += ["data.crop=random_resized", "data.start_size=12"]
    child = train("run", *changes, program=[CHILDREN / "compiled_eagerly.py"], env={"RANK_THAT_FAILS": "1"}, ranks=2)
    code, _, err = finish(child)
    assert code == 0 and "train.compile: not compiled, which is slower, as it failed. rank 1: " in err, err


def test_gradients_that_are_sent_in_fewer_bits_train_about_the_same(losses, plain_losses):
    short = losses("short", "train.gradient_dtype=bfloat16", "train.bucket_mib=1")
    assert short[0] == plain_losses[0] and short != plain_losses
    assert short == pytest.approx(plain_losses, rel=2e-2)


def test_powersgd_sends_less_from_its_step_on_and_still_learns(train, tmp_path):
    losses = []
    for rank in ('"none"', "2"):
        changes = ["train.epochs=2", "train.batch_size=64", f"train.powersgd_rank={rank}"]
        code, _, err = finish(train(f"rank {rank}", *changes, "train.powersgd_start_step=4", ranks=2))
        assert code == 0, err
        losses.append(train_losses(tmp_path / f"rank {rank}"))
    whole, narrow = losses
    assert whole[:3] == narrow[:3] and whole[-1] != narrow[-1]
    assert narrow[-1] < (narrow[0] + whole[-1]) / 2, "more than half of what whole gradients learn"


@pytest.mark.slow
def test_kfac_goes_on_with_other_ranks(train, tmp_path, metrics):
    """Each layer has one owner, to whom its gradient is reduced; the state of all of them is in the checkpoint."""
    changes = (*KFAC, "kfac.grad_worker_fraction=0", "train.log_every=5", "train.precision=off")
    for ranks, epochs in ((2, 1), (1, 2), (2, 3)):
        code, _, err = finish(train("run", *changes, f"train.epochs={epochs}", words=["--resume"], ranks=ranks))
        assert code == 0, err
    lines = metrics(tmp_path / "run")
    written = [line for line in lines if line["event"] == "kfac"]
    assert len(written) >= 5 and all(line["skipped"] == line["fallbacks"] == 0 for line in written)
    assert all(0 < cosine < 0.999 for line in written for cosine in line["cosines"].values())
    assert len({line["damping"] for line in written}) >= 3  # it adapts, and continues where it was
    assert [line["world_size"] for line in lines if line["event"] in ("run", "resume")] == [2, 1, 2]
    layers = written[0]["cosines"].keys()  # factors in steps 0, 1, 2, one of 3 to 5, one of 6 to 8; some in step 9
    solved = [name for name in layers if "bn" not in name]
    assert written[1]["step"] == 10 and 5 * len(layers) < written[1]["factor_updates"] < 6 * len(layers)
    assert written[1]["solution_updates"] == 5 * len(solved)
    assert [rank["rank"] for rank in lines[-1]["ranks"]] == [0, 1]
    assert all(rank["memory_bytes"] > 2**26 and rank["time_s"]["wait"] >= 0 for rank in lines[-1]["ranks"])


def test_filters_that_whiten_are_those_of_the_whole_batch(train, tmp_path):
    filters = []
    for ranks in (1, 2):
        changes = "model.name=whitened_small", "train.epochs=1", "train.batch_size=160"
        code, _, err = finish(train(f"run{ranks}", *changes, ranks=ranks))
        assert code == 0, err
        filters.append(load_checkpoint(tmp_path / f"run{ranks}" / "checkpoint.pt")["model"]["patches.weight"])
    torch.testing.assert_close(*filters)


def test_the_data_set_is_staged_once_for_all_ranks_of_a_node(train, tmp_path):
    local = tmp_path / "node" / "data"
    code, _, err = finish(train("run", *FIVE_STEPS, words=["--stage", local], ranks=2))
    assert code == 0, err
    assert {path.name for path in local.iterdir()} == {"train", "val"} and verify(local / "train") == []
    assert verify(local / "val") == []


def test_two_ranks_learn_and_count_as_one(start, packed, tmp_path):
    for ranks in (1, 2):
        code, _, err = finish(start(CHILDREN / "learns_as_one.py", packed, 32, tmp_path / f"{ranks}.pt", ranks=ranks))
        assert code == 0, err
    one, two = (torch.load(tmp_path / f"{ranks}.pt", weights_only=True) for ranks in (1, 2))
    for key in one:
        torch.testing.assert_close(two[key], one[key], rtol=1e-4, atol=1e-5)
    (accuracy_1, loss_1), (accuracy_2, loss_2) = (
        json.loads((tmp_path / f"{ranks}.json").read_text()) for ranks in (1, 2)
    )
    assert accuracy_1 == accuracy_2 == round(accuracy_1 * 77) / 77
    assert loss_1 == pytest.approx(loss_2, rel=1e-4)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc here")
def test_no_thread_of_the_ranks_outlives_the_training(start, packed, recipe_file, tmp_path):
    """A thread of gloo's that lets go of a tensor while Python ends aborts a process that had done its work.

    So does a thread of Python's that is in the store just then.
    """
    words = recipe_file, packed, tmp_path / "run", "train.epochs=1", "train.batch_size=330", *KFAC
    code, out, err = finish(start(CHILDREN / "threads_left.py", *words, ranks=2))
    assert code == 0, err
    assert out.count("python") >= 2, out  # the first threads of both
    assert "gloo" not in out and "datapipe-" not in out and "trainer-" not in out, out


@pytest.mark.parametrize("are_bound", [False, True])
def test_two_ranks_of_any_launcher_share_the_cores(train, tmp_path, metrics, are_bound):
    """torchrun alone says how many ranks there are on a host; srun may bind each to cores of its own."""
    allowed, children = sorted(os.sched_getaffinity(0)), []
    for rank, env in enumerate(each_rank(2)):
        cores = [allowed[rank % len(allowed)]] if are_bound else allowed
        program = [CHILDREN / "bound_to_cores.py", ",".join(map(str, cores))]
        children.append(train("run", *FIVE_STEPS, "data.threads=none", program=program, env=env))
    for code, _, err in map(finish, children):
        assert code == 0, err
    header = metrics(tmp_path / "run")[0]
    share = 1 if are_bound else max(1, len(allowed) // 2)
    assert (header["cores_per_rank"], header["loader_threads"]) == (share, share)
    assert header["hardware"]["cores"] == (min(2, len(allowed)) if are_bound else len(allowed))


def test_two_ranks_that_miss_the_target_still_report(train, tmp_path):
    """A launcher that sees one rank fail would end the other, which writes the report."""
    changes = "train.target_accuracy=1.0", "optimizer.lr=1e-9"
    ranks = [train("run", *FIVE_STEPS, *changes, env=env) for env in each_rank(2)]
    (code_0, out_0, err), (code_1, out_1, _) = map(finish, ranks)
    assert (code_0, code_1) == (1, 0), err
    assert "missed" in out_0 and out_1 == ""
    assert (tmp_path / "run" / "report.html").exists()


def test_two_ranks_keep_the_checkpoint_before_they_lost_themselves(train, tmp_path):
    changes = ["train.batch_size=330", "schedule={name='constant', warmup_epochs=2.9}"]
    changes += ["optimizer.lr=1e37", "optimizer.weight_decay=1e30"]  # the second step makes the parameters infinite
    for code, _, err in map(finish, [train("run", *changes, env=env) for env in each_rank(2)]):
        assert code == 1
        assert "error: parameters or running statistics are no longer finite after step 2" in err
        assert "checkpoint.pt is still that of epoch 1, step 1" in err
    assert load_checkpoint(tmp_path / "run" / "checkpoint.pt")["state"]["step"] == 1


def test_a_world_size_that_does_not_divide_is_refused_without_waiting(train, tmp_path):
    env = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    code, _, err = finish(train("run", env=env))  # there is no other rank: it must not look for one
    assert code == 2
    assert "train.batch_size = 32: must be a multiple of the world size, 3" in err
    assert "waiting for 3 ranks" not in err
    assert not (tmp_path / "run").exists()


def test_an_existing_run_is_refused_by_both_ranks(train, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    for code, _, err in map(finish, [train("run", env=env) for env in each_rank(2)]):
        assert code == 2 and "holds a run" in err
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "{}\n"


def test_what_one_rank_lacks_ends_both(train, packed, tmp_path):
    folders = packed, tmp_path / "missing"
    ranks = [train("run", data=data, env=env) for data, env in zip(folders, each_rank(2), strict=True)]
    (code_0, _, err_0), (code_1, _, err_1) = map(finish, ranks)
    assert (code_0, code_1) == (1, 2)  # the path that was given to rank 1 is wrong
    assert "missing" in err_1
    assert "rank 1: " in err_0
    assert "missing" in err_0
    assert "Traceback" not in err_0 + err_1


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("data", "rank 1 ({host}) has another data set than rank 0 ({host}): train "),
        ("recipe", "rank 1 ({host}) has another recipe than rank 0 ({host}): optimizer.lr 0.5, not 0.05"),
    ],
)
def test_ranks_that_begin_with_something_else_are_refused(train, packed, tmp_path, other, words):
    """As with an old copy of the data set on one node."""
    data, changes = packed, []
    if other == "data":
        data = tmp_path / "packed"
        pack(packed.parent / "raw", data, PackOptions(workers=1, seed=1))
    else:
        changes = ["optimizer.lr=0.5"]
    first, second = each_rank(2)
    ends = [*map(finish, [train("run", env=first), train("run", *changes, data=data, env=second)])]
    assert [code for code, _, _ in ends] == [1, 1], ends
    assert all(words.format(host=os.uname().nodename) in err.splitlines()[-1] for _, _, err in ends), ends
    assert not (tmp_path / "run").exists()
