"""Two hosts, a rank each, on a network of their own whose cables can be pulled."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_ports
from tests.trainer.runs import wait_for_step
from trainer.checkpoints.file import load_checkpoint

NETWORK = Path(__file__).parents[4] / "shared" / "testbed" / "netns-hosts.sh"
PREFIX, SUBNET = "ktrain", "93.9"  # of hosts made here: others may be up
LIMIT_S = 20
HANG_S = 8 * LIMIT_S

SAYS_INTERFACES = Path(__file__).parents[1] / "children" / "says_interfaces.py"

pytestmark = [pytest.mark.slow, pytest.mark.testbed, pytest.mark.ranks]


@pytest.fixture
def hosts() -> Iterator[None]:
    """node1 and node2."""
    if not NETWORK.exists():
        pytest.skip("there is no testbed beside the checkout")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    env = os.environ | {"TB_SUBNET": SUBNET}
    done = subprocess.run([NETWORK, "up", PREFIX, "2"], capture_output=True, text=True, env=env)
    if done.returncode:
        pytest.skip(f"no network namespaces here: {done.stderr.strip()[-300:]}")
    yield
    subprocess.run([NETWORK, "down", PREFIX], check=True, env=env)


@pytest.fixture
def train(hosts, start, packed, recipe_file, tmp_path):
    """train("--resume", …, code=("-m", "trainer")) -> both ranks of `trainer train` into tmp_path/run."""

    def _train(*arguments: object, code: tuple[str | Path, ...] = ("-m", "trainer")) -> list[subprocess.Popen]:
        line = [*code, "train", recipe_file, "--data", packed, "--out", tmp_path / "run", *arguments]
        env = {"WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": str(free_ports())}
        return [
            start(*line, env=env | {"RANK": str(rank)}, prefix=[str(NETWORK), "exec", PREFIX, f"node{rank + 1}"])
            for rank in range(2)
        ]

    return _train


def set_link(host: str, state: str) -> None:
    subprocess.run([NETWORK, "link", PREFIX, host, state], check=True)


def test_a_cut_link_ends_both_ranks_and_the_run_can_be_continued(train, tmp_path, metrics):
    settings = "--rank-timeout", LIMIT_S, "--set", "train.checkpoint_every_steps=5"
    children = train(*settings, "--set", "train.epochs=2000")
    wait_for_step(tmp_path / "run", 12, *children)
    set_link("node2", "down")
    began = time.monotonic()
    said = [child.communicate(timeout=HANG_S)[1] for child in children]
    print(f"ended after {time.monotonic() - began:.1f} s", *said, sep="\n")
    set_link("node2", "up")
    assert [child.returncode for child in children] == [1, 1], said
    last = [errors.splitlines()[-1] for errors in said]
    assert "the run ends, because rank 1 (node2) has given no sign of life for" in last[0], said
    assert f"(--rank-timeout {LIMIT_S})" in last[0], said
    assert "rank 0 (node1) does not answer" in last[1], said
    assert not any("Traceback" in errors for errors in said), said

    step = load_checkpoint(tmp_path / "run" / "checkpoint.pt")["state"]["step"]
    assert step >= 10
    epochs = step // 11 + 2
    children = train("--resume", *settings, "--set", f"train.epochs={epochs}", code=(SAYS_INTERFACES,))
    ended = [child.communicate(timeout=HANG_S) for child in children]
    assert [child.returncode for child in children] == [0, 0], ended
    assert all("interfaces: eth0 eth0" in out for out, _ in ended), ended
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if line["event"] == "resume"] == [step]
    assert lines[-1]["status"] == "completed"
