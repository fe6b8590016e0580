"""Bring packed data sets to node-local disk."""

from .copy import Staged, stage, stage_once
from .options import StageOptions

__all__ = ["StageOptions", "Staged", "stage", "stage_once"]
