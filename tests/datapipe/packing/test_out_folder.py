"""What packing removes, what it refuses to, and what it remembers between calls."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from datapipe.cluster import Task
from datapipe.dataset.manifest import MANIFEST, Manifest, find_data_sets
from datapipe.dataset.verify import verify
from datapipe.errors import ManifestError, SettingError, SourceError
from datapipe.images.recode import RecodeOptions
from datapipe.locks import locked
from datapipe.packing import PackOptions, convert, finish, out_folder, pack
from datapipe.packing.out_folder import DONE, FINISHING, NEW, STATE, OutFolder
from datapipe.packing.state import PLAN
from tests.waiting import limit_s, wait_until

CHILDREN = Path(__file__).with_name("children")
SMALL = 0.25  # MiB: four shards of train and one of val, of `image_folder`


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_file_that_is_only_named_like_ours_stays(image_folder, tmp_path, split, overwrite):
    (tmp_path / split).mkdir()
    precious = tmp_path / split / "shard-000007.tar"
    precious.write_text("precious")
    with pytest.raises(SettingError, match=r"remains such as .*shard-000007"):
        pack(image_folder, tmp_path, PackOptions(overwrite=overwrite))
    assert precious.read_text() == "precious" and not (tmp_path / STATE).exists()


def test_the_source_is_never_removed(image_folder, tmp_path):
    pack(image_folder, tmp_path / "out", PackOptions())
    for source, out in ((tmp_path / "out" / "train", tmp_path / "out"), (tmp_path / "out", tmp_path / "out" / "new")):
        with pytest.raises(SettingError, match=r"OUT:.*choose another"):
            convert(source, out, PackOptions(format="hdf5", overwrite=True, shard_mib=None))
    assert not list(verify(tmp_path / "out" / "train"))


def test_a_split_that_is_a_link_is_refused_before_anything_is_removed(image_folder, tmp_path):
    out = tmp_path / "out"
    pack(image_folder, out, PackOptions())
    (out / "train").rename(tmp_path / "elsewhere")
    (out / "train").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingError, match="contains files that datapipe did not write, such as train"):
        pack(image_folder, out, PackOptions(overwrite=True))
    assert not list(verify(tmp_path / "elsewhere"))


@pytest.mark.parametrize("place", [STATE, f"{STATE}/old", f"{STATE}/new/train", DONE, f"{DONE}/new"])
@pytest.mark.parametrize("link", [False, True])
def test_what_others_keep_in_folders_named_as_ours_stays(image_folder, tmp_path, place, link):
    """Also where a link makes one of these folders stand for a folder elsewhere."""
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    folder = elsewhere if link else out / place
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "b").write_text("precious")
    if link:
        (out / place).parent.mkdir(parents=True)
        (out / place).symlink_to(elsewhere)
    for overwrite in (False, True):
        message = f"contains files that datapipe did not write, such as {re.escape(place)}"
        with pytest.raises(SettingError, match=message):
            pack(image_folder, out, PackOptions(overwrite=overwrite))
        assert (folder / "a" / "b").read_text() == "precious"


def test_what_comes_into_a_split_while_it_is_packed_stays(image_folder, tmp_path):
    """Between two tasks, say."""
    pack(image_folder, tmp_path, PackOptions(shard_mib=SMALL, task=Task(0, 2, "")))
    precious = tmp_path / "val" / "mine"
    precious.parent.mkdir()
    precious.write_text("precious")
    message = "contains files that datapipe did not write, such as val/mine; move it away"
    with pytest.raises(SettingError, match=message):
        pack(image_folder, tmp_path, PackOptions(shard_mib=SMALL, task=Task(1, 2, "")))
    assert precious.read_text() == "precious"
    precious.rename(tmp_path.with_name(f"{tmp_path.name}.mine"))
    assert len(finish(image_folder, tmp_path, PackOptions(shard_mib=SMALL))) == 2


def test_a_link_in_place_of_a_temporary_file_is_not_written_to(image_folder, tmp_path):
    pack(image_folder, tmp_path / "out", PackOptions(shard_mib=SMALL, task=Task(0, 2, "")))
    precious, link = tmp_path / "precious", tmp_path / "out" / STATE / NEW / "train" / ".shard-000001.tar.partial"
    precious.write_text("precious")
    link.symlink_to(precious)
    with pytest.raises(OSError, match=r"\.shard-000001\.tar\.partial"):
        pack(image_folder, tmp_path / "out", PackOptions(shard_mib=SMALL, task=Task(1, 2, "")))
    assert precious.read_text() == "precious"


def test_a_pack_ends_although_the_old_data_set_cannot_be_removed(image_folder, old):
    """As with NFS, which keeps under another name what is removed while it is open."""
    kept = old / DONE / "old" / "train" / ".nfs00001"
    kept.parent.mkdir(parents=True)
    kept.write_text("in use")
    if subprocess.run(["chattr", "+i", kept], capture_output=True).returncode:
        pytest.skip("a file that cannot be removed needs root, and a filesystem that has them")
    try:
        for seed in (1, 2):
            pack(image_folder, old, PackOptions(overwrite=True, seed=seed))
            assert seed_of(old) == seed
    finally:
        subprocess.run(["chattr", "-i", *old.rglob(kept.name)], check=True)
    pack(image_folder, old, PackOptions(resume=True, seed=2))
    assert sorted(path.name for path in old.iterdir()) == ["train", "val"]


def test_a_task_looks_at_the_plan_again_when_it_has_waited(image_folder, tmp_path, caplog):
    """Behind a pack that holds the folder and replaces the plan."""
    assert pack(image_folder, tmp_path, PackOptions(shard_mib=SMALL, task=Task(0, 2, ""))) == {}
    errors = []

    def late() -> None:
        try:
            pack(image_folder, tmp_path, PackOptions(shard_mib=SMALL, task=Task(1, 2, "")))
        except SettingError as error:
            errors.append(str(error))

    with caplog.at_level("INFO"), locked(tmp_path, wait=True):
        task = threading.Thread(target=late)
        task.start()
        wait_until(lambda: f"{tmp_path}: waiting until process {os.getpid()} (" in caplog.text)
        with mock.patch("datapipe.packing.out_folder.locked"):  # as the process that has the lock
            pack(image_folder, tmp_path, PackOptions(shard_mib=SMALL, seed=7, overwrite=True))
    task.join(limit_s())
    assert errors and "another seed: 7, not 0" in errors[0]
    assert not list(verify(tmp_path / "train"))


def test_bad_samples_are_counted_over_all_calls(image_folder, tmp_path):
    source = shutil.copytree(image_folder, tmp_path / "source")
    images = sorted(path for path in source.rglob("*") if path.suffix in (".jpg", ".png") and "train" in path.parts)
    images = images or sorted(path for path in source.rglob("*") if path.is_file())
    for path in images[::3]:
        path.write_bytes(b"no image")
    num_bad = len(images[::3])
    assert num_bad > 3
    seen = []
    for _ in range(3):
        with pytest.raises(SourceError) as error:
            pack(source, tmp_path / "out", PackOptions(shard_mib=SMALL, workers=1, max_bad="2"))
        seen.append(str(error.value))
    assert all("number 3, and --max-bad allows 2" in message for message in seen), seen


def test_no_manifest_where_another_split_has_nothing(image_folder, tmp_path):
    source = tmp_path / "source"
    train = next(path.parent for path in sorted(image_folder.rglob("*")) if path.is_file())
    shutil.copytree(train, source / "train" / "a")
    (source / "val" / "a").mkdir(parents=True)
    (source / "val" / "a" / "x.jpg").write_bytes(b"no image")
    with pytest.raises(SourceError, match="split val holds no image"):
        pack(source, tmp_path / "out", PackOptions(max_bad="5"))
    assert not list(tmp_path.rglob(MANIFEST))


def test_a_convert_does_not_go_on_from_another_source(image_folder, tmp_path):
    options = PackOptions(format="hdf5", shard_mib=None, task=Task(0, 2, ""))
    pack(image_folder, tmp_path / "one", PackOptions(shard_mib=SMALL))
    convert(tmp_path / "one", tmp_path / "two", options)
    pack(
        image_folder,
        tmp_path / "one",
        PackOptions(shard_mib=SMALL, overwrite=True, recode=RecodeOptions(resize="max=32")),
    )
    with pytest.raises(SettingError, match=r"another (manifests|recode)"):
        convert(tmp_path / "one", tmp_path / "two", PackOptions(format="hdf5", shard_mib=None, task=Task(1, 2, "")))


def test_a_complete_data_set_of_another_source_is_not_what_was_asked_for(image_folder, tmp_path):
    pack(image_folder, tmp_path / "out", PackOptions())
    other = shutil.copytree(image_folder, tmp_path / "other")
    next(path for path in sorted(other.rglob("*")) if path.is_file()).unlink()
    for options in (PackOptions(resume=True), PackOptions(task=Task(0, 2, ""))):
        with pytest.raises(SettingError, match="holds another source"):
            pack(other, tmp_path / "out", options)
        assert pack(image_folder, tmp_path / "out", options)
    with pytest.raises(SettingError, match="holds another source"):
        finish(other, tmp_path / "out", PackOptions())
    shutil.rmtree(other)
    assert pack(other, tmp_path / "out", PackOptions(resume=True))  # it is gone, and no longer needed


# --- the new takes the place of the old -------------------------------------------------------------


@pytest.fixture
def begin(server):
    """begin(number, at, *arguments) starts `datapipe pack` that gets a signal before its change `at`; -1: never.

    It is ended with the test.
    """
    begun = []

    def start(number, at, *arguments, locks="as they are"):
        begun.append(server.start(CHILDREN / "packs_until.py", int(number), at, locks, "pack", *arguments))
        return begun[-1]

    yield start
    for child in begun:
        with child:
            child.kill()


def check_ends(child, code):
    """Wait until it ends, check its exit code, and return what it has printed."""
    output, errors = child.communicate(timeout=limit_s())
    assert child.returncode == code, errors
    return output


def changes_of(begin, *arguments):
    """The changes of the disk that an undisturbed pack makes."""
    output = check_ends(begin(0, -1, *arguments), 0)
    return [line for line in output.splitlines() if line.startswith("os.")]


def bytes_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def seed_of(folder):
    """The seed of a data set, which is whole and all of a piece."""
    folders = find_data_sets(folder)
    assert [path.name for path in folders] == ["train", "val"]
    assert not [problem for path in folders for problem in verify(path)]
    (seed,) = {Manifest.read(path).seed for path in folders}
    return seed


@pytest.fixture
def old(image_folder, tmp_path):
    """A data set with seed 0, to be replaced."""
    pack(image_folder, tmp_path / "out", PackOptions())
    return tmp_path / "out"


def test_a_new_pack_that_fails_leaves_the_old_data_set(image_folder, old, tmp_path):
    source = shutil.copytree(image_folder, tmp_path / "source")
    bad = next(path for path in sorted(source.rglob("*")) if path.is_file())
    good, before = bad.read_bytes(), bytes_of(old)
    bad.write_bytes(good[:100])
    shard = next((old / "train").glob("shard-*.tar"))
    with open(shard, "rb") as reader:
        for _ in range(2):
            with pytest.raises(SourceError, match="cannot be packed"):
                pack(source, old, PackOptions(overwrite=True, seed=1))
            assert bytes_of(old).items() >= before.items() and seed_of(old) == 0
        bad.write_bytes(good)
        pack(source, old, PackOptions(resume=True, seed=1))
        assert reader.read() == before["train/shard-000000.tar"]  # as long as somebody reads it
    assert seed_of(old) == 1 and sorted(path.name for path in old.iterdir()) == ["train", "val"]


def test_a_full_disk_leaves_the_old_data_set(image_folder, tmp_path, command):
    size = sum(path.stat().st_size for path in image_folder.rglob("*") if path.is_file())
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size * 7 // 4}", "tmpfs", small]).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        pack(image_folder, small / "out", PackOptions())
        done = command("datapipe", "pack", image_folder, small / "out", "--overwrite", "--seed", 1)
        assert done.returncode == 1 and "No space left on device" in done.stderr, done.stderr
        assert seed_of(small / "out") == 0
        subprocess.run(["mount", "-o", f"remount,size={size * 4}", small], check=True)
        done = command("datapipe", "pack", image_folder, small / "out", "--seed", 1)
        assert done.returncode == 0 and seed_of(small / "out") == 1, done.stderr
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_killed_before_any_change_either_is_whole(image_folder, old, tmp_path, begin, everywhere):
    """By name, at every moment; and the same command again ends with the new one."""
    options = "--overwrite", "--seed", 1, "--workers", 1
    new = shutil.copytree(old, tmp_path / "new")
    changes, seeds = changes_of(begin, image_folder, new, *options), []
    moves = [at for at, change in enumerate(changes) if "rename" in change and re.search(f"/old/|/{DONE}", change)]
    assert len(moves) == 5  # each split out, the folder, each split in
    for at in range(len(changes)) if everywhere else sorted({*moves, *range(3, len(changes), 13)}):
        out = shutil.copytree(old, tmp_path / str(at))
        check_ends(begin(signal.SIGKILL, at, image_folder, out, *options), -signal.SIGKILL)
        seeds.append(seed_of(out))
        resume = at % 2 == 1 and (seeds[-1] == 1 or (out / STATE / PLAN).exists())
        pack(image_folder, out, PackOptions(resume=resume, overwrite=not resume, seed=1, workers=1))
        assert bytes_of(out) == bytes_of(new), f"killed before change {at} of {len(changes)}"
    assert seeds == sorted(seeds) and {0, 1} == set(seeds)


def test_terminated_it_keeps_the_old_and_is_continued(image_folder, old, tmp_path, begin):
    new = shutil.copytree(old, tmp_path / "new")
    at = len(changes_of(begin, image_folder, new, "--overwrite", "--seed", 1)) // 2
    child = begin(signal.SIGTERM, at, image_folder, old, "--overwrite", "--seed", 1)
    check_ends(child, 128 + signal.SIGTERM)
    assert seed_of(old) == 0
    finished = {path.name: path.stat().st_ino for path in (old / STATE / NEW / "train").glob("shard-*.tar")}
    with pytest.raises(SettingError, match="unfinished pack with another seed: 1, not 2"):
        pack(image_folder, old, PackOptions(seed=2, resume=True))
    pack(image_folder, old, PackOptions(seed=1, resume=True))
    assert finished.items() <= {path.name: path.stat().st_ino for path in (old / "train").glob("shard-*.tar")}.items()
    assert bytes_of(old) == bytes_of(new)


def test_an_overwrite_that_is_given_up_is_replaced_by_another(image_folder, old, tmp_path, begin):
    """Killed on the way: the old data set is put back where it was, before anything else."""
    new = shutil.copytree(old, tmp_path / "new")
    changes = changes_of(begin, image_folder, new, "--overwrite", "--seed", 1)
    out = shutil.copytree(new, tmp_path / "copy")
    at = next(i for i, change in enumerate(changes) if change.startswith("os.rename") and f"/{DONE}'" in change)
    check_ends(begin(signal.SIGKILL, at, image_folder, out, "--overwrite", "--seed", 2), -signal.SIGKILL)
    assert not (out / "train").exists() and seed_of(out) == 1
    with pytest.raises(SourceError):
        pack(tmp_path / "nothing", out, PackOptions(overwrite=True, seed=3))
    assert seed_of(out) == 1
    check_ends(begin(signal.SIGKILL, 40, image_folder, out, "--overwrite", "--seed", 3), -signal.SIGKILL)
    assert seed_of(out) == 1 and (out / "train").exists()


# --- who finishes -----------------------------------------------------------------------------------


@pytest.fixture
def parts(image_folder, tmp_path):
    """A pack of two tasks of which the first is done; and that of one process."""
    pack(image_folder, tmp_path / "whole", PackOptions(shard_mib=1))
    assert pack(image_folder, tmp_path / "parts", PackOptions(shard_mib=1, task=Task(0, 2, ""))).num_missing == 1
    return tmp_path / "parts"


@pytest.fixture
def last_task(image_folder, begin):
    """last_task(out, number, at) starts the task that finishes `parts`, with a signal before its change `at`."""

    def start(out, number=0, at=-1, locks="as they are", timeout_s=600):
        options = "--shard-mib", 1, "--task", "1/2", "--resume", "--timeout", timeout_s
        return begin(number, at, image_folder, out, *options, locks=locks)

    return start


def state_of(child):
    """ "T" if it is stopped, and "Z" when it has ended, with all threads, of which the last one frees its locks."""
    state = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "" if state == "Z" and len(os.listdir(f"/proc/{child.pid}/task")) > 1 else state


@pytest.fixture
def finishing_changes(image_folder, parts, tmp_path, begin):
    """The changes at which the last task finishes: all behind that of its note."""
    copy = shutil.copytree(parts, tmp_path / "copy")
    changes = changes_of(begin, image_folder, copy, "--shard-mib", 1, "--task", "1/2")
    return range(1 + next(i for i, change in enumerate(changes) if f"/{FINISHING}'" in change), len(changes))


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_finisher_that_was_killed_is_replaced(image_folder, parts, tmp_path, last_task, finishing_changes, every):
    """Also between the manifests of two splits, and between two steps of their move."""
    for at in finishing_changes[::every]:
        out = shutil.copytree(parts, tmp_path / f"killed-{at}")
        check_ends(last_task(out, signal.SIGKILL, at), -signal.SIGKILL)
        index = at // every % 2  # the same task again, or the other
        assert pack(image_folder, out, PackOptions(shard_mib=1, task=Task(index, 2, ""), timeout_s=600))
        assert bytes_of(out) == bytes_of(tmp_path / "whole"), f"killed before change {at}"


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_two_finishers_do_no_harm(image_folder, parts, tmp_path, last_task, finishing_changes, every):
    """One stops anywhere, the other finishes all, and then the first continues."""
    for at in finishing_changes[::every]:
        out = shutil.copytree(parts, tmp_path / f"stopped-{at}")
        child = last_task(out, signal.SIGSTOP, at)
        wait_until(lambda child=child: state_of(child) == "T", child)
        assert pack(image_folder, out, PackOptions(shard_mib=1, task=Task(0, 2, ""), timeout_s=0.2))
        assert bytes_of(out) == bytes_of(tmp_path / "whole"), f"stopped before change {at}"
        child.send_signal(signal.SIGCONT)
        errors = child.communicate(timeout=limit_s())[1]
        assert child.returncode == 0, f"stopped before change {at}: {errors}"
        assert bytes_of(out) == bytes_of(tmp_path / "whole"), f"stopped before change {at}"


@pytest.mark.parametrize("times", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_two_finishers_in_turns_do_no_harm(parts, tmp_path, last_task, finishing_changes, times):
    """One stops anywhere, the second too, and then each does the rest, the first first."""
    random = np.random.default_rng(times)
    for attempt in range(times):
        out = shutil.copytree(parts, tmp_path / f"turns-{attempt}")
        ats = [int(random.choice(finishing_changes)), int(random.integers(2, len(finishing_changes) // 2))]
        children = []
        for at, timeout_s in zip(ats, (600, 0.2), strict=True):  # the second does not wait for the first
            child = last_task(out, signal.SIGSTOP, at, timeout_s=timeout_s)
            wait_until(
                lambda child=child: child.poll() is not None or state_of(child) == "T"
            )  # the second may find little
            children.append(child)
        for child in children:
            child.send_signal(signal.SIGCONT)
            errors = child.communicate(timeout=limit_s())[1]
            assert child.returncode == 0, f"stopped before changes {ats}: {errors}"
        assert bytes_of(out) == bytes_of(tmp_path / "whole"), f"stopped before changes {ats}"


@pytest.mark.parametrize(
    ("function", "place"),
    [
        ("os.fstat", DONE),
        ("os.fstat", "manifest-*"),
        ("datapipe.packing.finishing.sync_folder", "train"),
        ("numpy.load", "val/000000.npz"),
    ],
)
def test_who_finishes_second_may_meet_stale_handles(image_folder, parts, tmp_path, function, place):
    """As on NFS and FUSE: another node removes a folder or file while this one has it open."""
    overtaken = []

    def overtake(opened, **settings):
        name = os.readlink(f"/proc/self/fd/{opened}") if isinstance(opened, int) else getattr(opened, "name", opened)
        if overtaken or not Path(name).match(place):
            return real(opened, **settings)
        overtaken.append(name)
        assert pack(image_folder, parts, PackOptions(shard_mib=1, task=Task(0, 2, ""), timeout_s=0.2))
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    real = mock.patch(function).get_original()[0]
    with mock.patch(function, overtake):
        assert pack(image_folder, parts, PackOptions(shard_mib=1, task=Task(1, 2, "")))
    assert overtaken and bytes_of(parts) == bytes_of(tmp_path / "whole")


@pytest.fixture
def looks(monkeypatch):
    """looks(function) calls it in place of each pause between two looks at another task, though none is at work."""

    def call(function):
        monkeypatch.setattr("datapipe.packing.job.time", SimpleNamespace(monotonic=time.monotonic, sleep=function))

    return call


@pytest.fixture
def no_locks(monkeypatch):
    """No file can be locked by this process."""
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "no locks here")))


LAST = PackOptions(shard_mib=1, task=Task(1, 2, ""), resume=True, timeout_s=3600)


@pytest.mark.parametrize("locks", ["as they are", "not at all"])
def test_a_task_waits_for_who_finishes_until_that_dies(
    image_folder, parts, tmp_path, last_task, finishing_changes, looks, request, caplog, locks
):
    if locks == "not at all":
        request.getfixturevalue("no_locks")
    first, pauses = last_task(parts, signal.SIGSTOP, finishing_changes[2], locks), []
    wait_until(lambda: state_of(first) == "T", first)

    def pause(seconds):
        pauses.append(seconds)
        assert not list(parts.rglob(MANIFEST))
        assert len(pauses) <= 5
        if len(pauses) == 5:
            first.kill()
            wait_until(lambda: state_of(first) == "Z")  # it has ended, although nobody has waited for it

    looks(pause)
    with caplog.at_level("INFO"):
        assert pack(image_folder, parts, LAST)
    assert len(pauses) == 5 and caplog.text.count(f"waiting for process {first.pid} on ") == 1
    assert bytes_of(parts) == bytes_of(tmp_path / "whole")


def test_a_note_from_another_host_counts_for_a_while(image_folder, parts, no_locks, looks, tmp_path, caplog):
    note, pauses = parts / STATE / FINISHING, []
    note.write_text(json.dumps({"host": "elsewhere", "boot": "1", "pid": 1, "started": "1"}))

    def pause(seconds):
        pauses.append(seconds)
        assert len(pauses) <= 4
        os.utime(note, (time.time() - 900 * len(pauses),) * 2)

    looks(pause)
    with caplog.at_level("INFO"):
        assert pack(image_folder, parts, LAST)
    assert len(pauses) == 4 and "waiting for process 1 on elsewhere" in caplog.text
    assert bytes_of(parts) == bytes_of(tmp_path / "whole")


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"host": "elsewhere", "boot": "1", "pid": 1, "started": "1"}'])
def test_a_note_that_says_nothing_or_is_old_does_not_count(image_folder, parts, no_locks, looks, tmp_path, content):
    note = parts / STATE / FINISHING
    note.write_text(content)
    os.utime(note, (time.time() - 3601,) * 2)
    looks(mock.Mock(side_effect=AssertionError("it waits")))
    assert pack(image_folder, parts, LAST)
    assert bytes_of(parts) == bytes_of(tmp_path / "whole")


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_the_same_task_twice_without_locks(parts, last_task, tmp_path, times):
    """Each writes under names of its own, and what comes of it is whole."""
    for attempt in range(times):
        out = shutil.copytree(parts, tmp_path / f"twice-{attempt}")
        children = [last_task(out, locks="not at all") for _ in range(3)]
        errors = [child.communicate(timeout=limit_s())[1] for child in children]
        assert [child.returncode for child in children] == [0] * 3, errors
        assert bytes_of(out) == bytes_of(tmp_path / "whole")


def test_a_file_that_another_task_begins_while_this_one_finishes_does_not_stay(
    image_folder, parts, tmp_path, monkeypatch
):
    """Without locks it has a name of its own, and moves with the folder in which it was begun."""
    real = out_folder.sync_folder

    def begin_another(folder):
        if folder == parts and (parts / STATE / NEW / "val").exists():
            (parts / STATE / NEW / "val" / ".shard-000000.tar.another.partial").touch()
        real(folder)

    monkeypatch.setattr(out_folder, "sync_folder", begin_another)
    assert pack(image_folder, parts, LAST)
    assert bytes_of(parts) == bytes_of(tmp_path / "whole")


def test_a_plan_is_looked_for_while_another_task_finishes(parts, tmp_path):
    """What is listed may be gone before it is opened."""
    out = OutFolder(parts, tmp_path / "source")
    done, stop = parts / DONE, threading.Event()

    def finish_and_begin_again():
        while not stop.is_set():
            out.state.rename(done)
            done.rename(out.state)

    other = threading.Thread(target=finish_and_begin_again)
    other.start()
    found = lost = 0
    try:
        end = time.monotonic() + limit_s()  # the other thread may wait for a core
        while not (found > 100 and lost > 100):
            assert time.monotonic() < end, (found, lost)
            if out.load_plan() is None:
                lost += 1
            else:
                found += 1
    finally:
        stop.set()
        other.join()


# --- what a pack remembers of its source ------------------------------------------------------------


@pytest.mark.parametrize("what", ["pack", "task", "finish"])
def test_a_source_that_has_changed_is_refused(image_folder, tmp_path, what):
    source, out = shutil.copytree(image_folder, tmp_path / "source"), tmp_path / "out"
    pack(source, out, PackOptions(shard_mib=SMALL, task=Task(1, 2, "")))
    image = next(path for path in sorted((source / "train").rglob("*")) if path.is_file())
    more = source / "train" / "zebra" / f"new{image.suffix}"
    more.parent.mkdir()
    shutil.copy(image, more)
    moved = image.rename(tmp_path / image.name)

    def again():
        if what == "pack":
            return pack(source, out, PackOptions(shard_mib=SMALL, resume=True))
        if what == "task":
            return pack(source, out, PackOptions(shard_mib=SMALL, resume=True, task=Task(0, 2, "")))
        with mock.patch("datapipe.packing.out_folder.OutFolder.missing_shards", lambda *_: []):
            return finish(source, out, PackOptions(shard_mib=SMALL))

    message = r"gained 1 image \(train/zebra/new of class zebra\) and lost 1 image .*--overwrite .*remove .*pack"
    with pytest.raises(SettingError, match=message):
        again()
    # Other tasks of the same job do not look.
    assert pack(source, out, PackOptions(shard_mib=SMALL, task=Task(1, 2, ""))) == {}
    more.unlink()
    more.parent.rmdir()
    moved.rename(image)
    if what != "finish":
        again()
        assert seed_of(out) == 0


def test_a_source_that_is_gone_is_not_missed_when_all_shards_are_there(image_folder, tmp_path):
    source, out = shutil.copytree(image_folder, tmp_path / "source"), tmp_path / "out"
    with mock.patch("datapipe.packing.job.complete", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        pack(source, out, PackOptions())
    shutil.rmtree(source)
    assert finish(source, out, PackOptions()) and seed_of(out) == 0


def test_a_pack_is_not_continued_with_another_check(image_folder, tmp_path):
    options = {"shard_mib": SMALL, "resume": True}
    pack(image_folder, tmp_path / "out", PackOptions(task=Task(0, 2, ""), **options))
    with pytest.raises(SettingError, match="unfinished pack with another check: header, not decode"):
        pack(image_folder, tmp_path / "out", PackOptions(recode=RecodeOptions(check="decode"), **options))
    pack(image_folder, tmp_path / "out", PackOptions(**options))
    assert seed_of(tmp_path / "out") == 0


def test_a_lost_plan_does_not_cost_the_finished_shards(image_folder, parts):
    before = bytes_of(parts / STATE / NEW)
    plan = (parts / STATE / PLAN).rename(parts.parent / PLAN)
    for task in (Task(0, 1, ""), Task(0, 2, ""), Task(1, 2, "")):
        with pytest.raises(ManifestError, match=r"plan\.npz: is missing, but finished shards .*--overwrite"):
            pack(image_folder, parts, PackOptions(shard_mib=1, task=task))
    assert before and bytes_of(parts / STATE / NEW) == before
    plan.rename(parts / STATE / PLAN)
    assert pack(image_folder, parts, PackOptions(shard_mib=1, resume=True))


def test_new_names_survive_a_power_cut(image_folder, tmp_path, monkeypatch):
    """Every folder in which a name is made or changed is synced afterwards, except what is about to be removed."""
    unsynced, renames, out = {}, [], tmp_path / "above" / "out"

    def noted(name):
        real = getattr(os, name)

        def call(*arguments, **options):
            result = real(*arguments, **options)
            if name == "fsync":
                unsynced.pop(Path(os.readlink(f"/proc/self/fd/{arguments[0]}")), None)
                return result
            first, last = Path(arguments[0]), Path(arguments[-1] if name != "mkdir" else arguments[0])
            renames.append(first) if name != "mkdir" else None
            if not last.name.startswith("manifest-") and DONE not in first.parts:
                unsynced[last.parent] = name, last
            return result

        return call

    for name in ("mkdir", "rename", "replace", "fsync"):
        monkeypatch.setattr(os, name, noted(name))
    for options in (PackOptions(), PackOptions(overwrite=True, seed=1)):
        renames.clear()
        pack(image_folder, out, options)
        assert len(renames) > 10 and not {path: call for path, call in unsynced.items() if DONE not in path.parts}
