"""What other users have made, or could change, is refused, and said what to do about it."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from datapipe.dataset.verify import verify
from datapipe.errors import StagingError
from datapipe.foreign import check_file, check_folder, open_own, read_own
from datapipe.fsio import boot_id
from datapipe.locks import hold_lock
from datapipe.staging import StageOptions, stage, stage_once
from datapipe.staging.cache import evict
from datapipe.staging.folder_content import CHECKED, ORIGIN, find_copies
from tests.datapipe.staging.data_sets import needs_root

NOBODY = 65534

pytestmark = needs_root


def give_away(path: Path) -> None:
    """Make all of it another user's."""
    for each in (path, *path.rglob("*")):
        os.chown(each, NOBODY, NOBODY, follow_symlinks=False)


@pytest.mark.parametrize("name", ["local", "local/copy", "local/copy/train"])
def test_a_folder_and_all_above_it(tmp_path, name):
    folder, top = tmp_path / name, tmp_path / "local"
    check_folder(folder)  # nothing is there
    folder.mkdir(parents=True)
    check_folder(folder)
    for mode, is_good in ((0o700, True), (0o755, True), (0o1777, True), (0o777, False), (0o775, False), (0o757, False)):
        top.chmod(mode)
        os.chown(top, 0, 100)  # a group that others are in
        if is_good:
            check_folder(folder)
        else:
            with pytest.raises(StagingError, match=rf"^{top}: can be changed.*mode 0{mode:o}.*chmod go-w {top}"):
                check_folder(folder)
    top.chmod(0o755)
    os.chown(top, NOBODY, NOBODY)
    with pytest.raises(StagingError, match=rf"^{top}: is user nobody's, who could.*choose a folder of your own"):
        check_folder(folder)


def test_links_are_believed_as_those_who_made_them(tmp_path):
    """And as what they lead to."""
    (tmp_path / "disk" / "mine").mkdir(parents=True)
    (tmp_path / "link").symlink_to("disk/../disk")
    (tmp_path / "again").symlink_to(tmp_path / "link" / "mine")
    check_folder(tmp_path / "again" / "new")
    os.chown(tmp_path / "link", NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(StagingError, match=f"^{tmp_path}/link: is user nobody's"):
        check_folder(tmp_path / "again" / "new")
    os.chown(tmp_path / "link", 0, 0, follow_symlinks=False)
    os.chown(tmp_path / "disk", NOBODY, NOBODY)
    with pytest.raises(StagingError, match=f"^{tmp_path}/disk: is user nobody's"):
        check_folder(tmp_path / "again" / "new")
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(StagingError, match="too many links"):
        check_folder(tmp_path / "a")


def test_files(tmp_path):
    path = tmp_path / "note"
    check_file(path)
    path.write_text("mine")
    check_file(path)
    assert read_own(path) == b"mine"
    (tmp_path / "link").symlink_to(path)
    os.chown(path, 0, 100)
    for change in (lambda: path.chmod(0o664), lambda: path.chmod(0o646), lambda: os.chown(path, NOBODY, 100)):
        change()
        for ask in (check_file, read_own):
            with pytest.raises(StagingError, match=rf"^{path}: .*remove it, or choose another folder"):
                ask(path)
    with pytest.raises(StagingError, match="not a file that this user has made"):
        open_own(path)
    for ask, kind in ((check_file, StagingError), (read_own, OSError), (open_own, OSError)):
        with pytest.raises(kind):
            ask(tmp_path / "link")


def test_a_copy_that_another_user_has_planted_is_refused(public):
    """In a cache that all may write to. It is whole, and named as ours would be; root's own is taken."""
    source, cache = public / "source" / "val", public / "cache"
    cache.mkdir()
    cache.chmod(0o1777)
    copy = stage_once(source, cache)
    assert stage_once(source, cache) == copy
    give_away(copy)
    with pytest.raises(StagingError, match=f"^{copy}: is user nobody's.*choose a folder of your own"):
        stage_once(source, cache)
    with pytest.raises(StagingError, match=f"^{copy}: is user nobody's"):
        stage(source, copy)


def test_local_in_a_folder_that_another_user_has_made(public):
    (public / "alice").mkdir()
    give_away(public / "alice")
    with pytest.raises(StagingError, match=f"^{public}/alice: is user nobody's.*and {public}/alice/fms lies in it"):
        stage(public / "source", public / "alice" / "fms")
    assert not [*(public / "alice").iterdir()]


def test_a_folder_that_another_user_makes_first_is_not_locked(tmp_path):
    (tmp_path / "fms").mkdir()
    give_away(tmp_path / "fms")
    with pytest.raises(StagingError, match=f"^{tmp_path}/fms: is user nobody's"), hold_lock(tmp_path / "fms", 1.0):
        pass


def test_another_users_word_that_files_were_checked_is_not_believed(public, caplog):
    """Bytes were changed, and the note says that they are good."""
    source = public / "source" / "val"
    copy = stage_once(source, public / "cache")
    shard = next(copy.glob("*.tar"))
    content = bytearray(shard.read_bytes())
    content[600] ^= 1
    shard.write_bytes(content)
    states = {path.name: [path.stat().st_ino, path.stat().st_size, path.stat().st_mtime_ns] for path in copy.iterdir()}
    (copy / CHECKED).write_text(json.dumps({"boot": boot_id(), "files": states}))
    os.chown(copy / CHECKED, NOBODY, NOBODY)
    assert verify(stage_once(source, public / "cache")) == []
    assert f"{copy / CHECKED}: is user nobody's" in caplog.text


@pytest.mark.parametrize("name", [".pinned", ".keep-7.json"])
def test_another_users_word_keeps_no_copy(public, name, caplog):
    """In a cache that all may write to; only what its owner, or root, wrote there counts."""
    source, cache = public / "source" / "val", public / "cache"
    cache.mkdir()
    stage_once(source, cache)
    note = {"job": "7", "host": "another", "boot": "", "pid": 1, "until": time.time() + 1000}
    (cache / name).write_text(json.dumps(note))
    assert evict(cache, cache, 1 << 60, in_part=True) == [] and len(find_copies(cache)) == 1
    give_away(cache / name)
    assert len(evict(cache, cache, 1 << 60, in_part=True)) == 1
    assert f"{cache / name}: is user nobody's" in caplog.text


def test_what_staging_makes_is_believed_whatever_the_umask(public, monkeypatch):
    """And no other user enters the folders above LOCAL that it makes."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    before = os.umask(0)
    try:
        copy = stage_once(public / "source" / "val", public / "new" / "a" / "cache")
        stage(public / "source", public / "new" / "b" / "fms")
        stage(public / "source", public / "new" / "c" / "fms", StageOptions(mode="slice", capacity_bytes=1_000_000))
    finally:
        os.umask(before)
    check_folder(copy)
    for path in (public / "new", *(public / "new").rglob("*")):
        assert not path.stat().st_mode & 0o022, path
    made = public / "new", *(public / "new" / name for name in "abc")
    assert [oct(path.stat().st_mode & 0o777) for path in made] == ["0o700"] * 4
    assert [oct(path.stat().st_mode & 0o777) for path in (public / "new").glob("*/*")] == ["0o755"] * 3
    assert {ORIGIN, CHECKED} <= {path.name for path in copy.iterdir()}
    shutil.rmtree(public / "new")
