"""A packer in a process of its own: `python -m benchmarks.peers.pack pack|check|try MODULE [JOB]`.

Answers with a line of JSON. `pack`: wall_s and cpu_s of the packing alone, of this process and its children, synced,
without start-up and imports. `check`: what the packed images are, as `packing.summary` gives it. `try`, without a job:
the same of a few images made for it, or an error if they are not what was packed; of a MODULE that only loads, their
labels.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import open_answers, timed
from benchmarks.peers import PEERS, Task
from benchmarks.peers.packing import Job, read_files, summary

TRIED_IMAGES, TRIED_CLASSES = 20, 3


def tried(name: str, module) -> dict:
    """Pack a few images and read them back, or load them. Raises ValueError when something else comes back."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "images", "train"), Path(folder, "out")
        for i in range(TRIED_IMAGES):
            path = source / str(i % TRIED_CLASSES) / f"{i:02}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((40, 30), 10 + i).convert("RGB").save(path)
        if hasattr(module, "pack"):
            out.mkdir()
            job = Job(str(source), str(out), resize=False, workers=2)
            module.pack(job)
            packed, read = summary(read_files(source)), summary(module.read(job))
        else:
            packed = {"labels": sorted(label for _, label in read_files(source))}
            read = {"labels": loaded_labels(name, module, Path(folder))}
    if packed != read:
        raise ValueError(f"packed {packed}, read {read}")
    return read


def loaded_labels(name: str, module, corpus: Path) -> list[int]:
    data = next(peer.data for peer in PEERS.values() if peer.module == name)
    task = Task(size=16, channels=3, crop="random_resized", batch_size=8)
    batches = module.open_epochs(corpus / data / "train", task)(0)
    return sorted(label for _, labels_B in batches for label in labels_B.tolist())


def sync_files(folder: Path) -> None:
    """Have the disk hold what was written, of those who do not see to that themselves."""
    for path in folder.rglob("*"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def main() -> int:
    action, name, *arguments = sys.argv[1:]
    tell = open_answers()
    module = importlib.import_module(f"benchmarks.peers.{name}")
    if action == "try":
        answer = tried(name, module)
    else:
        job = Job(**json.loads(arguments[0]))
        if action == "pack":
            with timed() as answer:
                module.pack(job)
                sync_files(Path(job.out))
        else:
            answer = summary(module.read(job))
    tell(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
