"""PowerSGD is refused beside whatever its memory of left-out gradients does not survive."""

import pytest

from datapipe.errors import SettingError
from trainer.config.recipe import load_recipe


@pytest.mark.parametrize(
    "change",
    ["precision=fp16", "gradient_dtype=bfloat16", "when_diverged=skip", "when_diverged=roll_back"],
)
def test_powersgd_is_refused_beside_it(change):
    name, value = change.split("=")
    load_recipe("fashion-mnist-resnet8", [f"train.{change}"])
    with pytest.raises(SettingError, match=f'powersgd_rank must be "none" with {name} = "{value}"'):
        load_recipe("fashion-mnist-resnet8", [f"train.{change}", "train.powersgd_rank=2"])
