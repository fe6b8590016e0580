"""The plan of a pack: safe keys, every sample once, and the same plan when it is read again."""

import json
import re
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datapipe.errors import ManifestError
from datapipe.packing.plan import MAX_KEY_BYTES, divide_into_shards, make_keys, make_plan, shuffle, source_changes
from datapipe.packing.state import PLAN, Journal, load_plan, save_plan
from datapipe.sources import SAMPLES, Pixels, Source, open_source, samples_class
from datapipe.sources.packed import load as open_packed

WEBDATASET_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")  # how it cuts a name into key and extension
SETTINGS = {"seed": 3, "shard_mib": 1, "source": "/raw/é"}

names = st.lists(st.text(st.characters(exclude_characters="\x00"), max_size=120), max_size=30)


@given(names)
def test_keys_are_unique_and_safe(names):
    keys = make_keys(names)
    assert len(keys) == len(names) and len(set(keys)) == len(keys)
    for key in keys:
        assert re.fullmatch(r"[A-Za-z0-9_/-]+", key) and not key.startswith("/")
        assert len(key) <= MAX_KEY_BYTES + 12
        assert WEBDATASET_NAME.match(f"{key}.jpg").groups() == (key, "jpg")


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (["n01440764/n01440764_10026"], ["n01440764/n01440764_10026"]),
        (["a.b/c.d e"], ["a_b/c_d_e"]),
        (["naïve-é", "naive-e"], ["naive-e", "naive-e-2"]),
        (["日本", "日本語"], ["__", "___"]),
        (["a b", "a.b", "a_b-2", "a_b"], ["a_b", "a_b-2", "a_b-2-2", "a_b-3"]),
        (["", "../x", "/"], ["_", "__/x", "_/_"]),
        (["../../etc/passwd", "/etc/passwd"], ["__/__/etc/passwd", "_/etc/passwd"]),
        (["x" * 200 + "/end"], ["x" * 76 + "/end"]),
    ],
)
def test_keys(names, keys):
    assert make_keys(names) == keys


@given(st.integers(1, 400), st.floats(1, 1e6), st.integers(1, 1 << 28), st.integers(0, 99))
def test_every_sample_is_once_in_shards_of_even_counts(num_samples, mean, shard_bytes, seed):
    shards = divide_into_shards(shuffle(num_samples, None, seed), mean, shard_bytes)
    assert sorted(np.concatenate(shards)) == list(range(num_samples))
    counts = [len(shard) for shard in shards]
    assert max(counts) - min(counts) <= 1 and min(counts) >= 1


@given(st.lists(st.integers(0, 9), min_size=1, max_size=200), st.integers(0, 99))
def test_blocks_stay_together_and_are_shuffled_within(blocks, seed):
    blocks = np.array(blocks)
    order = shuffle(len(blocks), blocks, seed)
    assert sorted(order) == list(range(len(blocks)))
    assert 1 + np.count_nonzero(np.diff(blocks[order])) == len(set(blocks.tolist()))


def test_shuffle_within_blocks_is_no_order():
    order = shuffle(1000, np.arange(1000) // 500, 0)
    assert (np.diff(order) == 1).mean() < 0.05 and sorted(order[:500] % 500) == list(range(500))


def test_shards_meet_the_size():
    assert len(divide_into_shards(shuffle(1_281_167, None, 0), 110_000, 256 << 20)) == 525
    assert len(divide_into_shards(shuffle(10, None, 0), 1.0, 1 << 30)) == 1


def plan_of(source):
    return make_plan(source, SETTINGS)


def assert_same(one, two):
    assert (one.settings, one.kind, one.classes) == (two.settings, two.kind, two.classes)
    for mine, other in zip(one.splits, two.splits, strict=True):
        assert (mine.split, mine.keys, mine.mean_bytes) == (other.split, other.keys, other.mean_bytes)
        assert all((a == b).all() for a, b in zip(mine.shards, other.shards, strict=True))
        for field in fields(mine.samples):
            if field.init:
                a, b = getattr(mine.samples, field.name), getattr(other.samples, field.name)
                assert np.array_equal(a, b), field.name


def test_a_saved_plan_is_the_same_plan(image_folder, tmp_path):
    plan = plan_of(open_source(image_folder))
    save_plan(plan, tmp_path)
    again = load_plan(tmp_path)
    assert_same(plan, again)
    buffer = memoryview(bytearray(1 << 20))
    for mine, other in zip(plan.splits, again.splits, strict=True):
        for i in range(len(mine.samples)):
            assert bytes(mine.samples.read(i, buffer)) == bytes(other.samples.read(i, buffer))


def test_any_file_name_survives(tmp_path):
    names = ["new\nline", "tab\t", "bytes \udcff\udc80", "日本", ""]
    pixels = Pixels("/raw/\udcff", names, np.arange(5, dtype=np.uint32), np.zeros((5, 2, 2), np.uint8))
    plan = plan_of(Source("idx", ["a", "b"], {"train": pixels}))
    save_plan(plan, tmp_path)
    assert_same(plan, load_plan(tmp_path))


def test_no_plan_and_a_broken_plan(tmp_path):
    assert load_plan(tmp_path) is None
    for content in (b"", b"PK\x03\x04 but not really", b"\x93NUMPY"):
        (tmp_path / PLAN).write_bytes(content)
        with pytest.raises(ManifestError, match="--overwrite"):
            load_plan(tmp_path)


def test_a_plan_makes_nothing_but_samples(tmp_path):
    plan = plan_of(
        Source("idx", ["a"], {"train": Pixels("x", ["a"], np.zeros(1, np.uint32), np.zeros((1, 2, 2), np.uint8))})
    )
    save_plan(plan, tmp_path)
    content = dict(np.load(tmp_path / PLAN))
    content["head"] = np.frombuffer(
        content["head"].tobytes().replace(b'"samples": "pixels"', b'"samples": "subprocess"'), np.uint8
    )
    np.savez(tmp_path / PLAN, **content)
    with pytest.raises(ManifestError, match="'subprocess' is not a kind of samples"):
        load_plan(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"split": "../../elsewhere"}, "'../../elsewhere' is not a split"),
        ({"0.order": np.array([0, 2])}, "do not belong together"),
        ({"0.order": np.array([-1, 1])}, "do not belong together"),
        ({"0.keys": np.frombuffer(b"a\0", np.uint8)}, "do not belong together"),
        ({"counts": [3]}, "do not belong together"),
    ],
)
def test_a_plan_that_leads_astray_is_refused(tmp_path, change, says):
    """Written by somebody else: a split would be a folder anywhere, a sample none that is there."""
    save_plan(plan_of(source_of(["a"], {"train": [("x", 0), ("y", 0)]})), tmp_path)
    content = dict(np.load(tmp_path / PLAN))
    head = json.loads(content["head"].tobytes())
    head["splits"][0].update({name: value for name, value in change.items() if "." not in name})
    content.update({name: value for name, value in change.items() if "." in name})
    content["head"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
    np.savez(tmp_path / PLAN, **content)
    with pytest.raises(ManifestError, match=says):
        load_plan(tmp_path)


@pytest.mark.parametrize("step", [17, pytest.param(3, marks=pytest.mark.slow)])
def test_a_plan_with_a_flipped_bit_is_refused_or_read(tmp_path, step):
    """Whatever zipfile and numpy make of it, there is one kind of error."""
    save_plan(plan_of(source_of(["a"], {"train": [("x", 0), ("y", 0)]})), tmp_path)
    content = (tmp_path / PLAN).read_bytes()
    refused = 0
    for at in range(0, 8 * len(content), step):
        flipped = bytearray(content)
        flipped[at // 8] ^= 1 << at % 8
        (tmp_path / PLAN).write_bytes(flipped)
        try:
            load_plan(tmp_path)
        except ManifestError:
            refused += 1
    assert refused > 3000 // step


def test_every_registered_class_of_samples_is_there():
    assert [samples_class(name).__name__ for name in SAMPLES] == [
        "Files",
        "ArchiveMembers",
        "ParquetRows",
        "Pixels",
        "PackedSamples",
    ]


def test_a_plan_of_another_version_is_refused(tmp_path):
    save_plan(plan_of(source_of(["a"], {"train": [("x", 0)]})), tmp_path)
    content = dict(np.load(tmp_path / PLAN))
    head = json.loads(content["head"].tobytes())
    del head["version"]  # as it was at first
    content["head"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
    np.savez(tmp_path / PLAN, **content)
    with pytest.raises(ManifestError, match=r"another version of datapipe: .*--overwrite .*remove"):
        load_plan(tmp_path)


@pytest.mark.parametrize("change", ["less", "more"])
def test_a_conversion_planned_with_other_fields_is_refused(packed_folders, tmp_path, change):
    """An earlier version did not keep the quarantine; the number of its plans was the same."""
    save_plan(plan_of(open_packed(packed_folders["tar"])), tmp_path)
    content = dict(np.load(tmp_path / PLAN))
    head = json.loads(content["head"].tobytes())
    for split in head["splits"]:
        fields = split["fields"]
        fields.pop("quarantine") if change == "less" else fields.update(colour=None)
    content["head"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
    np.savez(tmp_path / PLAN, **content)
    with pytest.raises(ManifestError, match=r"another version of datapipe: let that one finish .*--overwrite .*remove"):
        load_plan(tmp_path)


def test_a_journal_of_another_version_is_refused(tmp_path):
    head = np.frombuffer(b"{}", np.uint8)
    np.savez(tmp_path / "000007.npz", records=np.zeros(1), head=head)
    with pytest.raises(ManifestError, match=r"another version of datapipe: let that one finish .*--overwrite .*remove"):
        Journal(tmp_path).read(7)


def source_of(classes, splits):
    """A source of splits of (name, label)."""
    return Source("idx", classes, {
        split: Pixels("/raw", [name for name, _ in samples], np.array([label for _, label in samples], np.uint32),
                      np.zeros((len(samples), 2, 2), np.uint8))
        for split, samples in splits.items()
    })  # fmt: skip


@pytest.mark.parametrize(
    ("classes", "splits", "changes"),
    [
        ("ab", {"train": [("x", 0), ("y", 1)]}, ""),
        ("ab", {"train": [("x", 0), ("y", 1), ("z", 1)]}, "gained 1 image (train/z of class b)"),
        ("ab", {"train": [("y", 1)]}, "lost 1 image (train/x of class a)"),
        ("ab", {"train": [("x", 1), ("y", 1)]},
         "gained 1 image (train/x of class b) and lost 1 image (train/x of class a)"),
        ("cab", {"train": [("x", 1), ("y", 2), *((f"{i}", 0) for i in range(5))]},
         "gained 5 images (train/0 of class c, train/1 of class c, train/2 of class c, …)"),
        ("ab", {"train": [("x", 0), ("y", 1)], "val": [("x", 0)]}, "gained 1 image (val/x of class a)"),
        ("ab", {"train": [("x", 0), ("x", 0), ("y", 1)]}, "gained 1 image (train/x of class a)"),
        ("ab", {"train": [("y", 1), ("x", 0)]}, "another order of its images, or other classes"),
        ("abc", {"train": [("x", 0), ("y", 1)]}, "another order of its images, or other classes"),
    ],
)  # fmt: skip
def test_changes_of_a_source_are_named(classes, splits, changes):
    plan = plan_of(source_of(["a", "b"], {"train": [("x", 0), ("y", 1)]}))
    assert source_changes(plan, source_of(list(classes), splits)) == changes
