"""The exit code of `datapipe verify` of several splits."""

import shutil

from typer.testing import CliRunner

from datapipe.cli import app


def test_one_damaged_split_is_enough_for_1(packed_folders, tmp_path):
    folder = tmp_path / "packed"
    shutil.copytree(packed_folders["tar"], folder)
    assert CliRunner().invoke(app, ["verify", str(folder)]).exit_code == 0
    (folder / "val" / "keys.txt").write_bytes(b"damaged\n")
    assert CliRunner().invoke(app, ["verify", str(folder)]).exit_code == 1


def test_several_folders(packed_folders, tmp_path):
    damaged = shutil.copytree(packed_folders["tar"] / "val", tmp_path / "damaged")
    (damaged / "keys.txt").write_bytes(b"damaged\n")
    good = packed_folders["hdf5"]
    done = CliRunner().invoke(app, ["verify", str(good), str(damaged)])
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"{good / split}: good" for split in ("train", "val")]
    assert lines[2].startswith(f"{damaged}: keys.txt: has 8 bytes") and len(lines) == 3
    assert CliRunner().invoke(app, ["verify", str(good), str(tmp_path / "none")]).exception is not None
