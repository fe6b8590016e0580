"""What the trainer's tests share: small packed data, a small recipe, and child processes."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from datapipe.packing import PackOptions, pack
from tests.ports import free_ports
from tests.processes import Process, ProcessServer, Ranks, clean_environment, skip_report
from tests.trainer.runs import setting

NUM_TRAIN, NUM_VAL = 330, 77  # neither divides by a batch size used here
BATCH_SIZE = 32

RECIPE = f"""
[data]
size = 16
mean = [0.3]
std = [0.3]
crop = "pad"
pad = 2
threads = 1
[model]
name = "resnet8"
[optimizer]
lr = 0.05
momentum = 0.9
weight_decay = 1e-4
[schedule]
name = "step"
milestones = [0.9]
gamma = 0.5
[train]
epochs = 3
batch_size = {BATCH_SIZE}
log_every = 1
"""


@pytest.fixture(autouse=True)
def _hide_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """From torch, as from the children below; else a run is refused where a driver has GPUs that torch does not see."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(autouse=True)
def _no_reports(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """At the end of trainings in this process, unless a test has `real_reports`: one takes longer than the training."""
    trains_here = "trainer.run.run" in sys.modules or "alone" in request.fixturenames
    if trains_here and "real_reports" not in request.fixturenames:
        monkeypatch.setattr("trainer.run.run.report_run", skip_report)


@pytest.fixture
def real_reports() -> None:
    """For tests of the report that a training in this process ends with."""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """For runs in this process: one rank, whatever has launched the tests."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def go(alone: None, packed: Path, recipe_file: Path, tmp_path: Path):
    """go("train.epochs=1", …, resume=False, data=…) -> exit code of a run in tmp_path/run, in this process."""
    from trainer.config.recipe import load_recipe
    from trainer.run.run import RunOptions, run

    def _go(*changes: str, resume: bool = False, data: Path = packed) -> int:
        return run(load_recipe(str(recipe_file), changes), data, tmp_path / "run", RunOptions(resume))

    return _go


@pytest.fixture
def cli(alone: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """cli("train", recipe, …) -> exit code, output and errors of a `trainer` command in this process."""
    from trainer.cli import main

    def _cli(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["trainer", *map(str, words)])
        code = main()
        return code, *capsys.readouterr()

    return _cli


def write_idx(folder: Path, stem: str, images: np.ndarray, labels: np.ndarray) -> None:
    header = struct.pack(">HBB3I", 0, 8, 3, *images.shape)
    (folder / f"{stem}-images-idx3-ubyte").write_bytes(header + images.tobytes())
    header = struct.pack(">HBBI", 0, 8, 1, len(labels))
    (folder / f"{stem}-labels-idx1-ubyte").write_bytes(header + labels.astype(np.uint8).tobytes())


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed data set of 16x16 grey images: 4 classes, told apart by which quarter is bright."""
    folder = tmp_path_factory.mktemp("quarters") / "raw"
    folder.mkdir()
    random = np.random.default_rng(0)
    for stem, count in (("train", NUM_TRAIN), ("t10k", NUM_VAL)):
        labels = np.arange(count) % 4
        images = random.integers(0, 120, (count, 16, 16), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            top, left = 8 * (label // 2), 8 * (label % 2)
            image[top : top + 8, left : left + 8] += 100
        write_idx(folder, stem, images, labels)
    pack(folder, folder.parent / "packed", PackOptions(workers=1))
    return folder.parent / "packed"


@pytest.fixture(scope="session")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "quarters.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def start(server: ProcessServer, tmp_path: Path, request: pytest.FixtureRequest):
    """Start a Python child in tmp_path: start(arg…, ranks=1, env={}) -> what has the methods of Popen.

    `torchrun`: start the ranks by it, not one by one. `prefix`: the command that it is run by. Without that, and with
    no variable that Python reads as it starts, a server forks the process; not if `fresh`. `reports`: with the report
    that a training ends with.
    """
    children = []

    def _start(
        *arguments: object,
        ranks: int = 1,
        env: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
        torchrun: bool = False,
        fresh: bool = False,
        reports: bool = False,
    ) -> subprocess.Popen | Process | Ranks:
        assert ranks == 1 or request.node.get_closest_marker("ranks"), "this test needs @pytest.mark.ranks"
        environment = clean_environment(**env or {})
        words = [*map(str, arguments)]
        if torchrun:
            launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", free_port()]
            words, ranks = [*launcher, *words], 1
        places = each_rank(ranks, LOCAL_WORLD_SIZE=str(ranks)) if ranks > 1 else [{}]
        for own in places:
            if fresh or prefix or server.differing_at_start(environment):
                streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
                streams |= {"text": True, "errors": "surrogateescape"}
                command = [*prefix, sys.executable, *words]
                children.append(subprocess.Popen(command, env=environment | own, cwd=tmp_path, **streams))
            else:
                children.append(server.start(*words, env=environment | own, cwd=tmp_path, reports=reports))
        return Ranks(children[-ranks:]) if ranks > 1 else children[-1]

    yield _start
    for child in children:
        if child.poll() is None:
            child.kill()
            child.communicate()


@pytest.fixture
def train(start, packed: Path, recipe_file: Path, tmp_path: Path):
    """train("run", "train.epochs=1", …, words=["--resume"]) -> what trains with these settings into tmp_path/run.

    `program`: what runs, instead of the `trainer` command. `data`: the data set. Otherwise as `start` has it.
    """

    def _train(
        name: str,
        *changes: str,
        words: Sequence[object] = (),
        program: Sequence[object] = ("-m", "trainer"),
        data: Path = packed,
        **options,
    ) -> subprocess.Popen | Process | Ranks:
        command = [*program, "train", recipe_file, "--data", data, "--out", tmp_path / name, *setting(changes), *words]
        return start(*command, **options)

    return _train


def each_rank(ranks: int, **more: str) -> list[dict[str, str]]:
    """Return the environment variables by which a launcher tells each rank its place."""
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), **more}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def free_port() -> str:
    return str(free_ports())


@pytest.fixture
def port() -> str:
    return free_port()


@pytest.fixture
def metrics():
    """metrics(run) -> the lines of its metrics.jsonl, as dicts."""
    return lambda run: [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
