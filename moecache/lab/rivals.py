"""Eviction policies of others by name, for a replay: what they would hit, judged by steps as everything here is.

All experts of a step are judged against the cache as it stood; those there are touched, then the missing ones come in, in the order of
their numbers, and none of the step is a victim of the step. With one expert a step each rule is what its authors describe, and is
checked against libcachesim where it has it. :data:`RIVALS` says what each one is here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .rival_rules import advance, touch_and_admit
from .rival_state import CODES, State
from .schedule import Schedule

__all__ = ["RIVALS", "Played", "play_rival"]

RIVALS: dict[str, str] = {
    "lfru": "the fewest uses for each step since the last one, of all its uses",
    "lfuda": "the smallest priority: its uses while it is there plus the priority of the last one evicted when it was used",
    "lru-2": "the one whose use before the last lies furthest back; those used once first",
    "slru": "the longest unused of the lowest of four equal segments; a use moves up by one",
    "arc": "the longest unused of those used once or more often, as ghosts of both say how much room each list should have",
    "s3-fifo": "the first come of a tenth for newcomers unless used twice, else of the main queue unless used since",
    "w-tinylfu": "a window of one slot, or 1 %; who leaves it must have been used more often than the main list's victim",
    "least-stale": "those not used in this forward pass first, of passed layers before coming ones; then the longest unused",
    "pinned-hot-10%": "the longest unused, but never the tenth of all experts that the history used most",
    "markov": "the smallest chance at its layer's next visit, given the layer's last experts",
    "fate-pairs": "the longest unused, but the likeliest 2 k of the next layer, given this layer's experts, last",
    "sequential-lru": "the longest unused, each expert judged on its own: one of a step may push out another",
}
"""What is evicted first, by name; `docs/policies.md` says where each comes from and what it was checked against."""


class Played(NamedTuple):
    """What a rival did.

    Attributes
    ----------
    demands, hits : int64 array ``[passes, layers]``
    evictions : int
    """

    demands: np.ndarray
    hits: np.ndarray
    evictions: int


def play_rival(name: str, plan: Schedule, slots: int, known: Schedule | None = None) -> Played:
    """Play a schedule.

    Parameters
    ----------
    name : str
        Of :data:`RIVALS`.
    plan : Schedule
    slots : int
    known : Schedule, optional
        What is learned from before: pairs of ``markov`` and ``fate-pairs``, counts of ``pinned-hot-10%``.
    """
    state = State.make(plan.num_experts, slots)
    code = CODES[name]
    if known is not None:
        advance(state, code, *_arrays(known))
        if name == "pinned-hot-10%":
            _pin(state, slots)
    demands = np.zeros((plan.passes, plan.experts.shape[1]), np.int64)
    hits = np.zeros_like(demands)
    evictions = touch_and_admit(state, code, *_arrays(plan), demands, hits)
    return Played(demands, hits, int(evictions))


def _arrays(plan: Schedule) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return plan.experts, plan.start, plan.request


def _pin(state: State, slots: int) -> None:
    # The hottest tenth of the experts, as far as slots are left for others. They take their places when they first come.
    heat = state.cells["heat"]
    hottest = np.argsort(-heat, kind="stable")[: min(len(heat) // 10, slots - 1)]
    state.cells["pinned"][hottest[heat[hottest] > 0]] = True
