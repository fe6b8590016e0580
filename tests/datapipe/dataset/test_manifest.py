"""The manifest: it knows its own checksum, and nothing in it can surprise who reads it."""

import json
import shutil
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from datapipe.dataset.manifest import MANIFEST, MAX_BYTES, Manifest
from datapipe.dataset.verify import verify
from datapipe.errors import ManifestError, StagingError
from datapipe.loaders import open_loader
from datapipe.staging import stage

OLD = Path(__file__).parents[2] / "data" / "packed"  # packed by the versions that wrote formats 1 and 2
ZEROS = "0" * 32


def sealed(fields: dict) -> bytes:
    """The file as README's section on the format describes it, without our code."""
    content = json.dumps({"version": 3, **fields, "xxh3_128": ZEROS}).encode()
    return content[: -len(ZEROS) - 2] + xxhash.xxh3_128_hexdigest(content).encode() + b'"}'


def unsealed(folder: Path) -> dict:
    fields = json.loads((folder / MANIFEST).read_bytes())
    fields.pop("xxh3_128", None)
    return fields


@pytest.fixture
def copied(packed_folders, tmp_path):
    return Path(shutil.copytree(packed_folders["tar"] / "val", tmp_path / "val"))


def flips(content: bytes):
    for place in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            yield bytes(changed)


def test_the_checksum_is_what_readme_says(copied):
    content = (copied / MANIFEST).read_bytes()
    digits = json.loads(content)["xxh3_128"]
    assert xxhash.xxh3_128_hexdigest(content.replace(digits.encode(), b"0" * 32)) == digits
    (copied / MANIFEST).write_bytes(sealed(unsealed(copied)))
    assert verify(copied) == []


def test_every_flipped_bit_is_seen(copied):
    """Of format 3, as it is written: also in white space, in an escape, and in the version itself."""
    Manifest.read(copied).model_copy(update={"classes": ["日本", "b", "c"]}).write(copied)
    content = (copied / MANIFEST).read_bytes()
    assert rb"\u" in content
    Manifest.parse(content, copied / MANIFEST)
    for changed in flips(content):
        with pytest.raises(ManifestError):
            Manifest.parse(changed, copied / MANIFEST)


def test_verify_and_all_who_read_it_see_a_flipped_bit(copied, tmp_path, command):
    content = (copied / MANIFEST).read_bytes()
    for changed in list(flips(content))[::199]:
        (copied / MANIFEST).write_bytes(changed)
        (problem,) = verify(copied)
        assert problem.file == MANIFEST
    (copied / MANIFEST).write_bytes(content.replace(b"class.0 x", b"class.4 x"))
    message = "was changed after it was packed, or is damaged.*stage it again"
    with pytest.raises(ManifestError, match=message):
        open_loader(copied, 4, size=16)
    with pytest.raises(ManifestError, match=message):
        stage(copied, tmp_path / "local")
    done = command("datapipe", "info", copied)
    assert done.returncode == 1 and "pack again" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("version", [1, 2])
def test_data_sets_of_earlier_versions(version, tmp_path):
    folder = OLD / f"v{version}"
    assert json.loads((folder / MANIFEST).read_bytes())["version"] == version
    assert Manifest.read(folder).version == version and verify(folder, deep=True) == []
    with open_loader(folder, 2, size=16) as loader:
        assert sum(len(batch.labels) for batch in loader) == 4
    stage(folder, tmp_path / "local")
    assert (tmp_path / "local" / MANIFEST).read_bytes() == (folder / MANIFEST).read_bytes()
    Manifest.read(folder).write(tmp_path / "local")  # what is written is always of the latest format
    assert Manifest.read(tmp_path / "local").version == 3
    with pytest.raises(StagingError, match="another data set"):
        stage(OLD / f"v{3 - version}", tmp_path / "local")


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_an_earlier_version_has_no_checksum(name, tmp_path):
    fields = unsealed(OLD / name)
    for wrong in ({"xxh3_128": ZEROS}, *({"version": version} for version in (3, None, True, 1.0, 2.0, "1"))):
        (tmp_path / MANIFEST).write_text(json.dumps({**fields, **wrong}))
        with pytest.raises(ManifestError):
            Manifest.read(tmp_path)


def shard(fields: dict, **changes) -> dict:
    return {**fields, "shards": [{**fields["shards"][0], **changes}, *fields["shards"][1:]]}


LYING = {
    "newer": lambda m: {**m, "version": 4},
    "much newer": lambda m: {**m, "version": 10**400},
    "not in the data set": lambda m: shard(m, name="../../etc/passwd"),
    "a command": lambda m: shard(m, name="pipe:touch PWNED; cat shard-000000.tar"),
    "a folder elsewhere": lambda m: {**m, "split": "../../elsewhere"},
    "no folder": lambda m: {**m, "split": ""},
    "a folder of ours": lambda m: {**m, "split": "new"},
    "hidden": lambda m: shard(m, name=".shard-000000.tar"),
    "an option": lambda m: shard(m, name="-rf"),
    "empty": lambda m: shard(m, name=""),
    "a line feed": lambda m: shard(m, name="shard-000000.tar\n"),
    "another script": lambda m: shard(m, name="日本.tar"),
    "too long": lambda m: shard(m, name="a" * 256),
    "itself": lambda m: shard(m, name=MANIFEST),
    "twice": lambda m: {**m, "files": [*m["files"], m["files"][0]]},
    "shard and file": lambda m: {**m, "files": [*m["files"], {k: v for k, v in m["shards"][0].items() if k[0] != "n"
                                                            or k == "name"}]},
    "negative": lambda m: shard(m, size_bytes=-1),
    "size": lambda m: shard(m, size_bytes=10**30),
    "samples": lambda m: {**shard(m, num_samples=10**30), "num_samples": 10**30},
    "more samples": lambda m: {**shard(m, num_samples=m["shards"][0]["num_samples"] + 1),
                               "num_samples": m["num_samples"] + 1},
    "infinite": lambda m: {**m, "num_samples": float("inf")},
    "sum": lambda m: {**m, "num_samples": m["num_samples"] + 1},
    "no samples": lambda m: {**m, "num_samples": 0, "shards": []},
    "many shards": lambda m: {**m, "shards": [{**m["shards"][0], "name": f"s{i}"} for i in range(10**5)]},
    "no index": lambda m: {**m, "files": [file for file in m["files"] if file["name"] != "index.npy"]},
    "width": lambda m: {**m, "width": 0},
    "wide": lambda m: {**m, "height": 10**6},
    "pixels": lambda m: {**m, "format": "npy"},
    "no classes": lambda m: {**m, "classes": []},
    "fewer classes": lambda m: {**m, "classes": m["classes"][:1]},
    "unknown": lambda m: {**m, "surprise\ud800": 1},
}  # fmt: skip


@pytest.mark.parametrize("lie", LYING)
def test_what_a_manifest_may_not_say(copied, lie):
    """Its checksum is right: whoever wrote it was mistaken, or wants to do harm."""
    (copied / MANIFEST).write_bytes(sealed(LYING[lie](unsealed(copied))))
    assert verify(copied, deep=True) != []
    for backend in ("cpu", "webdataset"):
        if backend == "cpu" or lie not in ("no index", "fewer classes", "more samples"):  # it has no index
            with pytest.raises(ManifestError):
                open_loader(copied, 4, size=16, backend=backend)


NO_MANIFESTS = {
    "nothing": b"",
    "half": b'{"version": 3,',
    "not UTF-8": b'{"version": 3, "classes": ["\xff"]}',
    "UTF-16": '{"version": 2}'.encode("utf-16"),
    "deep": b"[" * 10**6,
    "deep field": b'{"version": 2, "recode": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
    "number of many digits": b'{"version": ' + b"9" * 10**5 + b"}",
    "list": b"[]",
    "text": b'"version"',
    "NaN": b'{"version": NaN}',
}


@pytest.mark.parametrize("content", NO_MANIFESTS.values(), ids=NO_MANIFESTS)
def test_what_is_not_a_manifest(tmp_path, content, command):
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(ManifestError):
        Manifest.read(tmp_path)
    done = command("datapipe", "info", tmp_path)
    assert done.returncode == 1 and MANIFEST in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr) < 1000


def test_a_huge_file_is_not_read(tmp_path):
    with open(tmp_path / MANIFEST, "wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ManifestError, match="is not a manifest"):
        Manifest.read(tmp_path)


@settings(max_examples=300, deadline=None)
@given(
    path=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    value=st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers()),
)
def test_any_value_anywhere(packed_folders, path, value):
    """A manifest with one value replaced is read, or refused with a ManifestError."""
    fields = unsealed(packed_folders["tar"] / "val")
    place = fields
    for number in path[:-1]:
        inner = [x for x in (place.values() if isinstance(place, dict) else place) if isinstance(x, (dict, list)) and x]
        if not inner:
            break
        place = inner[number % len(inner)]
    keys = list(place) if isinstance(place, dict) else list(range(len(place)))
    place[keys[path[-1] % len(keys)]] = value
    try:
        manifest = Manifest.parse(sealed(fields), Path(MANIFEST))
        assert sum(info.num_samples for info in manifest.shards) == manifest.num_samples
    except ManifestError:
        pass
