"""Where channels lie in memory: a compiled network is compiled again for images that have them elsewhere."""

import pytest
import torch

from trainer.step.mixing import MixedBatch, mix


@pytest.mark.parametrize("alphas", [(1.0, 0.0), (0.0, 1.0)], ids=["mixup", "cutmix"])
def test_mixed_images_keep_their_channels_last(alphas):
    images_BCHW = torch.zeros(4, 6, 5, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
    labels_B = torch.arange(4)
    mixed = mix(MixedBatch(images_BCHW, labels_B, labels_B >= 0), *alphas, seed=(0,))
    assert mixed.images.stride() == images_BCHW.stride()
