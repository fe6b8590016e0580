"""How much memory packing takes, and how many threads it reads with: of a child process, as its kernel tells."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from PIL import Image, PngImagePlugin

from datapipe import memory
from datapipe.dataset.manifest import Manifest
from datapipe.errors import SettingError
from datapipe.packing import PackOptions, pace
from datapipe.packing.budget import Budget
from tests.processes import Process
from tests.waiting import limit_s, wait_until

CHILDREN = Path(__file__).with_name("children")
MIB = 1 << 20
BASE_BYTES = 40e6  # beside the budget: reading the source, the shards' bytes, and what the allocator keeps


@pytest.fixture
def growth(server):
    """growth(source, out, *options) packs, and says the exit code, the messages, and by how much the process grew."""

    def pack(source, out, *options):
        child = CHILDREN / "packs_and_measures.py"
        done = server.run(child, "pack", source, out, *options, timeout=limit_s())
        return done.returncode, done.stderr, int(done.stdout.splitlines()[-1])

    return pack


def most_threads(child: subprocess.Popen | Process, out: Path) -> int:
    """The most threads that a pack has had while shards were written: listing has threads of its own."""
    most, end = 0, time.monotonic() + limit_s()
    while child.poll() is None:
        assert time.monotonic() < end, "it does not end"
        with suppress(FileNotFoundError, StopIteration):
            next(out.rglob(".shard-*.partial"))
            most = max(most, len(os.listdir(f"/proc/{child.pid}/task")))
        time.sleep(0.01)
    return most


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
    [(2000, 5, "80MB", 1), (2000, 5, "134MB", 2), pytest.param(13_300, 2, "3500MB", 1, marks=pytest.mark.slow)],
)
def test_images_are_decoded_within_the_memory_that_is_allowed(tmp_path, growth, side, count, budget, images_at_once):
    options = "--resize", "short=256", "--workers", 16
    base = growth(pictures(tmp_path / "small", 64, count), tmp_path / "base", *options)[2]
    code, said, most = growth(pictures(tmp_path / "large", side, count), tmp_path / "out", *options, "--memory", budget)
    assert code == 0, said
    assert Manifest.read(tmp_path / "out" / "train").num_samples == count
    images = (most - base) / (14 * side**2)
    assert 0.5 < images < images_at_once + 0.5, f"{most / 1e6:.0f} MB, {base / 1e6:.0f} without"
    assert most < base + memory.parse_bytes("memory", budget) + BASE_BYTES


@pytest.mark.parametrize("options", [("--store", "raw"), ("--resize", "short=499"), ("--check", "decode")])
def test_little_memory_changes_no_byte_and_ends(tmp_path, command, options):
    """What is stored is larger than the budget: threads that hold some must not wait for those that cannot continue."""
    source = pictures(tmp_path / "large", 500, 24)
    outs = tmp_path / "little", tmp_path / "much"
    for out, budget in zip(outs, ("12MB", "4GB"), strict=True):
        line = "pack", source, out, *options, "--shard-mib", 1, "--workers", 12, "--memory", budget
        done = command("datapipe", *line, timeout=limit_s())
        assert done.returncode == 0, done.stderr
    little, much = ({path.name: path.read_bytes() for path in (out / "train").iterdir()} for out in outs)
    assert little == much


@pytest.mark.parametrize("max_bad", ["0", "100%"])
def test_an_image_that_needs_more_than_all_of_it(tmp_path, growth, max_bad):
    """It is not a bad image: elsewhere, with more memory, the same command packs it."""
    options = "--resize", "short=256", "--memory", "100MB", "--max-bad", max_bad
    base = growth(pictures(tmp_path / "small", 64, 3), tmp_path / "base", *options)[2]
    code, said, most = growth(pictures(tmp_path / "large", 3000, 3), tmp_path / "out", *options)
    assert most < base + BASE_BYTES  # not even to see how large it will be
    last = said.splitlines()[-1]
    assert code == 1 and last.startswith("error: ") and "Traceback" not in said, said
    assert ".png" in last and "takes about 126 MB" in last and "--memory" in last


@pytest.mark.parametrize("text", ["0", "much", "-1", "8 apples", "", "1e9"])
def test_a_wrong_size(text):
    with pytest.raises(SettingError, match=r"^memory: .* is not a size; allowed: such as 8GiB"):
        PackOptions(memory=text)


def test_a_size_too_small():
    with pytest.raises(SettingError, match="'1k' is too little for any image; allowed: from 1MiB"):
        PackOptions(memory="1k")


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


def test_a_real_control_group(server):
    group = Path("/sys/fs/cgroup/memory", f"datapipe-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no control groups (version 1) that may be made here")
    try:
        (group / "memory.limit_in_bytes").write_text(str(777 * MIB))
        code = f"import os; from datapipe import memory; open('{group}/tasks', 'w').write(str(os.getpid()))"
        done = server.run("-c", f"{code}; print(memory.allowed_bytes())", check=True)
        assert done.stdout == f"{777 * MIB}\n"
    finally:
        group.rmdir()


def test_more_threads_help_when_those_there_are_wait_for_the_filesystem(monkeypatch):
    """And the processor is idle, at several looks in a row."""
    clock, states = SimpleNamespace(wall=0.0, cpu=0.0), {}
    fake = SimpleNamespace(monotonic=lambda: clock.wall, process_time=lambda: clock.cpu)
    monkeypatch.setattr(pace, "time", fake)
    monkeypatch.setattr(pace, "_sleeps", states.__getitem__)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    reads, writes = (0.0, Path("shard"), mock.Mock(), (1,), None), (0.0, Path("shard"), None, (), None)

    def looks(busy: float, *threads: tuple[tuple | None, bool]) -> list[bool]:
        """What three looks say, of threads that access a file or None, and sleep or not."""
        looking = pace.Pace()
        states.update({number: sleeps for number, (_, sleeps) in enumerate(threads)})
        answers = []
        for _ in range(3):
            clock.wall, clock.cpu = clock.wall + 1, clock.cpu + busy
            answers.append(looking.is_idle(range(len(threads)), [access for access, _ in threads]))
        return answers

    assert looks(0.7, (reads, True), (reads, True)) == [False, False, True]
    assert looks(0.1, (reads, True), (None, True)) == [False, False, True]  # half of them
    assert not any(looks(0.9, (reads, True), (reads, True)))  # of two cores
    assert not any(looks(0.1, (writes, True), (None, True)))
    assert not any(looks(0.1, (reads, False), (reads, False)))  # other processes have the cores


def test_a_starved_thread_does_not_sleep():
    """It is ready to run, also while it waits for a core; one that waits for anything else sleeps."""
    end, data = threading.Event(), bytes(8 * MIB)
    waits = threading.Thread(target=end.wait)
    works = threading.Thread(target=lambda: [hashlib.sha256(data) for _ in iter(end.is_set, True)])  # without the GIL
    for thread in waits, works:
        thread.start()
    try:
        wait_until(lambda: pace._sleeps(waits))
        wait_until(lambda: not pace._sleeps(works))
    finally:
        end.set()
        waits.join()
        works.join()


@pytest.mark.slow
def test_a_starved_processor_is_not_an_idle_one(tmp_path):
    """Beside other jobs the threads get little of the processor; more of them would get no more, and take memory."""
    source, out = pictures(tmp_path / "raw", 900, 30), tmp_path / "out"
    if not shutil.which("taskset") or 0 not in os.sched_getaffinity(0):
        pytest.skip("needs taskset, and the first processor")
    alone = ["taskset", "-c", "0", sys.executable]
    others = [subprocess.Popen([*alone, "-c", "while True: pass"]) for _ in range(3)]
    try:
        line = [*alone, "-m", "datapipe", "pack", str(source), str(out), "--resize", "short=256"]
        child = subprocess.Popen(line)
        assert 2 <= most_threads(child, out) <= 6, "threads were added"
    finally:
        for other in others:
            other.kill()
            other.wait(limit_s())
    assert child.returncode == 0


def test_a_slow_filesystem_is_read_by_many_threads(mounted, server, photo, encoded):
    source, out = mounted.backing / "many" / "class", mounted.backing / "out"
    source.mkdir(parents=True)
    image = encoded(photo(500, 500, 1), quality=97)
    for i in range(200):
        (source / f"{i}.jpg").write_bytes(image)
    mounted.set(read_ms=40)
    try:
        child = server.start("-m", "datapipe", "pack", mounted.path / "many", out, "--workers", 24)
        assert most_threads(child, out) >= 20
    finally:
        mounted.calm()
    assert child.returncode == 0, child.communicate()


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
