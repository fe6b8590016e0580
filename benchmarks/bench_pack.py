"""How fast are image files packed into shards: copied as they are, and scaled down and re-encoded?

    python -m benchmarks.bench_pack [--count 6000] [--resize-count 2000] [--rounds 5] [--only NAME ...] [--out FOLDER]

Photographs as from ImageNet, in the page cache; written to a RAM disk, and as they are to a disk as well. Every packer
is a process of its own; they take turns. What each packed is read back once and compared with the source. Prints
tables, writes results/pack.json.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks import corpus
from benchmarks.measure import WORK, command_line, compare, environment, out_folder, process, shown, table, write_record
from benchmarks.peers import packing
from benchmarks.peers.packing import PEERS_VENV, QUALITY, RESTART, SECTIONS, SHORT, Packer, read_files, summary
from datapipe.fsio import mounted_as

OURS = "datapipe, tar"
SPACE = 4  # times the corpus, free on a RAM disk that is written to
ALONE = ("wall_s", "mb_per_s", "images_per_s", "cpu_s", "images_per_cpu_s")
WHOLE = tuple(f"process_{figure}" for figure in ALONE)
SHARED_LIBRARIES = ("Pillow", "numpy", "torch", "opencv-python", "numba")  # of the peers' environment
NOTES = (
    "Figures without process_ are of the packing alone, listing the source included, start-up and imports not; for tar "
    "they are of its process. mb_per_s counts the source's bytes.",
    "datapipe checksums every image and every shard, and syncs files before it names them; of the others the files are "
    "synced in the end.",
)


class Contest:
    """One corpus, one place to write to, one environment of the peers."""

    def __init__(self, source: Path, place: Path, venv: Path) -> None:
        self._source, self._place, self._venv = source, place, venv
        self.expected = summary(read_files(source))  # this reads all files into the page cache, too

    def missing(self, packer: Packer) -> str | None:
        return packing.missing(packer, self._venv)

    def check(self, packer: Packer, resize: bool) -> None:
        """Pack once and read it back. Raises ChildProcessError, ValueError: not what the source holds."""
        with self._emptied() as folder:
            self._child(packer, "pack", folder, resize)
            packed, _ = self._child(packer, "check", folder, resize)
        keys = ("images", "labels") if resize else tuple(self.expected)
        wrong = {key: packed[key] for key in keys if packed[key] != self.expected[key]}
        if resize and not SHORT - 1 <= packed["short_sides"][0] <= packed["short_sides"][1] <= SHORT:
            wrong["short_sides"] = packed["short_sides"]
        if wrong:
            raise ValueError(f"the packed images are not those of the source: {wrong}")

    def measure(self, packer: Packer, resize: bool) -> dict:
        with self._emptied() as folder:
            alone, whole = self._child(packer, "pack", folder, resize)
            output_bytes = sum(path.stat().st_size for path in (folder / "out").rglob("*") if path.is_file())
        if packer.program:
            whole |= {f"process_{key}": value for key, value in alone.items()}
        run = {**alone, **whole, "output_bytes": output_bytes}
        for prefix in ("", "process_"):
            run[f"{prefix}mb_per_s"] = self.expected["image_bytes"] / 1e6 / run[f"{prefix}wall_s"]
            run[f"{prefix}images_per_s"] = self.expected["images"] / run[f"{prefix}wall_s"]
            run[f"{prefix}images_per_cpu_s"] = self.expected["images"] / run[f"{prefix}cpu_s"]
        return run

    def _child(self, packer: Packer, action: str, folder: Path, resize: bool) -> tuple[dict, dict]:
        job = json.dumps(asdict(packer.job(self._source, folder / "out", resize)))
        command = packing.command(packer, action, job, self._venv)
        with open(folder / "log", "w+", encoding="utf-8", errors="replace") as log:
            try:
                # Compiled modules are kept, as where it is installed: the peers' were when pip installed them.
                kept = {"TMPDIR": str(folder / "tmp"), "PYTHONDONTWRITEBYTECODE": ""}
                output, whole = process(command, stderr=log, env=os.environ | kept)
            except ChildProcessError as error:
                log.seek(0)
                said = log.read().strip().splitlines()
                raise ChildProcessError(said[-1] if said else str(error)) from None
        return json.loads(output), whole

    @contextmanager
    def _emptied(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="bench-pack-", dir=self._place, ignore_cleanup_errors=True) as folder:
            for name in ("out", "tmp"):
                Path(folder, name).mkdir()
            yield Path(folder)


def section(name: str, packers: dict[str, Packer], contest: Contest, rounds: int) -> dict:
    """Check each packer, then measure them: every run's figures and their spread; and who could not be measured."""
    resize, missing, measured = name == "resize", {}, []
    for packer_name, packer in packers.items():
        reason = contest.missing(packer)
        if reason is None:
            try:
                contest.check(packer, resize)
            except (ChildProcessError, ValueError) as error:
                reason = str(error)
        if reason is None:
            measured.append(packer_name)
            print(f"  {packer_name}: packs what the source holds", flush=True)
        elif packer.needs:
            missing[packer_name] = reason
            print(f"  {packer_name}: not measured: {reason}", flush=True)
        else:
            raise SystemExit(f"error: {packer_name}: {reason}")
    keys = (*ALONE, *WHOLE, "process_peak_bytes", "output_bytes")
    figures = compare(measured, rounds, lambda packer_name, _: contest.measure(packers[packer_name], resize), keys)
    return {"rounds": rounds, "packers": figures, "not_measured": missing}


def report(name: str, result: dict) -> str:
    packers = result["packers"]
    header = [name, "MB/s", "images/s", "images/CPU-s", "wall s", "CPU s", "whole: wall s", "CPU s", "written, MB"]
    if OURS in packers:
        header += [f"{OURS} ÷: images/s", "images/CPU-s", "whole: images/s", "images/CPU-s"]
    rows = []
    for packer, figures in packers.items():
        row = [packer, shown(figures["mb_per_s"]), shown(figures["images_per_s"]), shown(figures["images_per_cpu_s"])]
        row += [f"{figures[key]['median']:.2f}" for key in ("wall_s", "cpu_s", "process_wall_s", "process_cpu_s")]
        row.append(f"{figures['output_bytes']['median'] / 1e6:,.1f}")
        if OURS in packers:
            compared = ("images_per_s", "images_per_cpu_s", "process_images_per_s", "process_images_per_cpu_s")
            row += [f"{packers[OURS][key]['median'] / figures[key]['median']:.2f}" for key in compared]
        rows.append(row)
    return "\n".join(
        [table(header, rows), *(f"not measured: {peer}: {why}" for peer, why in result["not_measured"].items())]
    )


def chosen(only: Sequence[str]) -> dict[str, dict[str, Packer]]:
    """Return the sections, and the packers in them, whose names begin like one of `only`; all, if that is empty."""

    def is_named(name: str) -> bool:
        return any(name.lower().startswith(beginning.lower()) for beginning in only)

    sections = {
        name: {packer: how for packer, how in packers.items() if not only or is_named(name) or is_named(packer)}
        for name, packers in SECTIONS.items()
    }
    if not any(sections.values()):
        names = [*SECTIONS, *dict.fromkeys(packer for packers in SECTIONS.values() for packer in packers)]
        raise SystemExit(f"error: --only: {', '.join(only)}: none of {'; '.join(names)}")
    return {name: packers for name, packers in sections.items() if packers}


def versions(venv: Path) -> dict:
    """Return the versions of tar and of the libraries in the peers' environment."""
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    names = sorted({packer.needs for packers in SECTIONS.values() for packer in packers.values() if packer.needs})
    installed = {"tar": subprocess.run(["tar", "--version"], capture_output=True, text=True).stdout.partition("\n")[0]}
    for name in (*names, *SHARED_LIBRARIES):
        python = str(venv / "bin" / "python")
        if shutil.which(python):
            asked = subprocess.run([python, "-c", code, name], capture_output=True, text=True)
            installed |= json.loads(asked.stdout) if asked.returncode == 0 else {name: None}
    return installed


def main() -> int:
    parser = command_line(__doc__, count=6000, rounds=5, out=True)
    parser.add_argument("--resize-count", type=int, default=2000, help="of them, to resize (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these sections or packers; no record")
    parser.add_argument("--peers", type=Path, default=PEERS_VENV, help="the peers' environment (default: %(default)s)")
    arguments = parser.parse_args()

    sections = chosen(arguments.only)
    described = environment()
    results, described_corpora, filesystems = {}, {}, {}
    for name, packers in sections.items():
        folder = corpus.photographs(arguments.resize_count if name == "resize" else arguments.count)
        source = folder / "images" / "train"
        out = WORK if name == "disk" else arguments.out
        place = out_folder(out, SPACE * sum(path.stat().st_size for path in source.glob("*/*")))
        contest = Contest(source, place, arguments.peers)
        described_corpora[name] = corpus.describe(folder)
        print(f"{described_corpora[name]}, written to {place} ({mounted_as(place)})", flush=True)
        print(f"{name}: 1 checked and {arguments.rounds} measured runs of each packer", flush=True)
        filesystems[name] = mounted_as(place)
        results[name] = {"filesystem": filesystems[name]} | section(name, packers, contest, arguments.rounds)
        print("\n" + report(name, results[name]) + "\n", flush=True)
    print("Medians (smallest–largest) over the runs, of the packing alone; whole: with start-up and imports.")
    if not arguments.only:
        record = {
            "environment": described,
            "peers": versions(arguments.peers),
            "corpora": described_corpora,
            "settings": {"short": SHORT, "quality": QUALITY, "restart": RESTART, "filesystem": filesystems["copy"]},
            "notes": NOTES,
            "sections": results,
        }
        print(write_record("pack", record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
