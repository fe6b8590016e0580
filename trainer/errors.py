"""The errors of a training run.

DatapipeError
└── TrainingError        the run cannot continue: exit code 1
    ├── CheckpointError  a checkpoint cannot be read, or belongs to another run
    └── DivergedError    the loss or the network is not finite
SettingError             a bad setting (from datapipe): exit code 2
"""

from __future__ import annotations

from datapipe.errors import DatapipeError


class TrainingError(DatapipeError):
    """The run cannot continue."""


class CheckpointError(TrainingError):
    """A checkpoint cannot be read, or belongs to another run."""


class DivergedError(TrainingError):
    """The loss or the network is not finite."""
