"""Packing on a filesystem that fails, hangs or fills up, as a user does it: a child process, which must say what is
wrong and where, leave nothing half-finished, and continue afterwards where it was.

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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest

from datapipe.dataset.index import read_keys
from datapipe.dataset.manifest import MANIFEST, QUARANTINE, Manifest
from datapipe.packing.out_folder import NEW, STATE
from tests.processes import Process, clean_environment
from tests.waiting import limit_s, wait_until

CHILDREN = Path(__file__).with_name("children")
NUM_IMAGES, NUM_SHARDS = 60, 5  # of 1 MiB
FULL_MB = 3.5  # a disk that fills up in the fourth shard
NEVER = 10**9  # a fault that only counts the calls it matches
SAYS = {error: os.strerror(getattr(errno, error)) for error in ("EIO", "ESTALE", "ENOSPC", "ENOENT")}


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


@pytest.fixture(scope="module")
def started(server) -> Callable[..., AbstractContextManager[Process]]:
    """started(source, out, *options, workers=None) begins a pack, which is killed in the end."""

    @contextmanager
    def start(source: Path, out: Path, *options: object, workers: int | None = None) -> Iterator[Process]:
        options += ("--workers", workers) if workers else ()
        child = server.start("-m", "datapipe", "pack", source, out, "--shard-mib", 1, *options)
        try:
            yield child
        finally:
            child.kill()
            child.communicate(timeout=limit_s())

    return start


@pytest.fixture(scope="module")
def run(started) -> Callable[..., subprocess.CompletedProcess]:
    """run(source, out, *options, workers=None) packs."""

    def pack(*arguments: object, **options: object) -> subprocess.CompletedProcess:
        with started(*arguments, **options) as child:
            said = child.communicate(timeout=limit_s())
        return subprocess.CompletedProcess(child.args, child.returncode, *said)

    return pack


@pytest.fixture(scope="module")
def whole(mounted, raw, run) -> Path:
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


def check_goes_on(started, slow, source: Path, out: Path, whole: Path) -> None:
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
            errors = child.communicate(timeout=limit_s())[1]
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
        pytest.param("write", "1+", "EIO", marks=pytest.mark.slow),
        pytest.param("write", "3+", "ESTALE", marks=pytest.mark.slow),
        ("fsync", "1+", "EIO"),
        pytest.param("fsync", "1+", "ESTALE", marks=pytest.mark.slow),
        # Not always: libfuse removes a file that is open by renaming it. The kernel asks once more after ESTALE.
        pytest.param("rename", "1", "EIO", marks=pytest.mark.slow),
        ("rename", "1 2", "ESTALE"),
    ],
)
def test_a_shard_that_cannot_be_written(slow, raw, whole, operation, when, error, run, started):
    out = slow.path / "out"
    partial = out / STATE / NEW / "train" / ".shard-000003.tar.partial"
    slow.set(faults=[f"{operation}:{pattern(partial, slow)}:{calls}:{error}" for calls in when.split()])
    done = run(raw, out, workers=1)
    check_failed(done.returncode, done.stderr, SAYS[error], partial)
    check_nothing_half_finished(slow.behind(out), whole)
    check_finished(slow.behind(out), 1)
    check_goes_on(started, slow, raw, out, whole)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_disk_that_is_full(slow, raw, whole, workers, run, started):
    out = slow.path / "out"
    slow.set(space_mb=FULL_MB)
    done = run(raw, out, workers=workers)
    check_failed(done.returncode, done.stderr, SAYS["ENOSPC"], f"{out}/", "00000")
    check_nothing_half_finished(slow.behind(out), whole)
    assert len(finished(slow.behind(out))) <= 3 and (workers > 1 or {0, 1} <= finished(slow.behind(out)))
    check_goes_on(started, slow, raw, out, whole)


@pytest.mark.parametrize("name", [".shard-000003.idx", ".000003.npz", f".{MANIFEST}"])
def test_a_full_disk_beside_the_shards(slow, raw, whole, name, run, started):
    """The shard's sidecar, its line in the journal, and what is written when all shards are there."""
    out = slow.path / "out"
    slow.set(faults=[f"write:*/{name}*.partial:1+:ENOSPC"])
    done = run(raw, out, workers=1)
    check_failed(done.returncode, done.stderr, SAYS["ENOSPC"], f"{out}/", f"{name}.", ".partial")
    check_nothing_half_finished(slow.behind(out), whole)
    assert finished(slow.behind(out)) == set(range(NUM_SHARDS)) - ({3, 4} if "3" in name else set())
    check_goes_on(started, slow, raw, out, whole)


@pytest.mark.parametrize(
    ("operation", "error", "workers"),
    [
        pytest.param("read", "EIO", 1, marks=pytest.mark.slow),
        ("read", "EIO", 4),
        pytest.param("read", "ESTALE", 1, marks=pytest.mark.slow),
        ("open", "ESTALE", 4),
    ],
)
def test_an_image_that_cannot_be_read(slow, raw, whole, image, operation, error, workers, run, started):
    out = slow.path / "out"
    slow.set(faults=[f"{operation}:{pattern(image, slow)}:1+:{error}"])
    done = run(raw, out, workers=workers)
    check_failed(done.returncode, done.stderr, SAYS[error], image, "shard-000003.tar")
    check_nothing_half_finished(slow.behind(out), whole)
    check_finished(slow.behind(out), workers)
    check_goes_on(started, slow, raw, out, whole)


@pytest.mark.parametrize(
    ("folder", "error"),
    [
        ("train/class 1", "EIO"),
        pytest.param("train/class 1", "ESTALE", marks=pytest.mark.slow),
        pytest.param("train", "EIO", marks=pytest.mark.slow),
    ],
)
def test_a_folder_that_cannot_be_listed(slow, raw, whole, folder, error, run, started):
    """Nothing of it is taken for all of it: no plan is made."""
    out = slow.path / "out"
    slow.set(faults=[f"readdir:{pattern(raw / folder, slow)}:1+:{error}"])
    done = run(raw, out)
    check_failed(done.returncode, done.stderr, SAYS[error], raw / folder)
    assert not contents(slow.behind(out))
    check_goes_on(started, slow, raw, out, whole)


def test_a_failing_clean_up_hides_nothing(slow, raw, whole, image, run, started):
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
    check_goes_on(started, slow, raw, out, whole)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["read", "write"])
def test_a_filesystem_that_hangs(slow, raw, whole, image, what, started):
    out = slow.path / "out"
    path = image if what == "read" else out / STATE / NEW / "train" / ".shard-000003.tar.partial"
    timeout_s = round(limit_s(10))  # what is not to hang answers before
    slow.set(faults=[f"{what}:{pattern(path, slow)}:1:stall={3 * timeout_s}"])
    with started(raw, out, "--timeout", timeout_s, workers=4) as child:
        wait_until(lambda: has_ended(child.pid))
        assert child.poll() is None, "it waited for the filesystem"
        meanwhile = {path.name: path.read_bytes() for path in slow.behind(out).rglob("shard-*")}
        errors = child.communicate(timeout=limit_s())[1]
    # With its folder: another split may have a shard of the same name.
    where = [image, "shard-000003.tar"] if what == "read" else [path.parent, "shard-000003.tar"]
    check_failed(child.returncode, errors, "--timeout", *where)
    waited_s = int(re.search(rf"a {what} has not answered for (\d+) s", errors)[1])
    assert timeout_s <= waited_s < 3 * timeout_s
    assert all(content == (whole / "train" / name).read_bytes() for name, content in meanwhile.items())
    check_nothing_half_finished(slow.behind(out), whole, unremovable=path.name)
    check_finished(slow.behind(out), 4)
    check_goes_on(started, slow, raw, out, whole)


def test_a_failing_disk_is_no_bad_image_but_a_missing_file_is_one(slow, raw, whole, image, run):
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
    assert line == {"path": f"{lost.parent.name}/{lost.name}", "key": key, "reason": "cannot be read (ENOENT)"}
    assert read_keys(train) == [other for other in read_keys(whole / "train") if other != key]
    assert Manifest.read(train).num_bad == 1 and Manifest.read(train).num_samples == NUM_IMAGES - 1


@pytest.mark.parametrize(
    ("number", "message"), [(signal.SIGTERM, "terminated|interrupted"), (signal.SIGINT, "interrupted")]
)
def test_interrupted(slow, raw, whole, number, message, started):
    out = slow.path / "out"
    slow.set(read_ms=100)  # the whole takes 3 s
    with started(raw, out, workers=2) as child:
        wait_until(lambda: len(finished(slow.behind(out))) >= 2 or child.poll() is not None)
        assert child.poll() is None, child.communicate()[1]
        child.send_signal(number)
        errors = child.communicate(timeout=limit_s())[1]
    assert child.returncode == 128 + number
    assert "Traceback" not in errors
    check_nothing_half_finished(slow.behind(out), whole)
    assert {0, 1} <= finished(slow.behind(out)) < set(range(NUM_SHARDS))
    check_goes_on(started, slow, raw, out, whole)
    assert re.search(message, errors, re.IGNORECASE), "it ended without a word"
    assert "is unfinished; the same command continues" in errors


def test_requests_a_file(slow, raw, whole, run):
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


@pytest.mark.parametrize("max_bad", [pytest.param("0", marks=pytest.mark.slow), "100%"])
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
    rest = [tmp_path / "out", "--max-bad", max_bad]
    line = ["unshare", "-m", sys.executable, CHILDREN / "packs_from_a_failing_disk.py", source, name, *rest]
    done = subprocess.run(
        [str(word) for word in line], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True
    )
    check_failed(done.returncode, done.stderr, SAYS["EIO"], name if kind == "files" else "train.tar, member 2")


def tarinfo(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = size
    return info


@pytest.mark.parametrize("kind", ["imagefolder", "webdataset", "csv", "idx", "cifar10", "parquet"])
@pytest.mark.parametrize("where", [pytest.param("first", marks=pytest.mark.slow), "middle"])
def test_a_source_that_cannot_be_read_to_its_end(slow, tmp_path, photo, encoded, kind, where, run):
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
