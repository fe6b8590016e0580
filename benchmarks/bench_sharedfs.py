"""What is the fastest way from photographs on a slow shared filesystem to three epochs of training?

    python -m benchmarks.bench_sharedfs [--count 6000] [--rounds 3] [--peer-rounds 1] [--epochs 3] [--only WAY …]

A raw tree of photographs lies on a FUSE filesystem whose metadata operations take 5 ms, 8 at a time, and whose reads
share 200 MB/s. It is packed there as each way needs it, once, and then trained on: crops of 224 pixels, batches of 64,
and a very small network. Ours take turns, and so do the others; each run has a mount and processes of its own, and
before each epoch the kernel drops what it keeps of the files, as of a data set that is larger than memory. Needs root,
and ../shared/testbed, which makes that filesystem. Prints tables, writes results/sharedfs.json.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks import corpus
from benchmarks.measure import (
    ROOT,
    Child,
    command_line,
    environment,
    interleaved,
    out_folder,
    process,
    shown,
    summarise,
    table,
    timed,
    write_record,
)
from benchmarks.peers import Peer, Task
from benchmarks.peers.packing import PEERS_VENV, Packer, missing
from benchmarks.peers.packing import command as packing_command
from benchmarks.testbed import SlowMount
from datapipe.dataset.manifest import Manifest
from datapipe.fsio import mounted_as

TASK = Task(size=224, channels=3, crop="random_resized", batch_size=64)
DATAPIPE = [sys.executable, "-m", "datapipe"]
WAITING = 8  # processes of peers that wait for the metadata server, which has as many slots
SHARD_MIB = 32  # 16 shards of 6,000 photographs: a large data set has many, too
SPACE = 3  # times the corpus: the copy in LOCAL, that of `datapipe, local disk`, and room
LATER, FIRST = 1.05, 1.1  # targets: epochs after the first, to local speed; the first, to the cap or the decoder
COUNTED = ("metadata_calls", "read_bytes", "server_cpu_s")
RAW, TAR, WEBDATASET, FFCV = "images/train", "tar/train", "webdataset/train", "ffcv-jpg/train"


@dataclass(frozen=True)
class Way:
    """How to train. `folder`: what it reads, on the shared filesystem. `stage`: "", "before" the training, or in the
    "background". `local`: it reads a copy that was always there, without the shared filesystem.
    """

    peer: Peer
    folder: str
    workers: int = 2
    stage: str = ""
    local: bool = False
    options: dict = field(default_factory=dict)


_OURS = Peer("datapipe_loader", TAR)
LOCAL, STAGED, BACKGROUND, BLOCKS = (
    f"datapipe, {how}" for how in ("local disk", "staged", "staged in background", "unstaged, blocks")
)
WAYS = {
    # Each of its workers waits for the metadata server: two would take more than twice as long.
    "ImageFolder + Pillow": Way(Peer("imagefolder", RAW), RAW, workers=WAITING),
    "WebDataset + Pillow": Way(Peer("webdataset_pillow", WEBDATASET), WEBDATASET),
    "FFCV, jpg": Way(Peer("ffcv_loader", FFCV, "ffcv"), FFCV, options={"beyond_memory": True}),
    STAGED: Way(_OURS, TAR, stage="before"),
    BACKGROUND: Way(_OURS, TAR, stage="background", options={"order": "blocks"}),  # reads no byte twice
    BLOCKS: Way(_OURS, TAR, options={"order": "blocks"}),
    LOCAL: Way(_OURS, TAR, local=True),
}
PACKERS = {
    WEBDATASET: (f"WebDataset's ShardWriter, {WAITING} processes", Packer("pack_webdataset", workers=WAITING)),
    FFCV: (f"FFCV's DatasetWriter, {WAITING} processes", Packer("ffcv_loader", "ffcv", workers=WAITING)),
}


def packing_line(folder: str, mount: Path) -> tuple[str, list[str]]:
    """Return who packs the raw tree as a way reads it, and the command. Both are on the shared filesystem."""
    if folder == TAR:
        settings = ["--shard-mib", str(SHARD_MIB)]
        return "datapipe pack", [*DATAPIPE, "pack", str(mount / RAW), str((mount / TAR).parent), *settings]
    name, packer = PACKERS[folder]
    return name, packing_command(packer, "pack", json.dumps(asdict(packer.job(mount / RAW, mount / folder, False))))


class Contest:
    """What all ways share: the filesystem's source, its knobs, a local disk, and how often to train."""

    def __init__(self, backing: Path, place: Path, knobs: dict[str, float], epochs: int) -> None:
        self._backing, self._place, self._knobs, self._epochs = backing, place, knobs, epochs

    def mount(self) -> SlowMount:
        return SlowMount(self._backing, self._backing.with_name(f"{self._backing.name}-slow"), **self._knobs)

    def prepare(self, folder: str) -> tuple[str, dict]:
        """Pack the raw tree as `folder`. Return who did it, and what it took, start and imports included."""
        with self.mount() as mount, mount.counted() as counted:
            name, line = packing_line(folder, mount.path)
            if folder != TAR:  # which `datapipe pack` makes itself
                (self._backing / folder).mkdir(parents=True)
            figures = process(line, stderr=subprocess.DEVNULL)[1]
        return name, figures | counted

    def train(self, name: str, _round: int) -> dict[str, float]:
        """Stage, where that is the way, and train for all epochs. Return the figures.

        Python and its libraries are there before the staging begins, so that a training whose data are staged in the
        background does not find everything in place when it begins.
        """
        way, local = WAYS[name], self._place / "local"
        shutil.rmtree(local, ignore_errors=True)
        with ExitStack() as stack:
            mount = stack.enter_context(self.mount())
            shared = source = mount.path / way.folder
            options = dict(way.options)
            if way.local or way.stage == "before":
                source = local
            elif way.stage:
                options["cache"] = str(local)
            if way.local:
                shutil.copytree(self._backing / way.folder, local)
            began = time.perf_counter()
            child = stack.enter_context(training_process(way, source, options))
            child.ask("")
            figures: dict[str, float] = {"start_s": time.perf_counter() - began}
            with mount.counted() as counted, timed() as seconds:
                if way.stage:
                    words = ["--background"] if way.stage == "background" else []
                    run_quietly([*DATAPIPE, "stage", shared, local, *words])
            figures |= {"stage_s": seconds["wall_s"] if way.stage else 0.0}
            figures |= {f"stage_{key}": counted[key] for key in COUNTED}
            runs = []
            for epoch in range(self._epochs):
                if epoch and way.folder != RAW:  # whose files are opened again for each image, which drops them
                    for folder in {source, Path(options.get("cache", source))}:
                        forget(folder)
                with mount.counted() as counted:
                    answer = child.ask(epoch)
                runs.append(answer | {key: counted[key] for key in COUNTED})
            if way.stage == "background":  # so that it does not outlive its mount
                run_quietly([*DATAPIPE, "cache", "wait", local])
        shutil.rmtree(local, ignore_errors=True)
        return figures | figures_of_epochs(runs)


def training_process(way: Way, source: Path, options: dict) -> Child:
    """Start a process that trains.

    Args:
        way: How.
        source: The folder that it reads.
        options: Of its peer's `open_epochs`.

    Returns:
        what answers an empty line when everything is imported, and each number with the figures of that epoch.
    """
    python = str(PEERS_VENV / "bin" / "python") if way.peer.needs else sys.executable
    task = json.dumps(asdict(replace(TASK, workers=way.workers)))
    words = [way.peer.module, str(source), task, json.dumps(options)]
    return Child(way.peer.module, [python, "-W", "ignore", "-m", "benchmarks.peers.train", *words])


def figures_of_epochs(runs: list[dict]) -> dict[str, float]:
    """Return what epochs took: each of them, the mean of all after the first (`later_s`), and totals."""
    figures = {
        f"epoch_{epoch}_{key}": run[key]
        for key in ("wall_s", "first_batch_s", "waited_s", "metadata_calls", "read_bytes")
        for epoch, run in enumerate(runs, 1)
    }
    later_s = statistics.mean(run["wall_s"] for run in runs[1:] or runs)
    totals = {key: sum(run[key] for run in runs) for key in ("cpu_s", "server_cpu_s")}
    return figures | totals | {"later_s": later_s, "images": min(run["images"] for run in runs)}


def run_quietly(line: Sequence[str | Path]) -> None:
    """Run a command from the repository's root, without what it prints. Raises SystemExit where it fails."""
    with tempfile.TemporaryFile("w+") as output:  # no pipe: what it leaves in the background would keep it open
        done = subprocess.run(line, cwd=ROOT, stdout=output, stderr=output)
        if done.returncode:
            output.seek(0)
            raise SystemExit(f"error: {line} ended with exit code {done.returncode}: {output.read()}")


def forget(folder: Path) -> None:
    """Make the kernel drop what it keeps of the files in a folder.

    On the shared filesystem, opening a file is enough for that; elsewhere, it is advised to.
    """
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # it has got its final name
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)


def absent_ways(names: Sequence[str]) -> dict[str, str]:
    """Return the reasons why ways cannot be tried here."""
    absent = {name: reason for name in names if (reason := missing(WAYS[name].peer))}
    if BACKGROUND in names and "--background" not in process([*DATAPIPE, "stage", "--help"])[0]:
        absent[BACKGROUND] = "`datapipe stage` has no --background"
    return absent


def floors(result: dict[str, dict], data_bytes: int, mbps: float) -> dict[str, float]:
    """Return the least seconds of an epoch: the filesystem's, and those of the decoder (our loader from local disk)."""
    least = {"bandwidth_s": data_bytes / mbps / 1e6}
    if LOCAL in result:
        least["decoder_first_s"] = result[LOCAL]["epoch_1_wall_s"]["median"]
        least["decoder_later_s"] = result[LOCAL]["later_s"]["median"]
    return least


def ratios(result: dict[str, dict], least: dict[str, float]) -> dict[str, dict[str, float]]:
    """Return by how much each of our ways misses the floors: `first` and `later` epochs, 1 is none."""
    if LOCAL not in result:
        return {}
    first_s = max(least["bandwidth_s"], least["decoder_first_s"])
    return {
        name: {
            "first": result[name]["epoch_1_wall_s"]["median"] / first_s,
            "later": result[name]["later_s"]["median"] / max(least["decoder_later_s"], unstaged_s),
        }
        for name, unstaged_s in ((STAGED, 0.0), (BACKGROUND, 0.0), (BLOCKS, least["bandwidth_s"]))
        if name in result
    }


def first_and_last(its: dict[str, dict], key: str, epochs: int) -> tuple[float, float]:
    """Return a median of the first epoch, with that of staging, and of the last."""
    return its[f"stage_{key}"]["median"] + its[f"epoch_1_{key}"]["median"], its[f"epoch_{epochs}_{key}"]["median"]


def report(prepared: dict[str, dict], result: dict[str, dict], epochs: int) -> str:
    rows = [
        [name, f"{its['process_wall_s']:.1f}", f"{its['metadata_calls']:,}", f"{its['read_bytes'] / 1e6:,.0f}",
         f"{its['process_cpu_s']:.1f}", f"{its['server_cpu_s']:.1f}"]
        for name, its in prepared.items()
    ]  # fmt: skip
    text = table(["preparation", "wall s", "metadata calls", "MB read", "CPU s", "filesystem's"], rows)
    rows = []
    for name, its in result.items():
        calls = (f"{count:,.0f}" for count in first_and_last(its, "metadata_calls", epochs))
        megabytes = (f"{size / 1e6:,.0f}" for size in first_and_last(its, "read_bytes", epochs))
        seconds = (shown(its[key], 1) for key in ("stage_s", "epoch_1_first_batch_s", "epoch_1_wall_s", "later_s"))
        cpu_s = (f"{its[key]['median']:.1f}" for key in ("cpu_s", "server_cpu_s"))
        rows.append([name, *seconds, " / ".join(calls), " / ".join(megabytes), *cpu_s])
    header = ["training", "stage s", "first batch s", "epoch 1 s", "later epochs s", "metadata calls, first / last",
              "MB read", "CPU s", "filesystem's"]  # fmt: skip
    return text + "\n\n" + table(header, rows)


def main() -> int:
    parser = command_line(__doc__, count=6000, rounds=3, out=True)
    parser.add_argument("--epochs", type=int, default=3, help="of each training (default: %(default)s)")
    parser.add_argument("--peer-rounds", type=int, default=1, help="those of the others (default: %(default)s)")
    parser.add_argument("--meta-ms", type=float, default=5, help="of a metadata operation (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=8, help="metadata operations at a time (default: %(default)s)")
    parser.add_argument("--mbps", type=float, default=200, help="that all reads share (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="WAY", help="ways whose names hold one of these; no record")
    arguments = parser.parse_args()
    names = [name for name in WAYS if any(word in name for word in arguments.only or [""])]
    if not names:
        parser.error(f"--only: none of {', '.join(WAYS)} has it in its name")
    described, absent = environment(), absent_ways(names)
    for name, reason in absent.items():
        print(f"without {name}: {reason}")
    names = [name for name in names if name not in absent]

    folder = corpus.photographs(arguments.count)
    facts = corpus.describe(folder)
    place = out_folder(arguments.out, SPACE * facts["images"] * facts["mean_bytes"])
    knobs = {"meta_ms": arguments.meta_ms, "mds_slots": arguments.slots, "read_mbps": arguments.mbps}
    print(f"{facts}, LOCAL in {place} ({mounted_as(place)}), {knobs}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that it unmounts then, too
    with (
        tempfile.TemporaryDirectory(prefix="sharedfs-", dir=folder) as backing,
        tempfile.TemporaryDirectory(prefix="sharedfs-", dir=place) as local,
    ):
        shutil.copytree(folder / RAW, Path(backing) / RAW, copy_function=os.link)
        contest = Contest(Path(backing), Path(local), knobs, arguments.epochs)
        prepared = dict(
            contest.prepare(way) for way in dict.fromkeys(WAYS[name].folder for name in names) if way != RAW
        )
        ours = [name for name in names if WAYS[name].peer is _OURS]
        runs = interleaved(ours, arguments.rounds, contest.train)
        runs |= interleaved([name for name in names if name not in ours], arguments.peer_rounds, contest.train)
        tar = Path(backing) / TAR
        data_bytes = Manifest.read(tar).size_bytes if tar.exists() else facts["images"] * facts["mean_bytes"]
    result = {name: summarise(runs[name]) for name in names}
    least = floors(result, data_bytes, arguments.mbps)
    missed = ratios(result, least)
    print("\n" + report(prepared, result, arguments.epochs))
    print("\nFloors: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in least.items()))
    for name, its in missed.items():
        print(f"{name}: first epoch {its['first']:.2f} (target {FIRST}), later {its['later']:.2f} (target {LATER})")
    if not arguments.only:
        settings = {**knobs, "filesystem": mounted_as(place), "epochs": arguments.epochs, "shard_mib": SHARD_MIB}
        record = {"environment": described, "corpus": facts, "settings": settings | {"task": asdict(TASK)},
                  "rounds": arguments.rounds, "peer_rounds": arguments.peer_rounds,
                  "targets": {"first": FIRST, "later": LATER}, "floors": least,
                  "ratios": missed, "absent": absent, "prepared": prepared, "ways": result}  # fmt: skip
        print(write_record("sharedfs", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
