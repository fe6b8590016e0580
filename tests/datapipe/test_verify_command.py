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
