"""`trainer repeat` as a process, with trainings of its own: to the end, killed and continued, stopped, refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from datapipe.errors import SettingError
from datapipe.packing import PackOptions, pack
from tests.processes import ROOT
from tests.trainer.runs import finish, wait_for_step
from tests.waiting import limit_s, wait_until
from trainer.config.recipe import load_recipe
from trainer.measuring.repeat import Repeats, repeat, start_training
from trainer.measuring.runs import settings_alike

CHILDREN = Path(__file__).parent / "children"
REACHED = ("--set", "train.target_accuracy=0.01", "--set", "train.epochs=1")


@pytest.fixture
def again(start, packed, recipe_file, tmp_path):
    """again("runs", "--seeds", 2, …) -> what starts `trainer repeat` into tmp_path/runs, as `start` does.

    Its trainings are forked. `as_users_do`: they are new interpreters. `held_at`: the step after which each waits for
    a signal.
    """

    def _again(name, *arguments, as_users_do=False, held_at=None, **options):
        if held_at is not None:
            options["env"] = {"HELD_AT": str(held_at)}
        if held_at is not None and as_users_do:
            shutil.copy(CHILDREN / "held.py", tmp_path / "sitecustomize.py")
            options["env"]["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
        command = ["-m", "trainer"] if as_users_do else [CHILDREN / "repeat_of_forks.py"]
        command += ["repeat", recipe_file, "--data", packed, "--out", tmp_path / name, "--device", "cpu"]
        return start(*command, *arguments, **options)

    return _again


@pytest.fixture
def plan(packed, recipe_file, tmp_path, alone):
    """plan(num_seeds=2, …) -> Repeats into tmp_path/runs."""
    return lambda **its: Repeats(**{"recipe": str(recipe_file), "data": packed, "out": tmp_path / "runs"} | its)


@pytest.fixture
def fake(plan, monkeypatch):
    """fake({seed: (exit code, status)}) -> what `repeat` returns of trainings that only write how they ended.

    An interrupted one has what interrupted it as a third.
    """

    def _fake(endings: dict[int, tuple[int, str]], **its):
        def end(command):
            seed = int(command[-1].removeprefix("train.seed="))
            code, status, *stopped_by = endings[seed]
            header = {"event": "run", "format": 1, "recipe": recipe.model_dump(mode="json"), "world_size": 1}
            header["recipe"]["train"]["seed"] = seed
            last = {"event": "end", "status": status, "accuracy": 0.5, "elapsed_s": 1.0, "images_per_s": 9.0}
            lines = [header, last | {"stopped_by": stopped_by[0] if stopped_by else None, "written_at": time.time()}]
            if status:
                folder = Path(command[command.index("--out") + 1])
                (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            return SimpleNamespace(wait=lambda: code)

        monkeypatch.setattr("trainer.measuring.repeat.start_training", end)
        return repeat(plan(num_seeds=len(endings), **its))

    recipe = load_recipe(plan().recipe)
    return _fake


def read(folder: Path) -> dict:
    return json.loads((folder / "repeat.json").read_text())


def test_each_seed_once(again, tmp_path, metrics, command):
    code, out, err = finish(again("runs", "--seeds", 2, *REACHED, "--set", "train.seed=7", "--json"))
    assert code == 0, err
    record = read(tmp_path / "runs")
    assert json.loads(out) == {key: value for key, value in record.items() if key != "settings"}
    assert [(run["name"], run["seed"], run["status"]) for run in record["runs"]] == [
        ("seed-7", 7, "target_reached"),
        ("seed-8", 8, "target_reached"),
    ]
    ends = [metrics(tmp_path / "runs" / name)[-1] for name in ("seed-7", "seed-8")]
    mean = sum(end["time_to_target_s"] for end in ends) / 2
    assert record["means"]["time_to_target_s"]["mean"] == pytest.approx(mean)
    attempt = record["runs"][0]["attempts"][0]
    assert (attempt["exit_code"], attempt["ranks"], attempt["num_classes"]) == (0, 1, 4)
    assert attempt["wall_s"] > ends[0]["elapsed_s"] and attempt["cores"] >= 1
    assert record["settings"]["set"][-1] == "train.seed=7" and record["settings"]["num_seeds"] == 2
    assert record["versions"][0]["torch"] and record["hardware"][0]["device"].startswith("cpu (")
    # Another seed is only that one; it is a table now.
    before = (tmp_path / "runs" / "seed-7" / "metrics.jsonl").stat().st_mtime_ns
    code, out, err = finish(again("runs", "--seeds", 3, *REACHED, "--set", "train.seed=7"))
    assert code == 0, err
    assert (tmp_path / "runs" / "seed-7" / "metrics.jsonl").stat().st_mtime_ns == before
    assert "seed 7 is complete" in err and "seed 9: " in err
    assert "3 of 3 reached" in out and "95 % interval" in out
    # And what it has made can be compared.
    same = shutil.copytree(tmp_path / "runs", tmp_path / "same")
    compared = command("trainer", "compare", tmp_path / "runs", same, "--json")
    figures = json.loads(compared.stdout)["figures"]
    assert [figure["value"] for figure in figures] == [1, 1, 1, 1, 0] and figures[0]["low"] < 1 < figures[0]["high"]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 138, marks=pytest.mark.slow),
    ],
)
def test_stopped_and_continued(again, tmp_path, metrics, number, code):
    """The training saves a checkpoint, and no other seed begins; called again, it continues there."""
    child = again("runs", "--seeds", 2, "--set", "train.epochs=2", held_at=4)
    wait_for_step(tmp_path / "runs" / "seed-0", 4, child)
    child.send_signal(number)
    ended, out, err = finish(child)
    assert ended == code, err
    assert "Traceback" not in err
    assert "interrupted" in out and "not begun" in out and "0 of 2 finished" in out
    last = metrics(tmp_path / "runs" / "seed-0")[-1]
    assert (last["status"], last["stopped_by"]) == ("interrupted", "SIGTERM")
    if number == signal.SIGTERM:
        ended, out, err = finish(again("runs", "--seeds", 2, "--set", "train.epochs=2"))
        assert ended == 0, err
        record = read(tmp_path / "runs")
        assert [run["num_resumes"] for run in record["runs"]] == [1, 0]
        assert [line["exit_code"] for line in record["runs"][0]["attempts"]] == [143, 0]
        assert "seed-0 was resumed 1 time" in out


@pytest.mark.slow
@pytest.mark.parametrize("as_users_do", [True, False])
def test_killed_and_continued(again, tmp_path, metrics, as_users_do):
    """A training, whose repeat is gone, saves and ends. One that was killed as well continues from its checkpoint."""
    every = ("--set", "train.checkpoint_every_steps=3", "--set", "train.epochs=2")
    child = again("runs", "--seeds", 1, *every, as_users_do=as_users_do, held_at=7)
    wait_for_step(tmp_path / "runs" / "seed-0", 7, child)
    (training,) = map(int, Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split())
    child.kill()
    if not as_users_do:
        os.kill(training, signal.SIGKILL)
    finish(child)  # and the training, which has the same pipe
    assert (metrics(tmp_path / "runs" / "seed-0")[-1].get("status") == "interrupted") == as_users_do
    code, _, err = finish(again("runs", "--seeds", 1, *every))
    assert code == 0, err
    lines = metrics(tmp_path / "runs" / "seed-0")
    assert [line["step"] for line in lines if line["event"] == "train"] == list(range(1, 21))
    assert read(tmp_path / "runs")["runs"][0]["num_resumes"] == 1


def test_elements_of_an_array_job(again, tmp_path):
    """Each trains with its own seed; both at the same time."""
    children = [again("runs", "--seeds", 2, *REACHED, env={"SLURM_ARRAY_TASK_ID": str(index)}) for index in (0, 1)]
    for child in children:
        code, _, err = finish(child)
        assert code == 0, err
    assert [run["status"] for run in read(tmp_path / "runs")["runs"]] == ["target_reached"] * 2
    code, _, err = finish(again("runs", "--seeds", 2, env={"SLURM_ARRAY_TASK_ID": "2"}))
    assert code == 2 and "--index 2: is out of range; allowed: 0 to 1" in err


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_are_stopped_and_continued(again, tmp_path, metrics):
    child = again("runs", "--seeds", 1, "--ranks", 2, as_users_do=True, held_at=4)
    wait_for_step(tmp_path / "runs" / "seed-0", 4, child)
    child.send_signal(signal.SIGUSR1)
    code, _, err = finish(child)
    assert code == 138, err
    assert metrics(tmp_path / "runs" / "seed-0")[-1]["status"] == "interrupted"
    code, _, err = finish(again("runs", "--seeds", 1, "--ranks", 2, as_users_do=True))
    assert code == 0, err
    lines = metrics(tmp_path / "runs" / "seed-0")
    assert [line["world_size"] for line in lines if line["event"] in ("run", "resume")] == [2, 2]
    assert lines[-1]["status"] == "completed"


def test_what_missed_or_failed_is_1_and_the_others_are_trained(fake):
    group, code = fake({0: (1, "target_missed"), 1: (1, "failed"), 2: (1, ""), 3: (-9, ""), 4: (0, "target_reached")})
    assert code == 1
    statuses = ["target_missed", "failed", "failed at its start", "failed at its start", "target_reached"]
    assert [outcome.status for outcome in group.outcomes] == statuses
    assert [outcome.attempts[0]["exit_code"] for outcome in group.outcomes] == [1, 1, 1, 137, 0]


@pytest.mark.parametrize("code", [2, 75])
def test_others_would_fare_no_better(fake, code):
    group, ended = fake({0: (0, "completed"), 1: (code, ""), 2: (0, "completed")})
    assert ended == code
    assert [outcome.status for outcome in group.outcomes] == ["completed", "failed at its start", "not begun"]


def test_what_failed_is_tried_again_and_told(fake, tmp_path):
    assert fake({0: (1, "failed")})[1] == 1
    group, code = fake({0: (0, "completed")})
    assert code == 0
    assert [line["exit_code"] for line in group.outcomes[0].attempts] == [1, 0]
    assert fake({0: (1, "failed")})[1] == 0  # it is not started


def test_time_that_is_over_is_told_by_torchrun_as_a_failure(fake):
    group, ended = fake({0: (1, "interrupted", "time"), 1: (0, "completed")})
    assert ended == 75 and [outcome.status for outcome in group.outcomes] == ["interrupted", "not begun"]
    assert fake({0: (1, "interrupted", "SIGTERM"), 1: (0, "completed")})[1] == 1
    assert fake({0: (75, "interrupted", "time"), 1: (0, "completed")})[1] == 75
    for code in (1, 2):  # refused before it could write how it ended
        assert fake({0: (code, ""), 1: (0, "completed")})[1] == code


def test_a_users_own_trainer_py_is_not_what_trains(tmp_path, monkeypatch):
    (tmp_path / "trainer.py").write_text("raise SystemExit(99)")
    monkeypatch.chdir(tmp_path)
    assert start_training([sys.executable, "-m", "trainer", "--version"]).wait() == 0


def test_commands(plan, monkeypatch):
    for name in ("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    line = plan(ranks=4, launcher="srun", changes=("train.epochs=1",), stage=Path("/local/x")).command(3)
    assert line[:4] == ["srun", "--ntasks", "4", sys.executable]
    assert line[-4:] == ["--set", "train.epochs=1", "--set", "train.seed=3"]
    assert line[line.index("--stage") + 1] == "/local/x" and "--resume" in line
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "16")
    assert plan(ranks=4, launcher="srun").command(3)[3:5] == ["--cpus-per-task", "16"]
    assert "torch.distributed.run" in plan(ranks=2).command(0)
    assert "torch.distributed.run" not in plan(ranks=1).command(0)


@pytest.mark.parametrize(
    ("its", "words"),
    [
        ({"num_seeds": 0}, "--seeds: 0 is out of range"),
        ({"num_seeds": -1}, "--seeds: -1 is out of range"),
        ({"ranks": 0}, "--ranks: 0 is out of range"),
        ({"ranks": 3}, "--ranks 3: train.batch_size, 32, is not a multiple of it"),
        ({"ranks": 64}, "--ranks 64: train.batch_size, 32"),
        ({"launcher": "mpirun"}, "--launcher: 'mpirun' is not one of torchrun, srun"),
        ({"recipe": "nothing"}, "recipe 'nothing' is not a file"),
        ({"changes": ("train.seed=2147483647",)}, "--seeds 5: the last seed would be 2147483651"),
    ],
)
def test_wrong_use(plan, tmp_path, its, words):
    with pytest.raises(SettingError, match=words):
        repeat(plan(**its))
    assert not (tmp_path / "runs").exists()


def test_several_processes_of_a_launcher(plan, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match="start it once, and give it --ranks"):
        repeat(plan())


def test_in_a_job_of_two_nodes_srun_uses_both(fake, monkeypatch):
    """From the batch script, which runs on one of them; torchrun would leave the other idle."""
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    endings = {0: (0, "target_reached")}
    with pytest.raises(SettingError, match="this job has 2 nodes"):
        fake(endings)
    group, code = fake(endings, launcher="srun")
    assert code == 0 and group.outcomes[0].attempts[-1]["nodes"] == 2


def test_out_is_a_file(plan, tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(SettingError, match="is a file"):
        repeat(plan())


def test_out_is_a_run_or_lies_in_the_data_set(fake, plan, tmp_path, packed):
    assert fake({0: (0, "completed")})[1] == 0
    with pytest.raises(SettingError, match="is the folder of a run"):
        repeat(plan(out=tmp_path / "runs" / "seed-0"))
    with pytest.raises(SettingError, match="lies in the data set"):
        repeat(plan(out=packed / "runs"))
    assert not (packed / "runs").exists()


def test_what_a_recipe_says_of_itself_may_differ():
    assert settings_alike({"published": "91 %", "source": "x", "train": {"seed": 1}}) == settings_alike({})


def test_out_holds_another_recipes(fake, plan):
    assert fake({0: (0, "completed")})[1] == 0
    with pytest.raises(SettingError, match="seed-0 is a run of another recipe, or of other settings"):
        repeat(plan(changes=("optimizer.lr=0.5",)))
    with pytest.raises(SettingError, match="seed-0 is a run of another recipe"):
        repeat(plan(recipe="fashion-mnist-resnet8"))


def test_out_holds_runs_on_other_data(fake, plan, tmp_path, sample_dir):
    assert fake({0: (0, "completed")})[1] == 0
    pack(sample_dir, tmp_path / "other", PackOptions(workers=1))
    with pytest.raises(SettingError, match="seed-0 was trained on another data set"):
        repeat(plan(data=tmp_path / "other"))


def test_no_seeds(command, packed, tmp_path):
    refused = command("trainer", "repeat", "fashion-mnist-resnet8", "--data", packed, "--out", tmp_path, "--seeds", "0")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "error: --seeds: 0 is out of range; allowed: whole numbers from 1" in refused.stderr


@pytest.fixture
def scaling(packed, recipe_file, tmp_path):
    """scaling("--ranks", "1 2", …) -> Popen of tools/scaling.sh into tmp_path/scaling."""
    (tmp_path / "bin").mkdir()
    for name, words in (("trainer", "-m trainer"), ("python", "")):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        program.chmod(0o755)
    sizes = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    environment = os.environ | sizes | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}

    def _scaling(*arguments, **more):
        line = ["bash", ROOT / "tools" / "scaling.sh", recipe_file, "--data", packed, "--out", tmp_path / "scaling"]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([*map(str, line), *arguments], env=environment | more, **streams)

    return _scaling


def test_weak_scaling_keeps_the_batch_of_a_rank(scaling, tmp_path):
    for name in ("trainer", "python"):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/{name}-noted\n')
    child = scaling("--ranks", "1 2", "--times", "1", "--weak", "24", "--set", "train.epochs=1")
    assert (child.communicate(timeout=limit_s())[1], child.returncode) == ("", 0)
    lines = (tmp_path / "trainer-noted").read_text().splitlines()
    assert ["train.epochs=1 --set train.batch_size=24 --out" in lines[0], len(lines)] == [True, 2]
    assert "--set train.batch_size=48 --out" in lines[1] and "--ranks 2" in lines[1]
    for value in ("0", "x", "--data"):
        child = scaling("--weak", value)
        assert "--weak" in child.communicate(timeout=limit_s())[1] and child.returncode == 2


@pytest.mark.slow
@pytest.mark.ranks
def test_scaling_over_ranks(scaling, tmp_path):
    """On 1 and 2 ranks, twice each; 3 do not divide the batch, and are in the table as what failed."""
    child = scaling("--ranks", "1 2 3", "--times", "2", "--device", "cpu", "--set", "train.epochs=1")
    out, err = child.communicate(timeout=limit_s(480))
    assert child.returncode == 1, err
    assert "--ranks 3: train.batch_size, 32, is not a multiple of it" in err
    one, two, three = out.splitlines()[1:]
    assert (one.split()[:3], two.split()[:3], three.split()[0]) == (["1", "1", "2"], ["2", "1", "2"], "3")
    assert "100" in one and "failed before it began" in three
    assert {path.name for path in (tmp_path / "scaling").iterdir()} == {
        *(f"ranks-{ranks}" for ranks in (1, 2, 3)),
        *(f"scaling.{suffix}" for suffix in ("txt", "csv", "json", "png", "pdf")),
    }
    shutil.rmtree(tmp_path / "scaling" / "ranks-3")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "scaling").rglob("metrics.jsonl")}
    assert len(before) == 4
    child = scaling("--ranks", "1 2", "--times", "2", "--device", "cpu", "--set", "train.epochs=1")
    assert child.communicate(timeout=limit_s()) and child.returncode == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_scaling_explains_itself(scaling):
    out, err = scaling("--help").communicate(timeout=limit_s())
    assert "bash tools/scaling.sh RECIPE --data DIR --out DIR" in out and err == "" and "set -e" not in out


def test_scaling_is_stopped(scaling, tmp_path):
    """The training gets SIGTERM and is waited for, and no other begins. `trainer` is played."""
    (tmp_path / "bin" / "trainer").write_text(
        f"""#!/bin/sh
trap 'kill $!; echo stopped >>{tmp_path}/played; exit 143' TERM
(echo "$@" >>{tmp_path}/played; exec sleep infinity) & # which a signal ends from then on: its traps are its own
wait
"""
    )
    child = scaling("--ranks", "1", "--times", "2", "--device", "cpu")
    wait_until((tmp_path / "played").exists, child)
    child.terminate()
    child.communicate(timeout=limit_s())
    assert child.returncode == 143
    begun, ended = (tmp_path / "played").read_text().splitlines()
    assert begun.endswith("--ranks 1 --index 0") and ended == "stopped"


def test_scaling_under_slurm(scaling, tmp_path):
    """What is handed to sbatch: a job for each number of ranks, and one for the table after them."""
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/jobs\nwc -l < {tmp_path}/jobs\n')
    sbatch.chmod(0o755)
    child = scaling("--ranks", "1 4", "--slurm", "--set", "train.epochs=1", SBATCH="sbatch --account=abc")
    out, err = child.communicate(timeout=limit_s())
    assert child.returncode == 0, err
    one, four, table = (tmp_path / "jobs").read_text().splitlines()
    assert "--account=abc" in one and "--ntasks=1 " in one and "--ntasks=4 " in four
    assert "--set train.epochs=1" in four and "--ranks 4 --launcher srun" in four and "--seeds 3" in four
    assert "--dependency=afterany:1:2" in table and "trainer.measuring.scaling" in table
    assert "jobs 1 2 3" in out


@pytest.mark.parametrize(
    "arguments", [("--ranks", "0"), ("--ranks", ""), ("--times", "0"), ("--times", "x"), ("--out",)]
)
def test_wrong_use_of_scaling(scaling, tmp_path, arguments):
    child = scaling(*arguments)
    assert child.communicate(timeout=limit_s())[1] and child.returncode == 2
    assert not (tmp_path / "scaling").exists()
