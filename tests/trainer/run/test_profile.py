"""`trainer profile` on real trainings: where a delay is put, there the trace and the verdict find it."""

import gzip
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.waiting import limit_s

CHILD = Path(__file__).parents[1] / "children" / "delayed.py"
STEPS = 3


@pytest.fixture
def profiled(start, packed, recipe_file, tmp_path):
    """profiled("host", "--steps", 3, ranks=2) -> (what it printed, profile.json, events of the trace)."""

    def _profiled(delay: str, *arguments: object, ranks: int = 1) -> tuple[str, dict, list[dict]]:
        out = tmp_path / "profile"
        words = ["profile", recipe_file, "--data", packed, "--out", out, "--steps", STEPS, *arguments]
        child = start(CHILD, delay, *words, ranks=ranks)
        said, errors = child.communicate(timeout=limit_s())
        assert child.returncode == 0, errors
        trace = json.loads(gzip.decompress((out / "trace.json.gz").read_bytes()))
        assert sorted(path.name for path in out.iterdir()) == ["profile.json", "trace.json.gz"]
        return said, json.loads((out / "profile.json").read_text()), trace["traceEvents"]

    return _profiled


def track(events: list[dict], rank: int, row: str) -> list[dict]:
    return sorted((e for e in events if e.get("cat") == row and e["pid"] == rank), key=lambda e: e["ts"])


@pytest.mark.parametrize("delay", ["data", "host", "compute"])
def test_what_takes_longest_is_found(profiled, delay):
    said, summary, events = profiled(delay)
    assert max(summary["shares"], key=summary["shares"].get) == delay, summary
    assert sum(summary["shares"].values()) == pytest.approx(1)
    assert summary["step_s"] > 0.1 and summary["images_per_s"] == pytest.approx(32 / summary["step_s"])
    words = {"data": "Waiting for data", "host": "The host", "compute": "Computing"}
    assert f"{words[delay]} bounds this run: {summary['shares'][delay]:.0%}" in said
    assert summary["bound"] == delay
    advised = [line.removeprefix("- ") for line in said.splitlines() if line.startswith("- ")]
    assert advised == summary["verdict"][1:] and all(re.search(r"\d", line) for line in advised)
    steps = [e for e in track(events, 0, "host") if e["name"].startswith("forward pass of step")]
    assert [e["name"] for e in steps] == [f"forward pass of step {n}" for n in range(5 + STEPS + 1, 5 + 2 * STEPS + 1)]
    delayed = [e for e in track(events, 0, "data" if delay == "data" else "host") if e["dur"] > 0.09e6]
    assert len(delayed) >= STEPS


@pytest.mark.ranks
@pytest.mark.slow
def test_two_ranks_on_one_clock(profiled):
    """What all ranks end together, such as a sum of gradients, ends at the same time in the trace."""
    _, summary, events = profiled(
        "", "--steps", 9, "--set", "train.batch_size=64", "--set", "train.bucket_mib=50", ranks=2
    )
    sums = [track(events, rank, "communication") for rank in (0, 1)]
    assert len(sums[0]) == len(sums[1]) >= STEPS
    apart_us = sorted(abs(a["ts"] + a["dur"] - b["ts"] - b["dur"]) for a, b in zip(*sums, strict=True))
    assert apart_us[0] < 2000, apart_us  # on a busy machine a rank may hear later of some
    assert summary["world_size"] == 2 and len(summary["shares_of_ranks"]) == 2
    assert summary["hosts"] == 1 and summary["num_parameters"] > 1000
    settings = {name: summary["settings"][name] for name in ("batch_size", "bucket_mib", "size")}
    assert settings == {"batch_size": 64, "bucket_mib": 50, "size": 16}
    assert all(its["communication"] > 0 for its in summary["shares_of_ranks"])
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        f"rank {rank} ({os.uname().nodename})" for rank in (0, 1)
    }


@pytest.mark.slow
def test_what_is_compiled_computes(profiled):
    _, summary, events = profiled("", "--device", "cpu", "--set", "train.compile=true")
    graphs = [e for e in track(events, 0, "compute") if "CompiledFxGraph" in e["name"]]
    assert len(graphs) == 2 * STEPS  # forward and backward
    ends = [e["ts"] + e["dur"] for e in track(events, 0, "compute")]
    assert all(later["ts"] >= end for later, end in zip(track(events, 0, "compute")[1:], ends, strict=False))
    assert summary["shares"]["compute"] > summary["shares"]["host"]


def test_more_steps_than_the_recipe_has(profiled):
    """Images that grow have their final size from the first of them."""
    growing = "--set", "data.start_size=8", "--set", "data.crop=random_resized"
    _, summary, events = profiled("", "--steps", 8, "--set", "train.epochs=1", *growing)
    assert len(track(events, 0, "data")) == 8 and summary["step_s"] > 0
    assert summary["size"] == 16


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--steps", "0"], "--steps"),
        (["--out", "{file}"], "--out {file}: is a file"),
        (["--out", "{packed}/profile"], "lies in --data {packed}"),
        (["--data", "{file}"], "{file}"),
        (["--set", "train.epochs=0"], "train.epochs"),
    ],
)
def test_wrong_use(start, packed, recipe_file, tmp_path, arguments, says):
    file = tmp_path / "file"
    file.write_text("")
    words = [word.format(file=file, packed=packed) for word in arguments]
    child = start("-m", "trainer", "profile", recipe_file, "--data", packed, "--out", tmp_path / "profile", *words)
    _, errors = child.communicate(timeout=limit_s())
    assert child.returncode in (1, 2) and says.format(file=file, packed=packed) in errors.splitlines()[-1], errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_full_disk(start, packed, recipe_file):
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("needs root, and unshare, to mount")
    on_tmpfs = 'mkdir disk && mount -t tmpfs -o size=4k tmpfs disk || exit 99; "$@"; code=$?; ls -A disk; exit $code'
    command = ["-m", "trainer", "profile", recipe_file, "--data", packed, "--out", "disk/profile", "--steps", 2]
    child = start(*command, prefix=["unshare", "-m", "sh", "-c", on_tmpfs, "sh"])
    said, errors = child.communicate(timeout=limit_s())
    assert child.returncode == 1 and "No space left" in errors.splitlines()[-1] and "Traceback" not in errors, errors
    assert said == ""  # neither a part of a file nor an empty folder is left
