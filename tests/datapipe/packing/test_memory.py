"""How much memory packing takes, and how many threads it reads with: of a child process, as its kernel tells."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from PIL import Image, PngImagePlugin

from datapipe import memory
from datapipe.dataset.manifest import Manifest
from datapipe.errors import SettingError
from datapipe.packing.budget import Budget

MIB = 1 << 20
BASE_BYTES = 40e6  # beside the budget: reading the source, the shards' bytes, and what the allocator keeps


def pack(source: Path, out: Path, *options: object, prefix: tuple = ()) -> tuple[int, str, int, int]:
    """Exit code, messages, peak of the resident memory in bytes, and of threads while shards are written."""
    line = [*prefix, sys.executable, "-m", "datapipe", "pack", source, out, *options]
    with open(out.with_name(f"{out.name}.log"), "w+") as log:
        child = subprocess.Popen([str(word) for word in line], stderr=log, stdout=log)
        num_threads, code = 0, None
        while code is None:
            with suppress(FileNotFoundError, StopIteration):
                next(out.rglob(".shard-*.partial"))  # listing has threads of its own
                num_threads = max(num_threads, len(os.listdir(f"/proc/{child.pid}/task")))
            process, status, usage = os.wait4(child.pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if process else None
            time.sleep(0.01)
        child.returncode = code
        log.seek(0)
        return code, log.read(), usage.ru_maxrss * 1024, num_threads


def pictures(folder: Path, side: int, count: int) -> Path:
    """PNGs of one colour, large in memory alone, and of half a megabyte, so that each is read by itself."""
    (folder / "class").mkdir(parents=True)
    text = PngImagePlugin.PngInfo()
    text.add_text("Comment", "x" * 500_000)
    Image.new("RGB", (side, side), (10, 200, 30)).save(folder / "class" / "0.png", pnginfo=text)
    for i in range(1, count):
        shutil.copy(folder / "class" / "0.png", folder / "class" / f"{i}.png")
    return folder


@pytest.mark.parametrize(
    ("side", "count", "budget", "images_at_once"),
    [
        (3000, 8, "180MB", 1),
        (3000, 8, "300MB", 2),
        pytest.param(13_300, 2, "3500MB", 1, marks=pytest.mark.slow),
    ],
)
def test_images_are_decoded_within_the_memory_that_is_allowed(tmp_path, side, count, budget, images_at_once):
    small = pictures(tmp_path / "small", 64, count)
    options = "--resize", "short=256", "--workers", 16
    base = pack(small, tmp_path / "base", *options)[2]
    large = pictures(tmp_path / "large", side, count)
    code, said, peak, _ = pack(large, tmp_path / "out", *options, "--memory", budget)
    assert code == 0, said
    assert Manifest.read(tmp_path / "out" / "train").num_samples == count
    allowed = memory.parse_bytes("memory", budget)
    assert 14 * side**2 < peak < base + allowed + BASE_BYTES, f"{peak / 1e6:.0f} MB, {base / 1e6:.0f} without"
    assert (peak - base) / (14 * side**2) < images_at_once + 0.5


@pytest.mark.parametrize("options", [("--store", "raw"), ("--resize", "short=999"), ("--check", "decode")])
def test_little_memory_changes_no_byte_and_ends(tmp_path, options):
    """What is stored is larger than the budget: threads that hold some must not wait for those that cannot go on."""
    source = pictures(tmp_path / "large", 1000, 40)
    shards = "--shard-mib", 1, "--workers", 12
    outs = tmp_path / "little", tmp_path / "much"
    for out, budget in zip(outs, ("60MB", "4GB"), strict=True):
        code, said, _, _ = pack(source, out, *options, *shards, "--memory", budget)
        assert code == 0, said
    little, much = ({path.name: path.read_bytes() for path in (out / "train").iterdir()} for out in outs)
    assert little == much


@pytest.mark.parametrize("max_bad", ["0", "100%"])
def test_an_image_that_needs_more_than_all_of_it(tmp_path, max_bad):
    """It is not a bad image: elsewhere, with more memory, the same command packs it."""
    options = "--resize", "short=256", "--memory", "100MB", "--max-bad", max_bad
    base = pack(pictures(tmp_path / "small", 64, 3), tmp_path / "base", *options)[2]
    code, said, peak, _ = pack(pictures(tmp_path / "large", 3000, 3), tmp_path / "out", *options)
    assert peak < base + BASE_BYTES  # not even to see how large it will be
    last = said.splitlines()[-1]
    assert code == 1 and last.startswith("error: ") and "Traceback" not in said, said
    assert ".png" in last and "takes about 126 MB" in last and "--memory" in last


@pytest.mark.parametrize("text", ["0", "much", "-1", "8 apples", "", "1e9"])
def test_a_wrong_size(tmp_path, text):
    with pytest.raises(SettingError, match=r"memory: .* is not a size; allowed: such as 8GiB"):
        memory.parse_bytes("memory", text)
    code, said, _, _ = pack(tmp_path, tmp_path / "out", f"--memory={text}")
    assert code == 2 and "is not a size" in said
    code, said, _, _ = pack(tmp_path, tmp_path / "out", "--memory=1k")
    assert code == 2 and "'1k' is too little for any image; allowed: from 1MiB" in said


def test_sizes():
    sizes = {"1": 1, "2kB": 2000, "500MB": 500_000_000, "8GiB": 8 << 30, "1.5 gib": 3 << 29, "3M": 3_000_000}
    assert {text: memory.parse_bytes("memory", text) for text in sizes} == sizes


def test_the_tightest_control_group_counts(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    for folder, limit in (("", "900"), ("a", "500"), ("a/b", "max")):
        (tmp_path / folder / "memory.max").write_text(f"{limit}\n")
    assert min(memory._limit(group, "memory.max") for group in memory._folders(tmp_path, "/a/b")) == 500
    assert min(memory._limit(group, "memory.max") for group in memory._folders(tmp_path, "/elsewhere/b")) == 900


def test_what_a_control_group_uses_counts_without_files_that_make_way(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 200000\nfile 450000\nshmem 50000\n")
    monkeypatch.setattr(memory, "_groups", lambda: [(tmp_path, "memory.max")])
    assert memory.available_bytes() == 1000000 - (700000 - 450000 + 50000)
    monkeypatch.setattr(memory, "_groups", list)
    assert 0 < memory.available_bytes() <= memory.allowed_bytes()


def test_a_real_control_group(tmp_path):
    group = Path("/sys/fs/cgroup/memory", f"datapipe-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no control groups (version 1) that may be made here")
    try:
        (group / "memory.limit_in_bytes").write_text(str(777 * MIB))
        code = f"import os; from datapipe import memory; open('{group}/tasks', 'w').write(str(os.getpid()))"
        line = [sys.executable, "-c", f"{code}; print(memory.allowed_bytes())"]
        assert subprocess.run(line, capture_output=True, text=True, check=True).stdout == f"{777 * MIB}\n"
    finally:
        group.rmdir()


def test_a_starved_processor_is_not_an_idle_one(tmp_path):
    """Beside other jobs the threads get little of the processor; more of them would get no more, and take memory."""
    source = pictures(tmp_path / "raw", 900, 30)
    alone = "taskset", "-c", "0"
    if not shutil.which("taskset") or 0 not in os.sched_getaffinity(0):
        pytest.skip("needs taskset, and the first processor")
    line = [*alone, sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(line) for _ in range(3)]
    try:
        code, said, _, threads = pack(source, tmp_path / "out", "--resize", "short=256", prefix=alone)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert code == 0, said
    assert 2 <= threads <= 6, "threads were added"


def test_a_slow_filesystem_is_read_by_many_threads(mounted, photo, encoded):
    source = mounted.backing / "many" / "class"
    source.mkdir(parents=True)
    image = encoded(photo(500, 500, 1), quality=97)
    for i in range(300):
        (source / f"{i}.jpg").write_bytes(image)
    mounted.set(read_ms=40)
    try:
        code, said, _, threads = pack(mounted.path / "many", mounted.backing / "out", "--workers", 24)
    finally:
        mounted.calm()
    assert code == 0, said
    assert threads >= 20


def test_a_closed_budget_lets_nobody_wait():
    """Nor those that ask after it was closed, when others hold what they would need."""
    budget = Budget(100, 1)
    budget.hold(90)
    budget.close()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(budget.claim(50, lambda: False)), daemon=True)
    thread.start()
    thread.join(30)
    assert answers == [False]


def test_the_budget_lets_everybody_through():
    """Threads that claim and hold at random: never more than is allowed, unless one is awaited, and all end."""
    budget, lock = Budget(100, 3), threading.Lock()
    assert budget.reserve(20, needed=False) and not budget.reserve(10, needed=False)
    state = {"decoding": 0, "most": 0, "used": 0, "turn": 0}

    def work(number: int) -> None:
        for place in range(number, 400, 8):
            size = random.Random(place).randrange(1, 76)
            assert budget.claim(size, lambda place=place: place == state["turn"])
            with lock:
                state["decoding"] += 1
                state["most"] = max(state["most"], state["decoding"])
            time.sleep(0.0005)
            with lock:
                state["decoding"] -= 1
            budget.release(size, size // 2)
            while state["turn"] != place:  # it is written in its turn
                time.sleep(0.0002)
            state["turn"] += 1
            budget.look_again()
            budget.let_go(size // 2)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and state["turn"] == 400
    assert 1 < state["most"] <= 3
    with pytest.raises(MemoryError, match="--memory"):
        budget.claim(76, lambda: True)
