"""The settings that several optimizers share in a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import model_validator

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
