"""Routing traces: record, read and replay them through the very core that runs, and fit forecasters to them, without any model."""

from __future__ import annotations

from ..trace import Trace, merge
from .counts import Counts
from .fit import FitResult, Settings, fit
from .formats import read_trace, write_trace
from .replay import REPLAY_NAMES, Result, replay
from .schedule import Schedule, schedule

__all__ = [
    "REPLAY_NAMES",
    "Counts",
    "FitResult",
    "Result",
    "Schedule",
    "Settings",
    "Trace",
    "fit",
    "merge",
    "read_trace",
    "replay",
    "schedule",
    "write_trace",
]
