"""Loaders that end, break off, fork, are forgotten, and come back two hundred times leave nothing behind."""

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from datapipe import clock, watched
from datapipe.errors import DatapipeError
from datapipe.loaders import engine, open_loader, threads
from tests.processes import clean_environment
from tests.waiting import limit_s, read_until, wait_until


def epoch(loader):
    """Copies of the images of one epoch, batch by batch."""
    return [batch.images.numpy().copy() for batch in loader]


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def left() -> Iterator[Callable[[], tuple[int, ...]]]:
    """left() -> how many threads, open files, loaders and files of shared memory there are."""
    gc.collect()
    clock.now()  # whose thread stays
    gc.freeze()  # what is there already is not looked through at each collection

    def left() -> tuple[int, ...]:
        gc.collect()
        loaders = sum(isinstance(thing, engine.Engine) for thing in gc.get_objects())
        shared = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
        return threading.active_count(), open_files(), loaders, sum(name.startswith("torch_") for name in shared)

    yield left
    gc.unfreeze()


def wait_until_at_most(before: tuple[int, ...], measure: Callable[[], tuple[int, ...]]) -> None:
    """Wait until none of the numbers is above what it was."""
    wait_until(lambda: all(now <= then for now, then in zip(measure(), before, strict=True)), describe=measure)


def test_early_break_and_close_leave_nothing_behind(folder, backend, left):
    before = left()
    for _ in range(5):
        loader = open_loader(folder, 4, backend=backend, size=200, threads=3)
        for _ in loader:
            break
        for _ in loader:  # continues where it stopped
            break
        assert loader.state_dict()["step"] == 2
        loader.close()
        loader.close()
        with pytest.raises(ValueError, match="closed"):
            next(iter(loader))
    del loader
    wait_until_at_most(before, left)


def test_an_exception_in_the_consumer_leaves_nothing_behind(folder, backend, left):
    before = left()
    with pytest.raises(RuntimeError, match="mine"), open_loader(folder, 4, backend=backend, size=100) as loader:
        for _ in loader:
            raise RuntimeError("mine")
    del loader
    wait_until_at_most(before, left)


def test_closing_in_mid_epoch_is_said(folder, backend):
    with open_loader(folder, 4, backend=backend, size=24) as loader:
        batches = iter(loader)
        next(batches)
        loader.close()
        with pytest.raises(ValueError, match="the loader is closed"):
            next(batches)


def test_batches_kept_by_the_user_are_not_overwritten(folder, backend):
    with open_loader(folder, 5, backend=backend, size=24, threads=2) as loader:
        kept = [batch.images[:2] for batch in loader]  # a part keeps the whole batch's memory
        loader.set_epoch(0)
        for part, images in zip(kept, epoch(loader), strict=True):
            np.testing.assert_array_equal(part.numpy(), images[:2])


def test_memory_is_used_again(packed_folders):
    with open_loader(packed_folders["tar"] / "train", 5, backend="cpu", size=24) as loader:
        for number in range(6):
            loader.set_epoch(number)
            for _ in loader:
                pass
        gc.collect()
        assert 1 <= len(loader.delivery._memory._free) <= 6


def test_decoders_leave_torch_to_the_consumer(packed_folders):
    """In a decoder torch has one thread; in the consumer, and in threads made later, as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with open_loader(packed_folders["tar"] / "train", 5, backend="cpu", size=24, threads=2) as loader:
            list(loader)
            gate = threading.Barrier(2, timeout=limit_s())
            inside = [loader._threads.fill.submit(lambda: (gate.wait(), torch.get_num_threads())[1]) for _ in range(2)]
            assert [future.result(limit_s()) for future in inside] == [1, 1]
            later = []
            thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            assert torch.get_num_threads() == 3 and later == [3]
    finally:
        torch.set_num_threads(before)


def test_loaders_one_after_the_other_leave_nothing_behind(packed_folders, left):
    def load(count):
        for _ in range(count):
            with open_loader(packed_folders["tar"] / "train", 8, size=64, threads=2) as loader:
                next(iter(loader))

    load(10)
    before, peak = left(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    load(30)
    wait_until_at_most(before, left)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 60 << 10  # KiB; a loader has over 8 MiB


@pytest.mark.parametrize("order", ["full", "blocks"])
def test_loaders_that_nobody_finished_leave_nothing_behind(packed_folders, order, left):
    """Of what was under way when the consumer broke off, idle threads hold nothing."""
    before = left()
    for _ in range(5):
        loader = open_loader(packed_folders["tar"] / "train", 4, size=224, threads=1, order=order)
        for _ in loader:
            break
        del loader
    wait_until_at_most(before, left)


def test_loaders_that_nobody_closed_leave_nothing_behind(packed_folders, left):
    before = left()
    for _ in range(5):
        next(iter(open_loader(packed_folders["tar"] / "train", 8, size=24, threads=2)))
    wait_until_at_most(before, left)


def test_a_loader_closed_by_another_thread_says_so(packed_folders, backend):
    with open_loader(packed_folders["tar"] / "train", 20, backend=backend, size=224, threads=1) as loader:
        batches = iter(loader)
        next(batches)
        closing = threading.Thread(target=loader.close)
        closing.start()
        with pytest.raises(ValueError, match="the loader is closed"):
            while True:
                for _ in batches:
                    pass
                batches = iter(loader)
        closing.join(limit_s())


def test_a_loader_can_be_taken_into_a_forked_process(packed_folders):
    """Files are opened, and threads begun, where it is iterated over."""
    with open_loader(packed_folders["tar"] / "train", 10, size=24) as loader:
        for begun in (False, True):
            if begun:
                next(iter(loader))
            loader.set_epoch(0)
            child = os.fork()
            if not child:
                signal.alarm(round(limit_s()))  # of which it dies
                count = 0
                try:
                    count = sum(int(batch.valid.sum()) for batch in loader)
                finally:
                    os._exit(0 if count == 60 else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        loader.set_epoch(0)
        assert sum(int(batch.valid.sum()) for batch in loader) == 60


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("dali", "webdataset")]


@pytest.mark.parametrize("reader", ["cpu", *SLOW])
def test_ctrl_c_ends_it(packed_folders, reader):
    """Without a `with`, in the middle of an epoch; in an interpreter that shuts down by itself."""
    pytest.importorskip({"cpu": "torch", "dali": "nvidia.dali"}.get(reader, reader))
    program = Path(__file__).parent / "children" / "loads_until_interrupted.py"
    command = [sys.executable, program, packed_folders["tar"] / "train", reader]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    child = subprocess.Popen(command, env=clean_environment(), text=True, **pipes)
    for _ in range(3):
        read_until("batch", child.stdout, child)
        child.stdin.write("\n")
        child.stdin.flush()
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=limit_s())
    assert child.returncode == -signal.SIGINT and "KeyboardInterrupt" in said


def test_a_pool_runs_in_order_and_ends():
    ran = []
    pool = threads.Pool(1)
    futures = [pool.submit(ran.append, i) for i in range(5)]
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result(5)
    for future in futures:
        future.result(5)
    assert ran == list(range(5)) and pool.idle_s() >= 0
    pool.close()
    assert not any(thread.is_alive() for thread in pool.threads)
    assert pool.submit(ran.append, 5).cancelled()  # nobody waits for it in vain


def test_waiting_has_a_limit():
    pool, told = threads.Pool(1), []

    def tell(waited_s, is_over):
        told.append((waited_s, is_over))
        if is_over:
            raise DatapipeError("over")

    ending = threading.Event()
    with pytest.raises(DatapipeError, match="over"):
        watched.wait_for(pool.submit(ending.wait), 0.1, tell)
    assert told[-1][1] and told[-1][0] >= 0.1
    ending.set()
    pool.close()
