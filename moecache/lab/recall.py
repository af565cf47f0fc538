"""How well what is counted tells which experts come next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..history import History
from ..policy import resolve
from ..trace import Trace
from ._recall import PREDICTORS
from ._recall import Recall as _Recall
from ._replay import Replay as _Replay
from .replay import _blocks, _Quiet, make_core, trained_history
from .schedule import schedule, split_requests

__all__ = ["DISTANCES", "EXPLAINED", "RecallResult", "recall"]

DISTANCES = (0, 1, 2, 4, 8)
"""Layers ahead in the same token; 0 stands for the same layer of the next token."""

EXPLAINED = {
    "matched": "share of the layer in the best matching past request",
    "transitions": "transition counts from the experts just routed, one layer after another",
    "fast": "frequency in this request over the last few tokens",
    "slow": "frequency in this request over some fifty tokens",
    "request": "frequency in this request",
    "prior": "frequency over all stored requests",
    "chance": "fast, slow and prior as eviction combines them",
    "forecast": "what prefetching goes by, for the coming layer",
}


@dataclass(frozen=True)
class RecallResult:
    """What one predictor found.

    Attributes
    ----------
    distance : int
        Layers ahead in the same token; 0 is the same layer of the next token.
    recall : tuple of float
        Share of the used experts among the k, 1.5 k and 2 k likeliest.
    reliability : list of (experts, mean chance, share used)
        For chances in twentieths.
    """

    trace: str
    predictor: str
    distance: int
    used: int
    recall: tuple[float, float, float]
    reliability: list[tuple[int, float, float]]

    @property
    def calibration_error(self) -> float:
        """Mean distance between the chance stated and the share that came true, over all experts."""
        total = sum(n for n, _, _ in self.reliability)
        return sum(n * abs(stated - true) for n, stated, true in self.reliability) / max(total, 1)

    def row(self) -> dict[str, Any]:
        """The result as plain Python values."""
        at_k, at_wider, at_widest = self.recall
        return {
            "trace": self.trace,
            "predictor": self.predictor,
            "distance": self.distance,
            "target": _target(self.distance),
            "used": self.used,
            "recall@k": at_k,
            "recall@1.5k": at_wider,
            "recall@2k": at_widest,
            "calibration_error": self.calibration_error,
            "reliability": self.reliability,
        }


def _target(distance: int) -> str:
    if distance == 0:
        return "next token"
    return f"{distance} layer{'s' if distance > 1 else ''} ahead"


def recall(
    trace: Trace,
    *,
    distances: Sequence[int] = DISTANCES,
    split: str | None = None,
    history: History | None = None,
    history_capacity: int = 1000,
    max_tokens: int | None = None,
    progress: Any = None,
) -> list[RecallResult]:
    """Ask the core, at each step of decoding, which experts coming layers will use.

    Parameters
    ----------
    distances : sequence of int
        Layers ahead in the same token; 0 for the same layer of the next token.

    Other parameters are those of :func:`moecache.lab.replay`.
    """
    known, played = split_requests(trace, split)
    plan = schedule(trace, played, max_tokens=max_tokens)
    base = trained_history(trace, known, history, history_capacity)
    bar = progress or _Quiet()
    k = trace.top_k
    chosen = np.array(sorted(distances), np.int32)
    widths = np.array([k, int(1.5 * k), 2 * k], np.int32)
    judge = _Recall(chosen, widths, _next_rows(plan.request, plan.start), max(trace.num_experts))
    core = make_core(trace, trace.top_k, resolve("expected-next-use"), base.copy())
    native = _Replay([core], *plan.arrays(), judge=judge)
    for first, end in _blocks(plan.passes):
        native.run(first, end)
        bar.update(end - first)
    return [
        RecallResult(
            trace=trace.name,
            predictor=name,
            distance=int(distance),
            used=int(judge.used[d]),
            recall=tuple(float(x) for x in judge.found[p, d] / max(judge.used[d], 1)),  # type: ignore[arg-type]
            reliability=[(int(n), chance / n, used / n) for n, chance, used in judge.binned[p, d].tolist() if n],
        )
        for d, distance in enumerate(chosen)
        for p, name in enumerate(PREDICTORS)
        if judge.binned[p, d].any()
    ]


def _next_rows(request: np.ndarray, start: np.ndarray) -> np.ndarray:
    # For each pass the row of the next pass of its request, where that is a single token.
    upcoming: dict[int, int] = {}
    rows = np.full(len(request), -1, np.int64)
    for f in range(len(request) - 1, -1, -1):
        rows[f] = upcoming.get(int(request[f]), -1)
        upcoming[int(request[f])] = int(start[f]) if start[f + 1] - start[f] == 1 else -1
    return rows
