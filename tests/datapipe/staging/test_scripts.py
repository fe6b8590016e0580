"""The scripts that stage and train, without a cluster: mpirun is real, PBS is played by a few lines.

A node is a host name of its own, on loopback, with a folder of its own in place of LOCAL.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from datapipe.dataset.manifest import Manifest, find_data_sets
from datapipe.dataset.verify import verify
from tests.datapipe.slurm import ROOT

PBS, MPI = ROOT / "tools/pbs/stage_and_train.pbs", ROOT / "tools/mpi/stage_and_train.sh"
NODES = ("node1", "node2")
SETTINGS = [
    "--device",
    "cpu",
    "--set",
    "train.epochs=1",
    "--set",
    "train.target_accuracy=none",
    "--set",
    "data.threads=1",
]
AS_ROOT = ["--allow-run-as-root"] if os.geteuid() == 0 else []
# As OpenPBS does (src/cmds/pbsdsh.c, and start_process in src/resmom/start_exec.c): one process per line of the node
# file, with qsub's environment and not the script's, in the home directory; and 0, whatever becomes of them.
PBSDSH = """
import os, subprocess, sys
from pathlib import Path
assert sys.argv[1] == "--"
kept = ("PBS_JOBID", "PBS_O_WORKDIR", "HOME", "USER")
tasks = []
for number, node in enumerate(Path(os.environ["PBS_NODEFILE"]).read_text().split()):
    own = {"PBS_NODENUM": str(number), "PBS_TASKNUM": f"{number + 2:08X}", "PATH": "/usr/bin:/bin"}
    env = {name: os.environ[name] for name in kept} | own
    tasks.append(subprocess.Popen([ENTER, node, *sys.argv[2:]], env=env, cwd=env["HOME"]))
for task in tasks:
    task.wait()
"""

needs_names = pytest.mark.skipif(
    subprocess.run(["unshare", "--uts", "--mount", "hostname", "node1"], capture_output=True).returncode != 0,
    reason="needs root, to give processes host names and mounts of their own",
)
needs_open_mpi = pytest.mark.skipif(
    "Open MPI" not in subprocess.run("mpirun --version || true", shell=True, capture_output=True, text=True).stdout,
    reason="needs Open MPI's mpirun (Debian: openmpi-bin)",
)


@pytest.mark.parametrize("script", [PBS, MPI])
def test_bash_can_read_them(script, run):
    run("bash", "-n", script)


@pytest.fixture(scope="module")
def data(tmp_path_factory, run, sample_dir) -> Path:
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("packed") / "fashion"
    run("datapipe", "pack", sample_dir, folder, "--shard-mib", 1)
    return folder


@pytest.fixture
def local(tmp_path) -> Path:
    """LOCAL: on each node, another folder."""
    for node in NODES:
        (tmp_path / "disks" / node).mkdir(parents=True)
    (tmp_path / "local").mkdir()
    return tmp_path / "local"


@pytest.fixture
def enter(tmp_path, local) -> Path:
    """A command: enter NODE COMMAND... runs it on that node."""
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost {' '.join(NODES)}\n")
    inside = f"""hostname "$1" && mount --bind {tmp_path}/hosts /etc/hosts && mount --bind {tmp_path}/disks/"$1" {local}
shift
exec "$@"
"""
    return program(tmp_path / "enter", f'#!/bin/sh\nexec unshare --uts --mount sh -c {shlex.quote(inside)} sh "$@"\n')


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def staged(local: Path) -> None:
    """Raise unless each node has a whole copy."""
    for node in NODES:
        folders = find_data_sets(local.parent / "disks" / node)
        assert len(folders) == 2 and not [problem for folder in folders for problem in verify(folder)]


@pytest.fixture
def job(tmp_path, environ, local, enter, data) -> dict[str, str]:
    """The environment of a job's script."""
    program(tmp_path / "bin" / "pbsdsh", f"#!{sys.executable}\nENTER = {str(enter)!r}\n{PBSDSH}")
    (tmp_path / "nodes").write_text("".join(f"{node}\n" for node in NODES))
    own = {"PBS_O_WORKDIR": str(tmp_path), "PBS_JOBID": "12.head", "PBS_NODEFILE": str(tmp_path / "nodes")}
    own |= {"PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PATH": f"{tmp_path}/bin:{environ['PATH']}", "USER": "somebody"}
    settings = {"DATA": str(data), "RECIPE": "fashion-mnist-resnet8", "RUN": "run", "OPTIONS": " ".join(SETTINGS)}
    return environ | own | settings | {"LOCAL": str(local), "HOME": str(tmp_path / "disks")}


@needs_names
@pytest.mark.ranks
@pytest.mark.slow
def test_pbs(run, job, local, tmp_path):
    """On two nodes; submitted again, it finds its copies and its run."""
    done = run("bash", PBS, env=job, cwd="/")
    staged(local)
    assert "2 ranks" in done.stdout + done.stderr and (tmp_path / "run" / "report.html").exists()
    assert done.stdout.count("MiB copied") == 4 > done.stdout.count("0.0 MiB copied"), done.stdout
    again = run("bash", PBS, env=job, cwd="/")
    assert again.stdout.count("0.0 MiB copied") == 4, again.stdout
    assert not [*tmp_path.glob(".stage_and_train*")]


@needs_names
@pytest.mark.ranks
def test_pbs_tells_what_went_wrong_on_a_node(run, job, local, tmp_path):
    (tmp_path / "disks" / "node2" / "train").write_text("a file")
    done = run("bash", PBS, env=job, cwd="/", check=2)
    assert "local/train is a file; allowed: a folder" in done.stderr
    assert "nothing is staged, because of node node2" in done.stderr
    assert not (tmp_path / "run").exists() and not [*tmp_path.glob(".stage_and_train*")]


def test_pbs_refuses_two_processes_on_a_host(run, job, tmp_path):
    (tmp_path / "nodes").write_text("node1\nnode1\n")
    assert "several processes on a host" in run("bash", PBS, env=job, cwd="/", check=2).stderr
    del job["RECIPE"]
    assert "RECIPE: is not set" in run("bash", PBS, env=job, cwd="/", check=1).stderr


@pytest.fixture
def mpirun(enter, tmp_path) -> Path:
    """Open MPI's, which starts a process on each node."""
    launch = shlex.join(["mpirun", *AS_ROOT, "--oversubscribe", "-n", "2"])
    on_host = f'{enter} "node$((OMPI_COMM_WORLD_RANK + 1))" "$@"'
    return program(tmp_path / "mpirun", f'#!/bin/sh\nexec {launch} sh -c {shlex.quote(on_host)} sh "$@"\n')


@needs_names
@needs_open_mpi
@pytest.mark.ranks
@pytest.mark.slow
def test_mpirun(run, environ, data, local, mpirun, tmp_path):
    """On two hosts; run again, it finds its copies and its run."""
    env = environ | {"MPIRUN": str(mpirun), "LOCAL": str(local)}
    line = ["bash", MPI, "--", "fashion-mnist-resnet8", data, tmp_path / "run", *SETTINGS]
    done = run(*line, env=env)
    staged(local)
    assert "2 ranks" in done.stdout + done.stderr and (tmp_path / "run" / "report.html").exists()
    again = run(*line, env=env)
    assert again.stdout.count("0.0 MiB copied") == 4, again.stdout


@needs_names
@needs_open_mpi
@pytest.mark.ranks
def test_two_mpiruns_on_the_same_hosts(environ, data, local, mpirun):
    """Each meets its own processes only, without a scheduler that would tell the jobs apart."""
    env = {name: value for name, value in environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    jobs = []
    for name in ("a", "b"):
        line = [mpirun, "datapipe", "stage", data, local / name, "--master", "node1", "--timeout", "30", "--json"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        jobs.append(subprocess.Popen([*map(str, line)], env=env, **pipes))
    for job in jobs:
        said, errors = job.communicate(timeout=120)
        assert job.returncode == 0, errors
        rows = [row for text in said.splitlines() for row in json.loads(text)["data_sets"]]
        assert sum(row["copied_bytes"] for row in rows) == sum(
            Manifest.read(folder).size_bytes for folder in find_data_sets(data)
        ), errors


@needs_open_mpi
def test_mpirun_with_two_processes_on_a_host(run, environ, data, tmp_path):
    line = ["bash", MPI, *AS_ROOT, "--oversubscribe", "-n", "2", "--", "fashion-mnist-resnet8", data, tmp_path / "run"]
    env = environ | {"LOCAL": str(tmp_path / "local")}
    assert "several processes on a host" in run(*line, env=env, check=2).stderr
    assert "usage: stage_and_train.sh" in run("bash", MPI, "-n", "2", env=env, check=2).stderr
