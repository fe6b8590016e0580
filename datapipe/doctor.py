"""Measure a filesystem and a node, and advise how to set the loader for them."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path

from .checks import checked_int
from .dataset.shard_files import ALIGNMENT
from .errors import DatapipeError, SettingError, WrongPathError, how_to_install
from .fsio import NETWORK_FILESYSTEMS, atomic_write, mounted_as

SMALL_FILES = 200
FILE_BYTES = 64 << 20  # written where DIR has no file that is large enough to read from
MAX_LOOKED_AT = 500  # entries, instead of the millions of an unpacked data set
SEQUENTIAL_BYTES, RANDOM_BYTES = 8 << 20, 128 << 10  # a block; an image and its neighbourhood
LIMIT_S = 3.0  # for each measurement
SLOW_METADATA_PER_S = 5_000  # a local disk does tens of thousands of stat, open and close
SLOW_AT_RANDOM = 0.5  # of the sequential bandwidth: random reads that reach less are slow
DALI_PACKAGES = ("nvidia-dali-cuda130", "nvidia-dali-cuda120")


def doctor(
    folder: Path,
    local: Path | None = None,
    num_nodes: int = 1,
    network_mb_per_s: float | None = None,
    master: str = "",
) -> dict:
    """Measure under `folder`, and say what staging would cost where a packed data set, or its splits, lie in it.

    It writes small files, and a large one where there is none to read, and removes them. Reads bypass the page cache
    where the filesystem allows it.

    Args:
        folder: Folder on the filesystem in question.
        local: Folder on the node's own disk, or one to be made there (default: that of temporary files).
        num_nodes: Number of nodes that would stage, from 1.
        network_mb_per_s: Rate at which a node receives from others, in MB/s (10⁶ bytes), above 0; None: as fast as the
            link.
        master: Host of process 0, to which the link leads; "": the link is that of the default route.

    Returns:
        `filesystem`, `node`, `decoders`, `staging` (None without a data set) and `advice` (lines).

    Raises:
        WrongPathError: The folder does not exist.
        DatapipeError: It cannot be written to and has nothing to read.
        SettingError: A number is out of its range.
    """
    from .stage_costs import assess, describe_costs

    folder = Path(folder)
    checked_int("nodes", num_nodes, 1)
    if network_mb_per_s is not None and not network_mb_per_s > 0:
        raise SettingError(f"network_mbps: {network_mb_per_s} is out of range; allowed: MB/s, above 0")
    if not folder.is_dir():
        raise WrongPathError("is not a folder" if folder.exists() else "does not exist", path=folder)
    filesystem, node, decoders = _filesystem(folder), _node(), _decoders()
    measured = {"folder": str(folder), "filesystem": filesystem, "node": node, "decoders": decoders}
    limits = {"network_mb_per_s": network_mb_per_s, "read_mb_per_s": filesystem["sequential_mb_per_s"]}
    staging = assess(folder, local, num_nodes, **limits, master=master, is_local=not _why_stage(filesystem))
    lines = advice(filesystem, node, decoders) + (describe_costs(staging) if staging else [])
    return {**measured, "staging": staging, "advice": lines}


def _why_stage(filesystem: dict) -> str:
    """Say why a data set on this filesystem is to be staged; "" where it is not."""
    kind, metadata = filesystem["kind"], filesystem["metadata_per_s"]
    if kind in NETWORK_FILESYSTEMS or kind.startswith("fuse"):
        return f"{kind} is shared over a network"
    is_slow = metadata is not None and metadata < SLOW_METADATA_PER_S
    return f"{metadata:,.0f} metadata operations per second" if is_slow else ""


def advice(filesystem: dict, node: dict, decoders: dict) -> list[str]:
    """Say what follows from measurements. Pure.

    Args:
        filesystem: Measurements of the filesystem, as in `doctor`'s result.
        node: Measurements of the node, as in `doctor`'s result.
        decoders: Measurements of the decoders, as in `doctor`'s result.

    Returns:
        Lines for the user.
    """
    lines, why = [], _why_stage(filesystem)
    sequential, scattered = filesystem["sequential_mb_per_s"], filesystem["random_mb_per_s"]
    is_slow_at_random = scattered < SLOW_AT_RANDOM * sequential
    if why:
        lines.append(f"stage: yes ({why}); `datapipe stage` copies the shards to node-local disk, each byte read once")
        lines.append('order: "full" once staged; "blocks" where there is no room to stage')
    elif is_slow_at_random:
        lines.append("stage: no, the filesystem is local")
        lines.append(f'order: "blocks" (random reads reach {scattered / sequential:.0%} of sequential bandwidth)')
    else:
        lines.append("stage: no, the filesystem is local")
        lines.append('order: "full" (random reads are nearly as fast as sequential ones)')
    cores, gpus = node["cores"], len(node["gpus"])
    if gpus and decoders["dali"]:
        lines.append(f"backend: dali (GPU and DALI {decoders['dali']} are here)")
    elif gpus:
        lines.append(f"backend: cpu; with DALI the GPU would decode: {how_to_install(node['dali_extra'])}")
    else:
        lines.append(f"backend: cpu ({'torch sees no GPU' if node['unseen_gpus'] else 'no GPU here'})")
    if node["unseen_gpus"]:
        lines.append(f"GPUs: {node['unseen_gpus']}")
    ranks = max(1, gpus)
    each = "" if ranks == 1 else f" for each of {ranks} ranks"
    lines.append(
        f"threads: {max(1, cores // ranks)}{each}, one per core; "
        "`datapipe bench DATA --step-ms MS` says whether they are enough for an accelerator"
    )
    return lines


def format_report(result: dict) -> list[str]:
    """Return `doctor`'s result as lines for a reader."""
    filesystem, node, decoders = result["filesystem"], result["node"], result["decoders"]
    metadata = filesystem["metadata_per_s"]
    past = "past the page cache" if filesystem["direct"] else "through the page cache: these are not a disk's figures"
    gib = 2**30
    return [
        f"{result['folder']}: {filesystem['kind']}, {filesystem['free_bytes'] / gib:,.0f} GiB free",
        "  metadata: "
        + (f"{metadata:,.0f} operations per second (create, stat, open, remove)" if metadata else "cannot write here"),
        f"  reads, {past}: {filesystem['sequential_mb_per_s']:,.0f} MB/s in blocks of 8 MiB, "
        f"{filesystem['random_mb_per_s']:,.0f} MB/s at random in pieces of 128 KiB",
        f"node: {node['cores']} cores, {node['memory_bytes'] / gib:,.0f} GiB of memory, "
        f"/dev/shm {node['shm_bytes'] / gib:,.1f} GiB (not needed), GPUs: {', '.join(node['gpus']) or 'none'}",
        "decoders: " + ", ".join(f"{name} {version or 'missing'}" for name, version in decoders.items()),
        *(line if line.startswith(" ") else f"advice: {line}" for line in result["advice"]),
    ]


def _filesystem(folder: Path) -> dict:
    direct, sequential, scattered = _reads(folder)
    return {
        "kind": mounted_as(folder),
        "free_bytes": shutil.disk_usage(folder).free,
        "metadata_per_s": _metadata(folder),
        "direct": direct,
        "sequential_mb_per_s": sequential,
        "random_mb_per_s": scattered,
    }


def _metadata(folder: Path) -> float | None:
    """Measure operations per second, one after another; None where nothing can be written."""
    try:
        temporary = Path(tempfile.mkdtemp(prefix=".doctor-", dir=folder))
    except OSError:
        return None
    try:
        began, count = time.perf_counter(), 0
        for number in range(SMALL_FILES):
            path = temporary / str(number)
            path.touch()
            path.stat()
            os.close(os.open(path, os.O_RDONLY))
            path.unlink()
            count += 4
            if time.perf_counter() - began > LIMIT_S:
                break
        return count / (time.perf_counter() - began)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _reads(folder: Path) -> tuple[bool, float, float]:
    """Return whether reads bypass the page cache, MB/s in large blocks, and MB/s at random."""
    large, made = _large_file(folder), None
    try:
        if large is None:
            large = made = _written(folder)
        try:
            return True, *_rates(large, os.O_DIRECT)
        except OSError:  # some filesystems tell only when it is read, and some not of each read
            return False, *_rates(large)
    finally:
        if made:
            made.unlink()


def _rates(path: Path, flag: int = 0) -> tuple[float, float]:
    """Return MB/s of a file in large blocks, and at random; `flag`: of open(2), too."""
    fd = os.open(path, os.O_RDONLY | flag)
    try:
        size = os.fstat(fd).st_size // ALIGNMENT * ALIGNMENT
        draw = random.Random(1)
        places = iter(range(0, size - SEQUENTIAL_BYTES + 1, SEQUENTIAL_BYTES))
        sequential = _rate(fd, SEQUENTIAL_BYTES, lambda: next(places, None))
        return sequential, _rate(fd, RANDOM_BYTES, lambda: draw.randrange(0, size - RANDOM_BYTES, ALIGNMENT), 400)
    finally:
        os.close(fd)


def _written(folder: Path) -> Path:
    path, block = folder / f".doctor-{os.getpid()}", random.Random(0).randbytes(1 << 20)
    try:
        with atomic_write(path) as file:
            for _ in range(FILE_BYTES >> 20):
                file.write(block)
    except OSError as error:
        message = f"cannot be written to, and holds no large file to read: {error.strerror}"
        raise DatapipeError(message, path=folder) from error
    return path


def _large_file(folder: Path) -> Path | None:
    """Return the largest of the first files there and one level below, if it is large enough."""
    best, best_size = None, FILE_BYTES - 1
    with suppress(OSError):  # it may not be looked into
        for path in islice(chain(folder.iterdir(), folder.glob("*/*")), MAX_LOOKED_AT):
            if path.is_file() and os.access(path, os.R_OK) and path.stat().st_size > best_size:
                best, best_size = path, path.stat().st_size
    return best


def _rate(fd: int, size: int, place: Callable[[], int | None], at_most: int = 1 << 30) -> float:
    memory = mmap.mmap(-1, size)  # aligned, as O_DIRECT requires
    memory[:] = bytes(size)
    began, done, count = time.perf_counter(), 0, 0
    while count < at_most and (offset := place()) is not None:
        done += os.preadv(fd, [memory], offset)
        count += 1
        if time.perf_counter() - began > LIMIT_S:
            break
    return done / 1e6 / (time.perf_counter() - began)


def _node() -> dict:
    from .loaders.device import dali_extra, explain_unseen_gpus, gpu_names, read_driver

    shm = Path("/dev/shm")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "shm_bytes": shutil.disk_usage(shm).total if shm.is_dir() else 0,
        "gpus": gpu_names(),
        "unseen_gpus": explain_unseen_gpus(),
        "dali_extra": dali_extra(read_driver()),
    }


def _decoders() -> dict[str, str | None]:
    from .images.turbojpeg import lossless, turbojpeg
    from .loaders.native_pixels import choose_native

    versions = {}
    for package in ("simplejpeg", *DALI_PACKAGES):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "in C": str(choose_native()),
        "simplejpeg": versions.get("simplejpeg"),
        "dali": next((versions[package] for package in DALI_PACKAGES if package in versions), None),
        "libturbojpeg 3": "found" if turbojpeg() else None,
        "lossless restart markers": "found" if lossless() else None,
    }
