"""What the sections of a recipe have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """Frozen; an unknown key or a value of another type is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def or_none() -> BeforeValidator:
    """The word none is None: TOML has no null, and --set must be able to say it."""
    return BeforeValidator(lambda value: None if value == "none" else value)


def one_of(kind: str, names: Sequence[str]) -> BeforeValidator:
    def check(value: object) -> object:
        if value not in names:
            raise ValueError(f"there is no such {kind}; allowed: {', '.join(names)}")
        return value

    return BeforeValidator(check)


Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]  # of a running average
