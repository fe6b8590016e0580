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
    with pytest.raises(SettingError, match=r"train\.precision = 'fp16'"):
        choose_precision("fp16", CPU)
    assert choose_precision("fp16", torch.device("cuda", 0)).dtype is torch.float16


def test_autocast_is_in_force():
    layer, x = torch.nn.Linear(2, 2), torch.zeros(1, 2)
    for name, dtype in (("bf16", torch.bfloat16), ("off", torch.float32)):
        with choose_precision(name, CPU).autocast():
            assert layer(x).dtype is dtype
