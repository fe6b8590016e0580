"""The testbed that may lie beside the checkout: a slow shared filesystem that counts, and hosts on a network."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.measure import ROOT, cpu_s_of

TESTBED = ROOT.parent / "shared" / "testbed"
MOUNT = TESTBED / "slowfs-mount.sh"
NETWORK = TESTBED / "netns-hosts.sh"
DATA_CALLS = ("read", "write")  # of what the filesystem counts; all others ask its metadata server


class SlowMount:
    """A slow view of a folder at `path`, unmounted at the end whatever happens.

    Args:
        source: The folder that is shown.
        path: Where; nothing may be there. In no temporary folder: emptying that would reach through a mount that could
            not be removed.
        options: Of the filesystem, without their dashes: `meta_ms=5, mds_slots=8, read_mbps=200, direct=True`.

    Raises:
        SystemExit: It cannot be had here.
    """

    def __init__(self, source: Path, path: Path, **options: float) -> None:
        if not MOUNT.exists():
            raise SystemExit(f"error: this benchmark needs {MOUNT}, which makes the slow filesystem")
        self.path = path
        self._command = [str(MOUNT), str(source), str(path)]
        for name, value in options.items():
            self._command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]

    def __enter__(self) -> SlowMount:
        done = subprocess.run(self._command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit("error: the slow filesystem could not be mounted")
        self._server = int(done.stdout.split()[-1])  # its process
        return self

    def __exit__(self, *_exc) -> None:
        subprocess.run([MOUNT, "-u", self.path], check=True)
        self.path.rmdir()
        self.path.with_suffix(".log").unlink()

    @contextmanager
    def counted(self) -> Iterator[dict]:
        """Yield a dictionary that has what was asked of the filesystem in the block, once that has ended.

        `calls`: how often, by operation; `metadata_calls`: all but reads and writes; `read_bytes`; `server_cpu_s`: the
        CPU seconds of the filesystem itself, which is a program on the same cores.
        """
        counted: dict = {}
        (self.path / ".slowfs").write_text(json.dumps({"reset": True}))
        began = cpu_s_of(self._server)
        yield counted
        status = self._status()
        metadata = sum(count for name, count in status["calls"].items() if name not in DATA_CALLS)
        counted |= {"calls": status["calls"], "metadata_calls": metadata, "read_bytes": status["read_bytes"]}
        counted["server_cpu_s"] = cpu_s_of(self._server) - began

    def _status(self) -> dict:
        while True:
            with suppress(json.JSONDecodeError):  # cut off where it ended a second ago, for all that the kernel knows
                return json.loads((self.path / ".slowfs").read_text())
            time.sleep(0.1)


@contextmanager
def hosts(prefix: str, count: int, subnet: str) -> Iterator[None]:
    """Have hosts node1 to nodeN, network namespaces on a switch of their own, for a block.

    Args:
        prefix: Of the namespaces' names.
        count: How many.
        subnet: The middle of their addresses, as in 10.SUBNET.1; others may be up.

    Raises:
        SystemExit: They cannot be had here.
    """
    if not NETWORK.exists():
        raise SystemExit(f"error: this benchmark needs {NETWORK}, which makes hosts")
    environment = os.environ | {"TB_SUBNET": subnet}
    subprocess.run([NETWORK, "up", prefix, str(count)], check=True, env=environment)
    try:
        yield
    finally:
        subprocess.run([NETWORK, "down", prefix], check=True, env=environment)


def on_host(prefix: str, number: int) -> list[str]:
    """Return the words before a command that is to run on a host: node1, node2, …"""
    return [str(NETWORK), "exec", prefix, f"node{number}"]
