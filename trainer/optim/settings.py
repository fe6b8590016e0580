"""What all optimizers have in common in a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..fields import Count, Positive, Section, one_of, or_none

PRECONDITIONERS = ("none", "kfac", "ekfac")


class OptimizerSettings(Section):
    """`lr` is meant for a global batch of `lr_batch_size`, and scaled to the one in use by `lr_scaling`."""

    preconditioner: Annotated[str, one_of("preconditioner", PRECONDITIONERS)] = "none"
    lr: Positive
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    lr_batch_size: Annotated[Count | None, or_none()] = None

    @model_validator(mode="after")
    def _complete(self) -> OptimizerSettings:
        if self.lr_scaling != "none" and self.lr_batch_size is None:
            raise ValueError(f'lr_scaling = "{self.lr_scaling}" needs lr_batch_size, the batch that lr is for')
        return self


class MomentumSettings(OptimizerSettings):
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = False

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> MomentumSettings:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov = true needs momentum above 0")
        return self
