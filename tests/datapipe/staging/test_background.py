"""Staging in the background: loaders read what has landed from LOCAL, the rest from DIR, and add what they read."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from datapipe.dataset import DataSet
from datapipe.dataset.local_first import LocalFirstReader
from datapipe.dataset.manifest import MANIFEST, Manifest
from datapipe.dataset.shard_reader import ShardReader
from datapipe.dataset.verify import verify
from datapipe.errors import StagingError
from datapipe.loaders import Batch, open_loader
from datapipe.locks import lock_holders, locked
from datapipe.staging import stage
from datapipe.staging.partial_file import PartialFile
from datapipe.staging.progress import find_progress
from tests.datapipe.staging.data_sets import CHUNK, NUM_IMAGES, let_others_in, make_data_set, needs_root, same
from tests.ports import free_ports
from tests.processes import Process
from tests.waiting import limit_s, wait_until

LOADING = {"batch_size": 2, "size": 16, "block_mib": 1, "threads": 2}  # two lanes: few blocks are divided


@pytest.fixture
def source(big_images) -> Path:
    """A data set of 23 MiB in 4 shards."""
    return big_images / "train"


@pytest.fixture
def background(source, tmp_path, start) -> Callable[..., Process]:
    """background(*arguments) -> a process that stages to tmp_path/local, in the foreground of its own; ended after."""
    # As under srun, where it does not leave: so that the test is its parent.
    env = os.environ | {"SLURM_STEP_ID": "0"}
    line = source, tmp_path / "local", "--chunk-mib", 1, "--json", "--background"
    return lambda *arguments: start(*line, *arguments, env=env)


@pytest.fixture
def reads(monkeypatch) -> Counter:
    """The bytes read from shards, by the folder that they are in; a partial shard's folder is "partial"."""
    count: Counter = Counter()
    read = ShardReader.read

    def counted(self, shard, offset, size, into=None):
        data = read(self, shard, offset, size, into)
        path = self._shards[shard].path
        count["partial" if path.suffix == ".partial" else str(path.parent)] += size
        return data

    monkeypatch.setattr(ShardReader, "read", counted)
    return count


def landed(local: Path) -> int:
    """The bytes that have landed; -1 if nothing was begun."""
    with suppress(StagingError):
        return find_progress(local).landed_bytes
    return -1


def stop_midway(child: Process, local: Path, num_chunks: int = 1) -> None:
    """Stop a process that stages once all four shards are begun and more than so many chunks have landed."""
    wait_until(lambda: len([*local.glob(".*.landed")]) == 4 and landed(local) > num_chunks * CHUNK, child)
    child.send_signal(signal.SIGSTOP)
    assert find_progress(local).state == "running"


def describe(batch: Batch) -> tuple[list[int], list[int], int]:
    return batch.samples.tolist(), batch.labels.tolist(), batch.images.sum().item()


def batches(source: Path, cache: Path | None, order: str, epochs: int = 1, **options) -> list[list]:
    with open_loader(source, order=order, cache=cache, **(LOADING | options)) as loader:
        return [list(map(describe, loader)) for _ in range(epochs)]


@pytest.mark.parametrize("order", ["full", "blocks"])
def test_batches_are_the_same_while_shards_arrive(source, background, tmp_path, reads, order):
    expected = batches(source, None, order, epochs=2)
    reads.clear()
    child = background("--max-mbps", 3)
    stop_midway(child, tmp_path / "local", 4)
    with open_loader(source, order=order, cache=tmp_path / "local", **LOADING) as loader:
        got = [list(map(describe, loader))]
        assert reads[str(source)] and reads["partial"] + reads[str(tmp_path / "local")]
        child.send_signal(signal.SIGCONT)
        got += [list(map(describe, loader))]
    assert got == expected
    _out, errors = child.communicate(timeout=limit_s())
    assert child.returncode == 0, errors
    assert same(source, tmp_path / "local") and verify(tmp_path / "local") == []
    reads.clear()
    assert batches(source, tmp_path / "local", order, epochs=2) == expected
    assert [*reads] == [str(tmp_path / "local")]


def test_what_a_loader_reads_in_blocks_is_not_read_again(source, background, tmp_path, reads):
    """The process that stages is stopped: an epoch brings nearly all chunks, and it reads only what is left."""
    total = sum(shard.size_bytes for shard in Manifest.read(source).shards)
    child = background("--max-mbps", 1)
    stop_midway(child, tmp_path / "local")
    before = landed(tmp_path / "local")
    batches(source, tmp_path / "local", "blocks", epochs=2, last="pad")
    assert reads[str(source)] <= 1.4 * total  # of two epochs
    progress = find_progress(tmp_path / "local")
    assert progress.state == "running" and progress.landed_bytes > before + 0.7 * total
    child.send_signal(signal.SIGCONT)
    out, errors = child.communicate(timeout=limit_s())
    assert child.returncode == 0, errors
    assert json.loads(out)["data_sets"][0]["copied_bytes"] <= 0.3 * total
    assert same(source, tmp_path / "local") and verify(tmp_path / "local") == []


def test_what_landed_wrong_is_read_from_the_source(source, background, tmp_path, caplog):
    expected = batches(source, None, "full")
    child = background("--max-mbps", 1)
    stop_midway(child, tmp_path / "local")
    for path in [*(tmp_path / "local").glob(".*.partial"), *(tmp_path / "local").glob("*.tar")]:
        with path.open("r+b") as file:
            for at in range(0, path.stat().st_size, 10_000):
                file.seek(at)
                file.write(b"rubbish")
    assert batches(source, tmp_path / "local", "full") == expected
    assert "are not the ones that were packed" in caplog.text
    child.kill()
    assert same(source, stage(source, tmp_path / "local")[0].folder)


def test_a_copy_that_vanishes_is_not_missed(source, background, tmp_path):
    expected = batches(source, None, "full", epochs=2)
    child = background("--max-mbps", 1)
    wait_until(lambda: landed(tmp_path / "local") > CHUNK, child)
    with open_loader(source, cache=tmp_path / "local", **LOADING) as loader:
        got = []
        for _ in range(2):
            got.append([])
            for batch in loader:
                got[-1].append(describe(batch))
                child.kill()
                shutil.rmtree(tmp_path / "local", ignore_errors=True)
    assert got == expected


def test_a_process_that_was_killed_leaves_what_the_next_one_continues(source, background, tmp_path):
    child = background("--max-mbps", 1)
    stop_midway(child, tmp_path / "local")  # else it may be done before the loader is, which adds to it
    batches(source, tmp_path / "local", "blocks")
    child.kill()
    child.wait(limit_s())
    progress = find_progress(tmp_path / "local")
    assert progress.state == "stopped"
    # Nobody is at work any more: a loader stages itself, and waits for that.
    expected = batches(source, None, "full")
    assert batches(source, tmp_path / "local", "full") == expected
    assert find_progress(tmp_path / "local").state == "whole" and same(source, tmp_path / "local")


def test_a_shard_that_gets_its_name_between_a_look_and_a_read(source, tmp_path, caplog):
    """The partial file is gone, and nothing is read from the source for that."""
    manifest = Manifest.read(source)
    info = manifest.shards[0]
    landing = PartialFile(tmp_path / info.name, info, 1 << 20, False)
    content = (source / info.name).read_bytes()
    for offset in range(0, len(content), 1 << 20):
        landing.write(offset, memoryview(content)[offset : offset + (1 << 20)])
    reader = LocalFirstReader(tmp_path / "nowhere", tmp_path, manifest)
    assert not reader._is_there(0, 0, 1 << 30) and reader._is_there(0, 0, 100)
    landing.finish(lambda path=None: None)
    assert bytes(reader.read(0, 700, 100)) == content[700:800] and bytes(reader.read(0, 0, 9)) == content[:9]
    reader.close()


def test_several_wrong_samples_of_one_read_are_healed(source, tmp_path):
    """The first one leads to the source; those that were read with it are wrong, too."""
    manifest = Manifest.read(source)
    for info in manifest.shards:
        landing = PartialFile(tmp_path / info.name, info, 1 << 20, False)
        for offset in range(0, info.size_bytes, 1 << 20):
            landing.write(offset, memoryview(bytes(min(1 << 20, info.size_bytes - offset))))
        landing.close()
    with DataSet(source, local=tmp_path) as data_set, DataSet(source) as expected:
        records = data_set.index[:20]
        wrong = [data_set.reader.read(*(int(r[name]) for name in ("shard", "offset", "size"))) for r in records]
        for sample, (data, r) in enumerate(zip(wrong, records, strict=True)):
            place = (int(r["shard"]), int(r["offset"]), int(r["checksum"]))
            assert not any(data) and data_set.checked(sample, data, *place) == expected.read(sample)


def test_an_earlier_versions_index_is_not_taken(source, tmp_path):
    (tmp_path / "index.npy").write_bytes(b"of another version")
    with DataSet(source, local=tmp_path) as data_set:
        assert len(data_set) == NUM_IMAGES


def test_files_are_given_back_when_a_shard_is_whole(source, tmp_path):
    """Of each shard one file stays open, and not its source, its map and what was written to."""
    before = len(os.listdir("/proc/self/fd"))
    manifest = Manifest.read(source)
    with DataSet(source, local=tmp_path) as data_set:
        landings = [PartialFile(tmp_path / info.name, info, 1 << 20, False) for info in manifest.shards]
        for number, (landing, info) in enumerate(zip(landings, manifest.shards, strict=True)):
            content = memoryview((source / info.name).read_bytes())
            landing.write(0, content[: 1 << 20])
            data_set.reader._arriving[number]._next_look = 0.0
            assert (
                data_set.reader.read(number, 0, 100) == data_set.reader.read(number, 2 << 20, 100)[:0] + content[:100]
            )
            for offset in range(1 << 20, len(content), 1 << 20):
                landing.write(offset, content[offset : offset + (1 << 20)])
            landing.finish(lambda path=None: None)
        for number in range(len(landings)):
            data_set.reader._arriving[number]._next_look = 0.0
            data_set.reader.read(number, 0, 100)
        # A thread closes them.
        wait_until(lambda: len(os.listdir("/proc/self/fd")) - before <= len(landings) + 2)
    assert len(os.listdir("/proc/self/fd")) <= before + 1


@needs_root
def test_another_users_copy_is_read_and_never_written(source, background, tmp_path, as_nobody):
    """Its files may be read; a loader of another user adds nothing."""
    child = background("--max-mbps", 1)
    stop_midway(child, tmp_path / "local")
    let_others_in(tmp_path, source)
    before = landed(tmp_path / "local")
    settings = json.dumps(LOADING | {"order": "blocks"})
    done = as_nobody("counts_images", source, tmp_path / "local", settings)
    assert done.returncode == 0 and done.stdout.split()[0] == str(NUM_IMAGES), done.stderr
    assert landed(tmp_path / "local") == before


# --- the command ---


@pytest.fixture
def run(command) -> Callable[..., str]:
    """run(*arguments, code=0, name="stage") -> what the command prints, or the error that it ends with."""

    def run(*arguments: object, code: int = 0, name: str = "stage") -> str:
        done = command("datapipe", name, *arguments)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if not code else done.stderr

    return run


@pytest.fixture
def run_cache(run) -> Callable[..., str]:
    """run_cache(*arguments, code=0) -> the same of `datapipe cache`."""
    return partial(run, name="cache")


def test_the_command_returns_early_and_the_rest_follows(tmp_path, run, run_cache):
    source, local = tmp_path / "source", tmp_path / "local"
    make_data_set(source, [6 * CHUNK, 1000, 2 * CHUNK])
    line = (source, local, "--background", "--chunk-mib", 1, "--max-mbps", 1, "--json")
    begun = json.loads(run(*line))
    assert begun["state"] == "running" and 0 < begun["landed_bytes"] < begun["total_bytes"] == 8 * CHUNK + 1000
    assert not (local / MANIFEST).exists()
    assert "MiB" in run_cache("status", local)
    whole = json.loads(run_cache("wait", local, "--json"))
    assert (whole["state"], whole["landed_bytes"], whole["seconds_left"]) == ("whole", begun["total_bytes"], None)
    assert same_but_log(source, local)
    assert json.loads(run(*line))["state"] == "whole"  # at once
    assert run_cache("status", local).startswith(f"{local}: whole")


def same_but_log(source: Path, local: Path) -> bool:
    (local / ".stage.log").unlink()
    return same(source, local)


def test_what_goes_wrong_in_the_background_is_told(tmp_path, run, run_cache):
    source, local = tmp_path / "source", tmp_path / "local"
    make_data_set(source, [CHUNK, 2 * CHUNK])
    assert "nothing was staged there" in run_cache("status", local, code=1)
    assert "no data set" in run(tmp_path / "nowhere", local, "--background", code=2)
    (source / "shard-000001.tar").write_bytes(bytes(2 * CHUNK))
    with suppress(AssertionError):  # it may have brought the first file before it met the second
        run(source, local, "--background", "--chunk-mib", 1)
    wait_until(lambda: find_progress(local).state == "stopped")
    assert "stopped" in run_cache("status", local)
    message = run_cache("wait", local, code=1)
    assert "no process is at work there" in message and "shard-000001.tar" in message


def test_it_returns_early_in_the_place_of_an_earlier_version(tmp_path, run, run_cache):
    """Of which files are removed: fewer bytes are there than before."""
    source, local = tmp_path / "source", tmp_path / "local"
    make_data_set(source, [6 * CHUNK, 6 * CHUNK])
    run(source, local)
    shutil.rmtree(source)
    make_data_set(source, [6 * CHUNK], seed=1)
    begun = json.loads(run(source, local, "--background", "--chunk-mib", 1, "--max-mbps", 1, "--json"))
    assert begun["state"] == "running"
    run_cache("wait", local)
    assert same_but_log(source, local)


def test_where_all_is_in_place_it_returns_at_once(tmp_path, run):
    """Also where somebody else has put it there, and where nothing can be written."""
    source, local = tmp_path / "source", tmp_path / "local"
    make_data_set(source, [CHUNK, 1000])
    shutil.copytree(source, local)
    whole = json.loads(run(source, local, "--background", "--json"))
    assert (whole["state"], whole["whole_files"]) == ("whole", 2)
    if os.geteuid() == 0:
        subprocess.run(["mount", "-o", "bind,ro", local, local], check=True)
        try:
            assert "0.0 MiB read from DIR" in run(source, local, "--background")
        finally:
            subprocess.run(["umount", local], check=True)
    assert "into itself" in run(source, source / "local", "--background", code=2)
    assert not (source / "local").exists()


def test_a_planted_link_is_not_followed(tmp_path, run):
    source, local, victim = tmp_path / "source", tmp_path / "local", tmp_path / "victim"
    make_data_set(source, [CHUNK])
    victim.write_text("precious")
    local.mkdir()
    (local / ".stage.log").symlink_to(victim)
    run(source, local, "--background", code=1)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", [".origin.json", ".checked.json"])
def test_what_a_planted_link_says_does_not_count(tmp_path, name, run, run_cache):
    source, local = tmp_path / "source", tmp_path / "local"
    make_data_set(source, [CHUNK])
    run(source, local)
    (local / name).rename(tmp_path / f"its{name}")
    (local / name).symlink_to(tmp_path / f"its{name}")
    (local / "shard-000000.tar").unlink()
    before = (tmp_path / f"its{name}").read_bytes()
    if name == ".origin.json":
        assert ".origin.json: cannot be read, or another" in run_cache("status", local, code=1)
    run(source, local)
    assert same(source, local) and not (local / name).is_symlink()
    assert (tmp_path / f"its{name}").read_bytes() == before


def test_ctrl_c_ends_what_was_begun(tmp_path, start):
    source, local = tmp_path / "source", tmp_path / "local"
    make_data_set(source, [CHUNK])
    local.mkdir(mode=0o700)
    log = local / ".stage.log"
    with locked(local, wait=False):  # nothing arrives, for which the command would not wait any longer
        child = start(source, local, "--background")
        wait_until(lambda: log.exists() and "waiting" in log.read_text(), child)
        assert lock_holders(log, shared=True)
        child.send_signal(signal.SIGINT)
        assert child.wait(limit_s()) == 130
        wait_until(lambda: not lock_holders(log, shared=True))


def test_nodes_exchange_in_the_background(start, tmp_path, run_cache):
    source = tmp_path / "source"
    make_data_set(source, [4 * CHUNK, 3 * CHUNK + 1])
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(2))}
    children = []
    for i in range(2):
        line = source, tmp_path / f"local-{i}", "--node", f"{i}/2", "--chunk-mib", 1, "--background"
        children.append(start(*line, host=f"node{i}", env=env))
    said = [child.communicate(timeout=limit_s()) for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    for i in range(2):
        assert "whole" in run_cache("wait", tmp_path / f"local-{i}")
        assert same_but_log(source, tmp_path / f"local-{i}")
