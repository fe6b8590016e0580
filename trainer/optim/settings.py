"""What several optimizers share: settings in a recipe, and which parameters decay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import model_validator
from torch import nn

from .fields import BelowOne, Count, FromZero, Positive, Section, one_of, or_none

PRECONDITIONERS = ("none", "kfac", "ekfac")


class OptimizerSettings(Section):
    """The settings that every optimizer has."""

    ignores_length: ClassVar[bool] = False
    if TYPE_CHECKING:  # each optimizer's own Literal; a field here would come first in saved recipes
        name: str
    preconditioner: Annotated[str, one_of("preconditioner", PRECONDITIONERS)] = "none"
    """What changes the gradients before the optimizer sees them: K-FAC, EKFAC or nothing."""
    lr: Positive
    """Peak learning rate, for a global batch of `lr_batch_size` images where `lr_scaling` is set."""
    weight_decay: FromZero = 0.0
    """Decay of matrices and filters per unit of learning rate; vectors (biases, norms) do not decay."""
    max_grad_norm: Annotated[Positive | None, or_none()] = None
    """Greatest norm of all gradients together that the optimizer sees; longer ones are shortened; "none": no bound."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How `lr` grows from `lr_batch_size` to the batch in use: not at all, in proportion, or with its square root."""
    lr_batch_size: Annotated[Count | None, or_none()] = None
    """Global batch that `lr` is meant for, in images; required unless `lr_scaling` is "none"."""

    @model_validator(mode="after")
    def _complete(self) -> OptimizerSettings:
        if self.lr_scaling != "none" and self.lr_batch_size is None:
            raise ValueError(f'lr_scaling = "{self.lr_scaling}" needs lr_batch_size, the batch that lr is for')
        return self

    def parameter_groups(self, model: nn.Module, vector_lr_factor: float = 1.0) -> list[dict[str, Any]]:
        """Return two groups for an optimizer: matrices and filters decay, vectors (norms and biases) do not.

        Decay of norms' scales and of biases costs accuracy with large batches (Goyal et al. 2017, section 5.1;
        Jia et al. 2018, arXiv:1807.11205, section 3.2). A group without parameters is left out. `set_lr` gives vectors
        `vector_lr_factor` times the others' learning rate.
        """
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0, "lr_factor": vector_lr_factor},
        ]
        return [group for group in groups if group["params"]]


class MomentumSettings(OptimizerSettings):
    """The settings of an optimizer with momentum."""

    momentum: BelowOne = 0.9
    """Decay of the momentum per step."""
    nesterov: bool = False
    """Use Nesterov's momentum; needs `momentum` above 0."""
    vector_lr_factor: Positive = 1.0
    """How many times `lr` the rate of vectors (biases, norms) is."""

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> MomentumSettings:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov = true needs momentum above 0")
        return self
