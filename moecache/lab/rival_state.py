"""What the kernels of other people's eviction policies know of each expert, and the queues that it stands in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..jit import compiled

_NAMES = ("lfru", "lfuda", "lru-2", "least-stale", "pinned-hot-10%", "markov", "fate-pairs", "sequential-lru")
_QUEUED = ("slru", "arc", "s3-fifo", "w-tinylfu")
CODES = {name: n for n, name in enumerate((*_NAMES, *_QUEUED))}
"""What the kernels call each policy."""

LFRU, LFUDA, LRU2, STALE, PINNED, MARKOV, FATE, SEQUENTIAL, SLRU, ARC, S3, TINY = range(len(CODES))

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
