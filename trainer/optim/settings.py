"""What the sections of a recipe share: their strictness, and ranges. What several optimizers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from torch import nn

from datapipe.checks import did_you_mean

PRECONDITIONERS = ("none", "kfac", "ekfac")


class Section(BaseModel):
    """A frozen part of a recipe; an unknown key, or a value of another type, is an error.

    The text under a field is its description, which the reference page of recipes shows.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def or_none() -> BeforeValidator:
    """Read the word "none" as None: TOML has no null, and --set must be able to say it."""
    return BeforeValidator(lambda value: None if value == "none" else value)


def _in_toml(value: object) -> str:
    """Return a value as a recipe has it, strings without their quotes."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def one_of(kind: str, names: Sequence[object]) -> BeforeValidator:
    """Allow only `names`, of which each names a `kind`."""

    def check(value: object) -> object:
        if value not in names:
            known = [_in_toml(name) for name in names]
            raise ValueError(f"unknown {kind}; allowed: {', '.join(known)}{did_you_mean(str(value), known)}")
        return value

    return BeforeValidator(check)


Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
FromZero = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]  # decay of a running average, and the like


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
