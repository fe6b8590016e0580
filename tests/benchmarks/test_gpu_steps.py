"""The benchmarks of one GPU, as far as a processor can run them: all steps, in calls that are killed and repeated."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from benchmarks.gpu import Conditions, Step, bench_train_gpu, check_machine, run_steps
from benchmarks.gpu.result_page import compare_with_goals
from tests.processes import ROOT, ProcessServer, clean_environment
from tests.waiting import limit_s, wait_until

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
VOID = {"meta", "br", "hr"}


class Page(HTMLParser):
    """What a page shows, and whether each element that needs it is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        assert not {"src", "href"} & {name for name, value in attrs if not (value or "").startswith("#")}, attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.mark.slow
def test_a_dry_run_that_is_killed_is_continued(server: ProcessServer, tmp_path: Path) -> None:
    out = tmp_path / "out"
    steps = run_steps.STEPS
    words = ["-m", "benchmarks.gpu.run_steps", out, "--dry-run"]
    # The compiler would take a minute; that trainings are compiled is tested with the trainer.
    environment = clean_environment(BENCHMARKS_WORK=str(tmp_path / "work"), TORCHDYNAMO_DISABLE="1")
    settings = {"env": environment, "cwd": ROOT}

    def read_statuses() -> dict[str, str]:
        records = (json.loads(path.read_text()) for path in (out / "steps").glob("*.json"))
        return {record["step"]: record["status"] for record in records}

    middle = next(step for step in steps if step.name.startswith("loader: cpu"))
    with server.start(*words, **settings) as child:
        wait_until(lambda: read_statuses().get(middle.name), child, describe=read_statuses)
        child.kill()
    before = {path: path.read_bytes() for path in (out / "steps").glob("*.json")}
    assert len(before) < len(steps)
    done = server.run(*words, timeout=limit_s(), **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    for path, content in before.items():
        assert path.read_bytes() == content or json.loads(content)["step"] == middle.name, "it was done again"

    statuses = read_statuses()
    left_out = {name: status for name, status in statuses.items() if status != "done"}
    assert left_out.pop("ResNet-50: synthetic, CUDA graphs") == "needs a GPU"
    assert set(left_out.values()) <= {"lacks"} and statuses.keys() == {step.name for step in steps}
    record = json.loads((out / "record.json").read_text())
    assert record["environment"]["versions"]["torch"] and record["environment"]["gpu"] is None and record["commit"]
    assert [row["step"] for row in record["steps"]] == [step.name for step in steps], "in their order"
    figures = {row["step"]: row["figures"] for row in record["steps"] if row["status"] == "done"}
    assert figures[run_steps.TESTS]["passed"] > 0 == figures[run_steps.TESTS]["failed"]
    step = figures["K-FAC's step: cholesky"]
    assert step["added"] == pytest.approx(step["ms"] / step["sgd_ms"] - 1) and step["host_ms"] > 0
    assert (out / "trace" / "trace.json.gz").stat().st_size > 0
    page = Page((out / "page.html").read_text())
    assert page.open == [] and page.tags.count("svg") == 2
    for text in ("no figure here means anything", "more than 2,790 images/s", "needs a GPU", record["commit"]):
        assert text in page.words


@pytest.fixture
def records(tmp_path: Path) -> run_steps.Records:
    return run_steps.Records(tmp_path, is_dry_run=True)


@pytest.fixture
def call(records: run_steps.Records, tmp_path: Path) -> Callable[..., int]:
    """Return what calls a run of some steps in this process, which forks each."""
    return lambda *steps, seconds=570.0: run_steps.run(list(steps), Conditions.tiny(tmp_path), records, seconds)


def give(*_: object) -> dict:
    return {"answer": 42}


def give_up(*_: object) -> dict:
    print("what it said")
    raise SystemExit("no photographs")


def hang(*_: object) -> dict:
    signal.pause()
    return {}


def die(*_: object) -> dict:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def test_a_step_that_fails_is_recorded_and_the_next_one_begins(
    call: Callable[..., int], records: run_steps.Records, tmp_path: Path
) -> None:
    steps = [Step(f"profile: {work.__name__}", work, 1, 60) for work in (give_up, die, give)]
    assert call(*steps) == 1
    first, second, last = map(records.read, steps)
    assert first["status"] == second["status"] == "failed" and last["figures"] == {"answer": 42}
    assert "no photographs" in first["error"] and "what it said" in first["tail"] and "-9" in second["error"]
    assert "what it said" in Page((tmp_path / "page.html").read_text()).words


def test_a_step_that_hangs_is_ended(call: Callable[..., int], records: run_steps.Records) -> None:
    step = Step("profile: hangs", hang, 0, 0)
    assert call(step) == 1
    assert records.read(step)["error"] == "not done after 0 s" and records.read(step)["beginnings"] == 1


def test_a_call_stops_before_its_limit(
    call: Callable[..., int], records: run_steps.Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step of a call is begun in any case; one that the end of two calls cuts off has failed."""
    monkeypatch.setattr(run_steps, "DRY_S", 60)
    quick, long, other = (
        Step("profile: quick", give, 60, 60),
        Step("profile: long", hang, 60, 60),
        Step("profile: other", give, 60, 60),
    )
    assert call(quick, long, other, seconds=run_steps.LEAVING_S) == run_steps.CALL_AGAIN
    assert records.read(quick)["status"] == "done" and not records.read(long)
    for beginnings in (1, 2):
        assert call(quick, long, other, seconds=run_steps.LEAVING_S) == run_steps.CALL_AGAIN
        assert records.read(long)["status"] == "ended" and records.read(long)["beginnings"] == beginnings
        assert not records.read(other)
    assert call(quick, long, other, seconds=run_steps.LEAVING_S) == 1
    assert records.read(long)["status"] == "failed" and records.read(other)["status"] == "done"


def test_a_step_whose_package_arrives_is_done(
    call: Callable[..., int], records: run_steps.Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step("profile: needy", give, 1, 60, ("arrives_late.part",))
    assert call(step) == 0 and records.read(step)["error"] == "without arrives_late.part"
    (tmp_path / "arrives_late").mkdir()
    (tmp_path / "arrives_late" / "part.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert call(step) == 0 and records.read(step)["figures"] == {"answer": 42}


def test_records_of_another_commit_do_not_count(records: run_steps.Records, tmp_path: Path) -> None:
    step = Step("profile: any", give, 1, 60)
    records.write(step, "done", 1)
    assert records.read(step)["status"] == "done"
    assert not run_steps.Records(tmp_path, is_dry_run=False).read(step)


def test_all_steps_fit_into_45_minutes_and_each_into_a_call() -> None:
    assert sum(step.about_s for step in run_steps.STEPS) < 45 * 60
    assert max(step.limit_s for step in run_steps.STEPS) <= 570 - run_steps.LEAVING_S
    assert len({step.name for step in run_steps.STEPS}) == len(run_steps.STEPS)


def test_goals() -> None:
    def done(name: str, **figures: object) -> dict:
        return {"step": name, "status": "done", "figures": figures}

    steps = [
        done("ResNet-50: synthetic, compiled", images_per_s={"median": 4000.0}),
        done("loader: dali, whole images", images_per_s={"median": 5000.0}),
        done("K-FAC's step: cholesky", added=0.07),
    ]
    goals = compare_with_goals({"steps": steps})
    assert [(measured, is_met) for _, measured, is_met in goals] == [
        ("4,000", "yes"), ("4,000", "no"), ("1.25", "no"), ("+7.0%", "yes")
    ]  # fmt: skip
    assert {is_met for _, _, is_met in compare_with_goals({"steps": []})} == {"not measured"}


def test_operations_of_resnet50_are_those_of_its_paper() -> None:
    """torchvision's model card: 4.09 billion products. (He et al. 2016 have 3.8, with strides in other layers.)"""
    assert bench_train_gpu.operations("resnet50", 224) == pytest.approx(3 * 2 * 4.09e9, rel=0.01)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["check_machine"])
    assert check_machine.main() == 0
    missing = {"crc32c": None, "xxhash": "2.9"}
    version = check_machine.metadata.version

    def answer(name: str) -> str:
        if name in missing and missing[name] is None:
            raise check_machine.metadata.PackageNotFoundError(name)
        return missing.get(name) or version(name)

    monkeypatch.setattr(check_machine.metadata, "version", answer)
    capsys.readouterr()
    assert check_machine.main() == 1
    said = capsys.readouterr().out
    assert "missing: xxhash>=3.4 – needed for everything" in said and "missing: crc32c>=2.7 – for tests/gpu" in said
    assert "carry.sh 3." in said


@pytest.mark.slow
def test_a_wheel_in_pieces_is_joined_and_installed(tmp_path: Path) -> None:
    carried, out, name = tmp_path / "carried", tmp_path / "out", "arrives-1-py3-none-any.whl"
    (carried / "wheels").mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        wheel.writestr("arrives.py", "")
        wheel.writestr("arrives-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: arrives\nVersion: 1\n")
        wheel.writestr("arrives-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("arrives-1.dist-info/RECORD", "")
    content = (tmp_path / name).read_bytes()
    (carried / "SHA256SUMS").write_text(f"{hashlib.sha256(content).hexdigest()}  {name}\n")
    (carried / "wheels" / f"{name}.part-aa").write_bytes(content[:300])
    script = ["bash", ROOT / "benchmarks" / "gpu" / "run_all.sh", out, "--carried", carried, "--check"]

    def run_script() -> str:
        done = subprocess.run(script, env=clean_environment(PYTHON=sys.executable), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert f"the pieces of {name}" in run_script() and not (out / "site").exists()
    (carried / "wheels" / f"{name}.part-ab").write_bytes(content[300:])
    assert "pieces" not in run_script() and (out / "site" / "arrives.py").exists()
