"""What tests of benchmarks share: how to import them, and images that a network tells apart at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks/ is not installed


@pytest.fixture(scope="module")
def bright_or_dark() -> Iterator[None]:
    """Train on two classes that a network tells apart at once, in batches of which each has two parts."""
    from benchmarks import optimizer_run

    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(256) % 2
    images = torch.randn(256, 1, 28, 28, generator=generator) / 4 + labels[:, None, None, None] - 0.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_run, "data", lambda split: (images, labels))
        patch.setattr(optimizer_run, "PART", 16)
        patch.setattr(optimizer_run, "HELD_OUT", 128)
        patch.setattr(optimizer_run, "EVALUATED_EVERY", 64)
        yield
