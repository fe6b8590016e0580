"""Does a training of two ranks end with the same bits however often it is disturbed and resumed?

    python -m benchmarks.bench_random_kills [--kills 100] [--seed 1]

ResNet-8 on a slice of Fashion-MNIST, two ranks on the processor. At random moments one rank or both are killed, asked
to end or stopped, or the disk is full: after each the training is resumed, until it ends. Its checkpoints and metrics
must then be those of a training that was left alone. The run's folder lies on a disk of its own, which is small: needs
root. The seed draws the same disturbances again, but not in the same step, as their moments are times. Prints a table,
writes results/random-kills.json.
"""

from __future__ import annotations

import argparse
import gzip
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from benchmarks import corpus
from benchmarks.measure import ROOT, WORK, command_line, environment, table, write_record
from datapipe.packing import PackOptions, pack
from tests.ports import free_ports
from tests.processes import Process, ProcessServer, clean_environment, open_server
from tests.trainer.runs import differing, outcome, setting

RANK_TIMEOUT_S = 5
HANG_S = 120  # no rank takes so long to notice that another one is gone, whatever else the machine does
POLL_S = 0.01
ROOM_BYTES = 500_000  # at most, on the full disk: less than a checkpoint takes
IMAGES, VAL_IMAGES = 480, 120
SAMPLE = ROOT / "tests" / "data" / "fashion-mnist-sample"
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
# training has begun, stops both; -SIGKILL: also that of a rank which this benchmark ends, as a launcher would.
ALLOWED = {
    "kill one": {1, -signal.SIGKILL},
    "kill all": {-signal.SIGKILL},
    "terminate": {1, 143, -signal.SIGTERM, -signal.SIGKILL},
    "fill disk": {1},
    "stop one": {1, -signal.SIGKILL},
}
MOMENTS = "starting", "training", "saving"


def write_slice(folder: Path) -> Path:
    """Write the first images of the sample of Fashion-MNIST, as IDX files; return their folder."""
    folder.mkdir()
    for stem, count in (("train", IMAGES), ("t10k", VAL_IMAGES)):
        for name in (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte"):
            content = gzip.decompress((SAMPLE / f"{name}.gz").read_bytes())
            (folder / name).write_bytes(corpus.first_items(content, count))
    return folder


class Rank:
    """A process of a training, whose output goes to a file."""

    def __init__(self, server: ProcessServer, line: list[object], environ: dict[str, str], home: Path) -> None:
        self.output = home / f"rank-{environ['RANK']}.txt"
        with self.output.open("w") as file:
            self.process: Process = server.start(
                *line, env=clean_environment(**environ), cwd=home, stdout=file, stderr=subprocess.STDOUT
            )

    def said(self) -> str:
        """Return what it has printed so far."""
        return self.output.read_text(errors="replace")

    def is_stopped(self) -> bool:
        status = Path(f"/proc/{self.process.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] == "T"


class Training:
    """A training in `disk/NAME`, which only its ranks see by this name; `folder`: the same, for this process."""

    def __init__(self, server: ProcessServer, data: Path, home: Path, name: str, kind: str) -> None:
        self._server, self._data, self._home, self._name = server, data, home, name
        self.disk = Path(f"/proc/{server.pid}/root{home}/disk")
        self.folder = self.disk / name
        self._words = setting(TRAININGS[kind])
        (home / "recipe.toml").write_text(RECIPE)

    def start(self, rank_timeout_s: float) -> list[Rank]:
        line = ["-m", "trainer", "train", self._home / "recipe.toml", "--data", self._data, "--resume"]
        line += ["--out", f"disk/{self._name}", "--rank-timeout", rank_timeout_s, *self._words]
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports())}
        places = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        return [Rank(self._server, line, place, self._home) for place in places]


def disturb(kind: str, ranks: list[Rank], draw: random.Random, disk: Path) -> None:
    """Do it to a random rank, or to all, or to the disk."""
    victim = draw.choice(ranks)
    match kind:
        case "kill one":
            victim.process.kill()
        case "kill all":
            for rank in ranks:
                rank.process.kill()
        case "terminate":
            for rank in draw.choice(([victim], ranks)):
                rank.process.terminate()
        case "stop one":
            victim.process.send_signal(signal.SIGSTOP)
        case "fill disk":
            room = draw.randrange(ROOM_BYTES)
            with suppress(OSError), open(disk / "fill", "wb", buffering=0) as file:
                while True:
                    status = os.statvfs(disk)
                    left = status.f_bavail * status.f_frsize - room
                    if left <= 0:
                        break
                    file.write(bytes(min(left, 1 << 20)))


def wait_for_end(ranks: list[Rank], has_begun: bool) -> None:
    """Wait for those that notice, which end by themselves once the training has begun; then end the others.

    Before it has begun, a launcher would end them.
    """
    deadline = time.monotonic() + (HANG_S if has_begun else 1)
    while time.monotonic() < deadline:
        ended = [rank.process.poll() is not None for rank in ranks]
        if all(ended) or (any(ended) and all(end or rank.is_stopped() for rank, end in zip(ranks, ended, strict=True))):
            break
        time.sleep(POLL_S)
    else:
        if has_begun:
            raise SystemExit(f"error: a rank hangs: {[rank.said() for rank in ranks]}")
    for rank in ranks:
        rank.process.kill()
        rank.process.wait()


def train_disturbed(training: Training, draw: random.Random, most: int, latest_s: float) -> list[tuple[str, str]]:
    """Train to the end.

    Args:
        training: The training.
        draw: Source of the disturbances.
        most: Number of disturbances that may be.
        latest_s: Time from a start to the latest disturbance, in seconds.

    Returns:
        By disturbance that ended the training, its kind and its moment.
    """
    events: list[tuple[str, str]] = []
    while True:
        kind = draw.choice([*ALLOWED]) if len(events) < most else ""
        ranks = training.start(RANK_TIMEOUT_S if kind else HANG_S)
        deadline = time.monotonic() + (draw.uniform(0, latest_s) if kind else HANG_S)
        while time.monotonic() < deadline and None in [rank.process.poll() for rank in ranks]:
            time.sleep(0.002)
        has_begun = "2 ranks, precision" in ranks[0].said()
        if kind:
            disturb(kind, ranks, draw, training.disk)
        wait_for_end(ranks, has_begun or kind in ("", "fill disk"))
        (training.disk / "fill").unlink(missing_ok=True)
        codes = [rank.process.wait() for rank in ranks]
        said = "\n".join(f"{kind}: {code}\n{rank.said()}" for rank, code in zip(ranks, codes, strict=True))
        # Python prints and drops what the handler of SIGTERM raises, where that interrupts one of its own callbacks.
        if "Traceback" in said and not (kind == "terminate" and "Exception ignored in" in said):
            raise SystemExit(f"error: a traceback: {said}")
        if codes[0] == 0:
            return events
        if not set(codes) <= {0} | ALLOWED.get(kind, set()):
            raise SystemExit(f"error: an exit code that should not be: {said}")
        is_saving = training.folder.exists() and any(training.folder.glob(".checkpoint*"))
        events.append((kind, "saving" if is_saving else "training" if has_begun else "starting"))
        print(*events[-1], flush=True)


def compare(server: ProcessServer, data: Path, home: Path, kind: str, draw: random.Random, kills: int) -> dict:
    """Train once undisturbed, then disturbed, in as many trainings as `kills` disturbances take.

    Returns:
        How many trainings it took, and how often each kind of disturbance ended one at each moment.

    Raises:
        SystemExit: A training ended with something else, or not as it should.
    """
    whole = Training(server, data, home, kind, kind)
    began = time.monotonic()
    train_disturbed(whole, draw, 0, HANG_S)
    latest_s = time.monotonic() - began
    expected, events, num_trainings = outcome(whole.folder), [], 0
    while len(events) < kills:
        num_trainings += 1
        training = Training(server, data, home, f"{kind}-{num_trainings}", kind)
        new = train_disturbed(training, draw, kills - len(events), latest_s)
        different = differing(outcome(training.folder), expected)
        if different:
            raise SystemExit(f"error: after {new}, {len(different)} values differ, such as {different[:9]}")
        events += new
        shutil.rmtree(training.folder)
    counts = Counter(events)
    ended = {disturbance: {moment: counts[disturbance, moment] for moment in MOMENTS} for disturbance in ALLOWED}
    return {"trainings": num_trainings, "ended": ended}


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--kills", type=int, default=100, help="disturbances of both trainings (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the disturbances (default: %(default)s)")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    described = environment()
    if os.geteuid() or shutil.which("unshare") is None:
        raise SystemExit("error: this benchmark needs root, and unshare, to mount a small disk")
    figures = {}
    WORK.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kills-", dir=WORK) as name:
        home = Path(name)
        pack(write_slice(home / "idx"), home / "data", PackOptions(workers=1))
        with open_server(clean_environment(), home, ["unshare", "-m", "sh", "-c", DISK, "sh"]) as server:
            for kind in TRAININGS:
                draw, kills = random.Random(arguments.seed), arguments.kills // len(TRAININGS)
                figures[kind] = compare(server, home / "data", home, kind, draw, kills)
    settings = {"kills": arguments.kills, "seed": arguments.seed, "rank_timeout_s": RANK_TIMEOUT_S,
                "images": IMAGES, "recipe": RECIPE, "changes": TRAININGS}  # fmt: skip
    write_record("random-kills", {"environment": described, "settings": settings, "found": figures})
    rows = [
        [f"{kind}, {disturbance}", *map(str, moments.values())]
        for kind, counted in figures.items()
        for disturbance, moments in counted["ended"].items()
    ]
    print("\n" + table(["training, disturbance", *MOMENTS], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
