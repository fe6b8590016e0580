"""Runs that were trained here: whether they are of the same data set, and which target counts, their lines tell."""

import pytest

from datapipe.dataset.manifest import SPLITS, Manifest
from datapipe.errors import SettingError
from datapipe.packing import PackOptions, pack
from trainer.config.recipe import load_recipe
from trainer.measuring.compare import compare
from trainer.measuring.runs import read_group
from trainer.reporting.runlog import read_run
from trainer.run.run import RunOptions, run

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def go(packed, recipe_file, tmp_path):
    """go("run", "train.epochs=1", …, data=…, resume=False) -> exit code of a run in tmp_path/run."""

    def _go(name, *changes, data=packed, resume=False):
        return run(load_recipe(str(recipe_file), changes), data, tmp_path / name, RunOptions(resume, "cpu"))

    return _go


@pytest.fixture
def other(packed, tmp_path):
    """The same images, but one training image has a pixel changed: as many, of the same classes."""
    (tmp_path / "raw").mkdir()
    for path in (packed.parent / "raw").iterdir():
        content = bytearray(path.read_bytes())
        content[-1] ^= path.name.startswith("train-images")
        (tmp_path / "raw" / path.name).write_bytes(content)
    pack(tmp_path / "raw", tmp_path / "other", PackOptions(workers=1))
    return tmp_path / "other"


def test_runs_of_different_data_sets_are_not_compared(go, packed, other, tmp_path, metrics, command):
    for name, data in {"a": packed, "b": packed, "c": other}.items():
        assert go(name, "train.epochs=1", data=data) == 0
    header = metrics(tmp_path / "a")[0]
    assert header["num_classes"] == 4
    assert header["data_sets"] == [Manifest.read(packed / split).index_checksum for split in SPLITS]
    assert compare(read_group(tmp_path / "a"), read_group(tmp_path / "b"))
    with pytest.raises(SettingError, match=r"cannot be compared: data sets \(by checksum\)"):
        compare(read_group(tmp_path / "a"), read_group(tmp_path / "c"))
    refused = command("trainer", "compare", tmp_path / "a", tmp_path / "c")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "data sets (by checksum)" in refused.stderr


def test_another_loader_is_no_other_data_set(go, packed, tmp_path, metrics):
    pytest.importorskip("webdataset")
    assert go("a", "train.epochs=1") == go("b", "train.epochs=1", "data.backend=webdataset") == 0
    assert metrics(tmp_path / "a")[0]["data_sets"] == metrics(tmp_path / "b")[0]["data_sets"]
    assert compare(read_group(tmp_path / "a"), read_group(tmp_path / "b"))


def test_the_target_is_that_of_the_last_attempt(go, tmp_path, real_reports, monkeypatch):
    monkeypatch.setattr("trainer.reporting.page.write_plots", lambda *_: [])
    assert go("run", "train.epochs=2", "train.target_accuracy=0.01") == 0  # reached after an epoch
    assert read_run(tmp_path / "run").figures()["target"] == 0.01
    assert go("run", "train.epochs=2", "train.target_accuracy=1.0", resume=True) == 1
    read = read_run(tmp_path / "run")
    assert (read.header["recipe"]["train"]["target_accuracy"], read.figures()["target"]) == (0.01, 1.0)
    assert (read.end["status"], read.end["time_to_target_s"]) == ("target_missed", None)
    read.end = None  # as it is while the run is going
    assert read.figures()["target"] == 1.0
    # A run that is complete is not resumed, and yet has the target that it was asked for last.
    assert go("run", "train.epochs=2", "train.target_accuracy=0.02", resume=True) == 0
    assert read_run(tmp_path / "run").figures()["target"] == 0.02
    assert "2.00\N{NO-BREAK SPACE}%" in (tmp_path / "run" / "report.html").read_text()
