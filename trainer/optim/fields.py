"""What the sections of a recipe share: their strictness, and the ranges of their settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from datapipe.checks import did_you_mean


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
