"""The arithmetic of the forward pass."""

import os

import pytest
import torch

from datapipe.errors import SettingError
from trainer.step.precision import choose_precision, kernels_chosen

CPU = torch.device("cpu")


def test_precision():
    assert choose_precision("bf16", CPU).dtype is torch.bfloat16
    assert choose_precision("off", CPU).dtype is None
    assert not choose_precision("bf16", CPU).scaler().is_enabled()
    for name in ("fp16", "tf32"):
        with pytest.raises(SettingError, match=rf"train\.precision = '{name}'"):
            choose_precision(name, CPU)
    assert choose_precision("fp16", torch.device("cuda", 0)).dtype is torch.float16


@pytest.mark.parametrize(
    ("capability", "native", "can_scale", "name"),
    [
        ((8, 0), True, True, "bf16"),
        ((7, 5), False, True, "fp16"),
        ((7, 0), False, True, "fp16"),
        ((7, 0), False, False, "off"),
        ((6, 1), False, True, "off"),
    ],
)
def test_auto_is_what_a_gpu_computes_fast(monkeypatch, capability, native, can_scale, name):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert choose_precision("auto", torch.device("cuda", 0), can_scale).name == name


def test_autocast_is_in_force():
    layer, x = torch.nn.Linear(2, 2), torch.zeros(1, 2)
    for name, dtype in (("bf16", torch.bfloat16), ("off", torch.float32)):
        with choose_precision(name, CPU).autocast():
            assert layer(x).dtype is dtype


def test_a_gpu_multiplies_in_tf32_where_it_is_asked_for():
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    try:
        for name, expected in (("tf32", True), ("off", False)):
            choose_precision(name, torch.device("cuda", 0)).set_up()
            assert [backend.allow_tf32 for backend in backends] == [expected] * 2
        torch.backends.cudnn.allow_tf32 = True
        choose_precision("bf16", torch.device("cuda", 0)).set_up()
        choose_precision("off", CPU).set_up()
        assert torch.backends.cudnn.allow_tf32
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.allow_tf32 = value


@pytest.mark.parametrize(
    "deterministic",
    [False, pytest.param(True, marks=pytest.mark.slow)],  # for which torch imports its compiler
)
def test_kernels_are_the_fastest_or_give_the_same_bits(deterministic, monkeypatch):
    """As long as a run lasts; then all is as it was."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.backends.cudnn.benchmark
    with kernels_chosen(deterministic):
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        assert torch.backends.cudnn.benchmark == (not deterministic)
        assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == deterministic
    assert not torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.benchmark == before
