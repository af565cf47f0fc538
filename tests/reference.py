"""Replays in plain Python, slow and obvious, to check the native ones against."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

# (layer, expert) of each distinct expert of a step with the number of tokens routed to it, experts ascending.
Step = list[tuple[tuple[int, int], int]]


def steps_of(experts: np.ndarray) -> list[Step]:
    """Every token a forward pass of its own; experts int array [tokens, layers, k], -1 is none."""
    steps = []
    for token in experts:
        for layer, row in enumerate(token):
            used, counts = np.unique(row[row >= 0], return_counts=True)
            if len(used):
                steps.append([((layer, int(e)), int(n)) for e, n in zip(used, counts, strict=True)])
    return steps


def event_atomic(
    steps: Sequence[Step], capacity: int, worth: Callable[[tuple[int, int], int], float]
) -> tuple[int, list[list]]:
    """Judge each step against the cache as it stood, then serve what is missing; no expert of the step is a victim of the step.

    Parameters
    ----------
    worth : callable (expert, number of the step) -> float
        The least worthy goes first; ties go to the longer unused, then to the lower slot.

    Returns
    -------
    (int, list)
        Hits, and the occupants of all slots after each step.
    """
    slots: list[tuple[int, int] | None] = [None] * capacity
    last: dict[tuple[int, int], int] = {}
    hits, tables = 0, []
    for now, step in enumerate(steps):
        wanted = [expert for expert, _ in step]
        missing = [expert for expert in wanted if expert not in slots]
        hits += len(wanted) - len(missing)
        last.update(dict.fromkeys(wanted, now))
        vacant = [i for i, occupant in enumerate(slots) if occupant is None]
        victims = [i for i, occupant in enumerate(slots) if occupant is not None and occupant not in wanted]
        victims.sort(key=lambda i: (worth(slots[i], now), last[slots[i]], i))
        for expert, slot in zip(missing, vacant + victims, strict=False):
            slots[slot] = expert
        tables.append(list(slots))
    return hits, tables


def lru(steps: Sequence[Step], capacity: int) -> tuple[int, list[list]]:
    return event_atomic(steps, capacity, lambda expert, now: 0.0)


def lfu(steps: Sequence[Step], capacity: int) -> tuple[int, list[list]]:
    counts: list[dict[tuple[int, int], int]] = []
    running: dict[tuple[int, int], int] = {}
    for step in steps:
        for expert, n in step:
            running[expert] = running.get(expert, 0) + n
        counts.append(dict(running))
    return event_atomic(steps, capacity, lambda expert, now: counts[now].get(expert, 0))


def belady(steps: Sequence[Step], capacity: int) -> tuple[int, list[list]]:
    def next_use(expert: tuple[int, int], now: int) -> float:
        later = (t for t in range(now + 1, len(steps)) if any(e == expert for e, _ in steps[t]))
        return next(later, len(steps))

    return event_atomic(steps, capacity, lambda expert, now: -next_use(expert, now))


def best_possible(steps: Sequence[Step], capacity: int) -> int:
    """Most hits of any rule that must hold a step's experts after it, by trying every choice."""
    states: dict[frozenset, int] = {frozenset(): 0}
    for step in steps:
        wanted = frozenset(expert for expert, _ in step)
        following: dict[frozenset, int] = {}
        for resident, hits in states.items():
            gained = hits + len(resident & wanted)
            for kept in _subsets(resident - wanted, capacity - len(wanted)):
                state = kept | wanted
                following[state] = max(following.get(state, -1), gained)
        states = following
    return max(states.values())


def _subsets(items: frozenset, size: int) -> list[frozenset]:
    from itertools import combinations

    # Keeping more never hurts.
    return [frozenset(chosen) for chosen in combinations(sorted(items), min(size, len(items)))]
