"""Numba kernels of other people's eviction policies: what a use, an arrival and an eviction are to each."""

from __future__ import annotations

import numpy as np

from ..jit import compiled
from .rival_queues import (
    AGAIN,
    NOW,
    SIZE,
    SLOTS,
    STEP,
    State,
    arc_admit,
    evict,
    put,
    s3_admit,
    slru_admit,
    slru_hit,
    tiny_admit,
    tiny_hit,
    tiny_use,
)

__all__ = ["CODES", "State", "advance", "touch_and_admit"]

_NAMES = ("lfru", "lfuda", "lru-2", "least-stale", "pinned-hot-10%", "markov", "fate-pairs", "sequential-lru")
_QUEUED = ("slru", "arc", "s3-fifo", "w-tinylfu")
CODES = {name: n for n, name in enumerate((*_NAMES, *_QUEUED))}
"""What the kernels call each policy."""

LFRU, LFUDA, LRU2, STALE, PINNED, MARKOV, FATE, SEQUENTIAL, SLRU, ARC, S3, TINY = range(len(CODES))


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
def _hit(s: State, rule: int, key: int) -> None:
    if rule == SLRU:
        slru_hit(s, key)
    elif rule == ARC:
        put(s, key, AGAIN)
    elif rule == S3:
        s.cells[key].count += 1
    elif rule == TINY:
        tiny_use(s, key)
        tiny_hit(s, key)
    else:
        _use(s, rule, key, False)


@compiled()
def _miss(s: State, rule: int, key: int, now_layer: int, now_pass: int, widest: int) -> int:
    # The victim, -1 where a slot was vacant, -2 where none can be had.
    if rule == SLRU:
        victim = slru_admit(s, key)
    elif rule == ARC:
        victim = arc_admit(s, key)
    elif rule == S3:
        victim = s3_admit(s, key)
    elif rule == TINY:
        tiny_use(s, key)
        victim = tiny_admit(s, key)
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
