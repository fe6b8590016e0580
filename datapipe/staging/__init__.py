"""Bring packed data sets to node-local disk."""

from .copy import Staged, stage, stage_once

__all__ = ["Staged", "stage", "stage_once"]
