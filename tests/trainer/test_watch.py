"""A rank that is dead, stopped or hangs ends the run in time, and is named. Real processes, as launchers start them."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

LIMIT_S = 8
ROOT = Path(__file__).parents[2]

# In the place of rank 1: stands still for ever in its 21st step.
HANGS = """
import os, sys, time
if os.environ.get("RANK") == "1" and "trainer" in sys.orig_argv:
    import trainer.objective as objective
    before = objective.batch_loss
    def hang(job, batch, step):
        while step == 20:
            time.sleep(1)
        return before(job, batch, step)
    objective.batch_loss = hang
"""

# In the place of rank 1: a bit of its parameters changes in its 20th step.
FLIPS = """
import os, sys
if os.environ.get("RANK") == "1" and "trainer" in sys.orig_argv:
    import torch
    import trainer.loop as loop
    before, calls = loop._update, []
    def flip(job, *rest):
        before(job, *rest)
        calls.append(1)
        if len(calls) == 20:
            weight = next(parameter for name, parameter in job.module.named_parameters() if "fc" in name)
            weight.data.flatten()[:1].view(torch.int32).bitwise_xor_(1 << 3)
    loop._update = flip
"""

# In the place of rank 1: each forward pass takes a tenth of a second longer.
SLOW = """
import os, sys, time
if "trainer" in sys.orig_argv:
    import trainer.objective as objective
    import trainer.watch as watch
    watch.COMPARE_S = 4
    before = objective.batch_loss
    def slow(job, batch, step):
        time.sleep(0.1 * (os.environ.get("RANK") == "1"))
        return before(job, batch, step)
    objective.batch_loss = slow
"""


# In the place of the last rank: computes for minutes in its 20th step, in which no handler of Python's can run.
COMPUTES = """
import os, sys
if "trainer" in sys.orig_argv and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
    import ctypes
    import trainer.objective as objective
    before = objective.batch_loss
    def compute(job, batch, step):
        if step == 19:
            open("computes", "w").close()
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):  # the second call waits for ever, and no signal interrupts it
                ctypes.CDLL(None).pthread_mutex_lock(mutex)
        return before(job, batch, step)
    objective.batch_loss = compute
"""


@pytest.fixture
def ranks(start, packed, recipe_file, port, tmp_path):
    """ranks(2, env={}) -> processes that train together, each started by itself. `of_last`: arguments of the last."""

    def _ranks(
        count: int, *arguments: object, env: dict[str, str] | None = None, of_last: Sequence[object] = ()
    ) -> list[subprocess.Popen]:
        command = ["-m", "trainer", "train", recipe_file, "--data", packed, "--out", tmp_path / "run"]
        command += ["--set", "train.epochs=200", "--set", "train.batch_size=30", "--rank-timeout", LIMIT_S, *arguments]
        shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | (env or {})
        others = [*command], [*command, *of_last]
        return [start(*others[rank == count - 1], env=shared | {"RANK": str(rank)}) for rank in range(count)]

    return _ranks


def wait_for_step(run: Path, step: int, children: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + 120
    while f'"step": {step},' not in (run.read_text() if run.exists() else ""):
        assert all(child.poll() is None for child in children), [child.communicate() for child in children]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("number", "which", "words"),
    [
        (signal.SIGKILL, 1, "rank 1 ({host}) does not answer"),
        (signal.SIGKILL, 0, "rank 0 ({host}) does not answer"),
        (signal.SIGSTOP, 1, "rank 1 ({host}) has given no sign of life for"),
        (signal.SIGSTOP, 0, "does not answer"),
    ],
)
def test_a_rank_that_dies_or_stops_ends_the_others_in_time(ranks, tmp_path, number, which, words):
    children = ranks(3)
    wait_for_step(tmp_path / "run" / "metrics.jsonl", 12, children)
    children[which].send_signal(number)
    began = time.monotonic()
    others = [child for child in children if child is not children[which]]
    said = [child.communicate(timeout=8 * LIMIT_S)[1] for child in others]
    assert time.monotonic() - began < 3 * LIMIT_S
    assert [child.returncode for child in others] == [1, 1], said
    host = os.uname().nodename
    assert all(words.format(host=host) in errors.splitlines()[-1] for errors in said), said
    assert not any("Traceback" in errors for errors in said), said
    assert (tmp_path / "run" / "failed-hosts").read_text() == f"{host}\n"


@pytest.mark.ranks
def test_a_rank_that_hangs_ends_the_run_and_is_named(ranks, tmp_path):
    (tmp_path / "hangs").mkdir()
    (tmp_path / "hangs" / "sitecustomize.py").write_text(HANGS)
    children = ranks(2, env={"PYTHONPATH": f"{tmp_path / 'hangs'}:{ROOT}"})
    said = [child.communicate(timeout=120)[1] for child in children]
    assert [child.returncode for child in children] == [1, 1], said
    for errors in said:
        assert f"because rank 1 ({os.uname().nodename}): no progress for" in errors.splitlines()[-1], said
        assert "in: forward pass of step 21 (--rank-timeout 8)" in errors.splitlines()[-1], said
    assert "waiting: rank 1" in said[0]


@pytest.mark.ranks
@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_a_signal_ends_all_soon_though_a_rank_is_stopped(ranks, tmp_path, stopped):
    """The limit for ranks, 200 s, is not over by then. Where the first rank is stopped, its store is silent, too."""
    children = ranks(3, "--rank-timeout", 200)
    wait_for_step(tmp_path / "run" / "metrics.jsonl", 12, children)
    children[stopped].send_signal(signal.SIGSTOP)
    time.sleep(1)
    others = [child for child in children if child is not children[stopped]]
    for child in others:
        child.terminate()
    said = [child.communicate(timeout=60)[1] for child in others]
    assert [child.returncode for child in others] == [143, 143], said
    words = f"because SIGTERM asked for it, and rank {stopped} ({os.uname().nodename}) has given no sign of life for"
    assert all(words in errors.splitlines()[-1] for errors in said), said


@pytest.mark.ranks
@pytest.mark.parametrize("count", [1, 2])
def test_a_second_ctrl_c_ends_what_computes_on(ranks, tmp_path, count):
    """Also while no Python code runs: the last rank computes for minutes, and the others wait for it."""
    (tmp_path / "sitecustomize.py").write_text(COMPUTES)
    children = ranks(count, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    wait_for_step(tmp_path / "run" / "metrics.jsonl", 12, children)
    while not (tmp_path / "computes").exists():
        time.sleep(0.05)
    time.sleep(1)
    for child in children:
        child.send_signal(signal.SIGINT)
    time.sleep(4)
    assert [child.poll() for child in children] == [None] * count
    for child in children:
        child.send_signal(signal.SIGINT)
    began = time.monotonic()
    said = [child.communicate(timeout=60)[1] for child in children]
    assert time.monotonic() - began < 10, said
    assert [child.returncode for child in children] == [130] * count, said
    assert all("the run ends, because of a second Ctrl-C" in errors for errors in said), said


@pytest.mark.ranks
def test_a_rank_that_hangs_while_it_opens_the_data_set_ends_the_run(ranks, packed, tmp_path):
    """A FIFO in place of a manifest hangs whoever opens it."""
    data = shutil.copytree(packed, tmp_path / "data")
    (data / "train" / "manifest.json").unlink()
    os.mkfifo(data / "train" / "manifest.json")
    children = ranks(2, of_last=["--data", data])
    said = [child.communicate(timeout=120)[1] for child in children]
    assert [child.returncode for child in children] == [1, 1], said
    words = f"because rank 1 ({os.uname().nodename}): no progress for"
    assert all(words in errors.splitlines()[-1] for errors in said), said
    assert "in: opening the data set (--rank-timeout 8)" in said[0].splitlines()[-1], said
    assert "waiting: rank 1" in said[0]


@pytest.mark.ranks
def test_a_rank_that_is_refused_tells_the_others(ranks):
    """They wait for it, and would for five minutes."""
    began = time.monotonic()
    children = ranks(3, of_last=["--set", "train.epochs=0"])
    said = [child.communicate(timeout=90)[1] for child in children]
    assert time.monotonic() - began < 60
    assert [child.returncode for child in children] == [1, 1, 2], said
    assert all("process 2 has left: train.epochs" in errors.splitlines()[-1] for errors in said[:2]), said


@pytest.mark.ranks
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI's mpirun is not installed")
def test_mpirun_starts_one_world(packed, recipe_file, tmp_path):
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, "-m", "trainer", "train"]
    command += [recipe_file, "--data", packed, "--out", tmp_path / "run", "--set", "train.epochs=1"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "2 ranks" in done.stderr, done.stderr


@pytest.mark.ranks
@pytest.mark.parametrize("count", [2, 3])
def test_a_flipped_bit_is_found_and_its_rank_named(ranks, tmp_path, count):
    """With two ranks it is not known which of them is right, so both are named."""
    (tmp_path / "sitecustomize.py").write_text(FLIPS)
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    children = ranks(count, "--set", "train.check_replicas_every_steps=5", env=env)
    said = [child.communicate(timeout=180)[1] for child in children]
    assert all(child.returncode == 1 for child in children), said
    host = socket.gethostname()
    who = f"rank 1 ({host})" if count == 3 else f"rank 0 ({host}), rank 1 ({host})"
    assert all(
        f"error: {who}: other parameters than the other ranks after step 20, first in fc" in text for text in said
    )


@pytest.mark.ranks
def test_a_slow_rank_is_named(ranks, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    children = ranks(3, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    wait_for_step(tmp_path / "run" / "metrics.jsonl", 150, children)
    children[0].terminate()
    said = [child.communicate(timeout=120)[1] for child in children]
    lines = [line for line in said[0].splitlines() if "slow:" in line]
    assert lines and all(f"slow: rank 1 ({socket.gethostname()}) spent" in line for line in lines), said[0]
    assert all("in forward passes" in line for line in lines)
