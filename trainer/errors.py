"""The errors of a training run.

DatapipeError
└── TrainingError        the run cannot continue: exit code 1
    ├── CheckpointError  a checkpoint cannot be read, or belongs to another run
    └── DivergedError    the loss or the network is not finite, or the loss is a spike
SettingError             a bad setting (from datapipe): exit code 2
"""

from __future__ import annotations

from typing import NamedTuple

from datapipe.errors import DatapipeError


class TrainingError(DatapipeError):
    """The run cannot continue."""


class CheckpointError(TrainingError):
    """A checkpoint cannot be read, or belongs to another run."""


class DivergedError(TrainingError):
    """The loss or the network is not finite, or the loss is a spike; raised on all ranks at the same step.

    Attributes:
        bad_step: The step, where it is known.
    """

    def __init__(self, message: str, bad_step: BadStep | None = None) -> None:
        super().__init__(message)
        self.bad_step = bad_step


class BadStep(NamedTuple):
    """A step whose loss is not finite, or a spike, on this rank or another."""

    number: int
    """Of the step, from 1."""
    loss: float
    """On this rank."""
    samples: list[int]
    """This rank's, by their numbers in the data set; -1 for padding."""
