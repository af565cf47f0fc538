"""What a replay of one trace has given, for tables, pages and JSON."""

from __future__ import annotations

from typing import Any

from ..trace import Trace
from .link import TimedResult
from .recall import RecallResult
from .replay import Result

__all__ = ["Outcome"]


class Outcome:
    """What came out for one trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.results: list[Result] = []
        self.timed: list[TimedResult] = []
        self.recalled: list[RecallResult] = []

    def rows(self) -> list[dict[str, Any]]:
        """One row for each policy and capacity, with its clocked results under ``links``."""
        rows = [result.row() for result in self.results]
        for row in rows:
            row["links"] = [
                t.row()
                for t in self.timed
                if (t.policy, t.capacity_experts) == (row["policy"], row["capacity_experts"])
            ]
        return rows
