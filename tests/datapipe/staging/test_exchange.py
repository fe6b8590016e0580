"""Staging on several nodes: each byte is read once in all, and no node waits for another that does not answer.

A node is a process with a host name of its own, on loopback.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datapipe.dataset.manifest import FileInfo, Manifest
from datapipe.fsio import free_bytes
from datapipe.packing import PackOptions, pack
from datapipe.staging import StageOptions, stage, stage_once
from datapipe.staging.landing import Landing
from datapipe.staging.together import PROTOCOL
from tests.datapipe.staging.data_sets import CHUNK, make_data_set, same
from tests.ports import free_ports

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        subprocess.run(["unshare", "--uts", "hostname", "node0"], capture_output=True).returncode != 0,
        reason="needs root, to give processes host names of their own",
    ),
]
SIZES = [10 * CHUNK + 5, 6 * CHUNK, *[1000] * 30, 2 * CHUNK]


@pytest.fixture
def port() -> int:
    return free_ports(2)


@pytest.fixture
def nodes(start, port, tmp_path):
    """nodes(n, *arguments) -> n processes that stage tmp_path/source to tmp_path/local-I."""

    def begin(count: int, *arguments: object, sources: list[Path] = (), **settings) -> list[subprocess.Popen]:
        env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        children = []
        for i in range(count):
            source = sources[i] if sources else tmp_path / "source"
            line = (source, tmp_path / f"local-{i}", "--node", f"{i}/{count}", "--chunk-mib", 1, "--json", *arguments)
            children.append(start(*line, host=f"node{i}", env=env, **settings))
        return children

    return begin


def results(children: list[subprocess.Popen], code: int = 0) -> tuple[list[int], list[str]]:
    """Wait for all; return the bytes that each has read from the source, and what it said."""
    said = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [code] * len(children), said
    read = [json.loads(out)["data_sets"][0]["copied_bytes"] if out else 0 for out, _ in said]
    return read, [errors for _, errors in said]


@pytest.mark.parametrize("count", [2, 3])
def test_each_byte_is_read_once(nodes, tmp_path, count):
    make_data_set(tmp_path / "source", SIZES)
    read, said = results(nodes(count))
    assert sum(read) == sum(SIZES), said
    assert all(0 < share < 0.7 * sum(SIZES) for share in read)
    assert all(same(tmp_path / "source", tmp_path / f"local-{i}") for i in range(count))
    assert results(nodes(count))[0] == [0] * count  # all is in place


def test_what_one_node_has_the_others_get_from_it(nodes, tmp_path):
    make_data_set(tmp_path / "source", SIZES)
    stage(tmp_path / "source", tmp_path / "local-1", StageOptions(chunk_mib=1))
    (tmp_path / "local-1" / "shard-000001.tar").unlink()
    read, _ = results(nodes(3))
    assert sum(read) == SIZES[1] and same(tmp_path / "source", tmp_path / "local-2")


def put(local: Path, name: str, content: bytes, chunks: dict[int, bytes], info: FileInfo) -> None:
    """Leave chunks of a file as an interrupted copy does; `chunks`: how each begins, if not as it should."""
    local.mkdir(exist_ok=True)
    landing = Landing(local / name, info, CHUNK, False)
    for chunk, damage in chunks.items():
        data = bytearray(content[chunk * CHUNK : (chunk + 1) * CHUNK])
        data[: len(damage)] = damage
        landing.write(chunk * CHUNK, memoryview(data))
    landing.close()


@pytest.mark.parametrize("damage", [b"", b"rubbish"])
def test_what_was_interrupted_continues_together(nodes, tmp_path, damage):
    """What some nodes have of a file, they give to the others; if it is damaged, each copies the file once more."""
    manifest = make_data_set(tmp_path / "source", SIZES)
    info = manifest.shards[0]
    content = (tmp_path / "source" / info.name).read_bytes()
    put(tmp_path / "local-0", info.name, content, dict.fromkeys(range(8), b""), info)
    put(tmp_path / "local-2", info.name, content, {7: b"", 9: damage}, info)
    read, said = results(nodes(3))
    expected = sum(SIZES) - 9 * CHUNK + (3 * SIZES[0] if damage else 0)
    assert sum(read) == expected, said
    assert all(same(tmp_path / "source", tmp_path / f"local-{i}") for i in range(3))


def test_all_processes_of_all_nodes_hear_of_what_is_wrong_on_one(nodes, start, port, tmp_path):
    make_data_set(tmp_path / "source", SIZES)
    (tmp_path / "local-1").write_text("a file")
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    children = []
    for i in range(4):
        line = (tmp_path / "source", tmp_path / f"local-{i // 2}", "--node", f"{i}/4")
        children.append(start(*line, host=f"node{i // 2}", env=env))
    said = [child.communicate(timeout=120)[1] for child in children]
    assert all(child.returncode in (1, 2) for child in children), said
    assert "has left: nothing is staged, because of node node1: LOCAL" in said[1], said
    assert not [*tmp_path.glob("local-0/*.tar")]


def test_two_jobs_that_stage_to_the_same_nodes(nodes, start, tmp_path):
    """Each has the lock of one node: none waits for the other's."""
    make_data_set(tmp_path / "source", [20 * CHUNK] * 2)
    first = nodes(2, "--max-mbps", 2)
    wait_for_chunks(tmp_path / "local-1", 1, first)
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(2))}
    second = [
        start(tmp_path / "source", tmp_path / f"local-{i}", "--node", f"{i}/2", "--json", host=f"node{i}", env=env)
        for i in range(2)
    ]
    assert sum(results(first)[0]) == 40 * CHUNK
    read, said = results(second)
    assert read == [0, 0] and all("each node stages by itself" in errors for errors in said), said


def test_a_process_group_of_the_caller_stays_as_it_is(tmp_path):
    """A library may stage in the middle of a training."""
    make_data_set(tmp_path / "source", SIZES)
    program = """
import os, sys
import torch, torch.distributed as dist
from datapipe.cluster import placement
from datapipe.fsio import free_bytes
from datapipe.staging import StageOptions, stage
dist.init_process_group("gloo")
stage(sys.argv[1], sys.argv[2] + os.environ["RANK"], StageOptions(placement=placement(os.environ), chunk_mib=1))
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 2
dist.destroy_process_group()
"""
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(2)), "WORLD_SIZE": "2"}
    children = []
    for rank in range(2):
        line = [sys.executable, "-c", program, str(tmp_path / "source"), str(tmp_path / "local-")]
        own = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        host = ["unshare", "--uts", "sh", "-c", f'hostname node{rank} && exec "$@"', "sh"]
        children.append(subprocess.Popen([*host, *line], env=own, stderr=subprocess.PIPE, text=True))
    said = [child.communicate(timeout=120)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    assert all(same(tmp_path / "source", tmp_path / f"local-{i}") for i in range(2))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_node_in_mid_exchange(nodes, tmp_path, number):
    make_data_set(tmp_path / "source", [40 * CHUNK] * 2)
    children = nodes(2, "--max-mbps", 8, "--timeout", 8)
    wait_for_chunks(tmp_path / "local-1", 3, children)
    children[1].send_signal(number)
    assert children[1].wait(10) == 128 + number
    results(children[:1])
    assert same(tmp_path / "source", tmp_path / "local-0")


def test_two_processes_of_a_node_stage_once(nodes, start, port, tmp_path):
    make_data_set(tmp_path / "source", SIZES)
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    children = []
    for i in range(4):
        line = (tmp_path / "source", tmp_path / f"local-{i // 2}", "--node", f"{i}/4", "--chunk-mib", 1, "--json")
        children.append(start(*line, host=f"node{i // 2}", env=env))
    read, _ = results(children)
    assert sum(read) == sum(SIZES) and read[1] == read[3] == 0
    assert all(same(tmp_path / "source", tmp_path / f"local-{i}") for i in range(2))


@pytest.mark.slow
def test_a_process_that_waits_for_its_node_does_not_need_process_0(start, port, tmp_path):
    """Which keeps the store by which the others hear that their node is staged."""
    make_data_set(tmp_path / "source", [40 * CHUNK] * 2)
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words, children = ("--chunk-mib", 1, "--max-mbps", 8, "--timeout", 8, "--json"), []
    for i in range(3):
        line = (tmp_path / "source", tmp_path / f"local-{min(i, 1)}", "--node", f"{i}/3", *words)
        children.append(start(*line, host=f"node{min(i, 1)}", env=env))
    wait_for_chunks(tmp_path / "local-1", 3, children)
    children.pop(0).kill()
    _, said = results(children)
    assert "this node reads by itself what it still lacks" in said[0]
    assert "this process looks by itself whether its node is staged" in said[1]
    assert same(tmp_path / "source", tmp_path / "local-1")


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_dies_or_stops_is_named_and_not_needed(nodes, tmp_path, which, number):
    """Process 0 keeps the store at which they meet; it is not needed either."""
    make_data_set(tmp_path / "source", [40 * CHUNK] * 2)
    children = nodes(3, "--max-mbps", 8, "--timeout", 8)
    wait_for_chunks(tmp_path / "local-2", 3, children)
    children[which].send_signal(number)
    rest = [child for i, child in enumerate(children) if i != which]
    _, said = results(rest)
    assert all(f"node {which} (node{which}) does not answer: this node reads by itself" in errors for errors in said), (
        said
    )
    for i in {0, 1, 2} - {which}:
        assert same(tmp_path / "source", tmp_path / f"local-{i}")


def wait_for_chunks(local: Path, count: int, children: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + 60
    while sum(path.read_bytes().partition(b"\n")[2].count(1) for path in local.glob(".*.landed")) < count:
        assert time.monotonic() < deadline and all(child.poll() is None for child in children)
        time.sleep(0.02)


def test_a_node_whose_disk_is_full_leaves(nodes, tmp_path):
    """It says why to the others, which finish without it."""
    make_data_set(tmp_path / "source", [20 * CHUNK] * 2)
    local = tmp_path / "local-1"
    local.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", local], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        children = nodes(3, "--max-mbps", 4, "--timeout", 20)
        wait_for_chunks(local, 1, children)
        with suppress(OSError):  # full sooner, by what has landed meanwhile
            (local / "filler").write_bytes(bytes(free_bytes(local) - 3 * CHUNK))
        full = children.pop(1)
        errors = full.communicate(timeout=120)[1]
        assert full.returncode == 1 and "No space left on device" in errors and "(errno 28, on node1)" in errors
        _, said = results(children)
    finally:
        subprocess.run(["umount", "--lazy", local], check=True)
    assert all("node 1 (node1) has left: " in errors and "No space left" in errors for errors in said), said
    assert all(same(tmp_path / "source", tmp_path / f"local-{i}") for i in (0, 2))


def test_all_know_what_is_wrong_on_one_before_a_byte_moves(nodes, tmp_path):
    make_data_set(tmp_path / "source", SIZES)
    (tmp_path / "local-1").write_text("a file")
    children = nodes(3)
    said = [child.communicate(timeout=120)[1] for child in children]
    assert [child.returncode for child in children] == [1, 2, 1]
    assert "local-1 is a file" in said[1]
    assert all("nothing is staged, because of node node1: LOCAL: " in said[i] for i in (0, 2)), said
    assert not [*tmp_path.glob("local-[02]/*.tar")]


def test_nodes_that_see_other_data_sets_are_refused(nodes, tmp_path):
    make_data_set(tmp_path / "source", SIZES)
    make_data_set(tmp_path / "other", SIZES, seed=1)
    children = nodes(2, sources=[tmp_path / "source", tmp_path / "other"])
    _, said = results(children, code=1)
    assert all("sees another data set" in errors for errors in said)


def test_nodes_with_other_versions_are_refused(nodes, start, port, tmp_path):
    make_data_set(tmp_path / "source", SIZES)
    (tmp_path / "later").mkdir()
    program = f"import datapipe.staging.together as together\ntogether.PROTOCOL = {PROTOCOL + 1}\n"
    (tmp_path / "later" / "sitecustomize.py").write_text(program)
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    later = env | {"PYTHONPATH": f"{tmp_path / 'later'}:{Path(__file__).parents[3]}"}
    children = [
        start(tmp_path / "source", tmp_path / f"local-{i}", "--node", f"{i}/2", host=f"node{i}", env=(env, later)[i])
        for i in range(2)
    ]
    _, said = results(children, code=1)
    assert f"node node1 has another version of datapipe (protocol {PROTOCOL + 1}, and this node {PROTOCOL})" in said[0]
    assert f"(protocol {PROTOCOL}, and this node {PROTOCOL + 1})" in said[1]


def test_a_node_that_does_not_come_is_named(nodes, start, port, tmp_path):
    make_data_set(tmp_path / "source", [100])
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    child = start(tmp_path / "source", tmp_path / "local", "--node", "0/2", "--timeout", 3, host="node0", env=env)
    errors = child.communicate(timeout=60)[1]
    assert child.returncode == 1 and "process 1 did not answer for 3 s" in errors, errors


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_node_that_waits_for_others(start, port, tmp_path, rank, number):
    make_data_set(tmp_path / "source", [100])
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    child = start(tmp_path / "source", tmp_path / "local", "--node", f"{rank}/2", host=f"node{rank}", env=env)
    with socket.socket() as probe:
        deadline = time.monotonic() + 60
        while rank == 0 and probe.connect_ex(("127.0.0.1", port + 1)):  # beside the one that a training will use
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
    time.sleep(2 if rank == 0 else 8)
    child.send_signal(number)
    assert child.wait(10) == 128 + number


def test_exchange_without_a_meeting_place_is_refused(start, tmp_path):
    make_data_set(tmp_path / "source", [100])
    env = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"}
    child = start(tmp_path / "source", tmp_path / "local", "--node", "0/2", "--mode", "exchange", env=env)
    errors = child.communicate(timeout=60)[1]
    assert child.returncode == 2 and "give --master HOST, or set MASTER_ADDR" in errors


def test_an_interface_that_is_not_there_is_told_to_all(nodes, start, port, tmp_path):
    """Before a byte moves. What is named otherwise on each node is good."""
    make_data_set(tmp_path / "source", SIZES)
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    children = []
    for i, interface in enumerate(("lo", "eth99")):
        line = (tmp_path / "source", tmp_path / f"local-{i}", "--node", f"{i}/2", "--interface", interface)
        children.append(start(*line, host=f"node{i}", env=env))
    said = [child.communicate(timeout=120)[1] for child in children]
    assert [child.returncode for child in children] == [1, 2], said
    wrong = "interface: 'eth99' is not on this host; allowed: lo (127.0.0.1)"
    assert f"error: --{wrong}" in said[1] and f"nothing is staged, because of node node1: {wrong}" in said[0]
    assert not [*tmp_path.glob("local-*/*.tar")]
    read, _ = results(nodes(2, "--interface", "lo"))
    assert sum(read) == sum(SIZES)


LOSE = """
import os, signal
import datapipe.staging.{module} as module
before = module.{name}
def end(*arguments, **options):
    {first}
    os.kill(os.getpid(), signal.SIGKILL)
module.{name} = end
"""


@pytest.mark.parametrize(
    ("module", "name", "first"),
    [
        ("node_group", "NodeGroup.__init__", "pass"),
        ("crew", "find_unreachable", "before(*arguments, **options)"),
        ("together", "exchange", "pass"),
    ],
)
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.slow
def test_a_node_that_is_lost_before_the_first_round(start, port, tmp_path, which, module, name, first):
    """While the others wait for its address, to connect, and for what it lacks."""
    make_data_set(tmp_path / "source", SIZES)
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "sitecustomize.py").write_text(LOSE.format(module=module, name=name, first=first))
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    lost = env | {"PYTHONPATH": f"{tmp_path / 'lost'}:{Path(__file__).parents[3]}"}
    children = []
    for i in range(3):
        line = (tmp_path / "source", tmp_path / f"local-{i}", "--node", f"{i}/3", "--timeout", 8, "--json")
        children.append(start(*line, host=f"node{i}", env=lost if i == which else env))
    assert children.pop(which).wait(60) == -signal.SIGKILL
    read, said = results(children)
    assert all("this node reads by itself" in errors and f"node {which} (node{which})" in errors for errors in said), (
        said
    )
    assert read == [sum(SIZES)] * 2
    assert all(same(tmp_path / "source", tmp_path / f"local-{i}") for i in {0, 1, 2} - {which})


ON_HOST = ["unshare", "--uts", "sh", "-c", 'hostname "$1" && shift && exec "$@"', "sh"]
LOAD = """
import sys
from datapipe.loaders import open_loader
with open_loader(sys.argv[1], 4, size=16, cache=sys.argv[2], threads=1) as loader:
    print(sum(len(batch.labels) for batch in loader))
"""
STAGE_ONCE = """
import sys
from datapipe.fsio import free_bytes
from datapipe.staging import StageOptions, stage_once
stage_once(sys.argv[1], sys.argv[2], StageOptions(chunk_mib=1, max_mbps=2))
"""


@pytest.fixture(scope="module")
def noise(tmp_path_factory) -> Path:
    """A data set of 48 images that a loader can read, 10 MB."""
    root = tmp_path_factory.mktemp("noise")
    (root / "raw" / "a").mkdir(parents=True)
    for i in range(48):
        pixels = np.random.default_rng(i).integers(0, 256, (256, 256, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / "raw" / "a" / f"{i}.png")
    pack(root / "raw", root / "packed", PackOptions(shard_mib=2, workers=1))
    return root / "packed" / "train"


@pytest.fixture
def caches(noise, tmp_path) -> list[Path]:
    """The cache of each of two nodes, and in it, the folder of a copy."""
    (folder,) = stage_once(noise, tmp_path / "elsewhere").parent.iterdir()
    return [tmp_path / f"cache-{i}" / folder.name for i in range(2)]


def exchange_to(start, port: int, source: Path, folders: list[Path], *arguments: object) -> list[subprocess.Popen]:
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    lines = [(source, folder, "--node", f"{i}/2", "--chunk-mib", 1, "--json") for i, folder in enumerate(folders)]
    return [start(*line, *arguments, host=f"node{i}", env=env) for i, line in enumerate(lines)]


def on_node(node: int, program: str, *arguments: Path) -> subprocess.Popen:
    line = [*ON_HOST, f"node{node}", sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_loaders_wait_for_an_exchange_to_their_cache(start, port, noise, caches):
    """They copy nothing themselves."""
    children = exchange_to(start, port, noise, caches, "--max-mbps", 2)
    wait_for_chunks(caches[1], 1, children)
    loaders = [on_node(i, LOAD, noise, cache.parent) for i, cache in enumerate(caches)]
    read, said = results(children)
    assert sum(read) == Manifest.read(noise).size_bytes, said
    before = [{path: path.stat().st_ino for path in cache.glob("*.tar")} for cache in caches]
    ends = [loader.communicate(timeout=120) for loader in loaders]
    assert [(loader.returncode, out.split()) for loader, (out, _) in zip(loaders, ends, strict=True)] == [
        (0, ["48"])
    ] * 2
    assert [{path: path.stat().st_ino for path in cache.glob("*.tar")} for cache in caches] == before
    assert all(same(noise, cache) for cache in caches)


def test_an_exchange_to_a_cache_that_a_loader_fills(start, port, noise, caches):
    """On one of the nodes: none waits for it before it copies what it lacks."""
    loader = on_node(1, STAGE_ONCE, noise, caches[1].parent)
    wait_for_chunks(caches[1], 1, [loader])
    loader.send_signal(signal.SIGSTOP)
    children = exchange_to(start, port, noise, caches)
    assert children[0].wait(60) == 0
    loader.send_signal(signal.SIGCONT)
    read, said = results(children)
    assert read == [Manifest.read(noise).size_bytes, 0] and all(
        "each node stages by itself" in errors for errors in said
    )
    assert loader.wait(60) == 0 and all(same(noise, cache) for cache in caches)
