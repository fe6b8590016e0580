"""Pack from a disk whose backing file has ended where the middle of a file lies, in a mount namespace of its own.

A read gives what comes before, and only the next one gives the kernel's own EIO. Arguments: the source, the name in it
of the file that fails, and those of `datapipe pack` behind SOURCE.
"""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
from pathlib import Path

BLOCK, KEPT = 4096, 262_144


def run(*line: object) -> None:
    subprocess.run([str(word) for word in line], check=True, stdout=subprocess.DEVNULL)


def blocks(path: Path) -> list[int]:
    """Return where on the disk the blocks of a file lie."""
    with open(path, "rb") as file:
        count = -(-os.fstat(file.fileno()).st_size // BLOCK)
        return [struct.unpack("i", fcntl.ioctl(file, 1, struct.pack("i", i)))[0] for i in range(count)]  # FIBMAP


def fail_in(source: Path, name: str, disk: Path, mount: Path) -> None:
    """Mount a copy of the source that fails in the middle of a file: that is written to the disk's end."""
    mount.mkdir()
    with open(disk, "wb") as file:
        file.truncate(24 << 20)
    run("mkfs.ext2", "-q", "-b", BLOCK, disk)
    run("mount", "-o", "loop", disk, mount)
    run("cp", "-r", source, mount / "raw")
    whole, path = (source / name).read_bytes(), mount / "raw" / name
    tail = len(whole) // BLOCK * BLOCK - 16 * BLOCK
    path.unlink()
    with open(path, "wb") as file:
        file.write(whole[:KEPT])
        file.seek(tail)
        file.write(whole[tail:])
    filler = mount / "filler"  # all that is free, but at the disk's end: so the middle lies behind all else
    filler.mkdir()
    for i in range(1000):
        try:
            (filler / str(i)).write_bytes(bytes(16 * BLOCK))
        except OSError:
            (filler / str(i)).unlink()
            break
    os.sync()
    highest = sorted(filler.iterdir(), key=lambda file: -min(blocks(file)))
    for place in highest[: (tail - KEPT) // BLOCK // 16 + 4]:
        place.unlink()
    with open(path, "r+b") as file:
        file.seek(KEPT)
        file.write(whole[KEPT:tail])
    assert path.read_bytes() == whole
    os.sync()
    middle = blocks(path)[KEPT // BLOCK : tail // BLOCK]
    others = [block for file in (mount / "raw").rglob("*.*") if file != path for block in blocks(file)]
    assert max([0, *others]) < min(middle), "the disk is laid out otherwise"
    run("umount", mount)
    run("mount", "-o", "loop,ro", disk, mount)
    os.truncate(disk, min(middle) * BLOCK)
    Path("/proc/sys/vm/drop_caches").write_text("3")


if __name__ == "__main__":
    source, name, *rest = sys.argv[1:]
    disk, mount = Path("disk.img").resolve(), Path("mount").resolve()
    fail_in(Path(source), name, disk, mount)
    from datapipe.cli import main

    sys.argv[1:] = ["pack", str(mount / "raw"), *rest]
    sys.exit(main())
