"""Numba kernels of other people's eviction policies: what a use, an arrival and an eviction are to each."""

from __future__ import annotations

import numpy as np

from ..jit import compiled
from .rival_state import (
    AGAIN,
    ARC,
    COUNTED,
    FATE,
    GHOST,
    GHOST_AGAIN,
    GHOST_ONCE,
    LFRU,
    LFUDA,
    LRU2,
    MAIN,
    MARKOV,
    NOW,
    ONCE,
    PINNED,
    PROBATION,
    PROTECTED,
    S3,
    SEGMENTS,
    SEQUENTIAL,
    SIZE,
    SLOTS,
    SLRU,
    SMALL,
    STALE,
    STEP,
    TINY,
    WINDOW,
    State,
    evict,
    first,
    put,
)

__all__ = ["advance", "touch_and_admit"]

# Rules that rank what is there


@compiled()
def _goes_before(s: State, rule: int, a: int, b: int, now_layer: int, now_pass: int, widest: int) -> bool:
    # Whether `a` is evicted rather than `b`.
    if rule == LFRU:
        one = s.cells[a].count * (s.number[STEP] - s.cells[b].held)
        other = s.cells[b].count * (s.number[STEP] - s.cells[a].held)
        if one != other:
            return bool(one < other)
    elif rule == LFUDA:
        if s.cells[a].count != s.cells[b].count:
            return bool(s.cells[a].count < s.cells[b].count)
    elif rule == LRU2:
        if s.cells[a].before != s.cells[b].before:
            return bool(s.cells[a].before < s.cells[b].before)
    elif rule == STALE:
        stale_a, stale_b = s.cells[a].used_at < now_pass, s.cells[b].used_at < now_pass
        if stale_a != stale_b:
            return bool(stale_a)
        past_a, past_b = a // widest <= now_layer, b // widest <= now_layer
        if stale_a and past_a != past_b:
            return bool(past_a)
    elif rule == PINNED:
        if s.cells[a].pinned != s.cells[b].pinned:
            return bool(not s.cells[a].pinned)
    elif rule in (MARKOV, FATE) and s.chance[a] != s.chance[b]:
        return bool(s.chance[a] < s.chance[b])
    return bool(s.cells[a].stamp < s.cells[b].stamp)


@compiled()
def _ranked_victim(s: State, rule: int, now_layer: int, now_pass: int, widest: int) -> int:
    found = -1
    for key in range(len(s.cells)):
        if not s.cells[key].resident or s.cells[key].held == s.number[STEP]:
            continue
        if found < 0 or _goes_before(s, rule, key, found, now_layer, now_pass, widest):
            found = key
    if found >= 0:
        if rule == LFUDA:
            s.level[0] = s.cells[found].count
        evict(s, found, 0)
    return found


@compiled()
def _use(s: State, rule: int, key: int, arrives: bool) -> None:
    # What every rule that ranks notes of a use.
    s.number[NOW] += 1
    s.cells[key].stamp = s.number[NOW]
    s.cells[key].before, s.cells[key].last = s.cells[key].last, s.number[NOW]
    if rule == LFUDA:
        # The uses since it came in, and the age of the cache as of now.
        s.cells[key].heat = 1 if arrives else s.cells[key].heat + 1
        s.cells[key].count = s.cells[key].heat + s.level[0]
    else:
        s.cells[key].count += 1


# Segmented LRU


@compiled()
def _segment(s: State, segment: int) -> int:
    # Slots of a segment, 1 the lowest.
    return int(s.number[SLOTS] // SEGMENTS + (1 if segment <= s.number[SLOTS] % SEGMENTS else 0))


@compiled()
def _slru_hit(s: State, key: int) -> None:
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
def _slru_admit(s: State, key: int) -> int:
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
def _arc_admit(s: State, key: int) -> int:
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
def _s3_admit(s: State, key: int) -> int:
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
def _tiny_use(s: State, key: int) -> None:
    s.cells[key].count += 1
    s.number[COUNTED] += 1
    if s.number[COUNTED] >= 32 * s.number[SLOTS]:
        s.number[COUNTED] //= 2
        for other in range(len(s.cells)):
            s.cells[other].count = np.floor(s.cells[other].count / 2)


@compiled()
def _tiny_hit(s: State, key: int) -> None:
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
def _tiny_admit(s: State, key: int) -> int:
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


@compiled()
def _hit(s: State, rule: int, key: int) -> None:
    if rule == SLRU:
        _slru_hit(s, key)
    elif rule == ARC:
        put(s, key, AGAIN)
    elif rule == S3:
        s.cells[key].count += 1
    elif rule == TINY:
        _tiny_use(s, key)
        _tiny_hit(s, key)
    else:
        _use(s, rule, key, False)


@compiled()
def _miss(s: State, rule: int, key: int, now_layer: int, now_pass: int, widest: int) -> int:
    # The victim, -1 where a slot was vacant, -2 where none can be had.
    if rule == SLRU:
        victim = _slru_admit(s, key)
    elif rule == ARC:
        victim = _arc_admit(s, key)
    elif rule == S3:
        victim = _s3_admit(s, key)
    elif rule == TINY:
        _tiny_use(s, key)
        victim = _tiny_admit(s, key)
    else:
        victim = -1
        if s.number[SIZE + 1] >= s.number[SLOTS]:
            victim = _ranked_victim(s, rule, now_layer, now_pass, widest)
            if victim < 0:
                return -2
        put(s, key, 1)
        _use(s, rule, key, True)
    if victim > -2:
        s.cells[key].resident = True
    return victim


@compiled()
def _distinct(experts: np.ndarray, first: int, end: int, layer: int, found: np.ndarray, seen: np.ndarray) -> int:
    # The experts of a step, each once, in the order of the tokens.
    count = 0
    for t in range(first, end):
        for j in range(experts.shape[2]):
            e = experts[t, layer, j]
            if e >= 0 and not seen[e]:
                seen[e] = True
                found[count] = e
                count += 1
    for i in range(count):
        seen[found[i]] = False
    return count


@compiled()
def _learn_pairs(s: State, layer: int, ids: np.ndarray, before: np.ndarray, befores: int) -> None:
    for i in range(befores):
        for e in ids:
            s.pairs[layer, before[i], e] += 1


@compiled()
def _foresee(s: State, rule: int, layer: int, ids: np.ndarray, k: int) -> None:
    # What the experts just used say of their layer's next visit (Markov), or of the next layer's (FATE).
    layers, widest = s.pairs.shape[:2]
    target = layer if rule == MARKOV else (layer + 1) % layers
    chance = s.chance[target * widest : (target + 1) * widest]
    chance[:] = 0
    for i in ids:
        total = max(s.pairs[target, i].sum(), np.float32(1))
        for e in range(widest):
            chance[e] += s.pairs[target, i, e] / total
    if rule == FATE:
        s.chance[layer * widest : (layer + 1) * widest] = 0
        likely = np.argsort(-chance)[: 2 * k]
        kept = chance[likely] > 0
        chance[:] = 0
        chance[likely[kept]] = 1


@compiled()
def advance(s: State, rule: int, experts: np.ndarray, start: np.ndarray, request: np.ndarray) -> None:
    """Learn from passes without serving them: uses of each expert, and pairs where the rule goes by them.

    Parameters
    ----------
    s : State
    rule : int
    experts : int16 array ``[tokens, layers, k]``
    start : int64 array ``[passes + 1]``
    request : int32 array ``[passes]``
    """
    layers, widest = s.pairs.shape[:2]
    seen = np.zeros(widest, np.bool_)
    kept = np.zeros((layers, widest), np.int64)
    counts = np.zeros(layers, np.int64)
    found = np.zeros(widest, np.int64)
    for f in range(len(start) - 1):
        if f > 0 and request[f] != request[f - 1]:
            counts[:] = 0
        for layer in range(layers):
            n = _distinct(experts, start[f], start[f + 1], layer, found, seen)
            for i in range(n):
                s.cells[layer * widest + found[i]].heat += 1
            source = layer if rule == MARKOV else (layer - 1) % layers
            if rule in (MARKOV, FATE):
                _learn_pairs(s, layer, found[:n], kept[source], counts[source])
            kept[layer, :n] = found[:n]
            counts[layer] = n


@compiled()
def touch_and_admit(
    s: State,
    rule: int,
    experts: np.ndarray,
    start: np.ndarray,
    request: np.ndarray,
    demands: np.ndarray,
    hits: np.ndarray,
) -> int:
    """Serve passes.

    Parameters
    ----------
    demands, hits : int64 array ``[passes, layers]``
        Filled.

    Returns
    -------
    int
        Evictions.
    """
    layers, widest = s.pairs.shape[:2]
    seen, found = np.zeros(widest, np.bool_), np.zeros(widest, np.int64)
    kept, counts = np.zeros((layers, widest), np.int64), np.zeros(layers, np.int64)
    evictions = 0
    for f in range(len(start) - 1):
        if f > 0 and request[f] != request[f - 1]:
            counts[:] = 0
        for layer in range(layers):
            n = _distinct(experts, start[f], start[f + 1], layer, found, seen)
            demands[f, layer] = n
            s.number[STEP] += 1
            missing = np.zeros(n, np.bool_)
            for i in range(n):
                key = layer * widest + found[i]
                missing[i] = not s.cells[key].resident
                if rule == SEQUENTIAL:
                    if missing[i]:
                        evictions += _miss(s, rule, key, layer, f, widest) >= 0
                    else:
                        _hit(s, rule, key)
                else:
                    s.cells[key].held = s.number[STEP] if s.cells[key].resident else s.cells[key].held
            hits[f, layer] = n - missing.sum()
            if rule in (MARKOV, FATE):
                source = layer if rule == MARKOV else (layer - 1) % layers
                _learn_pairs(s, layer, found[:n], kept[source], counts[source])
                _foresee(s, rule, layer, found[:n], experts.shape[2])
            if rule != SEQUENTIAL:
                for i in range(n):
                    if not missing[i]:
                        _hit(s, rule, layer * widest + found[i])
                for i in range(n):
                    key = layer * widest + found[i]
                    if missing[i]:
                        evictions += _miss(s, rule, key, layer, f, widest) >= 0
                        s.cells[key].held = s.number[STEP]
            for i in range(n):
                s.cells[layer * widest + found[i]].used_at = f
            kept[layer, :n] = found[:n]
            counts[layer] = n
    return evictions
