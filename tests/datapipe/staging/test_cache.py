"""Several jobs and users share a cache: who uses a copy keeps it, and the others make room."""

from __future__ import annotations

import gc
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from datapipe.cli import app
from datapipe.cli.cache import describe_copies, list_copies, pin, unpin
from datapipe.dataset.manifest import MANIFEST, Manifest
from datapipe.errors import SettingError, StagingError
from datapipe.fsio import boot_id
from datapipe.loaders import open_loader
from datapipe.locks import BusyError, find_holder, lock_holders, locked
from datapipe.staging import StageOptions, stage, stage_once
from datapipe.staging.cache import clean, evict, remove
from datapipe.staging.folder_content import FolderContent, find_copies
from datapipe.staging.lease import keep_for_job, leases_in
from datapipe.staging.progress import find_progress
from tests.datapipe.staging.data_sets import CHILDREN, CHUNK, make_data_set, needs_root, same
from tests.ports import free_ports
from tests.processes import Process, clean_environment
from tests.waiting import limit_s, read_until

OUTSIDE = clean_environment()  # of any job


@pytest.fixture
def held(begin) -> Callable[..., Process]:
    """held(source, cache) -> a process that has a loader open; it closes it when its input ends."""

    def hold(*arguments: object, name: str = "keeps_a_loader_open") -> Process:
        child = begin(name, *arguments, stdin=subprocess.PIPE)
        read_until("open", child.stdout, child)
        return child

    return hold


def used_before(copy: Path, hours: float) -> None:
    """Have a copy, or each of its splits, been used last so long ago."""
    at = time.time() - 3600 * hours
    for origin in copy.rglob(".origin.json"):
        os.utime(origin, (at, at))


def run_out_of_room(cache: Path) -> list[str]:
    """Remove what may be removed, as if there were never enough room; return the names of the folders that are left."""
    for copy in find_copies(cache):
        remove(copy, "for the test")
    return sorted(path.name for path in cache.iterdir())


def in_job(job: str, **variables: str) -> dict[str, str]:
    return OUTSIDE | {"SLURM_JOB_ID": job} | variables


# --- in use ---


def test_a_copy_that_a_loader_has_open_stays(packed_folders, tmp_path, held):
    """Until it is closed, or its process is killed."""
    source, cache = packed_folders["tar"] / "val", tmp_path / "cache"
    with open_loader(source, 4, size=16, cache=cache) as loader:
        (name,) = run_out_of_room(cache)
        assert sum(len(batch.labels) for batch in loader) == 8
    assert run_out_of_room(cache) == []
    child = held(source, cache)
    assert run_out_of_room(cache) == [name]
    child.kill()
    child.wait(limit_s())
    assert run_out_of_room(cache) == []


def test_a_loader_that_is_not_closed_lets_its_copy_go(packed_folders, tmp_path):
    source, cache = packed_folders["tar"] / "val", tmp_path / "cache"
    loader = open_loader(source, 4, size=16, cache=cache)
    assert len(run_out_of_room(cache)) == 1
    del loader
    gc.collect()
    assert run_out_of_room(cache) == []


@needs_root
def test_another_user_who_may_only_read_uses_a_copy(public, held):
    source, cache = public / "source" / "val", public / "cache"
    copy = stage_once(source, cache)
    child = held("keeps_a_loader_open", source, cache, name="as_nobody")
    (row,) = describe_copies(cache)
    assert [(process["pid"], process["user"]) for process in row["in_use"]] == [(child.pid, "nobody")]
    assert run_out_of_room(cache) == [copy.name]
    child.kill()
    child.wait(limit_s())
    assert run_out_of_room(cache) == []


def test_what_a_copy_says_of_itself_is_escaped(tmp_path, capsys):
    """Any user can write a copy's origin, and list what another has written."""
    (tmp_path / "cache" / "x\x9b1m").mkdir(parents=True)
    origin = {"source": "/é\x1b]0;owned\x07\nfolder", "manifest": "00", "files": ["a"]}
    (tmp_path / "cache" / "x\x9b1m" / ".origin.json").write_text(json.dumps(origin))
    list_copies(tmp_path / "cache")
    said = capsys.readouterr().out
    assert r"x\x9b1m  /é\x1b]0;owned\x07\nfolder  " in said and len(said.splitlines()) == 2, said


@needs_root
def test_another_users_copy_is_read_and_never_removed(public, as_nobody):
    source, cache = public / "source" / "val", public / "cache"
    copy = stage_once(source, cache)
    cache.chmod(0o777)  # not that of a shared TMPDIR, which alone would protect it
    done = as_nobody("datapipe", "cache", "clean", cache, "--free", "1000TB")
    assert done.returncode == 1 and "0 copies removed" in done.stdout, done.stderr
    for name in ("pin", "unpin"):
        done = as_nobody("datapipe", "cache", name, copy)
        assert done.returncode == 1 and "only that user can" in done.stderr, done.stderr
    done = as_nobody("datapipe", "cache", "list", cache)
    assert done.returncode == 0 and "root's" in done.stdout, done.stderr
    assert same(source, copy)
    os.chown(copy, 65534, 65534)  # the folder alone: a note on what it holds must be of the same user
    assert find_copies(cache) == []


@pytest.mark.parametrize(
    ("kind", "step"),
    [("cache", 2), *(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in ("cache", "splits"))],
)
def test_an_evictor_and_stagers_at_the_same_moment(tmp_path, server, kind, step):
    """Whatever the moment: who has staged to a cache holds a whole copy, and who stages again gets all there."""
    for split in ("train", "val"):
        make_data_set(tmp_path / "source" / split, [1000])
    done = server.run(CHILDREN / "evicts_at_each_moment.py", kind, tmp_path, step, timeout=limit_s(300))
    assert done.returncode == 0, done.stderr
    num_moments, num_removed = map(int, done.stdout.split())
    assert num_moments > 20 and num_removed > 5


def test_nobody_removes_what_a_stager_is_at_work_on(tmp_path):
    make_data_set(tmp_path / "source", [1000])
    copy = stage_once(tmp_path / "source", tmp_path / "cache")
    with locked(copy, wait=False):
        assert run_out_of_room(tmp_path / "cache") == [copy.name]
    assert run_out_of_room(tmp_path / "cache") == []


# --- kept for a job, and pinned ---


def test_a_copy_is_kept_between_the_steps_of_a_job(tmp_path, start):
    """Until the job's end, which Slurm tells; outside a job nothing is kept."""
    make_data_set(tmp_path / "source", [1000])
    cache, local = tmp_path / "cache", tmp_path / "cache" / "name"
    end = int(time.time()) + 600
    child = start(tmp_path / "source", local, env=in_job("17", SLURM_JOB_END_TIME=str(end)))
    assert child.wait(limit_s()) == 0
    note = json.loads((local / ".keep-17.json").read_text())
    assert note.pop("pid") == child.pid and note.pop("started").isdigit()
    here = {"host": socket.gethostname(), "boot": boot_id(), "namespace": os.readlink("/proc/self/ns/pid")}
    assert note == {"job": "17", "until": end, **here}
    assert run_out_of_room(cache) == ["name"]
    assert start(tmp_path / "source", local, env=in_job("17", SLURM_JOB_END_TIME=str(end - 1000))).wait(limit_s()) == 0
    assert run_out_of_room(cache) == []
    assert start(tmp_path / "source", local, env=OUTSIDE).wait(limit_s()) == 0
    assert run_out_of_room(cache) == []


@pytest.mark.parametrize(
    ("variables", "name", "hours"),
    [
        ({"PBS_JOBID": "12[3].server/x"}, ".keep-12_3_.server_x.json", 24),
        ({"PBS_JOBID": "12", "PBS_WALLTIME": "7200"}, ".keep-12.json", 2),
        ({"SLURM_JOB_ID": "12", "SLURM_JOB_END_TIME": "soon"}, ".keep-12.json", 24),
    ],
)
def test_how_long_a_copy_is_kept(tmp_path, start, variables, name, hours):
    make_data_set(tmp_path / "source", [1000])
    before = time.time()
    assert start(tmp_path / "source", tmp_path / "local", env=OUTSIDE | variables).wait(limit_s()) == 0
    until = json.loads((tmp_path / "local" / name).read_text())["until"]
    assert before + 3600 * hours <= until <= time.time() + 3600 * hours


@pytest.mark.parametrize("where", ["name", "name/train"])
def test_what_keeps_a_folder_keeps_its_splits(tmp_path, start, where):
    make_data_set(tmp_path / "source" / "train", [1000])
    make_data_set(tmp_path / "source" / "val", [1000])
    cache = tmp_path / "cache"
    assert start(tmp_path / "source", cache / "name", env=in_job("17")).wait(limit_s()) == 0
    assert (cache / "name" / ".keep-17.json").exists() and run_out_of_room(cache) == ["name"]
    clean(cache, ended="17")
    pin(cache / where)
    run_out_of_room(cache)
    left = sorted(path.name for path in (cache / "name").iterdir() if path.is_dir())
    assert left == (["train", "val"] if where == "name" else ["train"])


@pytest.mark.parametrize(
    "note",
    [b"", b"{", b"[]", b'{"job": "17"}', b"\xff", b"[" * 100_000, "boot", "until"],
    ids=["empty", "cut", "list", "short", "binary", "deep", "boot", "until"],
)
def test_a_note_that_does_not_count(tmp_path, note):
    """Of an earlier life of the node, of a job that is over, or not readable."""
    make_data_set(tmp_path / "source", [1000])
    copy = stage_once(tmp_path / "source", tmp_path / "cache")
    fields = {"job": "17", "host": socket.gethostname(), "boot": boot_id(), "pid": 1, "until": time.time() + 600}
    path = copy / ".keep-17.json"
    path.write_text(json.dumps(fields))
    assert run_out_of_room(tmp_path / "cache") == [copy.name]
    path.unlink()
    if isinstance(note, str):
        path.write_text(json.dumps(fields | {note: {"boot": "an earlier one", "until": time.time() - 1}[note]}))
    else:
        path.write_bytes(note)
    assert run_out_of_room(tmp_path / "cache") == []


def test_a_note_that_is_over_goes_with_the_next_one(tmp_path):
    """Where no epilog has removed it, as of a job that was killed with its node."""
    keep_for_job(tmp_path, "17", {"SLURM_JOB_END_TIME": str(int(time.time()) - 1)})
    keep_for_job(tmp_path, "18", {})
    keep_for_job(tmp_path, "19", {})
    assert [keep.job for keep in leases_in(tmp_path)] == ["18", "19"]


def test_no_link_is_followed_to_a_note_or_from_one(tmp_path, start, begin):
    """Another user of a shared folder may have put it there."""
    make_data_set(tmp_path / "source", [1000])
    local, victim = tmp_path / "cache" / "local", tmp_path / "victim"
    stage(tmp_path / "source", local)
    valid = {"job": "17", "host": "", "boot": boot_id(), "pid": 1, "until": time.time() + 600}
    victim.write_text(json.dumps(valid))
    (local / ".keep-17.json").symlink_to(victim)
    (local / ".keep-18.json").symlink_to(tmp_path / "new")
    (local / ".pinned").symlink_to(tmp_path / "new")
    (row,) = describe_copies(tmp_path / "cache")
    assert row["kept"] == [] and row["pinned"]
    assert start(tmp_path / "source", local, env=in_job("17")).wait(limit_s()) == 0
    assert start(tmp_path / "source", local, env=in_job("18")).wait(limit_s()) == 0
    assert begin("datapipe", "cache", "pin", local).wait(limit_s()) == 0
    assert json.loads(victim.read_text()) == valid and not (tmp_path / "new").exists()
    assert not any((local / name).is_symlink() for name in (".keep-17.json", ".keep-18.json", ".pinned"))
    os.mkfifo(local / ".keep-19.json")
    os.mkfifo(local / ".origin.json.new")
    os.replace(local / ".origin.json.new", local / ".origin.json")
    assert describe_copies(tmp_path / "cache") == []


def test_a_folder_that_is_a_link_is_not_a_copy(tmp_path):
    make_data_set(tmp_path / "source", [1000])
    stage(tmp_path / "source", tmp_path / "elsewhere" / "name")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "name").symlink_to(tmp_path / "elsewhere" / "name")
    assert find_copies(tmp_path / "cache") == []


def test_pinned_copies_stay(tmp_path, begin):
    make_data_set(tmp_path / "source", [1000])
    copy = stage_once(tmp_path / "source", tmp_path / "cache")
    assert begin("datapipe", "cache", "pin", copy).wait(limit_s()) == 0
    assert run_out_of_room(tmp_path / "cache") == [copy.name]
    assert begin("datapipe", "cache", "unpin", copy).wait(limit_s()) == 0
    assert run_out_of_room(tmp_path / "cache") == []
    child = begin("datapipe", "cache", "pin", copy)
    assert "is not a folder" in child.communicate(timeout=limit_s())[1] and child.returncode == 2


# --- making room ---


def make_sources(folder: Path, *sizes: int) -> list[Path]:
    sources = [folder / f"set-{number}" for number in range(len(sizes))]
    for number, (source, size) in enumerate(zip(sources, sizes, strict=True)):
        make_data_set(source, [size], seed=number)
    return sources


def test_the_least_recently_used_make_room_and_no_more_than_needed(tmp_path, disk, caplog):
    """Of 24 MiB, four copies take 20; the next needs 9."""
    caplog.set_level("INFO")
    *sources, last = make_sources(tmp_path, *[5 * CHUNK] * 4, 9 * CHUNK)
    copies = [stage_once(source, disk / "cache") for source in sources]
    for copy, hours in zip(copies, (1, 3, 4, 2), strict=True):
        used_before(copy, hours)
    stage_once(sources[2], disk / "cache")  # which makes it the last used
    new = stage_once(last, disk / "cache")
    assert [copy.exists() for copy in copies] == [True, False, True, False] and same(last, new)
    lines = [line for line in caplog.messages if line.startswith("removed")]
    assert len(lines) == 2 and str(copies[1]) in lines[0] and "bytes" in lines[0] and "last used" in lines[0]


def test_stage_makes_room_only_when_asked(tmp_path, disk, start):
    """Without --evict, the error names it, and what it would free; with it, what is in use, kept or pinned stays."""
    one, other, new = make_sources(tmp_path, 9 * CHUNK, 9 * CHUNK, 12 * CHUNK)
    for source in (one, other):
        stage(source, disk / source.name)
    used_before(disk / one.name, 2)
    child = start(new, disk / new.name, env=OUTSIDE)
    errors = child.communicate(timeout=limit_s())[1]
    assert child.returncode == 1 and f"with --evict, copies in {disk} that nobody uses make way: 18," in errors, errors
    pin(disk / one.name)
    with locked(disk / other.name, wait=False):
        child = start(new, disk / new.name, "--evict", env=OUTSIDE)
        errors = child.communicate(timeout=limit_s())[1]
        assert child.returncode == 1 and "there is not enough that nobody uses" in errors, errors
    child = start(new, disk / new.name, "--evict", env=OUTSIDE)
    errors = child.communicate(timeout=limit_s())[1]
    assert child.returncode == 0 and f"removed {disk / other.name} (" in errors, errors
    assert same(new, disk / new.name) and same(one, disk / one.name) is False  # it has a pin
    assert (disk / one.name / MANIFEST).exists() and not (disk / other.name).exists()


def test_nothing_is_removed_where_it_does_not_help(tmp_path, disk):
    one, new = make_sources(tmp_path, 9 * CHUNK, 30 * CHUNK)
    copy = stage_once(one, disk / "cache")
    with pytest.raises(StagingError, match="there is not enough that nobody uses"):
        stage_once(new, disk / "cache")
    assert same(one, copy)


def test_other_splits_of_the_same_copy_and_sources_stay(tmp_path, disk):
    """A copy of a copy: what others were copied from is never removed."""
    (first,) = make_sources(tmp_path, 3 * CHUNK)
    stage(first, disk / "first")
    stage(disk / "first", disk / "second")
    used_before(disk / "first", 5)
    assert [copy.folder.name for copy in evict(disk, disk, 20 * CHUNK)] == ["second"]
    for split, size in (("train", 6), ("val", 19)):
        make_data_set(tmp_path / "both" / split, [size * CHUNK])
    stage(tmp_path / "both" / "train", disk / "both" / "train")
    with pytest.raises(StagingError, match="needs"):
        stage(tmp_path / "both", disk / "both", StageOptions(evict=True))
    assert (disk / "both" / "train" / MANIFEST).exists()


@pytest.mark.slow
def test_nodes_make_room_before_they_agree(tmp_path, disk, start):
    one, new = make_sources(tmp_path, 9 * CHUNK, 20 * CHUNK)
    stage(one, disk / "one")
    env = OUTSIDE | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(2))}
    places = disk / "new", tmp_path / "new"
    line = ("--mode", "exchange", "--chunk-mib", 1, "--evict")
    children = [
        start(new, place, *line, "--node", f"{i}/2", host=f"node{i}", env=env) for i, place in enumerate(places)
    ]
    said = [child.communicate(timeout=limit_s())[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    assert all(same(new, place) for place in places) and not (disk / "one").exists()


def test_only_what_staging_has_put_there_is_removed(tmp_path):
    make_data_set(tmp_path / "source", [1000, 2000])
    copy = stage_once(tmp_path / "source", tmp_path / "cache")
    (copy / "notes.txt").write_text("mine")
    (tmp_path / "cache" / "packed").mkdir()
    make_data_set(tmp_path / "cache" / "packed" / "train", [500])
    assert run_out_of_room(tmp_path / "cache") == ["packed", copy.name]
    assert [path.name for path in copy.iterdir()] == ["notes.txt"]
    assert len([*(tmp_path / "cache" / "packed" / "train").iterdir()]) == 2


def test_a_copy_of_which_the_removal_was_stopped_is_removed(tmp_path):
    """And one of a version of this software that did not note its files."""
    make_data_set(tmp_path / "source", [1000, 2000])
    copy = stage_once(tmp_path / "source", tmp_path / "cache")
    (copy / MANIFEST).unlink()
    assert run_out_of_room(tmp_path / "cache") == []
    copy = stage_once(tmp_path / "source", tmp_path / "cache")
    (copy / ".origin.json").write_text(json.dumps({"source": str(tmp_path / "source")}))
    assert run_out_of_room(tmp_path / "cache") == []


def test_names_that_lead_out_of_a_folder_remove_nothing_there(tmp_path):
    make_data_set(tmp_path / "source", [1000])
    copy = stage_once(tmp_path / "source", tmp_path / "cache")
    (tmp_path / "precious").write_text("mine")
    origin = json.loads((copy / ".origin.json").read_text())
    origin["files"] += ["../../precious", str(tmp_path / "precious")]
    (copy / ".origin.json").write_text(json.dumps(origin))
    assert run_out_of_room(tmp_path / "cache") == []
    assert (tmp_path / "precious").read_text() == "mine"


# --- earlier versions ---


def test_earlier_versions_do_not_pile_up(packed_folders, tmp_path):
    """Those that are in use or pinned stay."""
    source, cache = tmp_path / "source", tmp_path / "cache"
    copies = []
    for seed in range(3):
        shutil.rmtree(source, ignore_errors=True)
        make_data_set(source, [1000], seed=seed)
        copies.append(stage_once(source, cache))
        assert [path.exists() for path in copies] == [False] * seed + [True]
    pin(copies[2])
    make_data_set(tmp_path / "other", [1000], seed=9)
    stage_once(tmp_path / "other", cache)
    shutil.rmtree(source)
    shutil.copytree(packed_folders["tar"] / "val", source)
    with open_loader(source, 4, size=16, cache=cache):
        manifest = Manifest.read(source)
        shutil.rmtree(source)
        make_data_set(source, [1000], seed=8, like=manifest)
        stage_once(source, cache)
        assert len([*cache.iterdir()]) == 4
    stage(source, cache / "by-hand")  # the same version elsewhere is not an earlier one
    assert [why for _, why in clean(cache).removed] == ["its source has a later version"]
    assert len([*cache.iterdir()]) == 4 and copies[2].exists()


# --- the commands ---


@pytest.fixture
def cache_command(command) -> Callable[..., subprocess.CompletedProcess]:
    """cache_command(*arguments, env=OUTSIDE) -> what `datapipe cache` has said."""
    return lambda *arguments, env=OUTSIDE: command("datapipe", "cache", *arguments, env=env)


def test_list(packed_folders, tmp_path, held, start, cache_command):
    source, cache = packed_folders["tar"] / "val", tmp_path / "cache"
    child = held(source, cache)
    end = int(time.time()) + 600
    assert start(source, cache / "kept", env=in_job("17", SLURM_JOB_END_TIME=str(end))).wait(limit_s()) == 0
    stage(source, cache / "pinned")
    pin(cache / "pinned")
    stage(source, cache / "unfinished")
    (cache / "unfinished" / MANIFEST).unlink()
    stage(source, cache / "unused")
    done = cache_command("list", cache)
    assert done.returncode == 0, done.stderr
    rows = {Path(line.split()[0]).name: line for line in done.stdout.splitlines()}
    (name,) = rows.keys() - {"folder", "kept", "pinned", "unfinished", "unused"}
    assert f"in use by process {child.pid} (" in rows[name] and str(source) in rows[name] and " MiB " in rows[name]
    assert "kept for job 17 until 2" in rows["kept"] and rows["unused"].endswith("  unused")
    assert rows["pinned"].endswith("  pinned") and rows["unfinished"].endswith("unfinished")
    by_name = {Path(row["folder"]).name: row for row in json.loads(cache_command("list", cache, "--json").stdout)}
    assert [process["pid"] for process in by_name[name]["in_use"]] == [child.pid]
    assert [(keep["job"], keep["until"]) for keep in by_name["kept"]["kept"]] == [("17", end)]
    assert [name for name, row in by_name.items() if row["evictable"]] == ["unfinished", "unused"]
    assert by_name["unused"]["size_bytes"] >= Manifest.read(source).size_bytes
    done = cache_command("list", tmp_path / "nothing")
    assert done.returncode == 2 and "is not a folder" in done.stderr


def test_clean(tmp_path, start, cache_command):
    """Notes of jobs that have ended go, and of this one in its epilog; unfinished copies whose source is gone."""
    make_data_set(tmp_path / "source", [1000])
    make_data_set(tmp_path / "gone", [1000])
    cache = tmp_path / "cache"
    for source, job in (("source", "17"), ("gone", "18")):
        assert start(tmp_path / source, cache / source, env=in_job(job)).wait(limit_s()) == 0
    (cache / "gone" / MANIFEST).unlink()
    (cache / "gone" / ".shard-000000.tar.partial").write_bytes(b"x")
    shutil.rmtree(tmp_path / "gone")
    done = json.loads(cache_command("clean", cache, "--json", env=in_job("18")).stdout)
    assert done["leases"] == [] and done["removed"] == []
    env = in_job("18", SLURM_SCRIPT_CONTEXT="epilog_slurmd")
    done = json.loads(cache_command("clean", cache, "--json", env=env).stdout)
    assert done["leases"] == [str(cache / "gone" / ".keep-18.json")]
    assert [row["why"] for row in done["removed"]] == ["it is unfinished, and its source is gone"]
    assert sorted(path.name for path in cache.iterdir()) == ["source"]
    done = cache_command("clean", cache, "--free", "1000TB")
    assert done.returncode == 1 and "were to be free" in done.stderr and "0 copies removed" in done.stdout
    assert (cache / "source" / MANIFEST).exists()


def test_clean_makes_room(tmp_path, disk, cache_command):
    copies = [stage_once(source, disk) for source in make_sources(tmp_path, *[7 * CHUNK] * 3)]
    for copy, hours in zip(copies, (2, 3, 1), strict=True):
        used_before(copy, hours)
    done = cache_command("clean", disk, "--free", "9MiB")
    assert done.returncode == 0 and "1 copy removed" in done.stdout, done.stderr
    assert [copy.exists() for copy in copies] == [True, False, True]


@pytest.mark.parametrize("option", ["--list", "--clean", "--free", "--pin", "--unpin", "--status", "--wait"])
def test_options_of_earlier_versions_answer_with_the_new_words(tmp_path, option):
    name = {"--free": "clean CACHE --free"}.get(option, option.removeprefix("--"))
    for words in ([option, str(tmp_path)], [f"{option}={tmp_path}", "--json"]):
        with pytest.raises(SettingError, match=f"^{option}: is `datapipe cache {name} "):
            typer.main.get_command(app)(["stage", *words], standalone_mode=False)


@pytest.mark.parametrize("line", ["cache clean ", "cache list ", "cache status ", "stage . ", "stage  ."])
def test_an_empty_argument_is_not_the_current_folder(tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(typer.BadParameter, match="is empty"):
        typer.main.get_command(app)(line.split(" "), standalone_mode=False)


@needs_root
def test_users_open_the_same_cache_at_once(public, as_nobody):
    """One copies; the other reads it, and holds it."""
    source, cache = public / "source" / "val", public / "cache"
    with open_loader(source, 4, size=16, cache=cache):
        done = as_nobody("counts_images", source, cache)
    assert done.returncode == 0 and done.stdout == "8 False\n", done.stderr


# --- who holds what ---


def test_an_earlier_version_that_a_loader_has_open_is_not_replaced(packed_folders, tmp_path, held):
    source, local = tmp_path / "source", tmp_path / "local"
    shutil.copytree(packed_folders["tar"] / "val", source)
    stage(source, local)
    child = held(source, local)
    before, manifest = sorted(path.name for path in local.iterdir()), Manifest.read(source)
    shutil.rmtree(source)
    make_data_set(source, [1000], like=manifest)
    with pytest.raises(StagingError, match=rf"is in use by process {child.pid} \(") as caught:
        stage(source, local)
    assert not isinstance(caught.value, BusyError)  # in an exchange, all nodes are told
    assert sorted(path.name for path in local.iterdir()) == before
    child.communicate("")
    stage(source, local)
    assert same(source, local)


def test_who_only_looks_at_a_folder_does_not_stage_to_it(tmp_path):
    make_data_set(tmp_path / "source", [1000])
    copy = stage_once(tmp_path / "source", tmp_path / "cache")
    with locked(copy, wait=False, shared=True):
        assert lock_holders(copy) == [] and lock_holders(copy, shared=True) == [os.getpid()]
        assert find_holder(copy) == "" and describe_copies(tmp_path / "cache")[0]["staging"] == []
    with locked(copy, wait=False):
        assert f"process {os.getpid()} (" in find_holder(copy)
        assert [its["pid"] for its in describe_copies(tmp_path / "cache")[0]["staging"]] == [os.getpid()]


@pytest.mark.parametrize("left", ["nothing", "an empty folder", "a folder with others", "the source, empty"])
def test_an_unfinished_copy_stays_while_its_source_may_come_back(tmp_path, left):
    """Only where the source's folder shows that it is gone, it goes; not where a filesystem is not mounted."""
    source, cache = tmp_path / "shared" / "source", tmp_path / "cache"
    make_data_set(source, [1000])
    copy = stage_once(source, cache)
    (copy / MANIFEST).unlink()
    shutil.rmtree(tmp_path / "shared")
    if left != "nothing":
        (tmp_path / "shared").mkdir()
    if left == "a folder with others":
        (tmp_path / "shared" / "other").mkdir()
    if left == "the source, empty":
        source.mkdir()
    assert len(clean(cache).removed) == (left == "a folder with others")


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_no_link_or_pipe_is_read_to_tell_how_far_a_copy_is(tmp_path, kind):
    make_data_set(tmp_path / "source", [1000])
    copy = stage_once(tmp_path / "source", tmp_path / "cache")
    path = copy / ".shard-000001.tar.landed"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        (tmp_path / "other").write_bytes(b"0 4096 4096\n\1\0")
        path.symlink_to(tmp_path / "other")
    assert find_progress(copy).landed_bytes == 1000


def test_progress_of_a_copy_that_is_removed_at_this_moment(tmp_path, monkeypatch):
    make_data_set(tmp_path / "source", [1000])
    copy = stage_once(tmp_path / "source", tmp_path / "cache")
    read = FolderContent.read

    def removed_before(folder: Path, cache: Path, follows: bool) -> FolderContent:
        shutil.rmtree(folder)
        return read(folder, cache, follows)

    monkeypatch.setattr(FolderContent, "read", removed_before)
    with pytest.raises(StagingError, match="was removed to make room"):
        find_progress(copy)


def test_what_is_pinned_is_not_replaced(tmp_path, command):
    """Neither by a later version of the data set nor by another one."""
    first, other, local = tmp_path / "first", tmp_path / "other", tmp_path / "local"
    make_data_set(first, [CHUNK])
    make_data_set(other, [CHUNK], seed=1)
    stage(first, local)
    command("datapipe", "cache", "pin", local)
    shutil.rmtree(first)
    shutil.copytree(other, first)
    for source, options in ((first, StageOptions()), (other, StageOptions(replace=True))):
        with pytest.raises(StagingError, match="is pinned"):
            stage(source, local, options)
        assert (local / MANIFEST).exists()
    command("datapipe", "cache", "unpin", local)
    stage(first, local)


def test_only_copies_are_pinned(tmp_path):
    (tmp_path / "junk").mkdir()
    with pytest.raises(StagingError, match="is not a copy"):
        pin(tmp_path / "junk")
    make_data_set(tmp_path / "source", [CHUNK])
    stage(tmp_path / "source", tmp_path / "local")
    with pytest.raises(StagingError, match="is not pinned"):
        unpin(tmp_path / "local")


def test_the_folder_of_the_source_is_no_place_for_its_copy(packed_folders, tmp_path):
    shutil.copytree(packed_folders["tar"], tmp_path / "packed")
    with pytest.raises(SettingError, match="would become a copy"):
        stage(tmp_path / "packed" / "train", tmp_path / "packed")
    assert not (tmp_path / "packed" / MANIFEST).exists()
