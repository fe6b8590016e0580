"""Runs in child processes: signals, kills, several ranks, exit codes."""

import functools
import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

import datapipe
from datapipe.dataset.verify import verify
from datapipe.packing import PackOptions, pack
from trainer.checkpoint import load_checkpoint

ROOT = Path(__file__).parents[2]
CHILD = Path(__file__).with_name("ranks_child.py")
TIMEOUT_S = 120


@pytest.fixture
def train(start, packed, recipe_file, tmp_path):
    """train("run", "--resume", …, ranks=1) -> what starts `trainer train` into tmp_path/run, as `start` does."""

    def _train(name, *arguments, data=packed, **options):
        command = ["-m", "trainer", "train", recipe_file, "--data", data, "--out", tmp_path / name, *arguments]
        return start(*command, **options)

    return _train


def finish(child: subprocess.Popen) -> tuple[int, str, str]:
    out, err = child.communicate(timeout=TIMEOUT_S)
    return child.returncode, out, err


def wait_for_step(child: subprocess.Popen, run: Path, step: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        path = run / "metrics.jsonl"
        if path.exists() and f'"step": {step},' in path.read_text():
            return
        assert child.poll() is None, child.communicate()
        time.sleep(0.005)
    raise AssertionError(f"no step {step} in {TIMEOUT_S} s")


def trained(run: Path) -> dict:
    content = load_checkpoint(run / "checkpoint.pt")
    assert content["state"]["epoch"] == 3
    parts = "model", "optimizer", "average"
    return {f"{part}.{key}": value for part in parts for key, value in flat(content[part] or {})}


def flat(value, name=""):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield name, value
        return
    for key, item in items:
        yield from flat(item, f"{name}.{key}")


def same(a, b) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


KFAC = ["optimizer.preconditioner=kfac", "kfac.factor_update_steps=3", "kfac.inv_update_steps=5"]
KFAC += ["kfac.damping_update_steps=2"]


# All that recipes for few epochs add.
FAST = ["ema.half_life_steps=3", "ema.update_every_steps=2", "train.precise_bn_batches=2", "train.loss=bce"]
FAST += ["train.evaluate_mirrored=true", "data.mixup=0.2", "data.cutmix=1", "data.crop=random_resized"]
FAST += ["data.start_size=8", "data.eval_size=20", "data.flip=alternate", "optimizer.max_grad_norm=1"]
FAST += ["model.blur_pool=true", 'schedule={name="polynomial"}']


@pytest.mark.parametrize("changes", [[], KFAC, FAST], ids=["sgd", "kfac", "fast"])
def test_killed_at_random_steps_ends_with_the_same_bits(train, tmp_path, metrics, changes):
    seed = random.randrange(10**6)
    steps = sorted(random.Random(seed).sample(range(2, 26), 2))
    print(f"seed {seed}: killed after steps {steps}")
    every = [word for change in ("train.checkpoint_every_steps=3", *changes) for word in ("--set", change)]
    train = functools.partial(train, env={"OMP_NUM_THREADS": "2"})  # sums over threads must be the same, too
    assert finish(train("whole", *every))[0] == 0
    for step in steps:
        child = train("killed", "--resume", *every)
        wait_for_step(child, tmp_path / "killed", step)
        child.send_signal(signal.SIGKILL)
        assert finish(child)[0] == -signal.SIGKILL
    code, _, err = finish(train("killed", "--resume", *every))
    assert code == 0, err
    whole, killed = trained(tmp_path / "whole"), trained(tmp_path / "killed")
    assert whole.keys() == killed.keys()
    assert [key for key in whole if not same(whole[key], killed[key])] == []
    lines = {name: metrics(tmp_path / name) for name in ("whole", "killed")}
    for event, fields in (("train", ("epoch", "step", "loss", "lr")), ("epoch", ("epoch", "train_loss", "val_loss"))):
        found = {
            name: [[line[field] for field in fields] for line in lines[name] if line["event"] == event]
            for name in lines
        }
        assert found["whole"] == found["killed"]  # every line once, with the same numbers
    assert lines["killed"][0]["event"] == "run"
    # Of whole images alone; images that are mixed have no accuracy.
    names = {key for line in lines["whole"] if line["event"] in ("train", "epoch") for key in line}
    assert {name for name in names if "accuracy" in name} == {"val_accuracy"}
    assert [path.name for path in (tmp_path / "killed").glob(".*")] == []


@pytest.mark.ranks
def test_kfac_goes_on_with_other_ranks(train, tmp_path, metrics):
    """Each layer has one owner, to whom its gradient is reduced; the state of all of them is in the checkpoint."""
    changes = (*KFAC, "kfac.grad_worker_fraction=0", "train.log_every=5", "train.precision=off")
    changes = [word for change in changes for word in ("--set", change)]
    for ranks, epochs in ((2, 1), (1, 2), (2, 3)):
        code, _, err = finish(train("run", "--resume", *changes, "--set", f"train.epochs={epochs}", ranks=ranks))
        assert code == 0, err
    lines = metrics(tmp_path / "run")
    told = [line for line in lines if line["event"] == "kfac"]
    assert len(told) >= 5 and all(line["skipped"] == line["fallbacks"] == 0 for line in told)
    assert all(0 < cosine < 0.999 for line in told for cosine in line["cosines"].values())
    assert len({line["damping"] for line in told}) >= 3  # it adapts, and goes on where it was
    assert [line["world_size"] for line in lines if line["event"] in ("run", "resume")] == [2, 1, 2]
    layers = told[0]["cosines"].keys()  # factors in steps 0, 1, 2, one of 3 to 5, one of 6 to 8; some in step 9
    solved = [name for name in layers if "bn" not in name]
    assert told[1]["step"] == 10 and 5 * len(layers) < told[1]["factor_updates"] < 6 * len(layers)
    assert told[1]["solution_updates"] == 5 * len(solved)
    assert [rank["rank"] for rank in lines[-1]["ranks"]] == [0, 1]
    assert all(rank["memory_bytes"] > 2**26 and rank["time_s"]["wait"] >= 0 for rank in lines[-1]["ranks"])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138)])
def test_a_signal_saves_and_stops(train, tmp_path, metrics, number, code):
    child = train("run")
    wait_for_step(child, tmp_path / "run", 4)
    child.send_signal(number)
    found, out, err = finish(child)
    assert found == code, err
    assert "--resume" in out
    assert "Traceback" not in err
    last = metrics(tmp_path / "run")[-1]
    assert (last["event"], last["status"]) == ("end", "interrupted")
    saved = load_checkpoint(tmp_path / "run" / "checkpoint.pt")
    assert 4 <= saved["state"]["step"] < 30
    found, _, err = finish(train("run", "--resume"))
    assert found == 0, err
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if line["event"] == "train"] == list(range(1, 31))
    assert [line["status"] for line in lines if line["event"] == "end"] == ["completed"]


@pytest.mark.parametrize("limit", ["option", "job"])
def test_it_stops_before_the_time_is_over(train, tmp_path, metrics, limit):
    """Half a minute before; with less than that left, after one step, so that a requeued job always comes further."""
    if limit == "option":
        child = train("run", "--max-time", "0:31", fresh=True)  # it takes longer than a second to import torch
    else:
        child = train("run", env={"SLURM_JOB_END_TIME": str(int(time.time()) + 20)})
    code, out, err = finish(child)
    assert code == 75 and out.splitlines()[-1].startswith("interrupted since the time is nearly over;"), err
    assert "are left before the time is over, and 30 s are kept" in err and "does a single step" in err
    assert metrics(tmp_path / "run")[-1]["status"] == "interrupted"
    assert load_checkpoint(tmp_path / "run" / "checkpoint.pt")["state"]["step"] == 1
    code, _, err = finish(train("run", "--resume", "--max-time", "1-0"))
    assert code == 0, err
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if line["event"] == "train"] == list(range(1, 31))
    (resumed,) = [line for line in lines if line["event"] == "resume"]
    assert resumed["waited_s"] > 0 and resumed["repeated_steps"] == 0


@pytest.mark.ranks
def test_two_ranks_stop_together_and_one_goes_on(train, tmp_path, metrics):
    child = train("run", ranks=2, torchrun=True)
    wait_for_step(child, tmp_path / "run", 4)
    child.send_signal(signal.SIGTERM)  # torchrun passes it on to both
    code, _, err = finish(child)
    assert code != 0
    assert metrics(tmp_path / "run")[-1]["status"] == "interrupted", err
    step = load_checkpoint(tmp_path / "run" / "checkpoint.pt")["state"]["step"]
    assert 4 <= step < 30
    code, _, err = finish(train("run", "--resume"))
    assert code == 0, err
    lines = metrics(tmp_path / "run")
    assert [(line["step"], line["world_size"]) for line in lines if line["event"] == "resume"] == [(step, 1)]
    assert [line["step"] for line in lines if line["event"] == "train"] == list(range(1, 31))


@pytest.mark.ranks
@pytest.mark.parametrize("kfac", [[], KFAC], ids=["sgd", "kfac"])
def test_parts_of_a_batch_are_as_good_as_ranks(train, tmp_path, metrics, kfac):
    """Four parts on one rank, two on two: batch normalisation sees the same eight images each time."""
    losses = []
    for ranks, parts in ((1, 4), (2, 2)):
        changes = ["train.epochs=1", f"train.accumulation_steps={parts}", "data.order=full", *kfac]
        words = [word for change in changes for word in ("--set", change)]
        code, _, err = finish(train(f"run{ranks}", *words, ranks=ranks))
        assert code == 0, err
        losses.append([line["loss"] for line in metrics(tmp_path / f"run{ranks}") if line["event"] == "train"])
    assert len(losses[0]) == 10 and losses[0] == pytest.approx(losses[1], rel=2e-2)


@pytest.mark.ranks
def test_gradients_that_are_sent_in_fewer_bits_train_about_the_same(train, tmp_path, metrics):
    losses = []
    for number, dtype in enumerate(("float32", "bfloat16")):
        changes = ["train.epochs=1", f"train.gradient_dtype={dtype}", "train.bucket_mib=1"]
        words = [word for change in changes for word in ("--set", change)]
        code, _, err = finish(train(f"run{number}", *words, ranks=2))
        assert code == 0, err
        losses.append([line["loss"] for line in metrics(tmp_path / f"run{number}") if line["event"] == "train"])
    assert losses[0][0] == losses[1][0] and losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "more",
    [[], KFAC, ["train.accumulation_steps=2"], ["train.compile=true"]],
    ids=["sgd", "kfac", "parts", "compiled"],
)
def test_a_graph_that_is_said_to_be_static_learns_the_same(train, tmp_path, metrics, more):
    losses = []
    for number, static in enumerate(("false", "true")):
        changes = ["train.epochs=1", f"train.static_graph={static}", *more]
        code, _, err = finish(train(f"run{number}", *(w for c in changes for w in ("--set", c)), ranks=2))
        assert code == 0, err
        losses.append([line["loss"] for line in metrics(tmp_path / f"run{number}") if line["event"] == "train"])
    assert losses[0] == losses[1] and len(losses[0]) == 10


@pytest.mark.ranks
def test_powersgd_sends_less_from_its_step_on_and_still_learns(train, tmp_path, metrics):
    losses = []
    for number, rank in enumerate(('"none"', "2")):
        changes = ["train.epochs=2", f"train.powersgd_rank={rank}", "train.powersgd_start_step=5"]
        code, _, err = finish(train(f"run{number}", *(w for c in changes for w in ("--set", c)), ranks=2))
        assert code == 0, err
        losses.append([line["loss"] for line in metrics(tmp_path / f"run{number}") if line["event"] == "train"])
    whole, narrow = losses
    assert whole[:4] == narrow[:4] and whole[-1] != narrow[-1]
    assert narrow[-1] < (narrow[0] + whole[-1]) / 2, "more than half of what whole gradients learn"


@pytest.mark.ranks
def test_ranks_compile_one_network(train, tmp_path, metrics):
    """And cut its graph so that gradients are sent early; the losses are those of networks that are not compiled."""
    losses = []
    for number, compiled in enumerate(("false", "true")):
        changes = ["train.epochs=1", f"train.compile={compiled}", "train.precision=off"]
        code, _, err = finish(train(f"run{number}", *(w for c in changes for w in ("--set", c)), ranks=2))
        assert code == 0 and "not compiled" not in err, err
        losses.append([line["loss"] for line in metrics(tmp_path / f"run{number}") if line["event"] == "train"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.ranks
def test_filters_that_whiten_are_those_of_the_whole_batch(train, tmp_path):
    filters = []
    for ranks in (1, 2):
        words = ("--set", "model.name=whitened_small", "--set", "train.epochs=1")
        code, _, err = finish(train(f"run{ranks}", *words, ranks=ranks))
        assert code == 0, err
        filters.append(load_checkpoint(tmp_path / f"run{ranks}" / "checkpoint.pt")["model"]["patches.weight"])
    torch.testing.assert_close(*filters)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_rank_that_cannot_compile_leaves_nobody_waiting(start, packed, recipe_file, tmp_path):
    """Also where the network is compiled for several sizes, and K-FAC sends its statistics in each pass."""
    code = f"""
import os, sys
from torch._inductor import config
from trainer.cli import main
if os.environ["RANK"] == "1":
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = "{tmp_path}/compiled"
    config.cpp.cxx = (None, "/bin/false")
sys.exit(main())
"""
    changes = ["train.epochs=2", "train.compile=true", "data.crop=random_resized", "data.start_size=12", *KFAC]
    words = [word for change in changes for word in ("--set", change)]
    line = "-c", code, "train", recipe_file, "--data", packed, "--out", tmp_path / "run", *words
    status, _, err = finish(start(*line, ranks=2))
    assert status == 0 and "train.compile: not compiled, which is slower, as it failed. rank 1: " in err, err


@pytest.mark.parametrize(("parts", "batch_size"), [(3, 32), (32, 32), (5, 32)])
def test_parts_that_a_batch_does_not_have_are_refused(train, tmp_path, parts, batch_size):
    words = ["--set", f"train.accumulation_steps={parts}", "--set", f"train.batch_size={batch_size}"]
    code, _, err = finish(train("run", *words))
    assert code == 2 and f"train.accumulation_steps = {parts}: must divide the 32 images of a rank" in err, err
    assert not (tmp_path / "run").exists()


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_data_set_is_staged_first(train, tmp_path, ranks):
    """Once for all ranks of a node."""
    local, words = tmp_path / "node" / "data", ("--set", "train.epochs=1")
    code, _, err = finish(train("run", "--stage", local, *words, ranks=ranks))
    assert code == 0, err
    assert {path.name for path in local.iterdir()} == {"train", "val"} and verify(local / "train") == []
    assert verify(local / "val") == []


@pytest.mark.ranks
def test_two_ranks_learn_and_count_as_one(start, packed, tmp_path):
    for ranks in (1, 2):
        code, _, err = finish(start(CHILD, packed, 32, tmp_path / f"{ranks}.pt", ranks=ranks, torchrun=ranks > 1))
        assert code == 0, err
    one, two = (torch.load(tmp_path / f"{ranks}.pt", weights_only=True) for ranks in (1, 2))
    for key in one:
        torch.testing.assert_close(two[key], one[key], rtol=1e-4, atol=1e-5)
    (accuracy_1, loss_1), (accuracy_2, loss_2) = (
        json.loads((tmp_path / f"{ranks}.json").read_text()) for ranks in (1, 2)
    )
    assert accuracy_1 == accuracy_2 == round(accuracy_1 * 77) / 77
    assert loss_1 == pytest.approx(loss_2, rel=1e-4)


# gloo's threads that let go of a tensor while Python ends abort a process that had done its work, and so do Python's
# that are in the store just then.
THREADS = """
import sys
import threading
from pathlib import Path
from trainer.config.recipe import load_recipe
from trainer.run import run
assert run(load_recipe(sys.argv[1], sys.argv[4:]), Path(sys.argv[2]), Path(sys.argv[3])) == 0
print(*sorted(path.read_text() for path in Path("/proc/self/task").glob("*/comm")), sep="")
print(*[thread.name for thread in threading.enumerate()], sep="\\n")
"""


@pytest.mark.ranks
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc here")
def test_no_thread_of_the_ranks_outlives_the_training(start, packed, recipe_file, tmp_path):
    (tmp_path / "child.py").write_text(THREADS)
    words = recipe_file, packed, tmp_path / "run", "train.epochs=1", *KFAC
    code, out, err = finish(start(tmp_path / "child.py", *words, ranks=2, torchrun=True))
    assert code == 0, err
    assert out.count("python") >= 2, out  # the first threads of both
    assert "gloo" not in out and "datapipe-" not in out and "trainer-" not in out, out


@pytest.mark.ranks
@pytest.mark.parametrize("are_bound", [False, True])
def test_two_ranks_of_any_launcher_share_the_cores(start, packed, recipe_file, port, tmp_path, metrics, are_bound):
    """torchrun alone says how many ranks there are on a host; srun may bind each to cores of its own."""
    allowed, children = sorted(os.sched_getaffinity(0)), []
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    command = ["-m", "trainer", "train", recipe_file, "--data", packed, "--out", tmp_path / "run"]
    command += ["--set", "train.epochs=1", "--set", "data.threads=none"]
    for rank in range(2):
        prefix = ["taskset", "--cpu-list", str(allowed[rank % len(allowed)])] if are_bound else []
        children.append(start(*command, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, prefix=prefix))
    for code, _, err in map(finish, children):
        assert code == 0, err
    header = metrics(tmp_path / "run")[0]
    share = 1 if are_bound else max(1, len(allowed) // 2)
    assert (header["cores_per_rank"], header["loader_threads"]) == (share, share)
    assert header["hardware"]["cores"] == (min(2, len(allowed)) if are_bound else len(allowed))


@pytest.mark.ranks
def test_two_ranks_that_miss_the_target_still_report(train, tmp_path):
    arguments = ["--set", "train.epochs=1", "--set", "train.target_accuracy=1.0", "--set", "optimizer.lr=1e-9"]
    code, out, err = finish(train("run", *arguments, ranks=2, torchrun=True))
    assert code == 1
    assert "missed" in out
    assert "exitcode  : 1" in err
    assert (tmp_path / "run" / "report.html").exists()


def test_two_ranks_keep_the_checkpoint_before_they_lost_themselves(train, port, tmp_path):
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    changes = ["train.batch_size=330", "schedule={name='constant', warmup_epochs=2.9}"]
    changes += ["optimizer.lr=1e37", "optimizer.weight_decay=1e30"]  # the second step makes the parameters infinite
    arguments = [word for change in changes for word in ("--set", change)]
    children = [train("run", *arguments, env=env | {"RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(2)]
    for code, _, err in map(finish, children):
        assert code == 1
        assert "error: parameters or running statistics are no longer finite after step 2" in err
        assert "checkpoint.pt is still that of epoch 1, step 1" in err
    assert load_checkpoint(tmp_path / "run" / "checkpoint.pt")["state"]["step"] == 1


def test_a_name_that_is_no_utf8(train, start, tmp_path, metrics):
    name = os.fsdecode(b"run\xe9")
    env = {"PYTHONIOENCODING": "utf-8:strict"}  # of a terminal; a pipe may be more tolerant
    code, out, err = finish(train(name, "--set", "train.epochs=1", env=env))
    assert code == 0 and "Traceback" not in err, err
    assert metrics(tmp_path / name)[0]["command"][-3].endswith(name)
    assert r"run\udce9/report.html" in out  # escaped, as both commands print such names
    code, _, err = finish(start("-m", "trainer", "report", tmp_path / name, env=env))
    assert code == 0, err


def test_world_size_that_does_not_divide_is_refused_without_waiting(train, tmp_path):
    env = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    started = time.monotonic()
    code, _, err = finish(train("run", env=env))  # there is no other rank: it must not look for one
    assert code == 2
    assert "train.batch_size = 32: must be a multiple of the world size, 3" in err
    assert time.monotonic() - started < 60
    assert not (tmp_path / "run").exists()


def test_what_one_rank_lacks_ends_both(train, packed, port, tmp_path):
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    has, lacks = (
        train("run", data=data, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, data in enumerate((packed, tmp_path / "missing"))
    )
    (code_0, _, err_0), (code_1, _, err_1) = finish(has), finish(lacks)
    assert (code_0, code_1) == (1, 1)
    assert "missing" in err_1
    assert "rank 1: " in err_0
    assert "missing" in err_0
    assert "Traceback" not in err_0 + err_1


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("data", "rank 1 ({host}) has another data set than rank 0 ({host}): train "),
        ("recipe", "rank 1 ({host}) has another recipe than rank 0 ({host}): optimizer.lr 0.5, not 0.05"),
    ],
)
def test_ranks_that_begin_with_something_else_are_refused(train, packed, port, tmp_path, other, words):
    """As with an old copy of the data set on one node."""
    data, changes = packed, ()
    if other == "data":
        data = tmp_path / "packed"
        pack(packed.parent / "raw", data, PackOptions(workers=1, seed=1))
    else:
        changes = ("--set", "optimizer.lr=0.5")
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    children = [train("run", env=env | {"RANK": "0"}), train("run", *changes, data=data, env=env | {"RANK": "1"})]
    ends = [finish(child) for child in children]
    assert [code for code, _, _ in ends] == [1, 1], ends
    assert all(words.format(host=os.uname().nodename) in err.splitlines()[-1] for _, _, err in ends), ends
    assert not (tmp_path / "run").exists()


@pytest.mark.ranks
def test_a_rank_that_dies_ends_the_other(train, port, tmp_path):
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    arguments = ["--set", "train.epochs=1000"]
    children = [train("run", *arguments, env=env | {"RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(2)]
    wait_for_step(children[0], tmp_path / "run", 4)
    children[1].kill()
    code, _, err = finish(children[0])
    assert code == 1
    assert f"lost contact with another rank: rank 1 ({os.uname().nodename}) does not answer" in err


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpoints_by_time(train, tmp_path, ranks):
    """Within an epoch, of all ranks at the same step; a run that is killed continues from there."""
    words = ["--set", "train.checkpoint_every_minutes=0.0005", "--set", "train.batch_size=4"]
    child = train("run", *words, ranks=ranks)
    wait_for_step(child, tmp_path / "run", 60)
    child.send_signal(signal.SIGKILL)
    finish(child)
    kept = [load_checkpoint(tmp_path / "run" / f"checkpoint{end}.pt")["state"]["step"] for end in ("", "-1")]
    assert 82 > kept[0] > kept[1] > 0 and not (tmp_path / "run" / "best.pt").exists()
    code, _, err = finish(train("run", "--resume", *words, "--set", "train.epochs=1", ranks=ranks))
    assert code == 0, err
    assert load_checkpoint(tmp_path / "run" / "best.pt")["state"]["step"] == 82


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_while_a_batch_does_not_come(train, packed, tmp_path, number):
    """The only rank saves and ends at once."""
    data = shutil.copytree(packed, tmp_path / "data")
    shard = data / "train" / "shard-000000.tar"
    shard.unlink()
    os.mkfifo(shard)  # who opens it hangs
    child = train("run", "--set", "data.timeout_s=100", data=data)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() or '"event": "run"' not in metrics.read_text():
        assert child.poll() is None, child.communicate()
        time.sleep(0.05)
    time.sleep(1)
    began = time.monotonic()
    child.send_signal(number)
    code, _, err = finish(child)
    assert time.monotonic() - began < 10, err
    assert code == 128 + number and load_checkpoint(tmp_path / "run" / "checkpoint.pt")["state"]["step"] == 0, err


@pytest.mark.ranks
def test_existing_run_is_refused_by_both_ranks(train, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    code, _, err = finish(train("run", ranks=2, torchrun=True))
    assert code == 1  # torchrun's own
    assert "holds a run" in err
    assert "exitcode  : 2" in err
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["report", "--help"], ["recipes", "--help"]])
def test_help_has_an_example_and_needs_no_torch(start, arguments):
    probe = "import sys; from trainer.cli import main; code = main(); "
    probe += "print([m for m in ('torch', 'numpy', 'matplotlib', 'trainer.config.recipe') if m in sys.modules]); "
    probe += "sys.exit(code)"
    code, out, err = finish(start("-c", probe, *arguments, fresh=True))
    assert code == 0, err
    assert "Example" in out
    assert out.endswith("[]\n")


def test_recipes_and_usage_errors(start, tmp_path):
    code, out, _ = finish(start("-m", "trainer", "recipes"))
    assert code == 0
    assert "cifar10-resnet32" in out
    for arguments in (["train"], ["train", "nosuch", "--data", ".", "--out", "x"], ["report", "a", "b"], ["fly"]):
        code, _, err = finish(start("-m", "trainer", *arguments))
        assert code == 2
        assert "Traceback" not in err
    assert not (tmp_path / "x").exists()
    assert finish(start("-m", "trainer", "--version"))[:2] == (0, f"trainer {datapipe.__version__}\n")
