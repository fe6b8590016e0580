"""Get a public data set's files, each checked against its sha256 sum.

Three ways, in this order: a file that is already there, Debian's package where `apt-get` can download it
(no root needed), the data set's public address.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Generator, Iterable
from pathlib import Path

from .console import Progress, printable
from .errors import FetchError, SettingError
from .foreign import open_regular
from .fsio import atomic_write, make_folder
from .locks import locked
from .public_data import DATASETS, RemoteDataSet

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 18
STALL_S = 30.0  # after which a silent connection is given up
APT_S = 600.0  # for one call of apt-get or dpkg-deb: a slow mirror may need minutes for 31 MB
MIRROR_VARIABLE = "DATAPIPE_MIRROR"
MIRROR_SCHEMES = ("http://", "https://", "file://")


def fetch(name: str, folder: Path) -> list[Path]:
    """Put the files of data set `name` (a key of `DATASETS`) into `folder` and return their paths.

    A file that is there with the right sum is kept, and the network is not used if all are. A file with a wrong sum
    is replaced. A file gets its name only when it is complete and right, so Ctrl-C, a full disk or a lost connection
    leave no partial files. Several processes may fetch into the same folder: the first does, and the others wait for
    its files.

    The environment variable DATAPIPE_MIRROR (an http, https or file address) replaces the folder of the public
    address, for a site with a copy of its own: files then come from $DATAPIPE_MIRROR/NAME, and apt is not tried.
    Proxies come from the usual variables (http_proxy, https_proxy, no_proxy).

    Raises SettingError for an unknown name, a `folder` that is a file or a mirror that is not such an address, and
    FetchError when a file cannot be fetched or written; its message lists what to place where by hand.
    """
    if name not in DATASETS:
        raise SettingError(f"name={name!r}: must be one of {', '.join(sorted(DATASETS))}")
    dataset, folder = DATASETS[name], Path(folder)
    mirror = os.environ.get(MIRROR_VARIABLE, "").rstrip("/")
    if mirror and not mirror.startswith(MIRROR_SCHEMES):
        raise SettingError(f"{MIRROR_VARIABLE}={mirror!r}: must start with {', '.join(MIRROR_SCHEMES)}")
    if folder.exists() and not folder.is_dir():
        raise SettingError(f"DIR: {folder} is a file; allowed: a folder, or a new name")
    try:
        make_folder(folder)
        with locked(folder, wait=True):
            missing = {name: sha256 for name, sha256 in dataset.files.items() if not _is_there(folder / name, sha256)}
            if missing and dataset.package and not mirror:
                missing = _from_debian(dataset, missing, folder)
            _from_address(mirror or dataset.address, missing, folder)
    except OSError as error:
        where = error.filename or folder
        raise FetchError(f"cannot be read or written: {error.strerror or error}", path=where) from error
    return [folder / name for name in dataset.files]


def _is_there(path: Path, sha256: str) -> bool:
    if not path.exists():
        return False
    with open(path, "rb", opener=open_regular) as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual == sha256:
        logger.info("%s is there already", path)
        return True
    logger.warning("%s has the sha256 sum %s, not %s: fetching it again", path, actual, sha256)
    return False


def _place(chunks: Iterable[bytes], path: Path, sha256: str) -> None:
    """Write a file; `FetchError`, and no change on disk, if its sum is wrong."""
    digest = hashlib.sha256()
    with atomic_write(path) as out:
        for chunk in chunks:
            digest.update(chunk)
            out.write(chunk)
        if digest.hexdigest() != sha256:
            raise FetchError(f"{path.name} has the sha256 sum {digest.hexdigest()}, not {sha256}")


# ---- the public address, or a mirror of it


def _from_address(address: str, files: dict[str, str], folder: Path) -> None:
    """Download files, whose sums are given by name. An error says how to bring by hand those that are missing then."""
    names = list(files)
    for number, name in enumerate(names):
        url = f"{address}/{name}"
        logger.info("fetching %s", url)
        try:
            with contextlib.closing(_download(url, name)) as chunks:
                _place(chunks, folder / name, files[name])
        except FetchError as error:
            to_place = "".join(
                f"\n  {folder / missing}\n    sha256 {files[missing]}\n    from   {address}/{missing}"
                for missing in names[number:]
            )
            message = printable(f"{error} (fetching {url}).")
            raise FetchError(f"{message}\nWithout a network here, place by hand and run again:{to_place}") from error


def _download(url: str, name: str) -> Generator[bytes, None, None]:
    """Yield the body of `url`; FetchError when it cannot be fetched, or ends before its announced length."""
    try:
        with urllib.request.urlopen(url, timeout=STALL_S) as response:
            length = response.headers.get("Content-Length", "")
            total_bytes = int(length) if length.isdecimal() else 0
            with Progress(name, total_bytes, "bytes") as progress:
                while chunk := response.read(_CHUNK_BYTES):
                    progress.advance(len(chunk))
                    yield chunk
            if progress.done < total_bytes:
                raise FetchError(f"{name} was cut off after {progress.done} of {total_bytes} bytes")
    except urllib.error.HTTPError as error:
        with error:  # it is the response, too
            raise FetchError(f"the server answered {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise FetchError(f"the address cannot be reached: {error.reason}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:  # reset, silent, no proper HTTP or address
        raise FetchError(f"the connection failed: {error!r}") from error


# ---- Debian's package


def _from_debian(dataset: RemoteDataSet, files: dict[str, str], folder: Path) -> dict[str, str]:
    """Take files, whose sums are given by name, from a data set's package; return those that it does not hold."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return files
    with tempfile.TemporaryDirectory(prefix="datapipe-fetch-") as scratch:
        try:
            _unpack(dataset.package, Path(scratch))
        except FetchError as error:
            why = f"{dataset.package} cannot be downloaded ({error})"
            logger.info("Debian's package %s: using the public address", why)
            return files
        missing = dict(files)
        for name in files:
            source = Path(scratch, dataset.package_folder, name)
            try:
                if source.is_file():
                    _place([source.read_bytes()], folder / name, missing[name])
                    del missing[name]
            except FetchError as error:
                logger.warning("Debian's package holds another file: %s", error)
        return missing


def _unpack(package: str, scratch: Path) -> None:
    logger.info("asking apt for Debian's package %s", package)
    _command(["apt-get", "-o", f"Acquire::http::Timeout={STALL_S:.0f}", "download", package], scratch)
    archives = list(scratch.glob("*.deb"))
    if len(archives) != 1:
        raise FetchError(f"apt-get download left {len(archives)} packages instead of one")
    _command(["dpkg-deb", "-x", archives[0].name, "."], scratch)


def _command(arguments: list[str], folder: Path) -> None:
    """Run a command in `folder`; `FetchError` with what it said if it fails or outlives `APT_S`."""
    process = subprocess.Popen(
        arguments,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    with process:
        try:
            said, _ = process.communicate(timeout=APT_S)
        except BaseException as error:  # Ctrl-C, too: apt's own children would continue, and keep the pipe open
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise FetchError(f"{arguments[0]} took longer than {APT_S:.0f} s") from error
            raise
    if process.returncode:
        raise FetchError(f"{' '.join(arguments)} failed: {' '.join(said.split())}")
