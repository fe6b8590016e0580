"""Trainings by two ranks, disturbed at random moments and resumed, end with the same bits as one that was left alone.

RANDOM_KILLS is how many disturbances there are, of both trainings together; RANDOM_SEED draws the same ones again, but
not in the same step, as their moments are times. The run's folder lies on a disk of its own, which is small.
"""

from __future__ import annotations

import functools
import gzip
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from datapipe.packing import PackOptions, pack
from tests.conftest import clean_environment
from tests.ports import free_ports
from tests.processes import Process, ProcessServer, open_server
from tests.trainer.conftest import write_idx
from tests.trainer.runs import flat, same
from trainer.checkpoint import load_checkpoint
from trainer.reporting.runlog import read_run

NUM_KILLS = int(os.environ.get("RANDOM_KILLS", "12"))
RANK_TIMEOUT_S = 5
HANG_S = 120  # no rank takes so long to notice that another one is gone, whatever else the machine does
LATEST_S = 1.3  # of a disturbance, after the start; the whole training takes about twice as long, and its report, too
ROOM_BYTES = 500_000  # at most, on the full disk: less than a checkpoint takes
DISK = 'mkdir disk && mount -t tmpfs -o size=128m tmpfs disk && exec "$@"'

RECIPE = """
[data]
size = 28
mean = [0.2860]
std = [0.3530]
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
name = "onecycle"
[train]
epochs = 6
batch_size = 30
log_every = 3
checkpoint_every_steps = 5
"""
KFAC = "optimizer.preconditioner=kfac", "kfac.factor_update_steps=3", "kfac.inv_update_steps=5"
KFAC += "kfac.damping_update_steps=2", "kfac.grad_worker_fraction=0"  # each layer's state is on one rank only
AVERAGED = "ema.half_life_steps=4", "train.precise_bn_batches=1", "data.mixup=0.2"
TRAININGS = {"sgd": AVERAGED, "kfac": KFAC}
# By kind, the exit codes. 1: the rank has noticed that the other is gone, or the disk is full; 143: SIGTERM, once the
# training has begun, stops both; -SIGKILL: also that of a rank which the test ends, as a launcher would.
ALLOWED = {
    "kill one": {1, -signal.SIGKILL},
    "kill all": {-signal.SIGKILL},
    "terminate": {1, 143, -signal.SIGTERM, -signal.SIGKILL},
    "fill disk": {1},
    "stop one": {1, -signal.SIGKILL},
}

pytestmark = [pytest.mark.slow, pytest.mark.ranks]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kills")


@pytest.fixture(scope="module")
def data(folder: Path, sample_dir: Path) -> Path:
    """A slice of the real sample: 480 training and 120 test images."""
    (folder / "raw").mkdir()
    for stem, count in (("train", 480), ("t10k", 120)):
        pixels = gzip.decompress((sample_dir / f"{stem}-images-idx3-ubyte.gz").read_bytes())
        labels = gzip.decompress((sample_dir / f"{stem}-labels-idx1-ubyte.gz").read_bytes())
        images = np.frombuffer(pixels, np.uint8, 784 * count, offset=16).reshape(count, 28, 28)
        write_idx(folder / "raw", stem, images, np.frombuffer(labels, np.uint8, count, offset=8))
    pack(folder / "raw", folder / "data", PackOptions(workers=1))
    return folder / "data"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ProcessServer]:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root, and unshare, to mount a small disk")
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces are not allowed here")
    with open_server(clean_environment(), folder, ["unshare", "-m", "sh", "-c", DISK, "sh"]) as server:
        yield server


class Training:
    """A training in `disk/NAME`, which only its ranks see by this name; `folder`: the same, for the test."""

    def __init__(self, server: ProcessServer, data: Path, home: Path, name: str, kind: str) -> None:
        self._server, self._data, self._home, self._name = server, data, home, name
        self.disk = Path(f"/proc/{server.pid}/root{home}/disk")
        self.folder = self.disk / name
        self._words = [word for change in TRAININGS[kind] for word in ("--set", change)]
        (home / "recipe.toml").write_text(RECIPE)

    def start(self, rank_timeout_s: float) -> list[Process]:
        line = ["-m", "trainer", "train", self._home / "recipe.toml", "--data", self._data, "--resume"]
        line += ["--out", f"disk/{self._name}", "--rank-timeout", rank_timeout_s, *self._words]
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports())}
        ranks = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        return [self._server.start(*line, env=clean_environment(**rank), cwd=self._home) for rank in ranks]

    def result(self) -> dict[str, object]:
        """All that the last and the best checkpoint hold, and the lines of the metrics, except times."""
        values = {}
        for file in ("checkpoint.pt", "best.pt"):
            content = load_checkpoint(self.folder / file)
            for part in content.keys() - {"clock", "metrics_bytes", "metrics_digest"}:
                values |= {f"{file} {part}{key}": value for key, value in flat(content[part])}
        metrics = read_run(self.folder)
        for line in (*metrics.train, *metrics.epochs):
            values |= {f"{line['event']} {line['step']} {key}": value for key, value in line.items()}
        times = "elapsed_s", "time_s", "images_per_s", "written_at"
        return {key: value for key, value in values.items() if not key.endswith(times)}


def disturb(kind: str, ranks: list[Process], draw: random.Random, disk: Path) -> None:
    victim = draw.choice(ranks)
    match kind:
        case "kill one":
            victim.kill()
        case "kill all":
            for rank in ranks:
                rank.kill()
        case "terminate":
            for rank in draw.choice(([victim], ranks)):
                rank.terminate()
        case "stop one":
            victim.send_signal(signal.SIGSTOP)
        case "fill disk":
            room = draw.randrange(ROOM_BYTES)
            with suppress(OSError), open(disk / "fill", "wb", buffering=0) as file:
                while True:
                    status = os.statvfs(disk)
                    left = status.f_bavail * status.f_frsize - room
                    if left <= 0:
                        break
                    file.write(bytes(min(left, 1 << 20)))


def wait_for_end(ranks: list[Process], has_begun: bool) -> None:
    """Those that notice end by themselves, once the training has begun; before, a launcher would end them."""
    deadline = time.monotonic() + (HANG_S if has_begun else 1)
    while time.monotonic() < deadline:
        ended = [rank.poll(0.05) is not None for rank in ranks]
        if all(ended) or (any(ended) and all(end or is_stopped(rank) for rank, end in zip(ranks, ended, strict=True))):
            break
    else:
        assert not has_begun, f"a rank hangs: {[rank.said() for rank in ranks]}"
    for rank in ranks:
        rank.kill()


def is_stopped(rank: Process) -> bool:
    return Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def train_disturbed(training: Training, draw: random.Random, most: int) -> list[tuple[str, str]]:
    """Train to the end, with up to `most` disturbances; return of what kind, and when, were those that ended it."""
    events: list[tuple[str, str]] = []
    while True:
        kind = draw.choice([*ALLOWED]) if len(events) < most else ""
        ranks = training.start(RANK_TIMEOUT_S if kind else HANG_S)
        deadline = time.monotonic() + (draw.uniform(0, LATEST_S) if kind else HANG_S)
        while time.monotonic() < deadline and None in [rank.poll() for rank in ranks]:
            time.sleep(0.002)
        has_begun = "2 ranks, precision" in ranks[0].said()[1]
        if kind:
            disturb(kind, ranks, draw, training.disk)
        wait_for_end(ranks, has_begun or kind in ("", "fill disk"))
        (training.disk / "fill").unlink(missing_ok=True)
        ends = [(*rank.communicate(), rank.returncode) for rank in ranks]
        said = "\n".join(f"{kind}: {code}\n{out}{err}" for out, err, code in ends)
        # Python prints and drops what the handler of SIGTERM raises, where that interrupts one of its own callbacks.
        assert "Traceback" not in said or (kind == "terminate" and "Exception ignored in" in said), said
        if ranks[0].returncode == 0:
            return events
        assert {code for _, _, code in ends} <= {0} | ALLOWED.get(kind, set()), said
        is_saving = training.folder.exists() and any(training.folder.glob(".checkpoint*"))
        events.append((kind, "saving" if is_saving else "training" if has_begun else "starting"))
        print(*events[-1], flush=True)


@pytest.mark.parametrize("optimizer", TRAININGS)
def test_random_kills_leave_no_trace(server, data, folder, optimizer):
    seed = int(os.environ.get("RANDOM_SEED", random.randrange(10**6)))
    print(f"RANDOM_SEED={seed}, {optimizer}")
    make = functools.partial(Training, server, data, folder, kind=optimizer)
    whole = make(name=optimizer)
    assert train_disturbed(whole, random.Random(), most=0) == []
    expected, draw, events, num_trainings = whole.result(), random.Random(seed), [], 0
    while len(events) < NUM_KILLS // len(TRAININGS):
        num_trainings += 1
        training = make(name=f"{optimizer}-{num_trainings}")
        new = train_disturbed(training, draw, NUM_KILLS // len(TRAININGS) - len(events))
        result = training.result()
        assert result.keys() == expected.keys()
        different = [key for key in expected if not same(result[key], expected[key])]
        assert different[:9] == [], f"after {new}: {len(different)} differ"
        events += new
        shutil.rmtree(training.folder)
    print(f"{num_trainings} trainings, {len(events)} disturbances:")
    for event, count in sorted(Counter(events).items()):
        print(count, *event)
