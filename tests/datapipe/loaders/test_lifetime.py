"""Loaders that end, break off, fork, are forgotten, and come back two hundred times leave nothing behind."""

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from datapipe.errors import DatapipeError
from datapipe.loaders import open_loader, threaded, threads
from datapipe.names import BACKENDS


def epoch(loader):
    """Copies of the images of one epoch, batch by batch."""
    return [batch.images.numpy().copy() for batch in loader]


def open_files():
    return len(os.listdir("/proc/self/fd"))


def settle(count, measure):
    deadline = time.monotonic() + 10
    while measure() > count and time.monotonic() < deadline:
        time.sleep(0.02)
    return measure()


def test_early_break_and_close_leave_nothing_behind(folder, backend):
    threads, files = threading.active_count(), open_files()
    for _ in range(5):
        loader = open_loader(folder, 4, backend=backend, size=200, threads=3)
        for _ in loader:
            break
        for _ in loader:  # goes on where it stopped
            break
        assert loader.state_dict()["step"] == 2
        loader.close()
        loader.close()
        with pytest.raises(ValueError, match="closed"):
            next(iter(loader))
    assert settle(threads, threading.active_count) <= threads
    assert settle(files, open_files) <= files


def test_an_exception_in_the_consumer_leaves_nothing_behind(folder, backend):
    threads, files = threading.active_count(), open_files()
    with pytest.raises(RuntimeError, match="mine"), open_loader(folder, 4, backend=backend, size=100) as loader:
        for _ in loader:
            raise RuntimeError("mine")
    assert settle(threads, threading.active_count) <= threads
    assert settle(files, open_files) <= files


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


def test_memory_is_used_again(folder):
    with open_loader(folder, 5, backend="cpu", size=24) as loader:
        for number in range(6):
            loader.set_epoch(number)
            for _ in loader:
                pass
        gc.collect()
        assert 1 <= len(loader._delivery._memory._free) <= 6


def test_decoders_leave_torch_to_the_consumer(folder):
    """In a decoder torch has one thread; in the consumer, and in threads made later, as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with open_loader(folder, 5, backend="cpu", size=24, threads=2) as loader:
            list(loader)
            gate = threading.Barrier(2)
            inside = [loader._threads.fill.submit(lambda: (gate.wait(), torch.get_num_threads())[1]) for _ in range(2)]
            assert [future.result() for future in inside] == [1, 1]
            later = []
            thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            assert torch.get_num_threads() == 3 and later == [3]
    finally:
        torch.set_num_threads(before)


def test_two_hundred_loaders_leave_nothing_behind(packed_folders):
    folder = packed_folders["tar"] / "train"

    def once():
        with open_loader(folder, 8, size=64, threads=2) as loader:
            for _ in loader:
                break

    def left():
        gc.collect()
        shm = sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else []
        return threading.active_count(), len(os.listdir("/proc/self/fd")), shm

    for _ in range(20):
        once()
    deadline = time.monotonic() + 10
    before, peak = left(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(200):
        once()
    while left() > before and time.monotonic() < deadline + 60:
        time.sleep(0.05)
    after = left()
    assert after[0] <= before[0] and after[1] <= before[1] and after[2] == before[2]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 60 << 10  # KiB; a loader has over 8 MiB


@pytest.mark.parametrize("order", ["full", "blocks"])
def test_loaders_that_nobody_finished_leave_nothing_behind(packed_folders, order):
    """Of what was under way when the consumer broke off, idle threads hold nothing."""

    def living():
        gc.collect()
        return sum(isinstance(thing, threaded.ThreadedLoader) for thing in gc.get_objects())

    threads, loaders = threading.active_count(), living()
    for _ in range(5):
        loader = open_loader(packed_folders["tar"] / "train", 4, size=224, threads=1, order=order)
        for _ in loader:
            break
        del loader
    deadline = time.monotonic() + 5
    while (living() > loaders or threading.active_count() > threads) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (living(), threading.active_count()) == (loaders, threads)


def test_loaders_that_nobody_closed_leave_nothing_behind(packed_folders):
    def left():
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def once():
        next(iter(open_loader(packed_folders["tar"] / "train", 8, size=24, threads=2)))

    once()
    deadline, before = time.monotonic() + 20, left()
    for _ in range(5):
        once()
    while left() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left() <= before


def test_a_loader_closed_by_another_thread_says_so(packed_folders, backend):
    with open_loader(packed_folders["tar"] / "train", 20, backend=backend, size=224, threads=1) as loader:
        batches = iter(loader)
        next(batches)
        closing = threading.Thread(target=loader.close)
        closing.start()
        with pytest.raises(ValueError, match="the loader is closed"):
            for _ in range(50):
                for _ in batches:
                    pass
                batches = iter(loader)
        closing.join()


def test_a_loader_can_be_taken_into_a_forked_process(packed_folders):
    """Files are opened, and threads begun, where it is iterated over."""
    with open_loader(packed_folders["tar"] / "train", 10, size=24) as loader:
        for begun in (False, True):
            if begun:
                next(iter(loader))
            loader.set_epoch(0)
            child = os.fork()
            if not child:
                count = 0
                try:
                    count = sum(int(batch.valid.sum()) for batch in loader)
                finally:
                    os._exit(0 if count == 60 else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        loader.set_epoch(0)
        assert sum(int(batch.valid.sum()) for batch in loader) == 60


CONSUMER = """
import sys, time
from datapipe.loaders import open_loader
loader = open_loader(sys.argv[1], 4, backend=sys.argv[2], size=224)
while True:
    for batch in loader:
        print("batch", flush=True)
        time.sleep(0.05)
"""


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "resident"])  # which has no threads then
def test_ctrl_c_ends_it(packed_folders, backend):
    """Without a `with`, in the middle of an epoch."""
    pytest.importorskip({"cpu": "torch", "dali": "nvidia.dali"}.get(backend, backend))
    command = [sys.executable, "-c", CONSUMER, str(packed_folders["tar"] / "train"), backend]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(3):
        assert child.stdout.readline() == "batch\n", child.stderr.read()
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=10)
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

    with pytest.raises(DatapipeError, match="over"):
        threads.wait_for(pool.submit(time.sleep, 1.0), 0.2, tell)
    assert told[-1][1] and told[-1][0] >= 0.2
    pool.close()
