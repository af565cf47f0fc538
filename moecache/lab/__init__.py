"""Routing traces: record, read and replay them through the very core that runs, and fit forecasters to them, without any model."""

from __future__ import annotations

from .counts import Counts
from .fit import FitResult, Settings, fit
from .replay import REPLAY_NAMES, Result, replay
from .schedule import Schedule, schedule
from .trace import Trace, merge, read_trace

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
]
