"""The packers that are compared pack what the source holds, and their benchmarks measure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import bench_imagenet, testbed
from benchmarks.bench_pack import Contest, chosen
from benchmarks.peers.packing import PEERS_VENV, SECTIONS, STATUS, Packer, missing


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a few images that are larger than what packers scale them to, in both directions."""
    folder = tmp_path_factory.mktemp("photographs")
    for i in range(10):
        path = folder / f"class{i % 3}" / f"{i}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.effect_noise((400, 300) if i % 2 else (300, 400), 20 + i).convert("RGB").save(path)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("section", "name"), [(section, name) for section in SECTIONS for name in SECTIONS[section]])
def test_packer_packs_what_the_source_holds(section: str, name: str, photographs: Path, tmp_path: Path) -> None:
    contest, packer = Contest(photographs, tmp_path, PEERS_VENV), SECTIONS[section][name]
    if reason := contest.missing(packer):
        pytest.skip(reason)
    contest.check(packer, resize=section == "resize")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_figures_of_a_packer_are_plausible(photographs: Path, tmp_path: Path) -> None:
    run = Contest(photographs, tmp_path, PEERS_VENV).measure(SECTIONS["resize"]["Pillow, bilinear"], resize=True)
    assert 0 < run["wall_s"] < run["process_wall_s"] and 0 < run["cpu_s"] < run["process_cpu_s"]
    assert run["images_per_s"] == pytest.approx(10 / run["wall_s"])
    assert run["output_bytes"] > 0 and run["process_peak_bytes"] > 1 << 20


@pytest.mark.slow
def test_a_packer_that_loses_or_changes_images_is_refused(photographs: Path, tmp_path: Path) -> None:
    contest, packer = Contest(photographs, tmp_path, PEERS_VENV), SECTIONS["copy"]["tar cf"]
    right = contest.expected
    for key, value in (("images", 11), ("content", right["content"] + 1)):
        contest.expected = right | {key: value}
        with pytest.raises(ValueError, match=key):
            contest.check(packer, resize=False)


def test_a_packer_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    contest = Contest(tmp_path / "empty", tmp_path, PEERS_VENV)
    with pytest.raises(ChildProcessError, match="no_such_module"):
        contest.measure(Packer("no_such_module"), resize=False)


def test_missing_peers_have_a_reason(tmp_path: Path) -> None:
    needs = {name: Packer("pack_x", name) for name in ("webdataset", "ffcv", "litdata")}
    assert "setup.sh" in missing(needs["ffcv"], tmp_path)
    (tmp_path / STATUS).write_text("webdataset\tinstalled\t1.0.2\nffcv\tmissing\terror: no compiler\n")
    assert missing(needs["webdataset"], tmp_path) is None
    assert missing(needs["ffcv"], tmp_path) == "error: no compiler"
    assert "setup.sh" in missing(needs["litdata"], tmp_path)
    assert missing(Packer("pack_tar"), tmp_path) is None


def test_chosen_packers() -> None:
    assert chosen([]) == SECTIONS
    assert chosen(["resize"]) == {"resize": SECTIONS["resize"]}
    assert {name: list(packers) for name, packers in chosen(["tar", "ffcv"]).items()} == {
        "copy": ["tar cf", "FFCV, bytes"],
        "resize": ["FFCV, jpg"],
        "disk": ["tar cf"],
    }
    with pytest.raises(SystemExit, match="nobody"):
        chosen(["nobody"])


def test_slow_filesystem_needs_the_testbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testbed, "MOUNT", tmp_path / "none.sh")
    with pytest.raises(SystemExit, match=r"needs .*none\.sh"):
        testbed.SlowMount(tmp_path, tmp_path / "slow", meta_ms=5)


@pytest.mark.slow
def test_steps_at_a_small_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_imagenet.main(["--count", "600", "--val-count", "20", "--classes", "3", "--out", str(tmp_path)])
    output = capsys.readouterr().out
    assert re.search(r"^620 images", output, re.MULTILINE)
    for step in (*bench_imagenet.OURS, "datapipe, tar"):
        assert re.search(rf"^{step}  +\d", output, re.MULTILINE), step
    assert not list(tmp_path.iterdir())
