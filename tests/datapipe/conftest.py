"""A slow filesystem that fails when told to, and a Slurm cluster. They come from a testbed beside the checkout."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.datapipe.slurm import ROOT, SUBNET, TESTBED, Cluster
from tests.ports import free_ports
from tests.waiting import limit_s, wait_until

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
            wait_until(lambda: "Z" in _state(daemon), describe=lambda: "the filesystem's process does not end")
    finally:
        if not os.path.ismount(slow.path):
            shutil.rmtree(folder)


def _state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


@pytest.fixture(scope="module")
def environ(tmp_path_factory) -> dict[str, str]:
    """Ours, without what may have launched the tests; first on PATH, this checkout's commands, and a torchrun."""
    bin = tmp_path_factory.mktemp("bin")
    script = f"#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT))}:$PYTHONPATH "
    script += f'exec {shlex.quote(sys.executable)} -m datapipe "$@"\n'
    for name, module in {"datapipe": "datapipe", "trainer": "trainer", "torchrun": "torch.distributed.run"}.items():
        (bin / name).write_text(script.replace("-m datapipe", f"-m {module}"))
        (bin / name).chmod(0o755)
    foreign = ("SLURM_", "SBATCH_", "PBS_", "OMPI_", "PMI", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)} | {
        "PATH": f"{bin}:{os.environ['PATH']}"
    }


@pytest.fixture(scope="module")
def run(environ) -> Callable[..., subprocess.CompletedProcess]:
    """Run a command; `check`: the exit code that it must end with."""

    def run(*line: str | Path, check: int = 0, **options) -> subprocess.CompletedProcess:
        options = {"env": environ, "timeout": limit_s(180), **options}
        done = subprocess.run([str(word) for word in line], capture_output=True, text=True, **options)
        assert done.returncode == check, f"{line} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done

    return run


@pytest.fixture(scope="module")
def cluster(request, environ, run) -> Iterator[Cluster]:
    """Slurm; its nodes have addresses of their own in a module with a `NETWORK`, which is a prefix of their names."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # not below pytest's, which munged refuses: others cannot enter it
    env = environ | {"TB_NODES": "4", "TB_CPUS": "4", "TB_PORT": str(free_ports(5))}
    network = getattr(request.module, "NETWORK", "")
    if network:
        env |= {"TB_NETNS": network, "TB_SUBNET": SUBNET}
        run(TESTBED / "netns-hosts.sh", "up", network, 4, env=env)
    cluster = Cluster(folder, run)
    try:
        started = subprocess.run([TESTBED / "slurm-up.sh", folder], capture_output=True, text=True, env=env)
        if started.returncode and not all(map(shutil.which, ("munged", "slurmctld", "slurmd", "sbatch"))):
            pytest.skip("Slurm is not installed, and could not be")
        assert started.returncode == 0, started.stderr
        run(TESTBED / "slowfs-mount.sh", cluster.backing, cluster.shared, "--meta-ms", 2)
        yield cluster
    finally:
        run(TESTBED / "slurm-down.sh", "--rm", folder)  # unmounts as well
        if network:
            run(TESTBED / "netns-hosts.sh", "down", network, env=env)
