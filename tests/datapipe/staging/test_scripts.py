"""The scripts that stage and train, without a cluster: PBS is played by a few lines.

A node is a host name of its own, on loopback, with a folder of its own in place of LOCAL. By default, what the scripts
start only notes its arguments.
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
from datapipe.packing import PackOptions, pack
from tests.datapipe.slurm import ROOT
from tests.datapipe.staging.data_sets import CHILDREN
from tests.waiting import limit_s

PBS, MPI = ROOT / "tools/pbs/stage_and_train.pbs", ROOT / "tools/mpi/stage_and_train.sh"
NODES = ("node1", "node2")
SETTINGS = "--device cpu --set train.epochs=1 --set train.target_accuracy=none --set data.threads=1"
AS_ROOT = ["--allow-run-as-root"] if os.geteuid() == 0 else []

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
def data(tmp_path_factory, sample_dir) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "fashion"
    pack(sample_dir, folder, PackOptions(shard_mib=1, workers=1))
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
def noted(tmp_path, environ) -> dict[str, str]:
    """An environment in which `datapipe` and `torchrun` only write what they were given to tmp_path/noted.

    `datapipe` ends with the code in tmp_path/code-NODE, if there is such a file.
    """
    for name in ("datapipe", "torchrun"):
        text = f'#!/bin/sh\necho "$(hostname): {name} $*" >>{tmp_path}/noted\n'
        if name == "torchrun":  # else a user's own trainer.py would be what trains
            text = text.replace("echo", '[ "$PYTHONSAFEPATH" = 1 ] || exit 9\necho')
        text += f'code=$(cat {tmp_path}/code-"$(hostname)" 2>/dev/null)\nexit "${{code:-0}}"\n'
        program(tmp_path / "noting" / name, text)
    return environ | {"PATH": f"{tmp_path}/noting:{environ['PATH']}"}


def read_noted(tmp_path: Path) -> list[str]:
    return sorted((tmp_path / "noted").read_text().splitlines())


def pbs_job(tmp_path: Path, environ: dict[str, str], local: Path, enter: Path, data: Path | str) -> dict[str, str]:
    """Return the environment of a job's script."""
    program(tmp_path / "bin" / "pbsdsh", f'#!/bin/sh\nexec {sys.executable} {CHILDREN / "pbsdsh.py"} "$@"\n')
    (tmp_path / "nodes").write_text("".join(f"{node}\n" for node in NODES))
    own = {"PBS_O_WORKDIR": str(tmp_path), "PBS_JOBID": "12.head", "PBS_NODEFILE": str(tmp_path / "nodes")}
    own |= {"PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PATH": f"{tmp_path}/bin:{environ['PATH']}", "USER": "somebody"}
    own |= {"LOCAL": str(local), "HOME": str(tmp_path / "disks"), "ENTER": str(enter)}
    return environ | own | {"DATA": str(data), "RECIPE": "fashion-mnist-resnet8", "RUN": "run", "OPTIONS": SETTINGS}


@needs_names
def test_pbs_stages_on_each_node_and_then_trains(run, noted, local, enter, tmp_path):
    run("bash", PBS, env=pbs_job(tmp_path, noted, local, enter, "packed"), cwd="/")
    meet = "--rdzv-id=12 --nproc-per-node=1 --master-addr=node1 --master-port=20012"  # by JSON: c10d unpickles
    trained = f"-m trainer train fashion-mnist-resnet8 --data {local} --out run --resume {SETTINGS}"
    expected = []
    for number, node in enumerate(NODES):
        expected.append(f"{node}: datapipe stage packed {local} --node {number}/2")
        expected.append(f"{node}: torchrun --nnodes=2 --node-rank={number} {meet} {trained}")
    assert read_noted(tmp_path) == expected
    assert not [*tmp_path.glob(".stage_and_train*")]


@needs_names
def test_pbs_ends_with_the_highest_code_of_its_nodes(run, noted, local, enter, tmp_path):
    """And does not train where a node could not stage."""
    (tmp_path / "code-node1").write_text("1")
    (tmp_path / "code-node2").write_text("3")
    run("bash", PBS, env=pbs_job(tmp_path, noted, local, enter, "packed"), cwd="/", check=3)
    assert len(read_noted(tmp_path)) == 2 and "torchrun" not in str(read_noted(tmp_path))
    assert not [*tmp_path.glob(".stage_and_train*")]


def test_pbs_refuses_two_processes_on_a_host(run, noted, local, enter, tmp_path):
    job = pbs_job(tmp_path, noted, local, enter, "packed")
    (tmp_path / "nodes").write_text("node1\nnode1\n")
    assert "several processes on a host" in run("bash", PBS, env=job, cwd="/", check=2).stderr
    del job["RECIPE"]
    assert "RECIPE: is not set" in run("bash", PBS, env=job, cwd="/", check=1).stderr


@pytest.fixture
def job(tmp_path, environ, local, enter, data) -> dict[str, str]:
    """The environment of a job's script, whose commands are real."""
    pytest.importorskip("torch")
    return pbs_job(tmp_path, environ, local, enter, data)


@needs_names
@pytest.mark.ranks
@pytest.mark.slow
def test_pbs(run, job, local, tmp_path):
    """On two nodes; submitted again, it finds its copies."""
    done = run("bash", PBS, env=job, cwd="/")
    staged(local)
    assert "2 ranks" in done.stdout + done.stderr and (tmp_path / "run" / "report.html").exists()
    assert done.stdout.count("MiB read from DIR") == 4 > done.stdout.count("0.0 MiB read from DIR"), done.stdout
    program(tmp_path / "bin" / "torchrun", "#!/bin/sh\n")
    again = run("bash", PBS, env=job, cwd="/")
    assert again.stdout.count("0.0 MiB read from DIR") == 4, again.stdout


@needs_names
@pytest.mark.ranks
@pytest.mark.slow
def test_pbs_tells_what_went_wrong_on_a_node(run, job, local, tmp_path):
    (tmp_path / "disks" / "node2" / "train").write_text("a file")
    done = run("bash", PBS, env=job, cwd="/", check=2)
    assert "local/train is a file; allowed: a folder" in done.stderr
    assert "nothing is staged, because of node node2" in done.stderr
    assert not (tmp_path / "run").exists()


def mpi_line(tmp_path: Path, data: Path | str) -> list[str | Path]:
    return ["bash", MPI, "--", "fashion-mnist-resnet8", data, tmp_path / "run", *SETTINGS.split()]


@needs_names
def test_mpi_stages_on_each_host_and_then_trains(run, noted, local, enter, tmp_path):
    """A launcher in mpirun's place starts what it is given on two hosts, as processes 0 and 1."""
    on_host = f'OMPI_COMM_WORLD_RANK=$rank {enter} "node$((rank + 1))" "$@" || code=1'
    launch = program(tmp_path / "launch", f'#!/bin/sh\nfor rank in 1 0; do\n{on_host}\ndone\nexit "$code"\n')
    run(*mpi_line(tmp_path, "packed"), env=noted | {"MPIRUN": str(launch), "LOCAL": str(local), "code": "0"})
    lines = read_noted(tmp_path)
    assert [line for line in lines if "datapipe" in line] == [
        f"{node}: datapipe stage packed {local} --master node1" for node in NODES
    ]
    trained = [line for line in lines if "torchrun" in line]
    for number, (node, line) in enumerate(zip(NODES, trained, strict=True)):
        assert line.startswith(f"{node}: torchrun --node-rank={number} --nnodes=2 --nproc-per-node=1 --rdzv-id=mpi-")
        run_there = f"-m trainer train fashion-mnist-resnet8 --data {local} --out {tmp_path}/run --resume {SETTINGS}"
        assert "--master-addr=node1 --master-port=2" in line and line.endswith(run_there)


def test_mpi_refuses_two_processes_on_a_host(run, noted, tmp_path):
    text = '#!/bin/sh\nfor rank in 0 1; do OMPI_COMM_WORLD_RANK=$rank "$@"; done\n'
    env = noted | {"LOCAL": str(tmp_path / "local"), "MPIRUN": str(program(tmp_path / "launch", text))}
    assert "several processes on a host" in run(*mpi_line(tmp_path, "packed"), env=env, check=2).stderr
    assert "usage: stage_and_train.sh" in run("bash", MPI, "-n", "2", env=env, check=2).stderr


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
    pytest.importorskip("torch")
    env = environ | {"MPIRUN": str(mpirun), "LOCAL": str(local)}
    done = run(*mpi_line(tmp_path, data), env=env)
    staged(local)
    assert "2 ranks" in done.stdout + done.stderr and (tmp_path / "run" / "report.html").exists()


@needs_names
@needs_open_mpi
@pytest.mark.ranks
@pytest.mark.slow
def test_two_mpiruns_on_the_same_hosts(environ, data, local, mpirun):
    """Each meets its own processes only, without a scheduler that would tell the jobs apart."""
    env = {name: value for name, value in environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    jobs = []
    for name in ("a", "b"):
        line = [mpirun, "datapipe", "stage", data, local / name, "--master", "node1", "--json"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        jobs.append(subprocess.Popen([*map(str, line)], env=env, **pipes))
    size = sum(Manifest.read(folder).size_bytes for folder in find_data_sets(data))
    for job in jobs:
        said, errors = job.communicate(timeout=limit_s())
        assert job.returncode == 0, errors
        rows = [row for text in said.splitlines() for row in json.loads(text)["data_sets"]]
        assert sum(row["copied_bytes"] for row in rows) == size, errors
