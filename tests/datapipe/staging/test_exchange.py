"""Staging on several nodes: each byte is read once in all, and no node waits for another that does not answer.

A node is a process with a host name of its own, on loopback.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from datapipe.dataset.manifest import FileInfo, Manifest
from datapipe.fsio import free_bytes
from datapipe.staging import StageOptions, stage, stage_once
from datapipe.staging.exchange import AHEAD, READERS
from datapipe.staging.multi_node import PROTOCOL
from datapipe.staging.partial_file import PartialFile
from tests.datapipe.staging.data_sets import CHUNK, NUM_IMAGES, chunks_on_their_way, make_data_set, same
from tests.ports import free_ports
from tests.processes import Process
from tests.waiting import limit_s, read_until, suspend, wait_until

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        subprocess.run(["unshare", "--uts", "hostname", "node0"], capture_output=True).returncode != 0,
        reason="needs root, to give processes host names of their own",
    ),
]
SIZES = [6 * CHUNK + 5, 4 * CHUNK, *[1000] * 20, 2 * CHUNK]
ON_ITS_WAY = (AHEAD + READERS) * CHUNK  # what a node may have read, and not sent, when another is lost
HELD_UP = [24 * CHUNK] * 2  # with `slow_at`: half a minute with three nodes, until one is made to leave


@pytest.fixture
def port() -> int:
    return free_ports(2)


@pytest.fixture
def nodes(begin, port, tmp_path):
    """nodes(n, *arguments) -> n processes that stage tmp_path/source to tmp_path/local-I, each on a node of its own.

    `hosts`: the node of each instead, whose folder local-I then is; `sources`: what each stages; `own`: words of each
    command line; `programs`: what each runs instead of `datapipe`, and its first arguments.
    """

    def begin_nodes(
        count: int,
        *arguments: object,
        hosts: tuple[int, ...] = (),
        sources: tuple[str, ...] = (),
        own: Sequence[tuple[str, ...]] = (),
        programs: dict[int, tuple[str, ...]] | None = None,
        port: int = port,
        **settings,
    ) -> list[Process]:
        env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        children = []
        for i in range(count):
            host = hosts[i] if hosts else i
            line = (
                tmp_path / (sources[i] if sources else "source"),
                tmp_path / f"local-{host}",
                "--node",
                f"{i}/{count}",
            )
            line = *line, "--chunk-mib", 1, "--json", *arguments, *(own[i] if own else ())
            program = (programs or {}).get(i, ("datapipe",))
            children.append(begin(*program, "stage", *line, host=f"node{host}", env=env, **settings))
        return children

    return begin_nodes


def slow_at(which: int, count: int) -> list[tuple[str, ...]]:
    """Have one node hold up an exchange of HELD_UP, which lasts until that node is gone: it reads a chunk in 2 s."""
    return [("--max-mbps", "0.5") if i == which else () for i in range(count)]


def results(children: list[Process], code: int = 0) -> tuple[list[int], list[str]]:
    """Wait for all; return the bytes that each has read from the source, and what it said."""
    said = [child.communicate(timeout=limit_s()) for child in children]
    assert [child.returncode for child in children] == [code] * len(children), said
    read = [json.loads(out)["data_sets"][0]["copied_bytes"] if out else 0 for out, _ in said]
    return read, [errors for _, errors in said]


def test_each_byte_is_read_once(nodes, tmp_path):
    make_data_set(tmp_path / "source", SIZES)
    read, said = results(nodes(3))
    assert sum(read) == sum(SIZES), said
    assert all(0 < share < 0.7 * sum(SIZES) for share in read)
    assert all(same(tmp_path / "source", tmp_path / f"local-{i}") for i in range(3))
    assert results(nodes(3))[0] == [0] * 3  # all is in place


def test_what_one_node_has_the_others_get_from_it(nodes, tmp_path):
    make_data_set(tmp_path / "source", SIZES)
    stage(tmp_path / "source", tmp_path / "local-1", StageOptions(chunk_mib=1))
    (tmp_path / "local-1" / "shard-000001.tar").unlink()
    read, _ = results(nodes(3))
    assert sum(read) == SIZES[1] and same(tmp_path / "source", tmp_path / "local-2")


def put(local: Path, name: str, content: bytes, chunks: dict[int, bytes], info: FileInfo) -> None:
    """Leave chunks of a file as an interrupted copy does; `chunks`: how each begins on the disk by now, if damaged."""
    local.mkdir(exist_ok=True)
    landing = PartialFile(local / name, info, CHUNK, False)
    for chunk in chunks:
        landing.write(chunk * CHUNK, memoryview(content[chunk * CHUNK : (chunk + 1) * CHUNK]))
    landing.close()
    with open(local / f".{name}.partial", "r+b") as file:
        for chunk, damage in chunks.items():
            file.seek(chunk * CHUNK)
            file.write(damage)


@pytest.mark.parametrize("damage", [b"", bytes(CHUNK)])
def test_what_was_interrupted_continues_together(nodes, tmp_path, damage):
    """What some nodes have of a file, they give to the others, but nothing that a power cut has turned to zeros."""
    manifest = make_data_set(tmp_path / "source", SIZES)
    info = manifest.shards[0]
    content = (tmp_path / "source" / info.name).read_bytes()
    put(tmp_path / "local-0", info.name, content, dict.fromkeys(range(4), b""), info)
    put(tmp_path / "local-2", info.name, content, {3: b"", 5: damage}, info)
    read, said = results(nodes(3))
    assert sum(read) == sum(SIZES) - (4 if damage else 5) * CHUNK, said
    assert all(same(tmp_path / "source", tmp_path / f"local-{i}") for i in range(3))


def test_all_processes_of_all_nodes_hear_of_what_is_wrong_on_one(nodes, tmp_path):
    """Before a byte moves."""
    make_data_set(tmp_path / "source", SIZES)
    (tmp_path / "local-1").write_text("a file")
    children = nodes(4, hosts=(0, 0, 1, 1))
    said = [child.communicate(timeout=limit_s())[1] for child in children]
    assert [child.returncode for child in children[::2]] == [1, 2], said
    assert all(child.returncode in (1, 2) for child in children[1::2]), said
    assert "local-1 is a file" in said[2] and "nothing is staged, because of node node1: LOCAL: " in said[0], said
    assert "has left: nothing is staged, because of node node1: LOCAL" in said[1] and "(on node0)" not in said[1], said
    assert not [*tmp_path.glob("local-0/*.tar")]


def test_two_jobs_that_stage_to_the_same_nodes(nodes, tmp_path):
    """Each has the lock of one node: none waits for the other's."""
    make_data_set(tmp_path / "source", [5 * CHUNK] * 2)
    first = nodes(2, "--max-mbps", 0.5)
    wait_until(lambda: chunks_on_their_way(tmp_path / "local-1"), *first)
    for child in first:
        child.send_signal(signal.SIGSTOP)
    with open(tmp_path / "said", "w") as file:
        second = nodes(2, port=free_ports(2), stderr=file)
        wait_until(lambda: (tmp_path / "said").read_text().count("each node stages by itself") >= 2, *second)
    for child in first:
        child.send_signal(signal.SIGCONT)
    assert sum(results(first)[0]) == 10 * CHUNK
    assert results(second)[0] == [0, 0]


def test_a_process_group_of_the_caller_stays_as_it_is(begin, port, tmp_path):
    """A library may stage in the middle of a training."""
    make_data_set(tmp_path / "source", SIZES)
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    children = []
    for rank in range(2):
        own = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        line = "stages_in_a_training", tmp_path / "source", tmp_path / "local-"
        children.append(begin(*line, env=own, host=f"node{rank}"))
    results(children)
    assert all(same(tmp_path / "source", tmp_path / f"local-{i}") for i in range(2))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_node_in_mid_exchange(nodes, tmp_path, number):
    make_data_set(tmp_path / "source", HELD_UP)
    children = nodes(2, own=slow_at(1, 2))
    wait_until(lambda: chunks_on_their_way(tmp_path / "local-1"), *children)
    children[1].send_signal(number)
    assert children[1].wait(limit_s()) == 128 + number
    results(children[:1])
    assert same(tmp_path / "source", tmp_path / "local-0")


def test_a_node_that_is_terminated_while_they_meet_is_named(nodes, tmp_path, patience_s):
    """At once, and not when its time is over: nobody waits for one that says it leaves."""
    make_data_set(tmp_path / "source", SIZES)
    children = nodes(3, "--timeout", patience_s, programs={2: ("echo",)})
    read_until("waiting for process 2", children[1].stderr, children[1])
    children[1].terminate()
    assert children[1].wait(limit_s()) == 128 + signal.SIGTERM
    assert "process 1 has left: it got SIGTERM" in children[0].communicate(timeout=limit_s())[1]


def test_two_processes_of_a_node_stage_once(nodes, tmp_path):
    make_data_set(tmp_path / "source", SIZES)
    read, _ = results(nodes(4, hosts=(0, 0, 1, 1)))
    assert sum(read) == sum(SIZES) and read[1] == read[3] == 0
    assert all(same(tmp_path / "source", tmp_path / f"local-{i}") for i in range(2))


@pytest.mark.slow
def test_a_process_that_waits_for_its_node_does_not_need_process_0(nodes, tmp_path, patience_s):
    """Which keeps the store by which the others hear that their node is staged."""
    make_data_set(tmp_path / "source", HELD_UP)
    children = nodes(3, "--timeout", patience_s, hosts=(0, 1, 1), own=slow_at(0, 3))
    wait_until(lambda: chunks_on_their_way(tmp_path / "local-1"), *children)
    children.pop(0).kill()
    _, said = results(children)
    assert "this node reads by itself what it still lacks" in said[0]
    assert "this process looks by itself whether its node is staged" in said[1]
    assert same(tmp_path / "source", tmp_path / "local-1")


@pytest.mark.parametrize(
    ("which", "number"),
    [
        (1, signal.SIGKILL),
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_node_that_dies_or_stops_is_named_and_not_needed(nodes, tmp_path, which, number, patience_s):
    """Process 0 keeps the store at which they meet; it is not needed either. The others exchange without it."""
    make_data_set(tmp_path / "source", HELD_UP)
    breaks_at_once = number == signal.SIGKILL and which != 0
    children = nodes(3, "--timeout", 6 * patience_s if breaks_at_once else patience_s, own=slow_at(which, 3))
    wait_until(lambda: chunks_on_their_way(tmp_path / "local-2"), *children)
    children[which].send_signal(number)
    rest = [child for i, child in enumerate(children) if i != which]
    read, said = results(rest)
    text = f"node {which} (node{which}) does not answer: 2 nodes exchange without it"
    assert all(text in errors for errors in said), said
    assert sum(read) <= sum(HELD_UP) + 2 * ON_ITS_WAY, said
    for i in {0, 1, 2} - {which}:
        assert same(tmp_path / "source", tmp_path / f"local-{i}")


@pytest.mark.slow
def test_nodes_that_are_suspended_for_longer_than_one_may_be_silent_continue_together(nodes, tmp_path, patience_s):
    make_data_set(tmp_path / "source", SIZES * 2)
    children = nodes(2, "--max-mbps", 2, "--timeout", patience_s)
    wait_until(lambda: chunks_on_their_way(tmp_path / "local-1"), *children)
    suspend(children, 1.5 * patience_s)
    read, said = results(children)
    assert sum(read) == sum(SIZES * 2), said


def test_a_node_whose_disk_is_full_leaves(nodes, tmp_path):
    """It says why to the others, which finish without it."""
    make_data_set(tmp_path / "source", HELD_UP)
    local = tmp_path / "local-1"
    local.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", local], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        children = nodes(3, own=slow_at(1, 3))
        wait_until(lambda: chunks_on_their_way(local), *children)
        with suppress(OSError):  # full sooner, by what has landed meanwhile
            (local / "filler").write_bytes(bytes(free_bytes(local) - CHUNK))
        full = children.pop(1)
        errors = full.communicate(timeout=limit_s())[1]
        assert full.returncode == 1 and "No space left on device" in errors and "(errno 28, on node1)" in errors
        read, said = results(children)
    finally:
        subprocess.run(["umount", "--lazy", local], check=True)
    assert all("node 1 (node1) has left: " in errors and "No space left" in errors for errors in said), said
    assert (
        all("2 nodes exchange without it" in errors for errors in said) and sum(read) <= sum(HELD_UP) + 2 * ON_ITS_WAY
    )
    assert all(same(tmp_path / "source", tmp_path / f"local-{i}") for i in (0, 2))


def test_nodes_that_see_other_data_sets_are_refused(nodes, tmp_path):
    make_data_set(tmp_path / "source", SIZES)
    make_data_set(tmp_path / "other", SIZES, seed=1)
    _, said = results(nodes(2, sources=("source", "other")), code=1)
    assert all("sees another data set" in errors for errors in said)


def test_nodes_with_other_versions_are_refused(nodes, tmp_path):
    make_data_set(tmp_path / "source", [100])
    _, said = results(nodes(2, programs={1: ("of_another_version",)}), code=1)
    assert f"node node1 has another version of datapipe (protocol {PROTOCOL + 1}, and this node {PROTOCOL})" in said[0]
    assert f"(protocol {PROTOCOL}, and this node {PROTOCOL + 1})" in said[1]


def test_a_node_that_does_not_come_is_named(start, port, tmp_path, patience_s):
    make_data_set(tmp_path / "source", [100])
    env = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"} | {"MASTER_PORT": str(port)}
    line = tmp_path / "source", tmp_path / "local", "--node", "0/2", "--master", "127.0.0.1"
    child = start(*line, "--timeout", patience_s // 2, host="node0", env=env)
    errors = child.communicate(timeout=limit_s())[1]
    assert child.returncode == 1 and f"process 1 did not answer for {patience_s // 2} s" in errors, errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_process_0_while_it_waits_for_others(start, port, tmp_path, number):
    make_data_set(tmp_path / "source", [100])
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    child = start(tmp_path / "source", tmp_path / "local", "--node", "0/2", host="node0", env=env)
    # Its store is beside the port that a training will use.
    wait_until(lambda: count_connections(port + 1) >= 2, child)
    child.send_signal(number)
    assert child.wait(limit_s()) == 128 + number


def count_connections(port: int) -> int:
    """Count the clients' ends of connections to a port of this machine (proc_pid_net(5))."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path("/proc/net", name).read_text().splitlines()[1:]]
    return sum(row[2].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_node_while_process_0_does_not_answer(start, port, tmp_path, number):
    make_data_set(tmp_path / "source", [100])
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with socket.create_server(("127.0.0.1", port + 1)) as server:
        child = start(tmp_path / "source", tmp_path / "local", "--node", "1/2", host="node1", env=env)
        server.settimeout(limit_s())
        with server.accept()[0], server.accept()[0]:  # it looks who listens there, and then speaks to the store
            child.send_signal(number)
            assert child.wait(limit_s()) == 128 + number


def test_exchange_without_a_meeting_place_is_refused(tmp_path, command):
    make_data_set(tmp_path / "source", [100])
    env = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"}
    line = "datapipe", "stage", tmp_path / "source", tmp_path / "local", "--node", "0/2", "--mode", "exchange"
    done = command(*line, env=env)
    assert done.returncode == 2 and "give --master HOST, or set MASTER_ADDR" in done.stderr


def test_an_interface_that_is_not_there_is_told_to_all(nodes, tmp_path):
    """Before a byte moves. What is named otherwise on each node is good."""
    make_data_set(tmp_path / "source", SIZES)
    children = nodes(2, own=(("--interface", "lo"), ("--interface", "eth99")))
    said = [child.communicate(timeout=limit_s())[1] for child in children]
    assert [child.returncode for child in children] == [1, 2], said
    wrong = "interface: 'eth99' is not on this host; allowed: lo (127.0.0.1)"
    assert f"error: --{wrong}" in said[1] and f"nothing is staged, because of node node1: {wrong}" in said[0]
    assert not [*tmp_path.glob("local-*/*.tar")]
    read, _ = results(nodes(2, "--interface", "lo"))
    assert sum(read) == sum(SIZES)


@pytest.mark.parametrize(
    ("module", "name", "moment"),
    [
        ("jobgroup.gloo", "NodeGroup.__init__", "before"),
        ("jobgroup.group", "find_unreachable", "after"),
        ("staging.multi_node", "exchange", "before"),
    ],
)
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.slow
def test_a_node_that_is_lost_before_the_first_round(nodes, tmp_path, which, module, name, moment, patience_s):
    """While the others wait for its address, to connect, and for what it lacks.

    The time-out is longer than those that know of the loss wait for each other.
    """
    make_data_set(tmp_path / "source", SIZES)
    children = nodes(3, "--timeout", 3 * patience_s, programs={which: ("lost_at", module, name, moment)})
    assert children.pop(which).wait(limit_s()) == -signal.SIGKILL
    read, said = results(children)
    text = f"node {which} (node{which})"
    assert all("2 nodes exchange without it" in errors and text in errors for errors in said), said
    assert sum(read) == sum(SIZES), said
    assert all(same(tmp_path / "source", tmp_path / f"local-{i}") for i in {0, 1, 2} - {which})


# --- to caches that loaders use ---


@pytest.fixture
def caches(big_images, tmp_path) -> list[Path]:
    """The cache of each of two nodes, and in it, the folder of a copy, under the name that `nodes` knows."""
    (folder,) = stage_once(big_images / "train", tmp_path / "elsewhere").parent.iterdir()
    (tmp_path / "source").symlink_to(big_images / "train")
    folders = [tmp_path / f"cache-{i}" / folder.name for i in range(2)]
    for i, cache in enumerate(folders):
        cache.mkdir(parents=True)
        (tmp_path / f"local-{i}").symlink_to(cache)
    return folders


def test_loaders_wait_for_an_exchange_to_their_cache(nodes, begin, big_images, caches):
    """They copy nothing themselves."""
    source = big_images / "train"
    children = nodes(2, "--max-mbps", 2)
    wait_until(lambda: chunks_on_their_way(caches[1]), *children)
    for child in children:
        child.send_signal(signal.SIGSTOP)
    loaders = [begin("counts_images", source, cache.parent, host=f"node{i}") for i, cache in enumerate(caches)]
    for loader in loaders:
        read_until("waiting for process", loader.stderr, loader)
    for child in children:
        child.send_signal(signal.SIGCONT)
    read, said = results(children)
    assert sum(read) == Manifest.read(source).size_bytes, said
    before = [{path: path.stat().st_ino for path in cache.glob("*.tar")} for cache in caches]
    ends = [loader.communicate(timeout=limit_s()) for loader in loaders]
    assert [(loader.returncode, out) for loader, (out, _) in zip(loaders, ends, strict=True)] == [
        (0, f"{NUM_IMAGES} False\n")
    ] * 2, ends
    assert [{path: path.stat().st_ino for path in cache.glob("*.tar")} for cache in caches] == before
    assert all(same(source, cache) for cache in caches)


def test_an_exchange_to_a_cache_that_a_loader_fills(nodes, begin, big_images, caches):
    """On one of the nodes: none waits for it before it copies what it lacks."""
    source = big_images / "train"
    loader = begin("stages_once", source, caches[1].parent, 4, host="node1")
    wait_until(lambda: chunks_on_their_way(caches[1]), loader)
    loader.send_signal(signal.SIGSTOP)
    children = nodes(2)
    assert children[0].wait(limit_s()) == 0
    loader.send_signal(signal.SIGCONT)
    read, said = results(children)
    assert read == [Manifest.read(source).size_bytes, 0]
    assert all("each node stages by itself" in errors for errors in said)
    assert loader.wait(limit_s()) == 0 and all(same(source, cache) for cache in caches)
