"""Fetching, against a real server on 127.0.0.1 and stand-ins for apt-get; the real apt under --slow."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.server
import importlib.util
import io
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from datapipe import fetch as fetching
from datapipe.errors import FetchError, SettingError
from datapipe.fetch import fetch
from datapipe.public_data import DATASETS, RemoteDataSet
from tests.processes import clean_environment
from tests.waiting import limit_s, wait_until

ROOT = Path(__file__).parents[2]
CHILDREN = Path(__file__).with_name("children")
ARCHIVE = "cifar-10-python.tar.gz"
# A CIFAR archive's stand-in: fetch must not look inside; three chunks, so that it can break in the middle.
with io.BytesIO() as _buffer:
    with tarfile.open(fileobj=_buffer, mode="w:gz") as _tar:
        _member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
        _member.size = 3 * fetching._CHUNK_BYTES
        _tar.addfile(_member, io.BytesIO(os.urandom(_member.size)))
    BODY = _buffer.getvalue()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves `bodies`; `promised` adds bytes to a body's announced length, `stall` holds its last third."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies = {f"/{ARCHIVE}": BODY}
        self.promised, self.announce, self.stall = 0, True, False
        self.asked: list[str] = []
        self.half_sent, self.go_on = threading.Event(), threading.Event()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        body = self.server.bodies.get(self.path)
        if body is None:
            self.send_error(404)
            return
        self.send_response(200)
        if self.server.announce:
            self.send_header("Content-Length", str(len(body) + self.server.promised))
        self.end_headers()
        cut = len(body) * 2 // 3 if self.server.stall else len(body)
        self.wfile.write(body[:cut])
        self.server.half_sent.set()
        if self.server.stall:
            self.server.go_on.wait(limit_s())
            self.wfile.write(body[cut:])

    def log_message(self, *_arguments) -> None:
        pass


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.go_on.set()
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def tiny(monkeypatch, server):
    """Make "cifar10" the small archive on the local server, and keep the machine's settings out."""
    dataset = RemoteDataSet(server.address, {ARCHIVE: sha256(BODY)})
    monkeypatch.setitem(DATASETS, "cifar10", dataset)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("DATAPIPE_MIRROR", raising=False)


def closed_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_downloads_and_returns_the_paths(tmp_path):
    folder = tmp_path / "new" / "raw"
    assert fetch("cifar10", folder) == [folder / ARCHIVE]
    assert (folder / ARCHIVE).read_bytes() == BODY
    assert os.listdir(folder) == [ARCHIVE]


def test_body_without_announced_length(tmp_path, server):
    server.announce = False
    fetch("cifar10", tmp_path)
    assert (tmp_path / ARCHIVE).read_bytes() == BODY


def test_a_right_file_is_kept_without_asking_the_network(tmp_path, server):
    (tmp_path / ARCHIVE).write_bytes(BODY)
    before = (tmp_path / ARCHIVE).stat()
    fetch("cifar10", tmp_path)
    assert server.asked == []
    assert (tmp_path / ARCHIVE).stat().st_ino == before.st_ino


def test_a_wrong_file_is_reported_and_replaced(tmp_path, caplog):
    (tmp_path / ARCHIVE).write_bytes(b"old")
    with caplog.at_level(logging.WARNING):
        fetch("cifar10", tmp_path)
    assert str(tmp_path / ARCHIVE) in caplog.text and sha256(b"old") in caplog.text
    assert (tmp_path / ARCHIVE).read_bytes() == BODY


def test_only_the_missing_files_are_asked_for(tmp_path, server, monkeypatch):
    files = {name: sha256(name.encode()) for name in ("a", "b", "c")}
    server.bodies = {"/a": b"a", "/b": b"b", "/c": b"c"}
    monkeypatch.setitem(DATASETS, "cifar10", RemoteDataSet(server.address, files))
    (tmp_path / "b").write_bytes(b"b")
    assert [path.read_text() for path in fetch("cifar10", tmp_path)] == ["a", "b", "c"]
    assert server.asked == ["/a", "/c"]


def test_who_fetches_what_another_is_fetching_waits_for_it(tmp_path, server):
    server.stall = True
    with ThreadPoolExecutor() as pool:
        first = pool.submit(fetch, "cifar10", tmp_path)
        assert server.half_sent.wait(limit_s())
        second = pool.submit(fetch, "cifar10", tmp_path)
        time.sleep(0.2)  # for it to continue if it does not wait
        server.go_on.set()
        assert first.result(limit_s()) == second.result(limit_s()) == [tmp_path / ARCHIVE]
    assert server.asked == [f"/{ARCHIVE}"]
    assert (tmp_path / ARCHIVE).read_bytes() == BODY


def breaks_by_404(server, monkeypatch):
    server.bodies.clear()
    return "404"


def breaks_by_another_body(server, monkeypatch):
    server.bodies[f"/{ARCHIVE}"] = BODY[:-1] + b"?"
    return sha256(BODY[:-1] + b"?")


def breaks_by_a_short_body(server, monkeypatch):
    server.promised = 1
    return f"cut off after {len(BODY)} of {len(BODY) + 1} bytes"


def breaks_by_a_short_body_of_unknown_length(server, monkeypatch):
    server.bodies[f"/{ARCHIVE}"] = BODY[:-1]
    server.announce = False
    return sha256(BODY[:-1])


def breaks_by_silence(server, monkeypatch):
    server.stall = True
    monkeypatch.setattr(fetching, "STALL_S", 0.3)
    return "connection failed"


def breaks_by_no_server(server, monkeypatch):
    monkeypatch.setitem(DATASETS, "cifar10", RemoteDataSet(closed_port(), DATASETS["cifar10"].files))
    return "cannot be reached"


@pytest.mark.parametrize("there", [None, b"old"], ids=["nothing there", "another file there"])
@pytest.mark.parametrize(
    "breaks",
    [
        breaks_by_404,
        breaks_by_another_body,
        breaks_by_a_short_body,
        breaks_by_a_short_body_of_unknown_length,
        breaks_by_silence,
        breaks_by_no_server,
    ],
)
def test_a_failed_download_says_what_to_place_where_and_changes_nothing(tmp_path, server, monkeypatch, breaks, there):
    if there:
        (tmp_path / ARCHIVE).write_bytes(there)
    reason = breaks(server, monkeypatch)
    with pytest.raises(FetchError) as caught:
        fetch("cifar10", tmp_path)
    message = str(caught.value)
    address = DATASETS["cifar10"].address
    for part in (reason, str(tmp_path / ARCHIVE), sha256(BODY), f"{address}/{ARCHIVE}"):
        assert part in message
    assert [path.read_bytes() for path in tmp_path.iterdir()] == ([there] if there else [])


def test_the_message_lists_every_file_still_missing_and_no_other(tmp_path, server, monkeypatch):
    files = {name: sha256(name[:1].encode()) for name in ("a.gz", "b.gz", "c.gz")}
    server.bodies = {"/a.gz": b"a", "/c.gz": b"c"}
    monkeypatch.setitem(DATASETS, "cifar10", RemoteDataSet(server.address, files))
    with pytest.raises(FetchError) as caught:
        fetch("cifar10", tmp_path)
    wanted = str(caught.value).partition("place by hand")[2]
    assert "a.gz" not in wanted
    assert "b.gz" in wanted and "c.gz" in wanted
    assert os.listdir(tmp_path) == ["a.gz"]  # it is complete and right: the next run continues from here


def test_a_mirror_replaces_the_address(tmp_path, server, monkeypatch):
    monkeypatch.setitem(DATASETS, "cifar10", RemoteDataSet(closed_port(), DATASETS["cifar10"].files))
    server.bodies = {f"/mirror/of/ours/{ARCHIVE}": BODY}
    monkeypatch.setenv("DATAPIPE_MIRROR", f"{server.address}/mirror/of/ours/")
    fetch("cifar10", tmp_path)
    assert server.asked == [f"/mirror/of/ours/{ARCHIVE}"]


def test_a_mirror_may_be_a_folder(tmp_path, monkeypatch):
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    (mirror / ARCHIVE).write_bytes(BODY)
    monkeypatch.setenv("DATAPIPE_MIRROR", mirror.as_uri())
    assert fetch("cifar10", tmp_path / "raw")[0].read_bytes() == BODY


def test_settings_are_checked(tmp_path, monkeypatch):
    with pytest.raises(SettingError, match=r"imagenet.*cifar10, cifar100, fashion-mnist"):
        fetch("imagenet", tmp_path)
    monkeypatch.setenv("DATAPIPE_MIRROR", "/some/folder")
    with pytest.raises(SettingError, match=r"DATAPIPE_MIRROR='/some/folder'.*file://"):
        fetch("cifar10", tmp_path)


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "raw").write_bytes(b"mine")
    with pytest.raises(SettingError, match="raw is a file; allowed: a folder, or a new name"):
        fetch("cifar10", tmp_path / "raw")
    assert (tmp_path / "raw").read_bytes() == b"mine"


def test_a_full_disk(tmp_path, monkeypatch):
    @contextlib.contextmanager
    def write_to_full_disk(_path):
        with open("/dev/full", "wb", buffering=0) as file:
            yield file

    monkeypatch.setattr(fetching, "atomic_write", write_to_full_disk)
    with pytest.raises(FetchError, match="No space left"):
        fetch("cifar10", tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_download_leaves_nothing(tmp_path, server, number):
    server.stall = True
    line = [CHILDREN / "fetches_one_file.py", server.address, ARCHIVE, sha256(BODY), tmp_path]
    child = subprocess.Popen([sys.executable, *line], cwd=ROOT, env=clean_environment())
    try:
        assert server.half_sent.wait(limit_s())
        wait_until(lambda: list(tmp_path.iterdir()), child)  # it has begun to write
        child.send_signal(number)
        assert child.wait(limit_s()) == 128 + number
    finally:
        child.kill()
        child.wait(limit_s())
    assert list(tmp_path.iterdir()) == []
    server.stall = False
    fetch("cifar10", tmp_path)
    assert os.listdir(tmp_path) == [ARCHIVE]


# ---- Debian's package: stand-ins for apt-get and dpkg-deb, found first on PATH


@pytest.fixture
def package(tmp_path, monkeypatch, server):
    """Make "fashion-mnist" a data set of two small files, also in a package; return a function that
    writes the stand-ins."""
    files = {name: sha256(name.encode()) for name in ("images", "labels")}
    dataset = RemoteDataSet(server.address, files, "the-package", "usr/share/it")
    monkeypatch.setitem(DATASETS, "fashion-mnist", dataset)
    server.bodies = {"/images": b"images", "/labels": b"labels"}
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)

    def write(apt_get: str, images: str = "images") -> Path:
        said = tmp_path / "said"
        unpack = f"mkdir -p usr/share/it && printf {images} >usr/share/it/images"
        unpack += " && printf labels >usr/share/it/labels"
        for name, script in (("apt-get", apt_get), ("dpkg-deb", unpack)):
            (tools / name).write_text(f'#!/bin/sh\necho {name} "$@" >>"{said}"\n{script}\n')
            (tools / name).chmod(0o755)
        return said

    return write


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.fixture
def impatient(monkeypatch):
    """impatient(path) has apt's time be over soon after a program has written a line to a file."""

    def begin(path: Path) -> None:
        def communicate_when_written(process: subprocess.Popen, **options) -> tuple[str, str]:
            wait_until(lambda: path.exists() and path.read_text().endswith("\n"))
            return communicate(process, **options)

        communicate = subprocess.Popen.communicate
        monkeypatch.setattr(subprocess.Popen, "communicate", communicate_when_written)
        monkeypatch.setattr(fetching, "APT_S", 0.1)

    return begin


BOTH = {"images": "images", "labels": "labels"}
UNKNOWN = 'echo "E: Unable to locate package the-package" >&2; exit 100'
HANGS = "sleep 1000 & wait"


def test_files_from_the_package(tmp_path, server, package):
    said = package("touch the-package_1_all.deb")
    fetch("fashion-mnist", tmp_path / "raw")
    assert contents(tmp_path / "raw") == BOTH
    assert server.asked == []
    assert [line.split()[0] for line in said.read_text().splitlines()] == ["apt-get", "dpkg-deb"]


def test_a_package_with_a_changed_file(tmp_path, server, package, caplog):
    package("touch the-package_1_all.deb", images="newer")
    fetch("fashion-mnist", tmp_path / "raw")
    assert contents(tmp_path / "raw") == BOTH
    assert server.asked == ["/images"]
    assert sha256(b"newer") in caplog.text


@pytest.mark.parametrize("apt_get", [UNKNOWN, "exit 1", "exit 0", HANGS], ids=["unknown", "fails", "no file", "hangs"])
def test_the_public_address_when_apt_cannot(tmp_path, server, package, impatient, apt_get):
    """Nothing but the download is asked of apt, whoever asks."""
    said = package(apt_get)
    if apt_get == HANGS:
        impatient(said)
    fetch("fashion-mnist", tmp_path / "raw")
    assert contents(tmp_path / "raw") == BOTH
    assert server.asked == ["/images", "/labels"]
    (call,) = said.read_text().splitlines()
    assert call.startswith("apt-get ") and call.endswith(" download the-package")


def test_an_apt_that_hangs_is_ended_with_its_children(tmp_path, package, impatient):
    package(f'sleep 1000 & echo $! > "{tmp_path}/child"; wait')
    impatient(tmp_path / "child")
    fetch("fashion-mnist", tmp_path / "raw")
    child = Path("/proc", (tmp_path / "child").read_text().strip(), "cmdline")
    wait_until(lambda: not child.exists() or not child.read_bytes())  # it is gone, or nobody has waited for it


def test_apt_is_not_tried_with_a_mirror_or_when_all_is_there(tmp_path, server, package, monkeypatch):
    said = package("touch the-package_1_all.deb")
    monkeypatch.setenv("DATAPIPE_MIRROR", server.address)
    fetch("fashion-mnist", tmp_path / "raw")
    monkeypatch.delenv("DATAPIPE_MIRROR")
    fetch("fashion-mnist", tmp_path / "raw")
    assert server.asked == ["/images", "/labels"]
    assert not said.exists()


# ---- the real thing, and the sample cut out of it


def _idx(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes())


def test_the_sample_is_small_balanced_and_reproducible(sample_dir):
    files = [sample_dir / name for name in DATASETS["fashion-mnist"].files]
    assert sum(path.stat().st_size for path in files) <= 1_500_000
    assert all(path.read_bytes()[3:8] == bytes(5) for path in files)  # gzip: no name, no time
    for split, per_class in (("train", 240), ("t10k", 60)):
        labels = _idx(sample_dir / f"{split}-labels-idx1-ubyte.gz")
        images = _idx(sample_dir / f"{split}-images-idx3-ubyte.gz")
        count = 10 * per_class
        assert labels[:8] == (0x801).to_bytes(4, "big") + count.to_bytes(4, "big")
        assert [labels[8:].count(label) for label in range(10)] == [per_class] * 10
        assert images[:16] == b"".join(n.to_bytes(4, "big") for n in (0x803, count, 28, 28))
        assert len(images) == 16 + count * 28 * 28 and len(labels) == 8 + count


@pytest.mark.network
@pytest.mark.slow
def test_real_fashion_mnist_by_apt_and_the_sample_out_of_it(tmp_path, sample_dir, monkeypatch):
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        pytest.skip("no apt-get and dpkg-deb here")
    package = DATASETS["fashion-mnist"].package
    tried = subprocess.run(["apt-get", "download", package], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    if tried.returncode:
        pytest.skip(f"apt cannot download {package} here: {tried.stderr.strip()}")
    whole = DATASETS["fashion-mnist"]
    only_apt = RemoteDataSet(closed_port(), whole.files, whole.package, whole.package_folder)
    monkeypatch.setitem(DATASETS, "fashion-mnist", only_apt)
    paths = fetch("fashion-mnist", tmp_path / "raw")
    assert [path.name for path in paths] == list(whole.files)
    assert [sha256(path.read_bytes()) for path in paths] == list(whole.files.values())

    spec = importlib.util.spec_from_file_location("make_sample", ROOT / "tools" / "make_sample.py")
    make_sample = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_sample)
    assert make_sample.main([str(tmp_path / "raw"), str(tmp_path / "sample")]) == 0
    for name in whole.files:  # not the compressed bytes: they depend on zlib's version
        assert _idx(tmp_path / "sample" / name) == _idx(sample_dir / name)
