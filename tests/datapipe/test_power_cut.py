"""A file has its final name only when its bytes are on the disk, and the name itself lasts, too."""

import os
from pathlib import Path

import pytest

from datapipe.fsio import atomic_write
from datapipe.packing import PackOptions, pack
from datapipe.staging import stage


@pytest.fixture
def events(monkeypatch):
    """What is made to last, ("sync", path), and what gets another name, ("name", path, new path), in order."""
    noted, sync, name = [], os.fsync, os.replace

    def note_sync(fd):
        noted.append(("sync", Path(os.readlink(f"/proc/self/fd/{fd}"))))
        sync(fd)

    def note_name(path, new, **folders):
        noted.append(("name", Path(path), Path(new)))
        name(path, new, **folders)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_name)
    return noted


def names_too_early(events):
    """Return the files that were given their names before their bytes, or other names, were on the disk."""
    return [
        event[2]
        for number, event in enumerate(events)
        if event[0] == "name" and ("sync", event[1]) not in events[:number]
    ]


def names_that_may_be_lost(events):
    """Return the files in whose folders nothing was made to last after they got their names."""
    return [
        event[2]
        for number, event in enumerate(events)
        if event[0] == "name" and ("sync", event[2].parent) not in events[number:]
    ]


def test_a_small_file(tmp_path, events):
    with atomic_write(tmp_path / "a") as file:
        file.write(b"a")
    assert [event[0] for event in events] == ["sync", "name", "sync"]
    assert not names_too_early(events) and not names_that_may_be_lost(events)


def test_shards(image_folder, tmp_path, events):
    pack(image_folder, tmp_path / "out", PackOptions(workers=1))
    shards = [event[2] for event in events if event[0] == "name" and event[2].suffix == ".tar"]
    assert len(shards) == 2
    assert not {*shards} & {*names_too_early(events), *names_that_may_be_lost(events)}


def test_what_is_staged(packed_folders, tmp_path, events):
    stage(packed_folders["tar"], tmp_path / "local")
    named = [event[2] for event in events if event[0] == "name"]
    assert sum(path.suffix == ".tar" for path in named) >= 2
    assert not names_too_early(events)
