"""What bounds a run, and that the advice names what the figures say, each with its number, and nothing done already."""

import itertools
import re

import pytest

from trainer.config.sections import Data, Train
from trainer.optim.kfac import Settings as KfacSettings
from trainer.optim.settings import OptimizerSettings
from trainer.reporting.recipe_settings import SETTING_SECTIONS, RecipeSettings, read_settings
from trainer.reporting.trace import ROWS
from trainer.reporting.verdict import Figures, advise, find_bound

RESNET50 = 25_557_032


def figures(compute=1.0, data=0.0, communication=0.0, host=0.0, settings=None, **changes):
    shares = dict(zip(ROWS, (data, host, compute, communication), strict=True))
    values = {
        "shares": shares, "step_s": 0.1, "images_per_s": 2560.0, "memory_share": 0.6, "device": "cpu", "world_size": 2,
        "hosts": 1, "num_parameters": RESNET50, "threads": 4, "cores": 4, "loader_threads": 4,
        "is_staged": True, "is_compiled": True,
    }  # fmt: skip
    return Figures(RecipeSettings(**{"size": 224, "batch_size": 256} | (settings or {})), **values | changes)


DATA = {"data": 0.5, "compute": 0.5}
HOST = {"host": 0.5, "compute": 0.5}
SENT = {"communication": 0.5, "compute": 0.5}


@pytest.mark.parametrize(
    ("shares", "bound"),
    [
        ({"compute": 0.92, "data": 0.04, "host": 0.04}, "compute"),
        ({"compute": 0.7, "data": 0.2, "host": 0.1}, "data"),
        ({"compute": 0.5, "data": 0.1, "communication": 0.15, "host": 0.25}, "host"),
        ({"compute": 0.5, "data": 0.1, "communication": 0.3, "host": 0.1}, "communication"),
    ],
)
def test_the_largest_share_that_can_be_saved_is_named_with_its_number(shares, bound):
    some = figures(**shares)
    assert find_bound(some) == bound
    first = advise(some)[0]
    assert f"{some.shares[bound]:.0%} of each step of 100.0 ms" in first


@pytest.mark.parametrize(
    ("shares", "memory_share", "bound"),
    [
        ({"compute": 0.75, "host": 0.15, "communication": 0.1}, 0.95, "memory"),
        ({"compute": 0.75, "host": 0.1, "communication": 0.15}, 0.95, "memory"),
        ({"compute": 0.75, "host": 0.15, "communication": 0.1}, 0.85, "host"),  # a larger batch fits
        ({"compute": 0.95, "host": 0.05}, 0.95, "compute"),  # and would gain nothing
        ({"compute": 0.6, "data": 0.25, "host": 0.15}, 0.95, "data"),  # and would wait as long for each image
        ({"compute": 0.6, "host": 0.4}, float("nan"), "host"),
    ],
)
def test_memory_bounds_where_a_larger_batch_would_help_and_does_not_fit(shares, memory_share, bound):
    some = figures(**shares, memory_share=memory_share)
    assert find_bound(some) == bound
    if bound == "memory":
        first = advise(some)[0]
        assert "memory bounds this run: 95% is in use" in first and "25% of each step of 100.0 ms" in first
    elif memory_share == 0.95:
        assert advise(some)[-1] == "memory: 95% is in use, so that a larger batch hardly fits"


@pytest.mark.parametrize(
    ("shares", "changes", "says"),
    [
        ({}, {"settings": {"precision": "off"}}, "train.precision = 'auto' (now 'off')"),
        ({}, {"settings": {"channels_last": False}}, "train.channels_last = true (now false)"),
        ({}, {"is_compiled": False}, "train.compile = true (now not compiled)"),
        ({}, {"threads": 1}, "OMP_NUM_THREADS = 4 (now 1)"),
        ({}, {"device": "cuda", "memory_share": 0.2}, "train.batch_size = 512 (now 256, 128 per rank) fills"),
        ({}, {"memory_share": 0.95}, "memory: 95%"),
        ({}, {"settings": {"accumulation_steps": 4}, "memory_share": 0.2}, "train.accumulation_steps = 2 (now 4)"),
        (DATA, {"loader_threads": 1}, "data.threads = 4 (now 1)"),
        (DATA, {"device": "cuda"}, "data.backend = 'dali' (now 'cpu')"),
        (DATA, {"memory_share": 0.2}, "data.backend = 'resident' (now 'cpu')"),
        (DATA, {"is_staged": False}, "--stage reads from the node's own disk"),
        (HOST, {"is_compiled": False}, "train.compile = true (now not compiled)"),
        (HOST, {"device": "cuda"}, "train.compile_mode = 'reduce-overhead' (now 'default')"),
        (HOST, {"memory_share": 0.8}, "train.batch_size = 288 (now 256, 128 per rank) shares the host's 50.0 ms"),
        (SENT, {"memory_share": 0.2}, "train.batch_size = 512 (now 256, 128 per rank) communicates"),
        (SENT, {"settings": {"bucket_mib": 10}}, "train.bucket_mib = 10 sends 97.5 MiB of gradients in about 10 parts"),
        (SENT, {"settings": {"bucket_mib": 100}}, "train.bucket_mib = 24 (now 100): 97.5 MiB of gradients"),
        (SENT, {"num_parameters": 77_754}, "train.bucket_mib = 25 has no influence: 0.3 MiB"),
        (SENT, {"settings": {"powersgd_rank": 4}}, "train.powersgd_rank = 4 begins at step 1000"),
        (SENT, {"hosts": 2}, "GLOO_SOCKET_IFNAME names the network between the 2 hosts"),
        (SENT, {"hosts": 2, "device": "cuda"}, "NCCL_SOCKET_IFNAME"),
        (SENT, {"memory_share": 0.95}, "train.accumulation_steps = 2 (now 1) with train.batch_size = 512 (now 256)"),
        (HOST, {"memory_share": 0.95, "settings": {"precision": "tf32"}}, "train.precision = 'auto' (now 'tf32')"),
        (HOST, {"memory_share": 0.95, "settings": {"backend": "resident"}}, "data.backend = 'cpu' (now 'resident')"),
    ],
)
def test_advice_is_given_where_it_applies(shares, changes, says):
    assert any(says in line for line in advise(figures(**shares, **changes)))
    assert not any(says in line for line in advise(figures(**shares)))


def test_powersgd_that_begins_at_once_is_not_said_to_begin_later():
    settings = {"powersgd_rank": 4, "powersgd_start_step": 2}
    assert not any("powersgd" in line for line in advise(figures(**SENT, settings=settings)))


@pytest.mark.parametrize("settings", [{"compile_mode": "reduce-overhead"}, {"compile_mode": "max-autotune"}])
def test_more_parts_are_not_advised_where_a_pass_is_one_graph(settings):
    assert not any("accumulation" in line for line in advise(figures(**SENT, memory_share=0.95, settings=settings)))


@pytest.mark.parametrize(
    "settings",
    [{"crop": "random_resized"}, {"start_size": 16}, {"eval_size": 40}, {"order": "blocks"}, {"io": "mmap"}],
)
def test_images_that_are_scaled_or_read_in_another_way_cannot_be_resident(settings):
    assert not any("resident" in line for line in advise(figures(**DATA, memory_share=0.2, settings=settings)))


@pytest.mark.parametrize(
    ("communication", "settings", "names"),
    [
        (0.5, {}, ["bucket_mib", "gradient_dtype", "powersgd_rank"]),
        (0.15, {}, ["bucket_mib", "gradient_dtype"]),  # half as many bytes suffice
        (0.5, {"gradient_dtype": "bfloat16"}, ["bucket_mib"]),  # which a recipe cannot have with PowerSGD
        (0.5, {"preconditioner": "kfac", "grad_worker_fraction": 0.0}, ["bucket_mib"]),  # K-FAC sends the gradients
        (0.5, {"preconditioner": "kfac"}, ["bucket_mib", "gradient_dtype", "powersgd_rank"]),
        (0.5, {"when_diverged": "skip"}, ["bucket_mib", "gradient_dtype"]),
        (0.5, {"precision": "fp16"}, ["bucket_mib", "gradient_dtype"]),
    ],
)
def test_what_is_said_of_gradients_is_what_the_recipe_may_change(communication, settings, names):
    lines = advise(figures(communication=communication, compute=1 - communication, settings=settings))
    said = [name for name in ("bucket_mib", "gradient_dtype", "powersgd_rank") if f"train.{name} = " in " ".join(lines)]
    assert said == names
    assert "train.bucket_mib = 25 sends 97.5 MiB of gradients in about 4 parts: 50 costs less latency, 12" in lines[1]
    assert ("sends 48.7 MiB of gradients per step, not 97.5" in " ".join(lines)) == ("gradient_dtype" in names)


def test_16_bits_are_not_advised_where_the_device_is_slow_in_them():
    """By `auto`, "off" is what was chosen since the device has no units for them."""
    assert not any("precision" in line for line in advise(figures(settings={"precision": "auto"})))


def test_every_line_has_a_number_and_a_size_that_a_batch_can_have():
    other = {"precision": "off", "channels_last": False, "accumulation_steps": 5, "batch_size": 50}
    choices = {
        "shares": [{}, DATA, HOST, SENT],
        "device": ["cpu", "cuda"],
        "memory_share": [0.1, 0.6, 0.95],
        "settings": [{}, other],
        "hosts": [1, 2],
        "is_staged": [True, False],
        "is_compiled": [True, False],
        "num_parameters": [1000, RESNET50],
    }
    for values in itertools.product(*choices.values()):
        changes = dict(zip(choices, values, strict=True))
        lines = advise(figures(**changes.pop("shares"), **changes, loader_threads=1, threads=1))
        for line in lines:
            text = re.sub("bfloat16|bf16", "", line)
            assert re.search(r"\d", text), line
        settings = changes["settings"]
        for line in lines:
            each, parts = settings.get("batch_size", 256) // 2, settings.get("accumulation_steps", 1)
            if size := re.search(r"batch_size = (\d+)", line):
                each, rest = divmod(int(size[1]), 2)
                assert rest == 0 and each > settings.get("batch_size", 256) // 2, line
            if number := re.search(r"accumulation_steps = (\d+)", line):
                parts = int(number[1])
            assert each % parts == 0 and each >= 2 * parts, line


def test_settings_are_those_of_a_recipe():
    sections = {"train": Train, "data": Data, "optimizer": OptimizerSettings, "kfac": KfacSettings}
    for name, default in RecipeSettings._field_defaults.items():
        field = sections[SETTING_SECTIONS.get(name, "train")].model_fields[name]
        assert field.is_required() or (field.default or type(default)()) == default, name


def test_settings_of_an_old_or_foreign_file():
    recipe = {
        "train": {"bucket_mib": 50, "powersgd_rank": None, "channels_last": "<b>"},
        "data": "x",
        "kfac": [1],
    }
    assert read_settings(recipe) == RecipeSettings(bucket_mib=50)
    assert read_settings({}) == RecipeSettings()
