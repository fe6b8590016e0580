"""`trainer launch`: what it writes is short and runs; the scripts under tools are what it writes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datapipe.cluster import parse_time_limit
from datapipe.errors import SettingError
from tests.datapipe.slurm import ROOT
from tests.waiting import limit_s
from trainer.launching import SCHEDULERS, Launch

EXAMPLE = {
    "recipe": "imagenet-resnet50",
    "data": Path("/shared/packed/imagenet"),
    "stage": Path("/local/imagenet"),
    "out": Path("/shared/runs/imagenet"),
    "nodes": 2,
    "gpus_per_node": 4,
    "time": "4:00:00",
}
SHOWN = {"slurm": "tools/slurm/train.sbatch", "pbs": "tools/pbs/train.pbs", "mpi": "tools/mpi/train.sh"}
SETTINGS = ["--set", "train.epochs=1", "--set", "train.target_accuracy=none", "--set", "data.threads=1"]


def make_data(folder: Path) -> Path:
    """Make what a packed data set looks like from outside."""
    for split in ("train", "val"):
        (folder / "data" / split).mkdir(parents=True)
    return folder / "data"


@pytest.mark.parametrize("scheduler", SHOWN)
def test_the_scripts_under_tools_are_what_it_writes(scheduler):
    text = Launch(**EXAMPLE, scheduler=scheduler).render()
    path = ROOT / SHOWN[scheduler]
    if "WRITE_SCRIPTS" in os.environ:  # after a template was changed
        path.write_text(text)
    assert path.read_text() == text


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("gpus", [0, 1, 8])
@pytest.mark.parametrize("more", [{}, {"time": None, "stage": None}, {"changes": ("name=c d",), "path": Path("/x y")}])
def test_bash_can_read_what_it_writes(tmp_path, scheduler, gpus, more):
    nodes = 1 if scheduler == "local" else 4
    launch = Launch(
        **(
            EXAMPLE
            | {
                "nodes": nodes,
                "data": make_data(tmp_path),
                "gpus_per_node": gpus,
                "out": tmp_path / ("a run" if scheduler in ("mpi", "local") else "run"),
            }
            | more
        ),
        scheduler=scheduler,
    )
    path = launch.write()
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    text = path.read_text()
    assert "\n\n\n" not in text and not any(line.endswith(" ") for line in text.splitlines())
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", path], check=True)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"scheduler": "lsf"}, "--scheduler"),
        ({"nodes": 0}, "--nodes"),
        ({"gpus_per_node": -1}, "--gpus-per-node"),
        ({"time": "soon"}, "time limit 'soon'"),
        ({"time": "0:20"}, r"--time 0:20: is 20 s, of which 30 s are kept.*allowed: more"),
        ({"time": "0:30"}, "--time 0:30"),
        ({"scheduler": "local"}, "--nodes 2"),
        ({"scheduler": "mpi", "options": ("-A abc",)}, "--option"),
        ({"options": ("account=abc",)}, "--option"),
        ({"scheduler": "mpi", "max_restarts": 3}, "--max-restarts"),
        ({"out": Path("/a b")}, "--out"),
        ({"out": Path("/a%j")}, "--out"),
        ({"out": Path("/shared/packed/imagenet/runs/1")}, "--out .*: lies in --data .*; allowed: a folder apart"),
        ({"out": Path("/shared")}, "--out .*: holds --data"),
        ({"stage": Path("/shared/packed/imagenet")}, "--stage .*: is --data"),
        ({"stage": Path("/shared/packed/imagenet/local")}, "--stage .*: lies in --data"),
        ({"stage": Path("/shared/runs/imagenet")}, "--stage .*: is --out"),
        ({"stage": Path("/shared/runs/../runs/imagenet/local")}, "--stage .*: lies in --out"),
        ({"local_checkpoints": Path("/shared/runs/imagenet/local")}, "--local-checkpoints .*: lies in --out"),
        ({"local_checkpoints": Path("/shared/packed/imagenet/a")}, "--local-checkpoints .*: lies in --data"),
    ],
)
def test_what_makes_no_sense_is_refused(change, word):
    with pytest.raises(SettingError, match=word):
        Launch(**EXAMPLE | change)


@pytest.mark.parametrize("character", ["\n", "\r", "\x1b", "\x7f", "\x85", "\u2028", "\u202e", "\udce9"])
@pytest.mark.parametrize("name", ["recipe", "data", "out", "stage", "local_checkpoints", "path", "changes", "options"])
def test_control_characters_are_refused_wherever_they_stand(name, character):
    """Each of these texts is in a script, and some in a comment, where a line break would begin a command."""
    text = f"--a{character}touch here"
    kinds = {"recipe": text, "changes": ("train.epochs=1", text), "options": (text,)}
    with pytest.raises(SettingError, match=r"has the control character \\.*allowed:") as caught:
        Launch(**EXAMPLE | {name: kinds.get(name, Path("/x", text))})
    assert character not in str(caught.value)
    Launch(**EXAMPLE | {"data": Path("/données/日本 x"), "stage": None})


@given(st.integers(1, 12), st.integers(0, 9))
def test_as_many_ranks_as_share_a_batch(nodes, gpus):
    launch = Launch(**EXAMPLE | {"nodes": nodes, "gpus_per_node": gpus, "changes": ("train.batch_size=120",)})
    if 120 % (nodes * max(1, gpus)) == 0:
        assert f"#SBATCH --nodes={nodes}\n" in launch.render()
        return
    with pytest.raises(SettingError, match=rf"--nodes {nodes}.*train\.batch_size = 120 is not a multiple.*allowed"):
        launch.render()


def test_what_is_refused_leaves_nothing(command, tmp_path):
    """A recipe that is not there, a data set that is not, ranks that do not share a batch, OUT that is a file."""
    make_data(tmp_path)
    (tmp_path / "file").write_text("mine")
    line = ["trainer", "launch", "fashion-mnist-resnet8", "--scheduler", "slurm"]
    for change, words in (
        ({2: "fashion-mnist-resnet9"}, "fashion-mnist-resnet9"),
        ({"--data": tmp_path / "dota"}, f"error: --data {tmp_path / 'dota'}: train/ is not there"),
        ({"--nodes": 7}, "error: --nodes 7: are 7 ranks"),
        ({"--out": tmp_path / "file"}, f"error: --out {tmp_path / 'file'}: is a file; allowed: a folder"),
        ({"--time": "0:20"}, "error: --time 0:20"),
    ):
        options = {"--data": tmp_path / "data", "--out": tmp_path / "run"}
        options |= {name: value for name, value in change.items() if name != 2}
        words_of_line = [*line[:2], change.get(2, line[2]), *line[3:]]
        done = command(*words_of_line, *(word for option in options.items() for word in option))
        assert done.returncode == 2 and words in done.stderr, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "file"]


@pytest.mark.parametrize("text", ["", "0", "1:2:3:4", "-5", "1h", "0:00"])
def test_times_that_are_none(text):
    with pytest.raises(SettingError, match="time limit"):
        parse_time_limit(text)


@pytest.mark.slow
def test_a_local_run(tmp_path, command, sample_dir):
    """Staged and trained by two ranks; run again, it finds everything done."""
    assert command("datapipe", "pack", sample_dir, tmp_path / "data").returncode == 0
    line = ["trainer", "launch", "fashion-mnist-resnet8", "--scheduler", "local", "--data", tmp_path / "data"]
    line += ["--stage", tmp_path / "local", "--out", tmp_path / "run", *SETTINGS, "--submit"]
    for word in ("0.0 MiB there already", "is complete"):
        done = command(*line)
        assert done.returncode == 0, done.stderr
        assert word in done.stdout + done.stderr
    assert (tmp_path / "run" / "report.html").exists()


def test_a_script_that_was_edited_stays(tmp_path):
    launch = Launch(**EXAMPLE | {"out": tmp_path / "run", "data": make_data(tmp_path)})
    path = launch.write()
    assert launch.write() == path
    path.write_text(path.read_text() + "# mine\n")
    with pytest.raises(SettingError, match="--overwrite"):
        launch.write()
    assert launch.write(overwrite=True).read_text() == launch.render()


def test_the_tasks_of_srun_get_the_cores_that_the_job_has(tmp_path):
    """Since Slurm 22.05 srun does not take --cpus-per-task from the job. srun is played; it says what it was given."""
    (tmp_path / "srun").write_text(f'#!/bin/sh\necho "${{SRUN_CPUS_PER_TASK:-none}}" >>{tmp_path}/told\n')
    (tmp_path / "squeue").write_text("#!/bin/sh\n")
    for name in ("srun", "squeue"):
        (tmp_path / name).chmod(0o755)
    launch = Launch(**EXAMPLE | {"data": make_data(tmp_path), "out": tmp_path / "run", "path": tmp_path})
    env = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}
    for more in ({"SLURM_CPUS_PER_TASK": "12"}, {}):
        subprocess.run(["bash", launch.write()], env=env | more, check=True, timeout=limit_s())
    assert (tmp_path / "told").read_text().split() == ["12", "12", "none", "none"]  # of staging, and of training


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (Debian: openmpi-bin)")
def test_mpirun_runs_what_it_writes(tmp_path, command, sample_dir):
    """Two ranks on this host; the target is missed, which the exit code says."""
    assert command("datapipe", "pack", sample_dir, tmp_path / "data").returncode == 0
    changes = ("train.epochs=1", "train.target_accuracy=0.999", "data.threads=1")
    launch = Launch(
        "fashion-mnist-resnet8", tmp_path / "data", tmp_path / "run", "mpi", time="10", changes=changes,
        stage=tmp_path / "local", path=Path(sys.executable).parent,
    )  # fmt: skip
    text = launch.render().replace("-n 1 --map-by ppr:1:node -x", "-n 2 -x")
    launch.write().write_text(text)
    env = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        ["bash", launch.script, "--oversubscribe"], env=env, capture_output=True, text=True, timeout=limit_s(180)
    )
    assert done.returncode == 1, done.stderr
    assert "2 ranks" in done.stderr and "missed" in done.stdout


@pytest.mark.parametrize(
    ("writes", "before", "again"), [("time", "", True), ("SIGTERM", "", False), ("", "time", False)]
)
def test_a_pbs_job_submits_itself_again_if_its_time_was_over(tmp_path, writes, before, again):
    """And not where it was deleted, nor where an attempt fails after one whose time was over. PBS is played."""
    metrics = tmp_path / "run" / "metrics.jsonl"
    line = 'echo \'{{"event": "end", "status": "interrupted", "stopped_by": "{}"}}\' >>' + str(metrics)
    programs = {
        "pbsdsh": 'shift && PBS_NODENUM=0 exec "$@"',
        "torchrun": f"{line.format(writes) if writes else ''}\nexit 1",
        "datapipe": "exit 0",
        "qsub": f'echo "$@" >{tmp_path}/submitted',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    changes = {"data": make_data(tmp_path), "out": tmp_path / "run", "nodes": 1, "path": tmp_path}
    launch = Launch(**EXAMPLE | changes | {"stage": tmp_path / "local" / "data"}, scheduler="pbs")
    launch.write()
    if before:
        subprocess.run(["sh", "-c", line.format(before)], check=True)
    (tmp_path / "nodes").write_text("node1\n")
    env = {"PATH": os.environ["PATH"], "PBS_O_WORKDIR": str(tmp_path), "PBS_JOBID": "7.server"}
    env |= {"PBS_NODEFILE": str(tmp_path / "nodes"), "RESTARTS": "3"}
    done = subprocess.run(["bash", launch.script], env=env, capture_output=True, text=True, timeout=limit_s())
    assert done.returncode == 1, done.stderr
    assert (tmp_path / "submitted").exists() == again, done.stderr
    if again:
        assert (tmp_path / "submitted").read_text() == f"-v RESTARTS=4 {launch.script}\n"


@pytest.mark.parametrize("scheduler", ["local", "mpi", "pbs"])
@pytest.mark.parametrize(("took_s", "left"), [(0, "0:3600"), (3000, "0:600"), (3590, "0:31"), (9000, "0:31")])
def test_after_long_staging_there_is_time_for_a_step(tmp_path, scheduler, took_s, left):
    """More than `trainer train` refuses as too short, which would be wrong use. All programs are played."""
    date = f"[ -f {tmp_path}/staged ] && echo $((1000 + {took_s})) || echo 1000"
    noting = f'echo "$@" >>{tmp_path}/noted'
    programs = {"date": date, "datapipe": f"touch {tmp_path}/staged", "trainer": noting}
    programs |= {"torchrun": f'[ "$PYTHONSAFEPATH" = 1 ] && {noting}'}  # else a user's own trainer.py would train
    programs |= {"mpirun": 'while [ "${1#/}" = "$1" ]; do shift; [ $# -gt 0 ] || exit 0; done; exec "$@"'}
    programs |= {"pbsdsh": 'shift && PBS_NODENUM=0 exec "$@"'}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "nodes").write_text("node1\n")
    changes = {"data": make_data(tmp_path), "out": tmp_path / "run", "nodes": 1, "gpus_per_node": 0}
    launch = Launch(**EXAMPLE | changes | {"time": "60", "scheduler": scheduler, "path": tmp_path})
    env = {"PATH": os.environ["PATH"], "PBS_O_WORKDIR": str(tmp_path), "PBS_JOBID": "7.server"}
    env |= {"PBS_NODEFILE": str(tmp_path / "nodes")}
    done = subprocess.run(["bash", launch.write()], env=env, capture_output=True, text=True, timeout=limit_s())
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "noted").read_text().endswith(f"--max-time {left}\n")


def test_a_rank_that_is_stopped_is_killed_in_a_minute_and_staging_never(tmp_path):
    """srun is played, and notes the options that it was given. A node may stage for hours longer than another one."""
    for name, text in (("srun", f'echo "$@" >>{tmp_path}/noted'), ("squeue", ""), ("scontrol", "echo node1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}
    written = Launch(**EXAMPLE | {"data": make_data(tmp_path), "out": tmp_path / "run", "path": tmp_path}).write()
    subprocess.run(["bash", written], env=env, check=True, timeout=limit_s())
    staging, training = (tmp_path / "noted").read_text().splitlines()
    assert " --wait=0 " in staging and " datapipe stage " in staging
    assert " --wait=60 " in training and " trainer train imagenet-resnet50 " in training
    assert "--kill-on-bad-exit=0" in staging and "--kill-on-bad-exit=0" in training
    assert " --ntasks=8 " in training


def test_what_the_user_asks_of_qsub_comes_first():
    """Of several resources of a name PBS takes the first: a user's may add cores."""
    select = "-l select=2:ncpus=32:ngpus=4:mpiprocs=1"
    lines = Launch(**EXAMPLE, scheduler="pbs", options=(select,)).render().splitlines()
    assert [line for line in lines if "select=" in line] == [f"#PBS {select}", "#PBS -l select=2:ngpus=4:mpiprocs=1"]
