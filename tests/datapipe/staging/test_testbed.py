"""Staging from a slow filesystem that fails, by hosts on a network whose cables can be pulled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from datapipe.errors import DatapipeError, ShardCorruptError
from datapipe.staging import StageOptions, stage
from tests.datapipe.staging.data_sets import CHUNK, chunks_on_their_way, make_data_set, same
from tests.processes import Process
from tests.waiting import limit_s, wait_until

TESTBED = Path(__file__).parents[4] / "shared" / "testbed"
SUBNET = "93.7"  # of hosts made here: others may be up
SIZES = [6 * CHUNK, 6 * CHUNK, 2 * CHUNK, *[2000] * 20]

pytestmark = pytest.mark.testbed


@pytest.fixture(scope="module")
def hosts() -> Iterator[str]:
    """The prefix of four hosts, node1 to node4."""
    if not TESTBED.exists():
        pytest.skip("there is no testbed beside the checkout")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    prefix, env = "dpstage", os.environ | {"TB_SUBNET": SUBNET}
    done = subprocess.run([TESTBED / "netns-hosts.sh", "up", prefix, "4"], capture_output=True, text=True, env=env)
    if done.returncode:
        pytest.skip(f"no network namespaces here: {done.stderr.strip()[-300:]}")
    yield prefix
    subprocess.run([TESTBED / "netns-hosts.sh", "down", prefix], check=True, env=env)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder with a data set `source` behind a mount without a page cache: all that is read is counted."""
    if not TESTBED.exists():
        pytest.skip("there is no testbed beside the checkout")
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("needs root, and FUSE in the kernel, to mount")
    folder = Path(tempfile.mkdtemp(prefix="stage-"))
    make_data_set(folder / "backing" / "source", SIZES)
    mount = TESTBED / "slowfs-mount.sh"
    line = [mount, folder / "backing", folder / "mount", "--direct", "--read-mbps", "20"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"slowfs cannot be mounted: {done.stderr.strip()[-300:]}")
    yield folder / "mount"
    subprocess.run([mount, "-u", folder / "mount"], check=True, timeout=60)
    if not os.path.ismount(folder / "mount"):
        shutil.rmtree(folder)


@pytest.fixture
def on_hosts(hosts, shared, begin, tmp_path) -> Callable[..., list[Process]]:
    """on_hosts(*arguments) -> a process per host, that stages to tmp_path/I."""

    def begin_on_hosts(*arguments: object) -> list[Process]:
        children = []
        for i in range(4):
            line = shared / "source", tmp_path / str(i), "--node", f"{i}/4", "--master", "node1", "--chunk-mib", 1
            host = f"node{i + 1}"
            children.append(begin("on_host", f"{hosts}-{host}", "stage", *line, *arguments, host=host))
        return children

    return begin_on_hosts


def test_four_hosts_read_each_byte_once(on_hosts, shared, tmp_path):
    children = on_hosts()
    said = [child.communicate(timeout=limit_s()) for child in children]
    assert [child.returncode for child in children] == [0] * 4, said
    read = json.loads((shared / ".slowfs").read_text())["read_bytes"]
    assert sum(SIZES) <= read <= 1.02 * sum(SIZES)
    assert all(same(shared / "source", tmp_path / str(i)) for i in range(4))


def test_an_interface_that_does_not_lead_to_the_others(on_hosts, shared, tmp_path):
    """Both addresses are named, and nobody waits for gloo to find out."""
    children = on_hosts("--interface", "lo")
    said = [child.communicate(timeout=limit_s())[1] for child in children]
    assert [child.returncode for child in children] == [0] * 4, said
    wrong = "node 0 (node1, 127.0.0.1) does not reach node 1 (node2, 127.0.0.1): Connection refused (4 of 4 pairs fail)"
    remedy = "--interface has chosen lo: leave it out, or choose another: this node reads by itself"
    assert all(f"{wrong}; {remedy}" in errors for errors in said), said
    assert all(same(shared / "source", tmp_path / str(i)) for i in range(4))


@pytest.mark.slow
def test_a_pulled_cable_stops_nobody(on_hosts, hosts, shared, tmp_path, patience_s):
    (shared / ".slowfs").write_text(json.dumps({"read_mbps": 4}))
    children = on_hosts("--timeout", patience_s)
    wait_until(lambda: chunks_on_their_way(tmp_path / "3") > 1, *children)
    subprocess.run([TESTBED / "netns-hosts.sh", "link", hosts, "node3", "down"], check=True)
    try:
        (shared / ".slowfs").write_text(json.dumps({"read_mbps": 100}))
        said = [child.communicate(timeout=limit_s())[1] for child in children]
    finally:
        subprocess.run([TESTBED / "netns-hosts.sh", "link", hosts, "node3", "up"], check=True)
    assert [child.returncode for child in children] == [0] * 4, said
    assert all("node 2 (node3) does not answer" in said[i] for i in (0, 1, 3)), said
    assert "node 0 (node1) does not answer" in said[2]
    assert all(same(shared / "source", tmp_path / str(i)) for i in range(4))


def test_a_fault_that_passes_is_healed(mounted, tmp_path, caplog):
    mounted.calm()
    make_data_set(mounted.backing / "healed", SIZES)
    mounted.set(faults=["open:*/shard-000001.tar:1:EIO"])
    stage(mounted.path / "healed", tmp_path / "local", StageOptions(chunk_mib=1))
    assert same(mounted.backing / "healed", tmp_path / "local") and "trying again in 0.1 s" in caplog.text
    mounted.calm()


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("read:*/shard-000001.tar:1+:EIO", DatapipeError, r"shard-000001\.tar: .*: Input/output error \(errno 5\)"),
        ("open:*/shard-000001.tar:1+:ESTALE", DatapipeError, r"shard-000001\.tar: .*: Stale file handle \(errno 116\)"),
        ("open:*/shard-000001.tar:1+:EACCES", DatapipeError, r"shard-000001\.tar: .*: Permission denied"),
        ("*:*/shard-000001.tar:1+:truncate=3000000", ShardCorruptError, r"shard-000001\.tar: truncated"),
        ("read:*/shard-000001.tar:1+:stall=8", DatapipeError, r"shard-000001\.tar: a read or write has not been"),
    ],
)
def test_a_fault_that_stays_is_named(mounted, tmp_path, fault, error, words):
    """No shard looks finished that is not, and the next call continues."""
    mounted.calm()
    source = mounted.backing / f"source-{abs(hash(fault))}"
    make_data_set(source, SIZES)
    mounted.set(faults=[fault])
    with pytest.raises(error, match=words):
        stage(mounted.path / source.name, tmp_path / "local", StageOptions(chunk_mib=1, retries=1, timeout_s=2))
    assert not (tmp_path / "local" / "shard-000001.tar").exists()
    assert not (tmp_path / "local" / "manifest.json").exists()
    mounted.calm()  # a read that was stalled goes through when its time is over
    stage(mounted.path / source.name, tmp_path / "local", StageOptions(chunk_mib=1))
    assert same(source, tmp_path / "local")
