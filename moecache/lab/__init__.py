"""Routing traces: record, read and replay them through the very core that runs, and fit forecasters to them, without any model."""

from __future__ import annotations

from ..trace import Trace, merge
from .counts import Counts
from .fit import FitResult, Settings, fit
from .formats import read_trace, write_trace
from .frames import to_frame
from .replay import REPLAY_NAMES, Result, replay
from .rivals import RIVALS
from .schedule import Schedule, schedule
from .selection import select

__all__ = [
    "REPLAY_NAMES",
    "RIVALS",
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
    "select",
    "to_frame",
    "write_trace",
]
