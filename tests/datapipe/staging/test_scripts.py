"""What `trainer launch` writes for PBS and mpirun, without a cluster: PBS is played by a few lines.

A node is a host name of its own, on loopback, with a folder of its own in place of --stage. What the scripts start only
notes its arguments, in the tests that are not slow.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from datapipe.dataset.manifest import Manifest, find_data_sets
from datapipe.dataset.verify import verify
from datapipe.packing import PackOptions, pack
from tests.datapipe.staging.data_sets import CHILDREN
from tests.waiting import limit_s

NODES = ("node1", "node2")
CHANGES = ("train.epochs=1", "train.target_accuracy=none", "data.threads=1")

needs_names = pytest.mark.skipif(
    subprocess.run(["unshare", "--uts", "--mount", "hostname", "node1"], capture_output=True).returncode != 0,
    reason="needs root, to give processes host names and mounts of their own",
)
needs_open_mpi = pytest.mark.skipif(
    "Open MPI" not in subprocess.run("mpirun --version || true", shell=True, capture_output=True, text=True).stdout,
    reason="needs Open MPI's mpirun (Debian: openmpi-bin)",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory, sample_dir) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "fashion"
    pack(sample_dir, folder, PackOptions(shard_mib=1, workers=1))
    return folder


@pytest.fixture
def local(tmp_path) -> Path:
    """Where data sets are staged: on each node, another folder."""
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


def written(scheduler: str, tmp_path: Path, data: Path, local: Path) -> Path:
    """Return the script of a run on two nodes."""
    pytest.importorskip("torch")
    from trainer.launching import Launch

    launch = Launch("fashion-mnist-resnet8", data, tmp_path / "run", scheduler, nodes=2, stage=local, changes=CHANGES)
    return program(tmp_path / "script", launch.render())


def staged(local: Path) -> None:
    """Raise unless each node has a whole copy."""
    for node in NODES:
        folders = find_data_sets(local.parent / "disks" / node)
        assert len(folders) == 2 and not [problem for folder in folders for problem in verify(folder)]


@pytest.fixture
def noted(tmp_path, environ) -> dict[str, str]:
    """An environment in which programs only write what they were given to tmp_path/noted.

    `datapipe` ends with the code in tmp_path/code-NODE, if there is such a file.
    """
    for name in ("datapipe", "torchrun", "trainer"):
        text = f'#!/bin/sh\necho "$(hostname): {name} $*${{MASTER_ADDR:+ at $MASTER_ADDR}}" >>{tmp_path}/noted\n'
        if name == "torchrun":  # else a user's own trainer.py would be what trains
            text = text.replace("echo", '[ "$PYTHONSAFEPATH" = 1 ] || exit 9\necho')
        text += f'code=$(cat {tmp_path}/code-"$(hostname)" 2>/dev/null)\nexit "${{code:-0}}"\n'
        program(tmp_path / "noting" / name, text)
    return environ | {"PATH": f"{tmp_path}/noting:{environ['PATH']}"}


def read_noted(tmp_path: Path) -> list[str]:
    return sorted((tmp_path / "noted").read_text().splitlines())


def words_of_training(tmp_path: Path, local: Path) -> str:
    changes = " ".join(f"--set {change}" for change in CHANGES)
    return f"train fashion-mnist-resnet8 --data {local} --out {tmp_path}/run --resume --device cpu {changes}"


def pbs_job(tmp_path: Path, environ: dict[str, str], enter: Path) -> dict[str, str]:
    """Return the environment of a job's script."""
    program(tmp_path / "bin" / "pbsdsh", f'#!/bin/sh\nexec {sys.executable} {CHILDREN / "pbsdsh.py"} "$@"\n')
    (tmp_path / "nodes").write_text("".join(f"{node}\n" for node in NODES))
    own = {"PBS_O_WORKDIR": str(tmp_path), "PBS_JOBID": "12.head", "PBS_NODEFILE": str(tmp_path / "nodes")}
    own |= {"PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PATH": f"{tmp_path}/bin:{environ['PATH']}", "USER": "somebody"}
    return environ | own | {"HOME": str(tmp_path / "disks"), "ENTER": str(enter)}


@needs_names
def test_pbs_stages_on_each_node_and_then_trains(run, noted, local, enter, tmp_path):
    script = written("pbs", tmp_path, tmp_path / "packed", local)
    run("bash", script, env=pbs_job(tmp_path, noted, enter), cwd="/")
    meet = "--nproc-per-node=1 --rdzv-id=12 --master-addr=node1 --master-port=20012"  # by JSON: c10d unpickles
    expected = []
    for number, node in enumerate(NODES):
        expected.append(f"{node}: datapipe stage {tmp_path}/packed {local} --node {number}/2 --master node1")
        trained = f"-m trainer {words_of_training(tmp_path, local)}"
        expected.append(f"{node}: torchrun --nnodes=2 --node-rank={number} {meet} {trained}")
    assert read_noted(tmp_path) == expected
    assert not [*tmp_path.glob(".launch*")]


@needs_names
def test_pbs_ends_with_the_highest_code_of_its_nodes(run, noted, local, enter, tmp_path):
    """And does not train where a node could not stage."""
    (tmp_path / "code-node1").write_text("1")
    (tmp_path / "code-node2").write_text("3")
    script = written("pbs", tmp_path, tmp_path / "packed", local)
    run("bash", script, env=pbs_job(tmp_path, noted, enter), cwd="/", check=3)
    assert len(read_noted(tmp_path)) == 2 and "torchrun" not in str(read_noted(tmp_path))
    assert not [*tmp_path.glob(".launch*")]


@needs_names
@pytest.mark.ranks
@pytest.mark.slow
def test_pbs(run, environ, data, local, enter, tmp_path):
    """On two nodes; submitted again, it finds its copies."""
    script, job = written("pbs", tmp_path, data, local), pbs_job(tmp_path, environ, enter)
    done = run("bash", script, env=job, cwd="/")
    staged(local)
    assert "2 ranks" in done.stdout + done.stderr and (tmp_path / "run" / "report.html").exists()
    assert done.stdout.count("MiB read from DIR") == 4 > done.stdout.count("0.0 MiB read from DIR"), done.stdout
    program(tmp_path / "bin" / "torchrun", "#!/bin/sh\n")
    again = run("bash", script, env=job, cwd="/")
    assert again.stdout.count("0.0 MiB read from DIR") == 4, again.stdout


@needs_names
@pytest.mark.ranks
@pytest.mark.slow
def test_pbs_tells_what_went_wrong_on_a_node(run, environ, data, local, enter, tmp_path):
    (tmp_path / "disks" / "node2" / "train").write_text("a file")
    script = written("pbs", tmp_path, data, local)
    done = run("bash", script, env=pbs_job(tmp_path, environ, enter), cwd="/", check=2)
    assert "local/train is a file; allowed: a folder" in done.stderr
    assert "nothing is staged, because of node node2" in done.stderr
    assert not (tmp_path / "run").exists()


def mpirun_on_hosts(tmp_path: Path, starts: str) -> None:
    """Put an mpirun into tmp_path/bin whose options are ignored; `starts`: how it starts its arguments on the hosts."""
    options = 'while [ "${1#/}" = "$1" ]; do [ "$1" != hostname ] || { echo node1; exit; }; shift; done'
    program(tmp_path / "bin" / "mpirun", f"#!/bin/sh\n{options}\n{starts}\n")


@needs_names
def test_mpi_stages_on_each_host_and_then_trains(run, noted, local, enter, tmp_path):
    """A launcher in mpirun's place starts what it is given on two hosts, as processes 0 and 1."""
    on_host = f'OMPI_COMM_WORLD_RANK=$rank {enter} "node$((rank + 1))" "$@" || code=1'
    mpirun_on_hosts(tmp_path, f'for rank in 1 0; do\n{on_host}\ndone\nexit "${{code:-0}}"')
    script = written("mpi", tmp_path, tmp_path / "packed", local)
    run("bash", script, env=noted | {"PATH": f"{tmp_path}/bin:{noted['PATH']}"})
    lines = [f"datapipe stage {tmp_path}/packed {local}", f"trainer {words_of_training(tmp_path, local)}"]
    assert read_noted(tmp_path) == [f"{node}: {line} at node1" for node in NODES for line in lines]


@pytest.fixture
def mpirun(environ, enter, tmp_path) -> dict[str, str]:
    """The environment in which `mpirun` is Open MPI's, which starts a process on each node."""
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    launch = shlex.join([shutil.which("mpirun"), *as_root, "--oversubscribe", "-n", "2"])
    on_host = f'{enter} "node$((OMPI_COMM_WORLD_RANK + 1))" "$@"'
    mpirun_on_hosts(tmp_path, f'exec {launch} sh -c {shlex.quote(on_host)} sh "$@"')
    return environ | {"PATH": f"{tmp_path}/bin:{environ['PATH']}"}


@needs_names
@needs_open_mpi
@pytest.mark.ranks
@pytest.mark.slow
def test_mpirun(run, data, local, mpirun, tmp_path):
    done = run("bash", written("mpi", tmp_path, data, local), env=mpirun)
    staged(local)
    assert "2 ranks" in done.stdout + done.stderr and (tmp_path / "run" / "report.html").exists()


@needs_names
@needs_open_mpi
@pytest.mark.ranks
@pytest.mark.slow
def test_two_mpiruns_on_the_same_hosts(data, local, mpirun):
    """Each meets its own processes only, without a scheduler that would tell the jobs apart."""
    env = {name: value for name, value in mpirun.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    jobs = []
    for name in ("a", "b"):
        program = shutil.which("datapipe", path=env["PATH"])
        line = ["mpirun", program, "stage", data, local / name, "--master", "node1", "--json"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        jobs.append(subprocess.Popen(["env", *map(str, line)], env=env, **pipes))  # env finds it on this PATH
    size = sum(Manifest.read(folder).size_bytes for folder in find_data_sets(data))
    for job in jobs:
        said, errors = job.communicate(timeout=limit_s())
        assert job.returncode == 0, errors
        rows = [row for text in said.splitlines() for row in json.loads(text)["data_sets"]]
        assert sum(row["copied_bytes"] for row in rows) == size, errors
