"""Checkpoints: whole or not at all, and damage is noticed."""

import os
import zipfile
from random import Random

import pytest
import torch

from trainer.checkpoints.file import (
    keep_as,
    list_checkpoints,
    load_checkpoint,
    random_state,
    restore_random,
    save_checkpoint,
    set_aside,
)
from trainer.errors import CheckpointError


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"weights": torch.arange(10_000.0), "state": {"step": 3, "names": ["a"]}})
    return path


def test_round_trip(path):
    content = load_checkpoint(path)
    assert torch.equal(content["weights"], torch.arange(10_000.0))
    assert content["state"] == {"step": 3, "names": ["a"]}


def test_random_numbers_go_on_where_they_were(path):
    torch.manual_seed(5)
    save_checkpoint(path, {"random": random_state()})
    expected = torch.rand(3)
    torch.rand(100)
    restore_random(load_checkpoint(path))
    assert torch.equal(torch.rand(3), expected)


def test_a_run_on_the_processor_leaves_the_gpus_alone(path, monkeypatch):
    """They may be somebody else's, or busy: with this build of torch, asking one for its state is an error as well."""
    if torch.cuda.is_initialized():
        pytest.skip("this process uses a GPU already")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert list(random_state()) == ["cpu"]
    restore_random({"random": {"cpu": torch.get_rng_state(), "cuda": torch.zeros(16, dtype=torch.uint8)}})
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("keep", [0, 1, 100, 20_000, -1])
def test_truncated(path, keep):
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt"):
        load_checkpoint(path)


def test_one_flipped_bit_in_the_weights(path):
    data = bytearray(path.read_bytes())
    at = bytes(data).index(torch.arange(5000.0, 5010.0).numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="checksum"):
        load_checkpoint(path)


def test_one_flipped_bit_in_the_directory(path):
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        data[archive.start_dir + 10] ^= 8  # how the first part is compressed: not at all becomes deflate
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt"):
        load_checkpoint(path)


def same(left, right):
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    return left == right


def test_any_damage_is_told_or_does_no_harm(tmp_path):
    """Bits flipped, bytes replaced and the end cut off, mostly in tables that no checksum covers."""
    path, random = tmp_path / "checkpoint.pt", Random(0)
    save_checkpoint(path, {"weights": torch.arange(40.0), "state": {"step": 3, "names": ["a"]}})
    data, content = path.read_bytes(), load_checkpoint(path)
    with zipfile.ZipFile(path) as archive:
        heads = [range(part.header_offset, part.header_offset + 64) for part in archive.infolist()]
        tables = [at for each in (*heads, range(archive.start_dir, len(data))) for at in each]
    causes = set()
    for number in range(1000):
        damaged = bytearray(data)
        for _ in range(random.choice([1, 1, 1, 4])):
            at = random.choice(tables) if random.random() < 0.9 else random.randrange(len(data))
            damaged[at] = damaged[at] ^ 1 << random.randrange(8) if random.random() < 0.7 else random.randrange(256)
        path.write_bytes(damaged[: random.randrange(len(data))] if number % 20 == 0 else damaged)
        try:
            read = load_checkpoint(path)
        except CheckpointError as error:
            assert error.path == path and "\n" not in str(error)
            causes.add(type(error.__cause__))
        else:
            assert same(read, content), f"number {number}"
    assert {OSError, zipfile.BadZipFile, type(None)} <= causes  # a place before the file's begin; wrong checksums


def test_a_part_that_would_be_a_folder_is_not_read_from_memory(path):
    """torch leaves the bytes of such a part as it finds them."""
    with zipfile.ZipFile(path) as archive:
        at = archive.start_dir
    data = bytearray(path.read_bytes())
    data[at + 38] ^= 0x10  # external attributes of the first part
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="should not be a folder"):
        load_checkpoint(path)


def test_what_is_not_the_file_s_fault_is_told_as_it_is(path, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.pt"):
        load_checkpoint(tmp_path / "absent.pt")
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(CheckpointError, match=r"folder\.pt: not a readable checkpoint: is a .* folder, not a file"):
        load_checkpoint(tmp_path / "folder.pt")
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    path.chmod(0)
    with pytest.raises(PermissionError, match=r"checkpoint\.pt"):
        load_checkpoint(path)


def test_damaged_ones_displace_none(tmp_path):
    path = tmp_path / "checkpoint.pt"
    for step in range(4):
        save_checkpoint(path, {"step": step}, keep=4)
    set_aside(tmp_path, [])
    assert steps(tmp_path) == [3, 2, 1, 0]
    set_aside(tmp_path, [str(path), str(tmp_path / "checkpoint-1.pt")])
    assert steps(tmp_path) == [1, 0]
    assert load_checkpoint(path)["step"] == 1
    assert load_checkpoint(tmp_path / "checkpoint-damaged.pt")["step"] == 3
    assert load_checkpoint(tmp_path / "checkpoint-1-damaged.pt")["step"] == 2
    for step in range(2, 5):
        save_checkpoint(path, {"step": step}, keep=4)
    assert steps(tmp_path) == [4, 3, 2, 1]


def test_newer_format(path):
    torch.save({"format": 99}, path)
    with pytest.raises(CheckpointError, match="format 99"):
        load_checkpoint(path)


def test_code_in_a_checkpoint_is_not_run(path, tmp_path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    torch.save({"format": 1, "weights": Payload()}, path)
    with pytest.raises(CheckpointError):
        load_checkpoint(path)
    assert not (tmp_path / "owned").exists()


def test_a_failed_write_leaves_the_old_one(path, monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(path, {"weights": torch.zeros(10)})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


def steps(folder):
    return [load_checkpoint(path)["step"] for path in list_checkpoints(folder)]


def test_the_last_checkpoints_are_kept(tmp_path):
    path = tmp_path / "checkpoint.pt"
    for step in range(5):
        save_checkpoint(path, {"step": step}, keep=3)
        assert steps(tmp_path) == [*range(step, max(-1, step - 3), -1)]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoint-1.pt", "checkpoint-2.pt", "checkpoint.pt"]


def test_a_second_name_stays_when_the_first_is_another_file(path, tmp_path, monkeypatch):
    first = path.read_bytes()
    for link in (os.link, lambda *_: (_ for _ in ()).throw(OSError(1, "not permitted"))):
        monkeypatch.setattr(os, "link", link)
        keep_as(path, tmp_path / "best.pt")
        keep_as(path, tmp_path / "best.pt")
        save_checkpoint(path, {"step": 1})
        assert (tmp_path / "best.pt").read_bytes() == first != path.read_bytes()
        path.write_bytes(first)
        assert sorted(each.name for each in tmp_path.iterdir()) == ["best.pt", "checkpoint.pt"]
