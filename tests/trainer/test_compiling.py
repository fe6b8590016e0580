"""Networks that are compiled before the first step, and those that cannot be."""

import shutil
from itertools import starmap
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_cache

import trainer.models
import trainer.run.rehearsal
import trainer.run.run
from tests.trainer.children.compiled_eagerly import COMPILE, build_tiny
from trainer.checkpoints.file import load_checkpoint

ADAPTIVE = ["optimizer.preconditioner=kfac", "kfac.factor_update_steps=1", "kfac.inv_update_steps=5"]
ADAPTIVE += ["kfac.damping_update_steps=2"]
GROWING = ["data.crop=random_resized", "data.start_size=12", "data.grow=[0.0, 0.5]"]  # 16 px in the second epoch
GROWING += ["data.mixup=0.2", "data.cutmix=1.0", "train.precise_bn_batches=2", "train.evaluate_mirrored=true"]


@pytest.mark.parametrize(
    "changes",
    [[], ADAPTIVE, pytest.param(GROWING, marks=pytest.mark.slow)],
    ids=["sgd", "adaptive", "growing and mixed"],
)
def test_compiling_before_the_first_step_changes_nothing(go, tmp_path, metrics, monkeypatch, changes):
    """All is compiled then, and the weights, the statistics and random numbers are those of a run that does not."""
    graphs, real, results = [], trainer.run.run.train, {}

    def backend(graph, _):
        graphs.append(graph)
        return graph

    def train(*arguments):
        before = len(graphs)
        status = real(*arguments)
        results["compiled later"] = len(graphs) - before
        return status

    monkeypatch.setattr(trainer.models, "build", build_tiny)
    monkeypatch.setattr(nn.Module, "compile", lambda module, **_: COMPILE(module, backend=backend))
    monkeypatch.setattr(trainer.run.run, "train", train)
    for name in ("with", "without"):
        torch._dynamo.reset()
        if name == "without":
            monkeypatch.setattr(trainer.run.run, "rehearse", lambda job: job.module.compile())
        assert go("train.epochs=2", "train.batch_size=64", "train.compile=true", *changes) == 0
        assert (results["compiled later"] == 0) == (name == "with") and graphs
        assert (metrics(tmp_path / "run")[-1]["time_s"]["compile"] > 0) == (name == "with")
        content = load_checkpoint(tmp_path / "run" / "checkpoint.pt")
        results[name] = [*_leaves([content[key] for key in ("model", "optimizer", "preconditioner", "random")])]
        shutil.rmtree(tmp_path / "run")
    assert len(results["with"]) == len(results["without"]) > 20
    assert all(starmap(torch.equal, zip(results["with"], results["without"], strict=True)))


@pytest.mark.slow
def test_a_network_that_the_compiler_cannot_compile_is_trained_as_it_is(go, tmp_path, metrics, caplog):
    torch._dynamo.reset()
    with fresh_cache(), inductor.patch({"cpp.cxx": ("/bin/false",)}):
        assert go("train.epochs=1", "train.compile=true") == 0
    warning = next(record.getMessage() for record in caplog.records if "train.compile" in record.getMessage())
    assert warning.startswith("train.compile: not compiled, which is slower, as it failed. rank 0: ")
    assert len([line for line in metrics(tmp_path / "run") if line["event"] == "train"]) == 10


@pytest.mark.parametrize(
    ("error", "words"), [(RuntimeError(), "RuntimeError: "), (OSError("no g++"), "OSError: no g++")]
)
def test_a_network_that_does_not_compile_is_trained_as_it_is(go, tmp_path, metrics, monkeypatch, caplog, error, words):
    """What failed need not say why."""

    def fail(*_, **__):
        raise error

    losses = []
    for compiled in ("false", "true"):
        if compiled == "true":
            monkeypatch.setattr(trainer.run.rehearsal, "_pass", fail)
        assert go("train.epochs=1", "train.batch_size=64", f"train.compile={compiled}") == 0
        losses.append([line["loss"] for line in metrics(tmp_path / "run") if line["event"] == "train"])
        shutil.rmtree(tmp_path / "run")
    assert losses[0] == losses[1]
    assert f"train.compile: not compiled, which is slower, as it failed. rank 0: {words}" in caplog.text


def _leaves(value):
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    elif isinstance(value, torch.Tensor | int | float):
        yield torch.as_tensor(value)


@pytest.mark.parametrize(
    ("compile", "device", "preconditioner", "epochs", "reason"),
    [
        ("auto", "cuda", None, 100, ""),
        ("auto", "cuda", None, 99, "in a run of 9,900 steps, compiling would take longer than it saves"),
        ("auto", "cuda", object(), 100, "the hooks of K-FAC would cut it at every layer"),
        ("auto", "cpu", None, 100, "it trains on a processor"),
        (True, "cpu", object(), 1, ""),
        (False, "cuda", None, 100, "train.compile = false"),
    ],
)
def test_what_is_compiled_unasked(compile, device, preconditioner, epochs, reason):
    recipe = SimpleNamespace(train=SimpleNamespace(compile=compile, epochs=epochs))
    world = SimpleNamespace(device=torch.device(device))
    job = SimpleNamespace(recipe=recipe, world=world, preconditioner=preconditioner, steps_per_epoch=100)
    assert trainer.run.rehearsal.why_not_compiled(job) == reason
