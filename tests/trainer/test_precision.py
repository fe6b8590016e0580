"""The arithmetic of the forward pass."""

import pytest
import torch

from datapipe.errors import SettingError
from trainer.precision import choose_precision

CPU = torch.device("cpu")


def test_precision():
    assert choose_precision("bf16", CPU).dtype is torch.bfloat16
    assert choose_precision("off", CPU).dtype is None
    assert not choose_precision("bf16", CPU).scaler().is_enabled()
    for name in ("fp16", "tf32"):
        with pytest.raises(SettingError, match=rf"train\.precision = '{name}'"):
            choose_precision(name, CPU)
    assert choose_precision("fp16", torch.device("cuda", 0)).dtype is torch.float16


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
