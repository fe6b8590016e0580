"""A slow filesystem that fails when told to. It comes from a testbed beside the checkout."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

MOUNT = Path(__file__).parents[3] / "shared" / "testbed" / "slowfs-mount.sh"
KNOBS = ("meta_ms", "meta_jitter_ms", "readdir_entry_us", "read_ms", "read_mbps", "write_mbps", "space_mb")
CALM = {**dict.fromkeys(KNOBS, 0), "faults": [], "reset": True}


class SlowFS:
    """`path`: the mount; `backing`: the folder behind it, where the test itself looks and no fault is."""

    def __init__(self, folder: Path) -> None:
        self.backing, self.path = folder / "backing", folder / "mount"
        self.daemon = 0  # its process

    def calm(self) -> None:
        self.set(**CALM)

    def set(self, **knobs) -> None:
        (self.path / ".slowfs").write_text(json.dumps(knobs))

    def calls(self) -> list[int]:
        """Of each fault: how many calls it has matched."""
        while True:
            with suppress(json.JSONDecodeError):  # cut off where it ended a second ago, for all that the kernel knows
                return [fault["calls"] for fault in json.loads((self.path / ".slowfs").read_text())["faults"]]
            time.sleep(0.05)

    def behind(self, path: Path) -> Path:
        return self.backing / path.relative_to(self.path)


@pytest.fixture(scope="module")
def mounted() -> Iterator[SlowFS]:
    if not MOUNT.exists():
        pytest.skip("there is no testbed beside the checkout")
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("needs root, and FUSE in the kernel, to mount")
    # In no folder of pytest's: emptying that would reach through a mount that could not be removed.
    folder = Path(tempfile.mkdtemp(prefix="slowfs-"))
    slow = SlowFS(folder)
    try:
        done = subprocess.run([MOUNT, slow.backing, slow.path], capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.skip(f"slowfs cannot be mounted: {done.stderr.strip()[-300:]}")
        slow.daemon = daemon = int(done.stdout.split()[-1])
        try:
            yield slow
        finally:
            subprocess.run([MOUNT, "-u", slow.path], check=True, timeout=60)
            with suppress(ProcessLookupError):  # a mount namespace made meanwhile would keep it
                os.kill(daemon, signal.SIGTERM)
            deadline = time.monotonic() + 30
            while Path(f"/proc/{daemon}").exists() and "Z" not in _state(daemon):
                assert time.monotonic() < deadline, "the filesystem's process does not end"
                time.sleep(0.01)
    finally:
        if not os.path.ismount(slow.path):
            shutil.rmtree(folder)


def _state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"
