"""Exact evaluation: every sample of the validation set counts once, whatever the number of ranks.

B batch, C channels, H height, W width, K classes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datapipe.loaders import Batch

from ..errors import DivergedError, TrainingError
from ..ranks.world import World, sum_over_ranks
from ..step.precision import Precision


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation: `accuracy` from 0 to 1, and the mean cross-entropy without label smoothing.

    A bad sample, of which the loader may tolerate some, counts as a wrong answer and is left out of the loss.
    """

    accuracy: float
    loss: float


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    num_samples: int,
    world: World,
    precision: Precision,
    stopped: Callable[[], bool] = lambda: False,
    with_mirrored: bool = False,
) -> Evaluation | None:
    """Evaluate a model on all ranks together. Leaves it in evaluation mode.

    Args:
        model: The network, the same on all ranks: uint8 [B, C, H, W] -> logits [B, K].
        batches: This rank's batches.
        num_samples: Samples of the validation set, over all ranks.
        world: This process's place among the ranks.
        precision: Arithmetic of the forward pass.
        stopped: Asked after every batch, at the same time on all ranks; evaluation ends once it is True.
        with_mirrored: Whether an answer is the mean of the logits for an image and for its mirror image.

    Returns:
        The result over all ranks; None if it was stopped.

    Raises:
        TrainingError: The ranks did not see exactly `num_samples` samples, or none of them is valid.
        DivergedError: The loss is not finite. Logits that are NaN would count as answers: always the first class.
    """
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=world.device)  # correct, loss, count, bad
    for batch in batches:
        with precision.autocast():
            logits_BK = model(batch.images).float()
            if with_mirrored:
                half_BK = logits_BK / 2  # before the next pass, as with CUDA graphs that writes to the same memory
                logits_BK = half_BK + model(batch.images.flip(-1)).float() / 2
        sums += _sums(logits_BK, batch)
        if stopped():
            return None
    correct, loss, count, bad = sum_over_ranks(world, sums.tolist())
    if count + bad != num_samples or not count:
        others = f", and {bad:.0f} bad ones" if bad else ""
        raise TrainingError(f"evaluation saw {count:.0f} samples of a set of {num_samples}{others}")
    if not math.isfinite(loss):
        raise DivergedError(f"the loss on the validation set is {loss}")
    return Evaluation(correct / num_samples, loss / count)


def _sums(logits_BK: Tensor, batch: Batch) -> Tensor:
    """Return float64 [4]: correct answers, summed loss and number of the valid samples, and the number of bad ones."""
    labels_B, valid_B = batch.labels, batch.valid
    bad_B = ~valid_B & (batch.samples >= 0)  # padding is not a sample
    correct_B = (logits_BK.argmax(dim=1) == labels_B) & valid_B
    # Padding may carry any label, and a NaN times zero is not zero: choose, do not multiply.
    loss_B = F.cross_entropy(logits_BK, labels_B.where(valid_B, torch.zeros_like(labels_B)), reduction="none")
    loss_B = loss_B.double().where(valid_B, torch.zeros_like(loss_B, dtype=torch.float64))
    return torch.stack([correct_B.sum().double(), loss_B.sum(), valid_B.sum().double(), bad_B.sum().double()])
