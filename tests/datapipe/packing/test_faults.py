"""Packing on a filesystem that fails, hangs or fills up, as a user does it: a child process, which must say what is
wrong and where, leave nothing half-finished, and go on afterwards where it was.

The filesystem (slowfs) comes from a testbed beside the checkout; without that, all of this is skipped.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from datapipe.dataset.index import read_keys
from datapipe.dataset.manifest import MANIFEST, QUARANTINE, Manifest
from datapipe.packing.out_folder import NEW, STATE

ROOT = Path(__file__).parents[3]
NUM_IMAGES, NUM_SHARDS = 60, 5  # of 1 MiB
TIMEOUT_S, STALL_S = 2, 9
LATE_S = 5.0  # beyond --timeout: until it looks (0.25 s), for its other threads (2 s), to end, on a busy machine
FULL_MB = 3.5  # a disk that fills up in the fourth shard
NEVER = 10**9  # a fault that only counts the calls it matches
SAYS = {error: os.strerror(getattr(errno, error)) for error in ("EIO", "ESTALE", "ENOSPC", "ENOENT")}


def wait_until(condition: Callable[[], bool], limit_s: float = 30) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.01)


def has_ended(process: int) -> bool:
    """Also when a thread of it cannot: FUSE holds that in the kernel until its request is answered, and so it holds the
    exit code. Then the rest of the process is a zombie.
    """
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture(scope="module")
def raw(mounted, photo, encoded) -> Path:
    """An ImageFolder of JPEGs of 85 kB: each is one request to read."""
    photos = [photo(400, 400, seed) for seed in range(6)]
    for i in range(NUM_IMAGES):
        path = mounted.backing / "raw" / "train" / f"class {i % 3}" / f"{i:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(np.roll(photos[i % 6], i, axis=1), quality=97))
    return mounted.path / "raw"


def line_of(source: Path, out: Path, *options: object, workers: int | None = None) -> list[str]:
    line = [sys.executable, "-m", "datapipe", "pack", source, out, "--shard-mib", 1, *options]
    return [str(word) for word in (*line, *(["--workers", workers] if workers else []))]


def run(*arguments: object, **options) -> subprocess.CompletedProcess:
    return subprocess.run(line_of(*arguments, **options), capture_output=True, text=True, timeout=60)


@contextmanager
def started(*arguments: object, **options) -> Iterator[subprocess.Popen]:
    line = line_of(*arguments, **options)
    child = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=60)


@pytest.fixture(scope="module")
def whole(mounted, raw) -> Path:
    """The undisturbed pack, behind the mount."""
    done = run(raw, mounted.path / "whole")
    assert done.returncode == 0, done.stderr
    assert len(Manifest.read(mounted.backing / "whole" / "train").shards) == NUM_SHARDS
    return mounted.backing / "whole"


@pytest.fixture(scope="module")
def image(raw, whole) -> Path:
    """An image in the middle of shard 3."""
    shards = Manifest.read(whole / "train").shards
    before = sum(shard.num_samples for shard in shards[:3])
    return raw / "train" / f"{key_to_name(read_keys(whole / 'train')[before + shards[3].num_samples // 2])}.jpg"


def key_to_name(key: str) -> str:
    """What a key is made of: the image's path in its split, without extension."""
    return key.replace("class_", "class ")


@pytest.fixture
def slow(mounted, raw, whole) -> Iterator:
    """The mount, without faults before and after."""
    mounted.calm()
    try:
        yield mounted
    finally:
        mounted.calm()
        for path in mounted.backing.glob("out*"):
            shutil.rmtree(path)


def pattern(path: Path, slow) -> str:
    """For a fault: a path in the mount."""
    return f"/{path.relative_to(slow.path)}"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def finished(out: Path) -> set[int]:
    """Numbers of the shards that the journal holds."""
    return {int(path.stem) for path in (out / STATE).rglob("*.npz") if path.stem.isdigit()}


def check_nothing_half_finished(out: Path, whole: Path, unremovable: str = "") -> None:
    """`out`: behind the mount. What has its final name is complete, and there is no manifest and nothing else."""
    assert not {path.name for path in out.rglob("*.partial")} - {unremovable} and not list(out.rglob(MANIFEST))
    for path in out.rglob("shard-*"):
        assert path.read_bytes() == (whole / path.relative_to(out / STATE / NEW)).read_bytes(), path.name
    for number in finished(out):
        assert all((out / STATE / NEW / "train" / f"shard-{number:06}{suffix}").exists() for suffix in (".tar", ".idx"))


def check_finished(out: Path, workers: int) -> None:
    """The shard that failed, 3, is not; one thread has finished those before, but perhaps for its neighbour."""
    assert 3 not in finished(out) and (workers > 1 or {0, 1} <= finished(out)), finished(out)


def check_failed(code: int, errors: str, *words: object) -> None:
    assert code == 1, errors
    assert "Traceback" not in errors and "Exception" not in errors
    last = errors.splitlines()[-1]
    assert last.startswith("error: ") and not [word for word in words if str(word) not in last], errors


def check_goes_on(slow, source: Path, out: Path, whole: Path) -> None:
    """Without faults both the same command and --resume complete it, and leave alone what was finished."""
    slow.calm()
    twin = out.with_name(f"{out.name}-twin")
    behind = {out: slow.behind(out), twin: slow.behind(twin)}
    if behind[out].exists():
        shutil.copytree(behind[out], behind[twin])
    before = {}  # by the names that shards will have
    for folder in behind.values():
        for path in (folder / STATE / NEW).glob("train/shard-*"):
            if int(path.stem[-6:]) in finished(folder):
                before[folder / path.relative_to(folder / STATE / NEW)] = path.stat()
    with started(source, out, "--resume", workers=1) as one, started(source, twin) as two:
        for child in (one, two):
            errors = child.communicate(timeout=60)[1]
            assert child.returncode == 0, errors
    for folder in behind.values():
        assert contents(folder) == contents(whole)
    for path, was in before.items():
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == (was.st_ino, was.st_mtime_ns), path.name


@pytest.mark.parametrize(
    ("operation", "when", "error"),
    [
        ("create", "1+", "EIO"),
        ("write", "2", "ENOSPC"),
        ("write", "1+", "EIO"),
        ("write", "3+", "ESTALE"),
        ("fsync", "1+", "EIO"),
        ("fsync", "1+", "ESTALE"),
        # Not always: libfuse removes a file that is open by renaming it. The kernel asks once more after ESTALE.
        ("rename", "1", "EIO"),
        ("rename", "1 2", "ESTALE"),
    ],
)
def test_a_shard_that_cannot_be_written(slow, raw, whole, operation, when, error):
    out = slow.path / "out"
    partial = out / STATE / NEW / "train" / ".shard-000003.tar.partial"
    slow.set(faults=[f"{operation}:{pattern(partial, slow)}:{calls}:{error}" for calls in when.split()])
    done = run(raw, out, workers=1)
    check_failed(done.returncode, done.stderr, SAYS[error], partial)
    check_nothing_half_finished(slow.behind(out), whole)
    check_finished(slow.behind(out), 1)
    check_goes_on(slow, raw, out, whole)


@pytest.mark.parametrize("workers", [1, 4])
def test_a_disk_that_is_full(slow, raw, whole, workers):
    out = slow.path / "out"
    slow.set(space_mb=FULL_MB)
    done = run(raw, out, workers=workers)
    check_failed(done.returncode, done.stderr, SAYS["ENOSPC"], f"{out}/", "00000")
    check_nothing_half_finished(slow.behind(out), whole)
    assert len(finished(slow.behind(out))) <= 3 and (workers > 1 or {0, 1} <= finished(slow.behind(out)))
    check_goes_on(slow, raw, out, whole)


@pytest.mark.parametrize("name", [".shard-000003.idx", ".000003.npz", f".{MANIFEST}"])
def test_a_full_disk_beside_the_shards(slow, raw, whole, name):
    """The shard's sidecar, its line in the journal, and what is written when all shards are there."""
    out = slow.path / "out"
    slow.set(faults=[f"write:*/{name}*.partial:1+:ENOSPC"])
    done = run(raw, out, workers=1)
    check_failed(done.returncode, done.stderr, SAYS["ENOSPC"], f"{out}/", f"{name}.", ".partial")
    check_nothing_half_finished(slow.behind(out), whole)
    assert finished(slow.behind(out)) == set(range(NUM_SHARDS)) - ({3, 4} if "3" in name else set())
    check_goes_on(slow, raw, out, whole)


@pytest.mark.parametrize(
    ("operation", "error", "workers"),
    [("read", "EIO", 1), ("read", "EIO", 4), ("read", "ESTALE", 1), ("open", "ESTALE", 4)],
)
def test_an_image_that_cannot_be_read(slow, raw, whole, image, operation, error, workers):
    out = slow.path / "out"
    slow.set(faults=[f"{operation}:{pattern(image, slow)}:1+:{error}"])
    done = run(raw, out, workers=workers)
    check_failed(done.returncode, done.stderr, SAYS[error], image, "shard-000003.tar")
    check_nothing_half_finished(slow.behind(out), whole)
    check_finished(slow.behind(out), workers)
    check_goes_on(slow, raw, out, whole)


@pytest.mark.parametrize(("folder", "error"), [("train/class 1", "EIO"), ("train/class 1", "ESTALE"), ("train", "EIO")])
def test_a_folder_that_cannot_be_listed(slow, raw, whole, folder, error):
    """Nothing of it is taken for all of it: no plan is made."""
    out = slow.path / "out"
    slow.set(faults=[f"readdir:{pattern(raw / folder, slow)}:1+:{error}"])
    done = run(raw, out)
    check_failed(done.returncode, done.stderr, SAYS[error], raw / folder)
    assert not contents(slow.behind(out))
    check_goes_on(slow, raw, out, whole)


def test_a_failing_clean_up_hides_nothing(slow, raw, whole, image):
    """Of two unfinished shards the first cannot be removed: the second is, and what went wrong first is told."""
    out = slow.path / "out"
    partial = out / STATE / NEW / "train" / ".shard-000002.tar.partial"
    slow.set(faults=[
        f"fsync:{pattern(partial, slow)}:1:stall=1.8",  # so that both are there when the image fails
        f"rename:{pattern(partial, slow)}:1+:EIO",  # libfuse's way to remove a file that is open
        f"unlink:{pattern(partial, slow)}:1+:EIO",
        f"read:{pattern(image, slow)}:1:stall=0.5",
        f"read:{pattern(image, slow)}:1+:ESTALE",
    ])  # fmt: skip
    done = run(raw, out, workers=2)
    check_failed(done.returncode, done.stderr, SAYS["ESTALE"], image, "shard-000003.tar")
    assert [path.name for path in slow.behind(out).rglob("*.partial")] == [partial.name]
    check_goes_on(slow, raw, out, whole)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["read", "write"])
def test_a_filesystem_that_hangs(slow, raw, whole, image, what):
    out = slow.path / "out"
    path = image if what == "read" else out / STATE / NEW / "train" / ".shard-000003.tar.partial"
    slow.set(faults=[f"{what}:{pattern(path, slow)}:1:stall={STALL_S}"])
    with started(raw, out, "--timeout", TIMEOUT_S, workers=4) as child:
        wait_until(lambda: slow.calls() != [0] or child.poll() is not None)
        began = time.monotonic()
        wait_until(lambda: has_ended(child.pid), STALL_S + 30)
        took_s = time.monotonic() - began
        meanwhile = {path.name: path.read_bytes() for path in slow.behind(out).rglob("shard-*")}
        errors = child.communicate(timeout=STALL_S + 30)[1]
    assert took_s < TIMEOUT_S + LATE_S
    # With its folder: another split may have a shard of the same name.
    where = [image, "shard-000003.tar"] if what == "read" else [path.parent, "shard-000003.tar"]
    check_failed(child.returncode, errors, f"a {what} has not answered for {TIMEOUT_S} s", "--timeout", *where)
    assert all(content == (whole / "train" / name).read_bytes() for name, content in meanwhile.items())
    check_nothing_half_finished(slow.behind(out), whole, unremovable=path.name)
    check_finished(slow.behind(out), 4)
    check_goes_on(slow, raw, out, whole)


def test_a_failing_disk_is_no_bad_image_but_a_missing_file_is_one(slow, raw, whole, image):
    source, out = slow.path / "out-raw", slow.path / "out"
    shutil.copytree(slow.behind(raw), slow.behind(source))
    lost = source / image.relative_to(raw)
    slow.set(faults=[f"read:{pattern(lost, slow)}:1+:EIO"])
    done = run(source, out, "--max-bad", "100%", workers=1)
    check_failed(done.returncode, done.stderr, SAYS["EIO"], lost, "shard-000003.tar")
    check_nothing_half_finished(slow.behind(out), whole)
    slow.calm()
    slow.behind(lost).unlink()
    slow.behind(lost).symlink_to("nowhere")  # the source is what it was by the names in it
    done = run(source, out)
    check_failed(done.returncode, done.stderr, SAYS["ENOENT"], lost, "shard-000003.tar")
    assert not list(slow.behind(out).rglob(MANIFEST))
    done = run(source, out, "--max-bad", 1)
    assert done.returncode == 0, done.stderr
    train = slow.behind(out) / "train"
    (line,) = (json.loads(line) for line in (train / QUARANTINE).read_text().splitlines())
    key = next(key for key in read_keys(whole / "train") if key_to_name(key) == f"{lost.parent.name}/{lost.stem}")
    assert line == {"path": str(lost), "key": key, "reason": SAYS["ENOENT"]}
    assert read_keys(train) == [other for other in read_keys(whole / "train") if other != key]
    assert Manifest.read(train).num_bad == 1 and Manifest.read(train).num_samples == NUM_IMAGES - 1


@pytest.mark.parametrize(
    ("number", "message"), [(signal.SIGTERM, "terminated|interrupted"), (signal.SIGINT, "interrupted")]
)
def test_interrupted(slow, raw, whole, number, message):
    out = slow.path / "out"
    slow.set(read_ms=100)  # the whole takes 3 s
    with started(raw, out, workers=2) as child:
        wait_until(lambda: len(finished(slow.behind(out))) >= 2 or child.poll() is not None)
        assert child.poll() is None, child.communicate()[1]
        child.send_signal(number)
        errors = child.communicate(timeout=20)[1]
    assert child.returncode == 128 + number
    assert "Traceback" not in errors
    check_nothing_half_finished(slow.behind(out), whole)
    assert {0, 1} <= finished(slow.behind(out)) < set(range(NUM_SHARDS))
    check_goes_on(slow, raw, out, whole)
    assert re.search(message, errors, re.IGNORECASE), "it ended without a word"
    assert "is unfinished; the same command continues" in errors


def test_requests_a_file(slow, raw, whole):
    """One look-up (which opening needs), one open and one read of each file, and nothing else of any; one stat more of
    each that stands for the mean size when shards are planned. (slowfs counts no close, nor an fstat that the kernel
    answers itself.)
    """
    out = slow.path / "out"
    images = f"{pattern(raw, slow)}/*.jpg"
    counted = [f"{operation}:{images}:{NEVER}:EIO" for operation in ("getattr", "open", "read", "*")]
    slow.set(faults=counted)
    assert run(raw, out, workers=4).returncode == 0
    assert slow.calls() == [2 * NUM_IMAGES, NUM_IMAGES, NUM_IMAGES, 4 * NUM_IMAGES]
    shutil.rmtree(slow.behind(out))
    # Planned before: a resumed pack lists the folders, to see what has changed, but asks for no size.
    slow.set(faults=[f"create:{pattern(out / STATE / NEW, slow)}/train/*:1+:EIO"])
    assert run(raw, out, workers=1).returncode == 1
    slow.set(faults=counted)
    assert run(raw, out, "--resume", workers=4).returncode == 0
    assert slow.calls() == [NUM_IMAGES, NUM_IMAGES, NUM_IMAGES, 3 * NUM_IMAGES]
    assert contents(slow.behind(out)) == contents(whole)


# In a mount namespace of its own: a disk whose backing file has ended where the middle of a file lies. A read gives
# what comes before, and only the next one gives the kernel's own EIO.
FAILING_DISK = """
import fcntl, os, struct, subprocess, sys
from pathlib import Path
source, name, *command = sys.argv[1:]
source, disk, mount = Path(source), Path("disk.img").resolve(), Path("mount").resolve()
BLOCK, KEPT = 4096, 262_144

def run(*line):
    subprocess.run([str(word) for word in line], check=True, stdout=subprocess.DEVNULL)

def blocks(path):
    with open(path, "rb") as file:
        count = -(-os.fstat(file.fileno()).st_size // BLOCK)
        return [struct.unpack("i", fcntl.ioctl(file, 1, struct.pack("i", i)))[0] for i in range(count)]  # FIBMAP

mount.mkdir()
with open(disk, "wb") as file:
    file.truncate(24 << 20)
run("mkfs.ext2", "-q", "-b", BLOCK, disk)
run("mount", "-o", "loop", disk, mount)
run("cp", "-r", source, mount / "raw")
whole, path = (source / name).read_bytes(), mount / "raw" / name
tail = len(whole) // BLOCK * BLOCK - 16 * BLOCK
os.unlink(path)
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
for file in highest[: (tail - KEPT) // BLOCK // 16 + 4]:
    file.unlink()
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
sys.exit(subprocess.run([*command[:4], mount / "raw", *command[4:]]).returncode)
"""


@pytest.mark.parametrize("max_bad", ["0", "100%"])
@pytest.mark.parametrize("kind", ["files", "tar"])
def test_a_disk_that_fails_in_the_middle_of_a_large_file(tmp_path, photo, encoded, kind, max_bad):
    """The kernel gives what it could read, and the error only when asked again: that is not the end of a file."""
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists() or not shutil.which("mkfs.ext2"):
        pytest.skip("needs root, loop devices and mkfs.ext2")
    small, large = encoded(photo(64, 64, 1)), encoded(np.tile(photo(400, 400, 2), (4, 4, 1)), quality=98)
    assert len(large) > 1 << 20  # beyond one readahead
    source = tmp_path / "source"
    (source / "class").mkdir(parents=True)
    if kind == "files":
        name = "class/large.jpg"
        (source / "class" / "small.jpg").write_bytes(small)
        (source / name).write_bytes(large)
    else:
        name = "train.tar"
        (source / "class").rmdir()
        with tarfile.open(source / name, "w") as archive:
            for member, data in (("1.jpg", small), ("1.cls", b"0"), ("2.jpg", large), ("2.cls", b"1"), ("3.jpg", small),
                                 ("3.cls", b"0")):  # fmt: skip
                archive.addfile(tarinfo(member, len(data)), io.BytesIO(data))
            archive.addfile(tarinfo("pad.txt", 1 << 13), io.BytesIO(bytes(1 << 13)))
    program, rest = [sys.executable, "-m", "datapipe", "pack"], [tmp_path / "out", "--max-bad", max_bad]
    line = ["unshare", "-m", sys.executable, "-c", FAILING_DISK, source, name, *program, *rest]
    done = subprocess.run([str(word) for word in line], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    check_failed(done.returncode, done.stderr, SAYS["EIO"], name if kind == "files" else "train.tar, member 2")


def tarinfo(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = size
    return info


@pytest.mark.parametrize("kind", ["imagefolder", "webdataset", "csv", "idx", "cifar10", "parquet"])
@pytest.mark.parametrize("where", ["first", "middle"])
def test_a_source_that_cannot_be_read_to_its_end(slow, tmp_path, photo, encoded, kind, where):
    """Whatever lies there: it is neither a bad image nor a truncated file, also with --max-bad."""
    pytest.importorskip("pyarrow" if kind == "parquet" else "numpy")
    path = SOURCES[kind](slow.backing / "out-source", encoded(photo(900, 900, 3), quality=97))
    at = {"first": 0, "middle": path.stat().st_size // 2}[where]
    seen = slow.path / path.relative_to(slow.backing)
    slow.set(faults=[f"read:{pattern(seen, slow)}:@{at}:EIO"])
    done = run(slow.path / "out-source", slow.path / "out", "--max-bad", "100%")
    check_failed(done.returncode, done.stderr, SAYS["EIO"], seen)


def a_folder(folder: Path, image: bytes) -> Path:
    (folder / "class").mkdir(parents=True)
    for name in ("1.jpg", "2.jpg"):
        (folder / "class" / name).write_bytes(image)
    return folder / "class" / "2.jpg"


def a_tar(folder: Path, image: bytes) -> Path:
    folder.mkdir()
    with tarfile.open(folder / "train.tar", "w") as archive:
        for member, data in (("1.jpg", image), ("1.cls", b"0")):
            archive.addfile(tarinfo(member, len(data)), io.BytesIO(data))
    return folder / "train.tar"


def a_table(folder: Path, image: bytes) -> Path:
    folder.mkdir()
    (folder / "1.jpg").write_bytes(image)
    (folder / "train.csv").write_text("path,label\n" + "1.jpg,a\n" * 50_000)
    return folder / "train.csv"


def some_idx(folder: Path, image: bytes) -> Path:
    folder.mkdir()
    for split in ("train", "t10k"):
        (folder / f"{split}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 0x803, 500, 28, 28) + bytes(500 * 784))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, 500) + bytes(500))
    return folder / "train-images-idx3-ubyte"


def some_cifar(folder: Path, image: bytes) -> Path:
    folder.mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (folder / f"{name}.bin").write_bytes(bytes(100 * 3073))
    (folder / "batches.meta.txt").write_text("\n".join("abcdefghij"))
    return folder / "data_batch_3.bin"


def some_parquet(folder: Path, image: bytes) -> Path:
    import pyarrow
    from pyarrow import parquet

    folder.mkdir()
    table = pyarrow.table({"image": [image] * 4, "label": [0, 1, 0, 1]})
    parquet.write_table(table, folder / "train.parquet", row_group_size=2, compression="none", use_dictionary=False)
    return folder / "train.parquet"


SOURCES = {
    "imagefolder": a_folder, "webdataset": a_tar, "csv": a_table, "idx": some_idx, "cifar10": some_cifar,
    "parquet": some_parquet,
}  # fmt: skip
