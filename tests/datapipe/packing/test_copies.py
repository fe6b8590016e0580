"""Images that are there twice are told, whatever they came by: links, copies, rows of tables, other shards."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from datapipe.errors import SourceError
from datapipe.packing import PackOptions, pack

OPTIONS = PackOptions(workers=1)
WHOLE = "all images of val are train's, byte for byte"


@pytest.fixture
def raw(tmp_path, photo, encoded):
    """Two classes of four images each in train, and val without any."""
    for i, label in enumerate(("cat", "dog")):
        (tmp_path / "raw" / "train" / label).mkdir(parents=True)
        (tmp_path / "raw" / "val" / label).mkdir(parents=True)
        for k in range(4):
            (tmp_path / "raw" / "train" / label / f"{k}.jpg").write_bytes(encoded(photo(20, 20, 10 * i + k)))
    return tmp_path / "raw"


WAYS = {
    "link": lambda path, copy: copy.symlink_to(path),
    "relative link": lambda path, copy: copy.symlink_to(os.path.relpath(path, copy.parent)),
    "hard link": lambda path, copy: copy.hardlink_to(path),
    "copy": shutil.copy,
}


@pytest.mark.parametrize("way", WAYS)
def test_images_of_val_that_are_trains(raw, tmp_path, photo, encoded, caplog, way):
    for path in raw.glob("train/*/[01].jpg"):
        WAYS[way](path, raw / "val" / path.parent.name / f"val{path.name}")
    with pytest.raises(SourceError, match=f"{raw}: {WHOLE}.*to pack train alone, name it with --split"):
        pack(raw, tmp_path / "out", OPTIONS)
    (raw / "val" / "cat" / "5.jpg").write_bytes(encoded(photo(20, 20, 99)))
    pack(raw, tmp_path / "other", OPTIONS)
    assert f"{raw}: 4 images of val are train's, too, byte for byte" in caplog.text
    assert "copies of others" not in caplog.text


def test_a_class_of_links(raw, tmp_path, caplog):
    shutil.rmtree(raw / "val")
    (raw / "train" / "puppy").mkdir()
    for path in raw.glob("train/dog/*"):
        (raw / "train" / "puppy" / path.name).symlink_to(path)
    shutil.copy(raw / "train" / "cat" / "0.jpg", raw / "train" / "cat" / "9.jpg")
    pack(raw, tmp_path / "out", OPTIONS)
    assert f"{raw}: 5 images are copies of others in train, byte for byte, 4 of them as another class" in caplog.text


def table(folder: Path, name: str, rows: list[Path]) -> None:
    lines = [f"{path.relative_to(folder)},{path.parent.name}\n" for path in rows]
    (folder / name).write_text("path,label\n" + "".join(lines))


def test_rows_that_name_an_image_twice(raw, tmp_path, caplog):
    shutil.rmtree(raw / "val")
    images = sorted(raw.glob("train/*/*"))
    table(raw, "labels.csv", [*images, *images[:3]])
    pack(raw / "labels.csv", tmp_path / "out", OPTIONS)
    assert "3 images are copies of others in train, byte for byte" in caplog.text and "class" not in caplog.text


def test_tables_whose_val_is_train(raw, tmp_path):
    shutil.rmtree(raw / "val")
    images = sorted(raw.glob("train/*/*"))
    for part, some in (("a", images[::2]), ("b", images[1::2])):
        table(raw, f"train_{part}.csv", some)
        table(raw, f"val_{part}.csv", list(reversed(some)))
    with pytest.raises(SourceError, match=WHOLE):
        pack(raw, tmp_path / "out", PackOptions(workers=1, kind="csv"))
