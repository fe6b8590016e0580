"""The small parts: ranks, precision, timing, metrics, summary, evaluation."""

import json
from types import SimpleNamespace

import pytest
import torch

from datapipe.errors import SettingError
from datapipe.loaders import Batch
from trainer.config.recipe import load_recipe
from trainer.distributed import World, set_threads, together, world_from_environment
from trainer.errors import TrainingError
from trainer.evaluate import evaluate
from trainer.loop import _loss
from trainer.precision import choose_precision
from trainer.reporting.metrics import MetricsFile
from trainer.reporting.runlog import wait_share
from trainer.reporting.summary import summary
from trainer.reporting.timing import Clock
from trainer.state import MeanLoss, State

CPU = torch.device("cpu")


def test_world():
    assert world_from_environment({}).world_size == 1
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    world = world_from_environment(env)
    assert (world.rank, world.world_size, world.local_world_size, world.is_main) == (5, 8, 4, False)
    with pytest.raises(SettingError, match="WORLD_SIZE not set"):
        world_from_environment({"RANK": "0", "LOCAL_RANK": "0"})
    with pytest.raises(SettingError, match="not a number"):
        world_from_environment(env | {"RANK": "x"})


def test_global_batch_is_shared_equally_or_refused():
    assert World(world_size=4).batch_size(256) == 64
    with pytest.raises(SettingError, match=r"train\.batch_size = 256: must be a multiple of the world size, 3"):
        World(world_size=3).batch_size(256)


@pytest.mark.parametrize(
    ("env", "changes"),
    [
        ({}, True),
        ({"OMP_NUM_THREADS": "7"}, False),
        ({"OMP_NUM_THREADS": "1"}, False),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, True),  # torchrun's own doing
    ],
)
def test_threads(env, changes, monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)), raising=False)
    set_threads(World(world_size=4, local_world_size=4), env)
    assert chosen == ([3] if changes else [])


def test_precision():
    assert choose_precision("bf16", CPU).dtype is torch.bfloat16
    assert choose_precision("off", CPU).dtype is None
    assert not choose_precision("bf16", CPU).scaler().is_enabled()
    with pytest.raises(SettingError, match=r"train\.precision = 'fp16'"):
        choose_precision("fp16", CPU)
    assert choose_precision("fp16", torch.device("cuda", 0)).dtype is torch.float16


def test_autocast_is_in_force():
    layer, x = torch.nn.Linear(2, 2), torch.zeros(1, 2)
    for name, dtype in (("bf16", torch.bfloat16), ("off", torch.float32)):
        with choose_precision(name, CPU).autocast():
            assert layer(x).dtype is dtype


def test_together_raises_what_was_raised():
    with pytest.raises(SettingError, match="mine"), together(World()):
        raise SettingError("mine")


def test_clock_counts_sections_and_goes_on():
    clock = Clock(CPU)
    clock.add_step(1.0, 10.0, 13.0, 14.0)
    clock.add_step(5.0, 15.0, 18.0, 20.0)  # waited 5 s, but only 1 s passed between the steps
    clock.drain()
    time_s = clock.total()
    assert (time_s["wait"], time_s["forward_backward"], time_s["optimizer"]) == (2.0, 6.0, 3.0)
    assert wait_share(time_s) == pytest.approx(2 / 11)
    clock.begin_epoch()
    assert clock.epoch()["forward_backward"] == 0.0
    later = Clock(CPU)
    later.load_state_dict(clock.state_dict() | {"elapsed_s": 100.0})
    assert later.elapsed_s == pytest.approx(100.0, abs=1.0)
    assert later.total()["forward_backward"] == 6.0


def test_mean_loss():
    loss = MeanLoss(CPU)
    for value in (1.0, 2.0, 6.0):
        loss.add(torch.tensor(value))
        loss.read(World(), 1)
    assert loss.take_line() == 3.0
    loss.add(torch.tensor(11.0))
    loss.read(World(), 4)
    assert (loss.take_line(), loss.take_epoch()) == (11.0, 5.0)
    loss.add(torch.tensor(float("nan")))
    with pytest.raises(TrainingError, match=r"loss became nan.*step 5"):
        loss.read(World(), 5)


def test_status():
    state = State(MeanLoss(CPU))
    assert state.status(0.9, 3) is None
    state.evaluations += [
        {"epoch": 1, "elapsed_s": 10.0, "accuracy": 0.91, "loss": 1.0},
        {"epoch": 2, "elapsed_s": 20.0, "accuracy": 0.90, "loss": 1.0},
    ]
    assert state.status(0.9, 3) == "target_reached"
    assert (state.time_to(0.9), state.time_to(0.95), state.best_accuracy, state.accuracy) == (10.0, None, 0.91, 0.90)
    state.epoch = 3
    assert (state.status(0.95, 3), state.status(None, 3)) == ("target_missed", "completed")


def test_metrics_are_cut_to_what_the_checkpoint_knew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    first.open()
    first.write("run", format=1)
    length = first.sync()
    first.write("train", loss=float("inf"), time_s={"wait": float("nan")})
    first.close()
    later = json.loads(path.read_text().splitlines()[1])
    assert later == {"event": "train", "loss": None, "time_s": {"wait": None}}
    with path.open("a") as file:
        file.write('{"event": "tra')  # killed while writing
    second = MetricsFile(path)
    second.open(keep_bytes=length)
    assert not second.is_empty
    second.write("resume", step=2)
    second.close()
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["run", "resume"]


def test_summary(tmp_path):
    end = {
        "status": "target_reached",
        "accuracy": 0.9123,
        "time_to_target_s": 61.2,
        "elapsed_s": 70.0,
        "images_per_s": 1234.5,
        "wait_share": 0.314,
    }
    text = summary(end, 0.9, tmp_path / "report.html", tmp_path)
    for words in ("91.23%", "reached", "61.2 s", "1,234", "report.html", "data-bound: 31% of the step"):
        assert words in text
    text = summary(end | {"wait_share": 0.01, "status": "interrupted"}, 0.99, None, tmp_path)
    assert "data-bound" not in text
    assert "--resume" in text


def batches_of(labels, valid, bad=()):
    images, valid = torch.zeros(len(labels), 1, 2, 2), torch.tensor(valid)
    samples = torch.arange(len(labels)).where(valid, -1)  # padding is no sample
    samples[list(bad)] = 99
    return [SimpleNamespace(images=images, labels=torch.tensor(labels), samples=samples, valid=valid)]


def always_first(images):
    return torch.tensor([[2.0, 0.0]]).expand(len(images), 2)


class Constant(torch.nn.Module):
    def forward(self, images):
        return always_first(images)


def evaluated(batches, num_samples):
    return evaluate(
        Constant(),
        batches,
        lambda images: images,
        num_samples=num_samples,
        world=World(),
        precision=choose_precision("off", CPU),
    )


def test_padding_does_not_count_whatever_its_label():
    result = evaluated(batches_of([0, 1, 0, -1], [True, True, False, False]), 2)
    right, wrong = torch.log(1 + torch.exp(torch.tensor([-2.0, 2.0], dtype=torch.float64)))
    assert result.accuracy == 0.5
    assert result.loss == pytest.approx(float(right + wrong) / 2, rel=1e-6)


def test_a_bad_sample_is_a_wrong_answer_and_no_loss():
    result = evaluated(batches_of([0, 0, 1, 0], [True, False, True, False], bad=[1]), 3)
    assert result.accuracy == 1 / 3
    assert result.loss == evaluated(batches_of([0, 1], [True, True]), 2).loss
    with pytest.raises(TrainingError, match="saw 0 samples of a set of 1, and 1 bad ones"):
        evaluated(batches_of([0], [False], bad=[0]), 1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_bad_sample_teaches_nothing_whatever_its_label(recipe_file, smoothing):
    """And the others as much as without it: they are 3 of 4, of which the loss is a mean."""
    recipe = load_recipe(str(recipe_file), [f"train.label_smoothing={smoothing}"])
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    job = SimpleNamespace(recipe=recipe, model=model, prepare=lambda x: x, precision=choose_precision("off", CPU))
    images, samples = torch.rand(4, 1, 2, 2), torch.arange(4)

    def gradient(label, valid, kept=slice(None)):
        tensors = images, torch.tensor([0, label, 1, 2]), samples, torch.tensor(valid)
        batch = Batch(*(tensor[kept] for tensor in tensors))
        return torch.autograd.grad(_loss(job, batch), model[1].weight)[0]

    expected = gradient(0, [True] * 4, kept=torch.tensor([0, 2, 3])) * 3 / 4
    for label in range(3):
        assert torch.allclose(gradient(label, [True, False, True, True]), expected, atol=1e-7)
    assert not torch.allclose(gradient(1, [True] * 4), expected, atol=1e-3)


def test_evaluation_must_see_every_sample():
    with pytest.raises(TrainingError, match="saw 2 samples of a set of 3"):
        evaluated(batches_of([0, 1], [True, True]), 3)
