"""The benchmarks' loaders and packers see the right images and labels, and their measures measure."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from optuna.samplers import GPSampler
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks/ is not installed

from benchmarks import bench_order, bench_pack_slow, bench_plan, corpus, measure
from benchmarks.bench_loader import Child
from benchmarks.bench_pack import Contest, chosen
from benchmarks.measure import cpu_s, process, spread
from benchmarks.optimizer_run import Run
from benchmarks.peers import EVERYWHERE, PEERS, Task, open_peer
from benchmarks.peers.packing import PEERS_VENV, SECTIONS, STATUS, Packer, missing
from datapipe.images.recode import RecodeOptions
from datapipe.packing import PackOptions, pack
from trainer import models
from trainer.kfac.costs import costs
from trainer.kfac.settings import KFACSettings

NUM_CLASSES, EACH = 4, 24
TRIAL = Run("resnet8", 4096, 5, {}, tuning=True)
SPIN = "import time\nwhile time.process_time() < 0.8: pass\nprint(flush=True)\ninput()"


@pytest.fixture(scope="module")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of one brightness a class, in every format: what a peer says of an image can be checked."""
    folder = tmp_path_factory.mktemp("corpus")
    noise = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in range(NUM_CLASSES):
            (folder / "images" / split / str(label)).mkdir(parents=True)
            for i in range(EACH):
                pixels = noise.integers(0, 20, (150, 200, 3), np.uint8) + 60 * label
                path = folder / "images" / split / str(label) / f"{i:03}.jpg"
                Image.fromarray(pixels.astype(np.uint8)).save(path, quality=95)
    corpus._pack(folder / "images", folder, shard_mib=0.1)  # shards of few images
    return folder


@pytest.mark.parametrize("name", EVERYWHERE)
def test_peer_gives_images_with_their_labels(name: str, small_corpus: Path) -> None:
    task = Task(size=64, channels=3, crop="random_resized", batch_size=8)
    epochs = open_peer(name, small_corpus, task)
    for epoch in range(2):
        count = 0
        for images_BCHW, labels_B in epochs(epoch):
            assert str(images_BCHW.dtype) == "torch.uint8"
            assert images_BCHW.shape == (len(labels_B), 3, 64, 64)
            seen = (images_BCHW.float().mean((1, 2, 3)) / 60).long()
            assert seen.tolist() == labels_B.tolist()
            count += len(labels_B)
        assert count == NUM_CLASSES * EACH


@pytest.mark.parametrize("name", EVERYWHERE)
def test_peer_evaluates_every_image_once(name: str, small_corpus: Path) -> None:
    task = Task(size=200, channels=1, crop="pad", batch_size=10, train=False)
    if name.startswith("datapipe"):
        pytest.skip("datapipe's own tests cover its evaluation")
    labels = [label for _, labels_B in open_peer(name, small_corpus, task)(0) for label in labels_B.tolist()]
    assert sorted(labels) == sorted(list(range(NUM_CLASSES)) * EACH)


COLOUR_ONLY = [name for name in PEERS if name not in EVERYWHERE]


@pytest.mark.parametrize("name", COLOUR_ONLY)
def test_peer_trains_on_photographs(name: str, small_corpus: Path) -> None:
    """In processes of their own, as they are measured: some need libraries that we do not have."""
    if reason := missing(PEERS[name]):
        pytest.skip(reason)
    corpus.packed_as(small_corpus, "restart8", PackOptions(recode=RecodeOptions(restart=8)))
    corpus.packed_as(small_corpus, "raw256", PackOptions(format="npy", recode=RecodeOptions(store="raw", size=256)))
    task = Task(size=64, channels=3, crop="random_resized", batch_size=8)
    with Child(name, small_corpus, task) as child:
        for epoch in range(2):
            run = child.epoch(epoch)
            assert run["images"] == NUM_CLASSES * EACH and run["mean_label"] == (NUM_CLASSES - 1) / 2
            for brightness, label in zip(*child.last, strict=True):
                assert int(brightness / 60) == label  # each class has one of its own


def test_kfac_benchmarks_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """All but the GPU's part, on a network that takes no time."""
    from benchmarks import bench_kfac
    from benchmarks.gpu import bench_kfac_gpu

    records = {}
    small = ["--model", "resnet8", "--size", "8", "--batch-size", "2", "--periods", "1"]
    for module, more in ((bench_kfac, ["--without", "K-FAC, eigen"]), (bench_kfac_gpu, ["--device", "cpu"])):
        monkeypatch.setattr(module, "write_record", lambda name, record: records.setdefault(name, record))
        monkeypatch.setitem(module.SETTINGS, "inv_update_steps", 10)
        monkeypatch.setattr(sys, "argv", ["bench", *small, *more])
        assert module.main() == 0
    for record in records.values():
        assert "K-FAC, cholesky" in record["found"] and record["found"]["SGD"]["added"] == 0
        json.dumps(record)
    assert records["kfac-resnet8"]["operations"]["training"] > 0
    assert records["kfac-resnet8"]["found"].keys() == {
        "SGD", "K-FAC, cholesky", "K-FAC, cholesky, ¼", "K-FAC, cholesky, ⅛, bfloat16", "K-FAC, cholesky, SUA, ¼",
        "K-FAC as published"
    }  # fmt: skip
    assert "worst ÷ median" in capsys.readouterr().out


@pytest.fixture
def bright_or_dark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two classes that a network tells apart at once, in batches of which each has two parts."""
    from benchmarks import optimizer_run

    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(256) % 2
    images = torch.randn(256, 1, 28, 28, generator=generator) / 4 + labels[:, None, None, None] - 0.5
    monkeypatch.setattr(optimizer_run, "data", lambda split: (images, labels))
    monkeypatch.setattr(optimizer_run, "PART", 16)
    monkeypatch.setattr(optimizer_run, "HELD_OUT", 128)
    monkeypatch.setattr(optimizer_run, "EVALUATED_EVERY", 64)


def test_every_optimizer_of_the_comparison_trains(bright_or_dark: None) -> None:
    from benchmarks.bench_optimizers import OPTIMIZERS, next_trial
    from benchmarks.optimizer_run import train

    for name in OPTIMIZERS:
        run = next_trial(OPTIMIZERS[name], [], Run("resnet8", 32, 4, {}))
        found = train(run)
        near = [line["accuracy"] >= 0.88 for line in found]
        steps = [0] + [line["step"] for line in found]
        assert [b - a for a, b in pairwise(steps)][1:-1] == [2 if is_near else 6 for is_near in near[:-2]]
        assert found[-1]["accuracy"] >= 0.92 or found[-1]["step"] == 32
        assert found[-1]["wall_s"] >= found[0]["wall_s"] > 0
        assert ("cosine" in found[0]) == (name in ("K-FAC", "EKFAC"))


def test_a_comparison_of_optimizers(
    bright_or_dark: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from benchmarks import bench_optimizers as bench
    from benchmarks.optimizer_run import train

    one = threading.Lock()  # random numbers come from one generator

    def process(command: list[str], **_) -> tuple[str, dict]:
        with one:
            return json.dumps(train(Run(**json.loads(command[-1])))), {}

    monkeypatch.setattr(bench, "process", process)
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "OPTIMIZERS", {name: bench.OPTIMIZERS[name] for name in ("LARS", "K-FAC")})
    monkeypatch.setattr(bench, "FIRST_ORDER", ("LARS",))
    monkeypatch.setattr(sys, "argv", ["bench", "--batch-size", "32", "--trials", "2", "--seeds", "2", "--epochs", "2"])
    path = tmp_path / "optimizers-resnet8-32.json"
    assert bench.main() == 0
    record = json.loads(path.read_text())
    assert record["shares"].keys() == {"0.90", "0.91", "0.92"}
    assert len(record["runs"]) == 2 * (2 + 2) and len(record["environments"]) == 1
    for name, of in record["found"].items():
        kind, setting = {"LARS": ("optimizer", "lr"), "K-FAC": ("kfac", "damping")}[name]
        box = bench.OPTIMIZERS[name][kind == "kfac"][setting].box(0)
        assert len(of["trials"]) == 2
        assert all(box.low <= trial[kind][setting] <= box.high for trial in of["trials"])
        best = max(of["trials"], key=lambda trial: trial["accuracy"])
        assert best | of["best"] == best
        assert of["targets"]["0.90"]["runs"] == 2
    *before, last = record["runs"]
    path.write_text(json.dumps(record | {"runs": before}))
    with monkeypatch.context() as patch:
        patch.setattr(bench, "process", lambda command, **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            bench.main()
    assert json.loads(path.read_text())["found"] == record["found"]  # what is broken off loses nothing
    assert bench.main() == 0
    again = json.loads(path.read_text())
    assert again["runs"][:-1] == before and again["runs"][-1]["run"] == last["run"]  # nothing is trained twice
    assert [line["accuracy"] for line in again["runs"][-1]["found"]] == [line["accuracy"] for line in last["found"]]
    assert [run["environment"] for run in again["runs"]] == [0] * len(before) + [1]
    told = capsys.readouterr().out
    assert "92% steps" in told and "90% wall_s" in told
    again["environments"][1]["cpu"] = "another"  # of K-FAC's last seed
    path.write_text(json.dumps(again))
    assert bench.main() == 0
    assert json.loads(path.read_text())["found"]["LARS"]["targets"]["0.90"]["runs"] == 1
    near, best = bench.near("optimizers-resnet8-32")["K-FAC"], record["found"]["K-FAC"]["best"]["kfac"]
    before = []
    for _ in range(6):
        trial = bench.next_trial(near, before, TRIAL)
        away = max(abs(math.log10(trial.kfac[key] / best[key])) for key in ("damping", "kl_clip"))  # decades
        assert away <= (0.5 if len(before) < 4 else 1) + 1e-9
        before.append((trial, 0.5 - 0.1 * math.log10(trial.kfac["damping"])))
    assert min(trial.kfac["damping"] for trial, _ in before) < best["damping"] / 10**0.5


def test_trials_go_where_the_best_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accuracy that falls with the square of the distance from a place away from the box's centre."""
    from benchmarks.bench_optimizers import OPTIMIZERS, next_trial

    def accuracy(run: Run) -> float:
        decades = math.hypot(math.log10(run.kfac["kl_clip"] / 6e-3), math.log10(run.kfac["damping"] / 4e-4))
        return max(0.1, 0.9 - 0.1 * decades**2)

    boxes = {key: around.box(0) for key, around in OPTIMIZERS["K-FAC"][1].items()}
    before = []
    for _ in range(10):
        run = next_trial(OPTIMIZERS["K-FAC"], before, TRIAL)
        assert all(box.low <= run.kfac[key] <= box.high for key, box in boxes.items())
        before.append((run, accuracy(run)))
    found = [value for _, value in before]
    assert max(found) > 0.895 > max(found[:4])
    assert next_trial(OPTIMIZERS["K-FAC"], before[:-1], TRIAL) == before[-1][0]
    monkeypatch.setattr(GPSampler, "sample_relative", lambda *_: {key: before[5][0].kfac[key] for key in boxes})
    assert next_trial(OPTIMIZERS["K-FAC"], before, TRIAL) not in [run for run, _ in before]  # nothing twice


def test_the_box_of_later_trials_is_wider() -> None:
    """With the best at the edge of the first."""
    from benchmarks.bench_optimizers import OPTIMIZERS, next_trial

    box, before = OPTIMIZERS["LAMB"][0]["lr"].box(0), []
    for _ in range(12):
        run = next_trial(OPTIMIZERS["LAMB"], before, TRIAL)
        before.append((run, 0.5 + 0.1 * math.log10(run.optimizer["lr"] / box.low)))
    assert all(run.optimizer["lr"] <= box.high for run, _ in before[:10])
    assert max(run.optimizer["lr"] for run, _ in before[10:]) > box.high


def test_steps_to_a_target() -> None:
    from benchmarks.bench_optimizers import interval, to_target

    line = {"epoch": 1.0, "wall_s": 1.0, "cpu_s": 1.0}
    runs = [[{"step": 5, "accuracy": 0.8, **line}, {"step": step, "accuracy": 0.9, **line}] for step in (10, 12, 14)]
    found = to_target([*runs, runs[0][:1]], 0.9)
    assert (found["reached"], found["runs"], found["step"]["mean"]) == (3, 4, 12)
    assert found["step"]["half_width"] == pytest.approx(4.303 * 2 / 3**0.5, rel=1e-3)  # Student's t, two degrees
    assert to_target(runs, 0.95) == {"reached": 0, "runs": 3}
    assert interval([1.0])["mean"] == 1.0


def test_the_share_of_steps() -> None:
    """Against the best of the first order, in steps and in seconds; one that misses counts with all of its steps, and
    the share is a bound.
    """
    from benchmarks.bench_optimizers import FIRST_ORDER, share

    def of(*steps: int, top: float = 0.9, cpu_s: float = 2.0) -> list[list[dict]]:
        return [[{"step": step, "accuracy": top, "wall_s": step, "cpu_s": cpu_s * step}] for step in steps]

    runs = dict.fromkeys(FIRST_ORDER, of(100, 140)) | {"LARS": of(80, 100, cpu_s=4.0), "K-FAC": of(40, 50)}
    lars = {
        "share": pytest.approx(0.5),
        "interval": pytest.approx([0.5, 0.5]),
        "of": "LARS",
        "at_most": False,
        "met": True,
    }
    assert share(runs, 0.9, "step") == lars == share(runs, 0.9, "wall_s")
    sgd = share(runs, 0.9, "cpu_s")  # shares of 0.4 and 0.357
    assert (sgd["of"], sgd["share"]) == ("SGD, Nesterov", pytest.approx((0.4 * 5 / 14) ** 0.5))
    standard_error = math.log(0.4 / (5 / 14)) / 2  # of two: half their difference
    low, high = sgd["interval"]
    assert math.log(high / sgd["share"]) == pytest.approx(12.706 * standard_error, rel=1e-3)
    assert low * high == pytest.approx(sgd["share"] ** 2)
    assert sgd["share"] < 0.75 < high and not sgd["met"]  # too uncertain
    assert not share(runs | {"K-FAC": of(56, 70)}, 0.9, "step")["met"]  # 0.7
    missed = share(dict.fromkeys(FIRST_ORDER, of(60, 60, top=0.8)) | {"K-FAC": of(30, 30)}, 0.9, "step")
    assert missed == lars | {"of": "SGD, Nesterov", "at_most": True}
    some = of(30) + of(90, top=0.8)
    partly = share(dict.fromkeys(FIRST_ORDER, some) | {"K-FAC": of(30, 30)}, 0.9, "step")
    assert partly["at_most"] and partly["share"] == pytest.approx(3**-0.5)
    assert share(runs | {"K-FAC": of(40) + of(50, top=0.8)}, 0.9, "step") is None
    one = share({name: found[:1] for name, found in runs.items()}, 0.9, "step")
    assert one == lars | {"interval": None, "met": False}


def test_one_step_by_damping(bright_or_dark: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import bench_kfac_damping as bench

    records = []
    monkeypatch.setattr(bench, "write_record", lambda name, record: records.append(record))
    monkeypatch.setattr(bench, "PART", 16)
    monkeypatch.setattr(bench, "DAMPINGS", (1e-3,))
    monkeypatch.setattr(sys, "argv", ["bench", "--steps", "1", "--samples", "64"])
    assert bench.main() == 0
    (record,) = records
    assert [of["kind"] for of in record["found"]] == ["gradient", "kfac", "ekfac"]
    for of in record["found"]:
        assert min(step["loss"] for step in of["steps"]) < record["before"]["loss"]
    layers = {size: of.keys() for size, of in record["traces"].items()}
    assert layers["28 pixels"] == layers["14 pixels"] and len(layers["14 pixels"]) == 8
    assert all(ratio > 0 for of in record["traces"].values() for ratio in of.values())


def test_the_average_of_the_weights() -> None:
    """The weight of a step falls as a polynomial of degree 8 towards the first."""
    from benchmarks.optimizer_run import averaged

    steps = torch.eye(40, dtype=torch.float64)
    average = steps[0]
    for number in range(1, 40):
        average = averaged(average, steps[number], torch.tensor(number))
    weights = torch.tensor([math.prod(range(t, t + 8)) for t in range(1, 41)], dtype=torch.float64)
    torch.testing.assert_close(average, weights / weights.sum())


def test_the_published_algorithm_is_what_it_says() -> None:
    """Eigenvectors of averages that begin with the identity, the damping on the product, and the clip."""
    from benchmarks.peers.kfac_published import PublishedKFAC

    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3, padding=1)), torch.randn(6, 2, 5, 5)
    peer = PublishedKFAC(model, 0.01, 1, 1, kl_clip=0.001, lr=0.1)
    out = model(x)
    out.retain_grad()
    out.square().flatten(1).sum(1).mean().backward()
    weight, bias = (parameter.grad.double() for parameter in model.parameters())
    raw = torch.cat([weight.flatten(1), bias[:, None]], 1)
    peer.step()
    rows = torch.nn.functional.unfold(x, 3, padding=1).mT.flatten(0, 1)
    rows = torch.cat([rows, torch.ones(len(rows), 1)], 1).double()
    g = (6 * out.grad).movedim(1, -1).reshape(-1, 3).double()
    a, g = (0.95 * torch.eye(of.shape[1]) + 0.05 * of.T @ of / n for of, n in ((rows, 6), (g, len(g))))
    curvature = torch.kron(g, a) + 0.01 * torch.eye(3 * 19, dtype=torch.float64)
    wanted = torch.linalg.solve(curvature, raw.flatten()).reshape(3, 19)
    wanted *= min(1.0, (0.001 / (0.01 * (wanted * raw).sum().item())) ** 0.5)
    weight, bias = (parameter.grad.double() for parameter in model.parameters())
    torch.testing.assert_close(torch.cat([weight.flatten(1), bias[:, None]], 1), wanted, rtol=1e-3, atol=1e-6)


def test_the_costs_in_the_documentation() -> None:
    """The table of memory and traffic is what the formula says of ResNet-50."""
    with torch.device("meta"):
        network = models.build("resnet50", num_classes=1000, in_channels=3)
    page = (Path(__file__).parents[2] / "docs" / "kfac.md").read_text()
    table = page.partition("| ranks | workers per layer |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = 0
    for line in table:
        ranks, *cells = (cell.strip().replace(",", "") for cell in line.strip().strip("|").split("|"))
        told = re.findall(r"\d+(?: `\w+`)?", cells[0])
        for i, way in enumerate(told):
            workers, _, option = way.partition(" ")
            settings = KFACSettings(grad_worker_fraction=int(workers) / int(ranks), solver="cholesky")
            settings.local_factors = option == "`local_factors`"
            found = costs(network, int(ranks), settings, reduce_to_owners=option == "`reduce_to_owners`")
            said = [re.split("; *", cell)[min(i, cell.count(";"))] for cell in cells[1:]]
            said = [*said[:2], *re.findall(r"\d[\d.]*", said[2])]
            assert len(said) == 5 + ("reduce_to_owners" in option)
            for value, text in zip(found, said, strict=False):
                assert abs(value / 1e6 - float(text)) <= 0.51 * 10 ** -len(text.partition(".")[2]), line
            rows += 1
    assert rows >= 9


def test_solvers_are_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    from benchmarks import bench_kfac_solvers as bench

    records = {}
    monkeypatch.setattr(bench, "write_record", lambda name, record: records.setdefault(name, record))
    monkeypatch.setattr(bench, "SIZES", (8,))
    monkeypatch.setattr(bench, "STACKS", ((8, 2),))
    monkeypatch.setattr(sys, "argv", ["bench", "--rounds", "1"])
    assert bench.main() == 0
    assert len(records["kfac-solvers"]["solvers"]) == 1 and len(records["kfac-solvers"]["stacks"]) == 2
    json.dumps(records)
    assert "cholesky, ms" in capsys.readouterr().out


def test_threads_that_sleep_are_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Whether the setting comes in time is a test of the trainer's."""
    from benchmarks import bench_spinning as bench

    sample = Path(__file__).parents[1] / "data" / "fashion-mnist-sample"
    pack(sample, tmp_path / "tar", PackOptions())
    monkeypatch.setattr(corpus, "fashion_mnist", lambda _: tmp_path)
    monkeypatch.setattr(corpus, "describe", lambda folder: {"name": folder.name})
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "WORK", tmp_path)
    monkeypatch.setattr(bench, "CORES", sorted(os.sched_getaffinity(0))[:2])
    monkeypatch.setattr(bench, "STATES", bench.STATES[:1])
    monkeypatch.setattr(sys, "argv", ["bench", "--rounds", "1"])
    assert bench.main() == 0
    record = json.loads((tmp_path / "spinning.json").read_text())
    assert len(record["ways"]) == 2 and all(way["images_per_s"]["min"] > 0 for way in record["ways"].values())
    spinning = record["ways"]["one core taken, threads spin"]["images_per_s"]["median"]
    sleeping = record["ways"]["one core taken, threads sleep"]["images_per_s"]["median"]
    assert record["ratios"]["one core taken"] == [pytest.approx(sleeping / spinning)]
    assert "× the images/s with threads that sleep" in capsys.readouterr().out


def test_gpu_benchmark_without_a_gpu(small_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to the device, with the processor in its place; torchvision may be missing."""
    from benchmarks.gpu import bench_loader_gpu as gpu

    corpus.packed_as(small_corpus, "restart8", PackOptions(recode=RecodeOptions(restart=8)))
    corpus.packed_as(small_corpus, "raw256", PackOptions(format="npy", recode=RecodeOptions(store="raw", size=256)))
    monkeypatch.setattr(gpu, "BATCH", 16)
    monkeypatch.setattr(gpu, "SIZE", 64)
    device, ran = torch.device("cpu"), set()
    for name, opened in gpu.ways(small_corpus, device).items():
        try:
            run = gpu.measure(opened(), 0, device)
        except (ImportError, RuntimeError):
            continue
        assert run["images"] == NUM_CLASSES * EACH and run["images_per_s"] > 0
        ran.add(name)
    assert len(ran) >= 6, ran


def test_reading_benchmark(small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import bench_reading

    monkeypatch.setattr(bench_reading, "BATCH", 16)
    monkeypatch.setattr(bench_reading, "WORK", tmp_path)
    folder = small_corpus / "tar" / "train"
    for order in ("full", "blocks"):
        assert bench_reading.ours(folder, order, "cached")["samples_per_s"] > 0
    assert bench_reading.plain(folder, direct=False)["mb_per_s"] > 0
    target = bench_reading.long_index(folder, 1000)
    start = bench_reading.first_batch(target, 0)
    assert 0 < start["open_s"] < start["first_batch_s"] and start["index_private_dirty_kib"] == 0


def test_padded_crop_of_grey_images() -> None:
    from benchmarks.peers.pillow import prepare

    task = Task(size=28, channels=1, crop="pad", pad=2)
    image = Image.fromarray(np.full((28, 28), 7, np.uint8))
    pixels = np.stack([prepare(image, task).numpy() for _ in range(50)])
    assert pixels.shape == (50, 1, 28, 28)
    assert set(np.unique(pixels)) == {0, 7}
    assert (prepare(image, replace(task, train=False)).numpy() == 7).all()


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few images that are larger than what packers scale them to, both lying and upright."""
    folder = tmp_path_factory.mktemp("photographs")
    for i in range(10):
        path = folder / f"class{i % 3}" / f"{i}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.effect_noise((400, 300) if i % 2 else (300, 400), 20 + i).convert("RGB").save(path)
    return folder


@pytest.mark.parametrize(("section", "name"), [(section, name) for section in SECTIONS for name in SECTIONS[section]])
def test_packer_packs_what_the_source_holds(section: str, name: str, photographs: Path, tmp_path: Path) -> None:
    contest, packer = Contest(photographs, tmp_path, PEERS_VENV), SECTIONS[section][name]
    if reason := contest.missing(packer):
        pytest.skip(reason)
    contest.check(packer, resize=section == "resize")
    assert not list(tmp_path.iterdir())


def test_figures_of_a_packer_are_plausible(photographs: Path, tmp_path: Path) -> None:
    run = Contest(photographs, tmp_path, PEERS_VENV).measure(SECTIONS["resize"]["Pillow, bilinear"], resize=True)
    assert 0 < run["wall_s"] < run["process_wall_s"] and 0 < run["cpu_s"] < run["process_cpu_s"]
    assert run["images_per_s"] == pytest.approx(10 / run["wall_s"])
    assert run["output_bytes"] > 0 and run["process_peak_bytes"] > 1 << 20


def test_a_packer_that_loses_or_changes_images_is_refused(photographs: Path, tmp_path: Path) -> None:
    contest, packer = Contest(photographs, tmp_path, PEERS_VENV), SECTIONS["copy"]["tar cf"]
    for key, of_a_larger_source in (("images", 11), ("content", contest.wanted["content"] + 1)):
        right = contest.wanted
        contest.wanted = right | {key: of_a_larger_source}
        with pytest.raises(ValueError, match=key):
            contest.check(packer, resize=False)
        contest.wanted = right


def test_a_packer_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    contest = Contest(tmp_path / "empty", tmp_path, PEERS_VENV)
    with pytest.raises(ChildProcessError, match="no_such_module"):
        contest.measure(Packer("no_such_module"), resize=False)


def test_missing_peers_are_told_with_their_reason(tmp_path: Path) -> None:
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
    }
    with pytest.raises(SystemExit, match="nobody"):
        chosen(["nobody"])


def test_bare_reading_reads_every_file(photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, names = [], [str(path.relative_to(photographs)) for path in photographs.glob("*/*")]
    real = bench_pack_slow.os.read
    monkeypatch.setattr(bench_pack_slow.os, "read", lambda fd, size: read.append(real(fd, size)) or read[-1])
    bench_pack_slow.read_bare(str(photographs), names)
    assert sorted(filter(None, read)) == sorted((photographs / name).read_bytes() for name in names)


def test_slow_filesystem_needs_the_testbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_pack_slow, "MOUNT", tmp_path / "none.sh")
    with pytest.raises(SystemExit, match=r"needs .*none\.sh"):
        bench_pack_slow.SlowMount(tmp_path, tmp_path, 5, 32)


def test_planning_figures_are_multiplied_up(tmp_path: Path) -> None:
    bench_plan.make_images(tmp_path / "images", 7, 3)
    assert len(list((tmp_path / "images").glob("*/*.png"))) == 7
    steps = bench_plan.measure(tmp_path / "images", rounds=1)
    assert list(steps) == [bench_plan.START, bench_plan.PLAN, bench_plan.PACK]
    for step, cpu_s_of_step in ((bench_plan.START, 1.0), (bench_plan.PLAN, 3.0), (bench_plan.PACK, 5.0)):
        steps[step]["process_cpu_s"]["median"] = cpu_s_of_step
    multiplied = bench_plan.for_imagenet(steps, bench_plan.IMAGENET // 10)
    assert multiplied[bench_plan.PLAN]["process_cpu_s"] == pytest.approx(1 + 2 * 10, rel=1e-4)
    assert multiplied[bench_plan.PACK]["process_cpu_s"] == pytest.approx(1 + 4 * 10, rel=1e-4)


def test_orders_are_measured(tmp_path: Path) -> None:
    figures = bench_order.measure(tmp_path, 100_000, rounds=1)
    assert list(figures) == ["full", "blocks"]
    for row in figures.values():
        assert 0 < row["peak_bytes"]["median"] < 100_000 * 200 and 0 < row["batch_s"]["median"] < 1
    assert not list(tmp_path.iterdir())


def test_process_is_measured_with_its_children() -> None:
    child = "import time\nwhile time.process_time() < 0.5: pass"
    output, usage = process(
        [sys.executable, "-c", f"import subprocess, sys; print(7); {_run(child)}; sys.exit(3)"], (3,)
    )
    assert output == "7\n"
    assert 0.5 < usage["process_cpu_s"] < 5 and usage["process_wall_s"] > 0.5 and usage["process_peak_bytes"] > 1 << 20
    with pytest.raises(ChildProcessError, match="exit code 3"):
        process([sys.executable, "-c", "raise SystemExit(3)"])


def _run(code: str) -> str:
    return f"subprocess.run([sys.executable, '-c', {code!r}])"


def test_cpu_seconds_count_children_that_still_run() -> None:
    before = cpu_s()
    with subprocess.Popen([sys.executable, "-c", SPIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        while_running = cpu_s() - before
        child.communicate(b"\n")
    assert while_running > 0.7
    assert cpu_s() - before == pytest.approx(while_running, abs=0.3)


def test_first_items_of_an_idx_file() -> None:
    idx = b"\0\0\x08\3" + b"\0\0\0\5" + b"\0\0\0\2" * 2 + bytes(range(20))
    assert corpus._first(idx, 3) == b"\0\0\x08\3" + b"\0\0\0\3" + b"\0\0\0\2" * 2 + bytes(range(12))


def test_spread() -> None:
    assert spread([3.0, 1.0, 8.0]) == {"median": 3.0, "min": 1.0, "max": 8.0}
