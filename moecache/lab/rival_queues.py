"""Numba kernels of eviction policies that are made of queues, and what they and all others keep of each expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..jit import compiled

__all__ = [
    "AGAIN",
    "NOW",
    "SIZE",
    "SLOTS",
    "STEP",
    "State",
    "arc_admit",
    "evict",
    "put",
    "s3_admit",
    "slru_admit",
    "slru_hit",
    "tiny_admit",
    "tiny_hit",
    "tiny_use",
]

# Places in `State.number`: the clock of uses, the present step, how many keys each queue holds, the slots, and uses counted since TinyLFU
# last halved its counts.
NOW, STEP, SIZE, SLOTS, COUNTED = 0, 1, 2, 10, 11
SEGMENTS = 4  # of SLRU
# Queues: of ARC used once, used again and their ghosts; of S3-FIFO small, main, ghost; of W-TinyLFU window, probation, protected.
ONCE, AGAIN, GHOST_ONCE, GHOST_AGAIN = 1, 2, 3, 4
SMALL, MAIN, GHOST = 1, 2, 3
WINDOW, PROBATION, PROTECTED = 1, 2, 3


_CELL = np.dtype(
    [
        ("where", np.int8),  # queue of the key; 0 is none
        ("resident", np.bool_),
        ("pinned", np.bool_),
        ("stamp", np.int64),  # when it entered its queue or was used; the smallest leaves first
        ("last", np.int64),  # clock of its last use, -1 is none
        ("before", np.int64),  # and of the one before
        ("count", np.float64),  # uses, or the priority made of them
        ("heat", np.int64),  # uses in the history, or since it came in
        ("used_at", np.int64),  # forward pass of its last use
        ("held", np.int64),  # the step that last used it
    ],
    align=True,
)


class State(NamedTuple):
    """What the rules know of each expert (a key is ``layer * widest + expert``), and of all.

    Attributes
    ----------
    cells : record array ``[keys]``
    chance : float64 array ``[keys]``
        What a predictor says of it.
    pairs : float32 array ``[layers, widest, widest]``
        How often the second followed the first.
    number : int64 array
    level : float64 array ``[1]``
        ARC's target, or the age of LFUDA's cache.
    """

    cells: np.ndarray
    chance: np.ndarray
    pairs: np.ndarray
    number: np.ndarray
    level: np.ndarray

    @classmethod
    def make(cls, num_experts: Sequence[int], slots: int) -> State:
        """An empty cache of so many slots."""
        layers, widest = len(num_experts), max(num_experts)
        cells = np.zeros(layers * widest, _CELL)
        for name in ("last", "before", "used_at", "held"):
            cells[name] = -1
        number = np.zeros(16, np.int64)
        number[SLOTS] = slots
        return cls(cells, np.zeros(len(cells)), np.zeros((layers, widest, widest), np.float32), number, np.zeros(1))


@compiled()
def put(s: State, key: int, queue: int) -> None:
    # At the end of a queue (0: of none), out of the one it was in.
    if s.cells[key].where:
        s.number[SIZE + s.cells[key].where] -= 1
    s.cells[key].where = queue
    if queue:
        s.number[SIZE + queue] += 1
    s.number[NOW] += 1
    s.cells[key].stamp = s.number[NOW]


@compiled()
def first(s: State, queue: int) -> int:
    # The key that leaves a queue first; of those with slots none that the present step uses. -1: there is none.
    found = -1
    for key in range(len(s.cells)):
        if s.cells[key].where != queue or (s.cells[key].resident and s.cells[key].held == s.number[STEP]):
            continue
        if found < 0 or s.cells[key].stamp < s.cells[found].stamp:
            found = key
    return found


@compiled()
def evict(s: State, key: int, queue: int) -> int:
    s.cells[key].resident = False
    put(s, key, queue)
    return key


# Rules that rank what is there


@compiled()
def _segment(s: State, segment: int) -> int:
    # Slots of a segment, 1 the lowest.
    return int(s.number[SLOTS] // SEGMENTS + (1 if segment <= s.number[SLOTS] % SEGMENTS else 0))


@compiled()
def slru_hit(s: State, key: int) -> None:
    put(s, key, min(s.cells[key].where + 1, SEGMENTS))
    for segment in range(SEGMENTS, 1, -1):
        while s.number[SIZE + segment] > _segment(s, segment):
            # Who moves down keeps its slot, so one of this step may.
            lowest = -1
            for other in range(len(s.cells)):
                if s.cells[other].where == segment and (lowest < 0 or s.cells[other].stamp < s.cells[lowest].stamp):
                    lowest = other
            put(s, lowest, segment - 1)


@compiled()
def slru_admit(s: State, key: int) -> int:
    # The victim, -1 where a slot was vacant, -2 where none can be had.
    for segment in range(1, SEGMENTS + 1):
        if s.number[SIZE + segment] < _segment(s, segment):
            put(s, key, segment)
            return -1
    for segment in range(1, SEGMENTS + 1):
        victim = first(s, segment)
        if victim >= 0:
            evict(s, victim, 0)
            put(s, key, segment)
            return victim
    return -2


# ARC (N. Megiddo, D. Modha, FAST 2003)


@compiled()
def _arc_replace(s: State, ghost_again: bool) -> int:
    once, target = s.number[SIZE + ONCE], s.level[0]
    from_once = once > 0 and (once > target or (ghost_again and once == target))
    victim = first(s, ONCE if from_once else AGAIN)
    if victim < 0:
        victim = first(s, AGAIN if from_once else ONCE)
    if victim >= 0:
        evict(s, victim, GHOST_ONCE if s.cells[victim].where == ONCE else GHOST_AGAIN)
    return victim


@compiled()
def arc_admit(s: State, key: int) -> int:
    size, slots = s.number[SIZE : SIZE + 5], s.number[SLOTS]
    ghost = s.cells[key].where
    full = size[ONCE] + size[AGAIN] >= slots
    victim = -1
    if ghost == GHOST_ONCE:
        s.level[0] = min(float(slots), s.level[0] + max(1.0, size[GHOST_AGAIN] / size[GHOST_ONCE]))
    elif ghost == GHOST_AGAIN:
        s.level[0] = max(0.0, s.level[0] - max(1.0, size[GHOST_ONCE] / size[GHOST_AGAIN]))
    if ghost in (GHOST_ONCE, GHOST_AGAIN):
        victim = _arc_replace(s, ghost == GHOST_AGAIN) if full else -1
        if full and victim < 0:
            return -2
        put(s, key, AGAIN)
        return victim
    if size[ONCE] + size[GHOST_ONCE] >= slots:
        if size[GHOST_ONCE] > 0:
            put(s, first(s, GHOST_ONCE), 0)
            victim = _arc_replace(s, False) if full else -1
        else:
            victim = first(s, ONCE)
            if victim >= 0:
                evict(s, victim, 0)
            else:
                victim = _arc_replace(s, False)
    elif size[ONCE] + size[AGAIN] + size[GHOST_ONCE] + size[GHOST_AGAIN] >= slots:
        if size[ONCE] + size[AGAIN] + size[GHOST_ONCE] + size[GHOST_AGAIN] >= 2 * slots:
            put(s, first(s, GHOST_AGAIN), 0)
        victim = _arc_replace(s, False) if full else -1
    if full and victim < 0:
        return -2
    put(s, key, ONCE)
    return victim


# S3-FIFO (J. Yang and others, SOSP 2023)


@compiled()
def _s3_evict_small(s: State) -> int:
    while True:
        key = first(s, SMALL)
        if key < 0:
            return -1
        if s.cells[key].count >= 2:
            s.cells[key].count = 0
            put(s, key, MAIN)
            continue
        evict(s, key, GHOST)
        while s.number[SIZE + GHOST] > int(0.9 * s.number[SLOTS]):
            put(s, first(s, GHOST), 0)
        return key


@compiled()
def _s3_evict_main(s: State) -> int:
    while True:
        key = first(s, MAIN)
        if key < 0:
            return -1
        if s.cells[key].count >= 1:
            s.cells[key].count = min(s.cells[key].count, 3) - 1
            put(s, key, MAIN)
            continue
        return evict(s, key, 0)


@compiled()
def s3_admit(s: State, key: int) -> int:
    slots = s.number[SLOTS]
    small = int(0.1 * slots)
    ghost = s.cells[key].where == GHOST
    if ghost:
        put(s, key, 0)
    victim = -1
    full = s.number[SIZE + SMALL] + s.number[SIZE + MAIN] >= slots
    if full:
        main_first = s.number[SIZE + MAIN] > slots - small or s.number[SIZE + SMALL] == 0
        victim = _s3_evict_main(s) if main_first else _s3_evict_small(s)
        if victim < 0:
            victim = _s3_evict_small(s) if main_first else _s3_evict_main(s)
        if victim < 0:
            return -2
    s.cells[key].count = 0
    put(s, key, MAIN if ghost or (not full and s.number[SIZE + SMALL] >= small) else SMALL)
    return victim


# W-TinyLFU (G. Einziger, R. Friedman, B. Manes, ACM TOS 2017), with exact counts


@compiled()
def tiny_use(s: State, key: int) -> None:
    s.cells[key].count += 1
    s.number[COUNTED] += 1
    if s.number[COUNTED] >= 32 * s.number[SLOTS]:
        s.number[COUNTED] //= 2
        for other in range(len(s.cells)):
            s.cells[other].count = np.floor(s.cells[other].count / 2)


@compiled()
def tiny_hit(s: State, key: int) -> None:
    queue = s.cells[key].where
    put(s, key, WINDOW if queue == WINDOW else PROTECTED)
    window = max(1, s.number[SLOTS] // 100)
    while s.number[SIZE + PROTECTED] > (s.number[SLOTS] - window) * 8 // 10:
        lowest = -1
        for other in range(len(s.cells)):
            if s.cells[other].where == PROTECTED and (lowest < 0 or s.cells[other].stamp < s.cells[lowest].stamp):
                lowest = other
        put(s, lowest, PROBATION)


@compiled()
def tiny_admit(s: State, key: int) -> int:
    window = max(1, s.number[SLOTS] // 100)
    full = s.number[SIZE + WINDOW] + s.number[SIZE + PROBATION] + s.number[SIZE + PROTECTED] >= s.number[SLOTS]
    if s.number[SIZE + WINDOW] < window and not full:
        put(s, key, WINDOW)
        return -1
    leaves = first(s, WINDOW)
    if not full:
        if leaves >= 0:
            put(s, leaves, PROBATION)
        put(s, key, WINDOW)
        return -1
    rests = first(s, PROBATION)
    if rests < 0:
        rests = first(s, PROTECTED)
    if leaves < 0 and rests < 0:
        return -2
    if rests < 0 or (leaves >= 0 and s.cells[leaves].count <= s.cells[rests].count):
        victim = evict(s, leaves, 0)
    else:
        victim = evict(s, rests, 0)
        if leaves >= 0:
            put(s, leaves, PROBATION)
    put(s, key, WINDOW)
    return victim


# All of them
