"""Numba kernels for what needs the whole trace: next uses, reuse distances, and Belady's bound."""

from __future__ import annotations

import numpy as np

from ..jit import compiled

__all__ = ["belady_hits", "next_uses", "reuse_distances", "sequential_hits", "waiting_hits"]


@compiled()
def next_uses(experts: np.ndarray, start: np.ndarray, num_experts: int) -> np.ndarray:
    """When each routed expert is used next.

    Parameters
    ----------
    experts : int16 array ``[tokens, layers, k]``
    start : int64 array ``[passes + 1]``
    num_experts : int
        Of the largest layer.

    Returns
    -------
    int64 array ``[tokens, layers, k]``
        Number of the layer step (``pass * layers + layer``), ``passes * layers`` for never.
    """
    tokens, layers, k = experts.shape
    never = (len(start) - 1) * layers
    upcoming = np.full((layers, num_experts), never, np.int64)
    out = np.full((tokens, layers, k), never, np.int64)
    for f in range(len(start) - 2, -1, -1):
        for layer in range(layers):
            for t in range(start[f], start[f + 1]):
                for j in range(k):
                    if experts[t, layer, j] >= 0:
                        out[t, layer, j] = upcoming[layer, experts[t, layer, j]]
            for t in range(start[f], start[f + 1]):
                for j in range(k):
                    if experts[t, layer, j] >= 0:
                        upcoming[layer, experts[t, layer, j]] = f * layers + layer
    return out


@compiled()
def reuse_distances(experts: np.ndarray, start: np.ndarray, num_experts: int) -> np.ndarray:
    """How many distinct experts were used since each demand's expert was last used: the LRU stack distance of single demands.

    Returns
    -------
    int64 array ``[layers * num_experts + 1]``
        Number of demands by distance; the last entry counts first uses.
    """
    layers, k = experts.shape[1:]
    gids = layers * num_experts
    steps = (len(start) - 1) * layers
    # A Fenwick tree over steps: 1 where a step is the latest use of some expert, weighted by how many experts that is.
    tree = np.zeros(steps + 1, np.int64)
    latest = np.full(gids, -1, np.int64)
    histogram = np.zeros(gids + 1, np.int64)
    seen = np.zeros(gids, np.int64)
    step = 0
    for f in range(len(start) - 1):
        for layer in range(layers):
            step += 1
            for t in range(start[f], start[f + 1]):
                for j in range(k):
                    e = experts[t, layer, j]
                    if e < 0 or seen[layer * num_experts + e] == step:
                        continue
                    g = layer * num_experts + e
                    seen[g] = step
                    if latest[g] < 0:
                        histogram[gids] += 1
                    else:
                        distance = 0
                        i = step - 1
                        while i > 0:
                            distance += tree[i]
                            i -= i & -i
                        i = latest[g]
                        while i > 0:
                            distance -= tree[i]
                            i -= i & -i
                        histogram[distance] += 1
            for t in range(start[f], start[f + 1]):
                for j in range(k):
                    e = experts[t, layer, j]
                    if e < 0 or latest[layer * num_experts + e] == step:
                        continue
                    g = layer * num_experts + e
                    i = latest[g]
                    while 0 < i <= steps:
                        tree[i] -= 1
                        i += i & -i
                    latest[g] = step
                    i = step
                    while i <= steps:
                        tree[i] += 1
                        i += i & -i
    return histogram


@compiled()
def belady_hits(
    experts: np.ndarray, start: np.ndarray, next_use: np.ndarray, num_experts: int, capacity: int, bypass: bool
) -> np.ndarray:
    """Hits of the policy that knows the future, judged step by step.

    Parameters
    ----------
    next_use : int64 array ``[tokens, layers, k]``
        As :func:`next_uses` gives it.
    capacity : int
        Experts; without bypass at least those of the largest step.
    bypass : bool
        Whether a missing expert may be served without taking a place from one that is used sooner.

    Returns
    -------
    int64 array ``[passes, layers]``
    """
    layers, k = experts.shape[1:]
    gids = layers * num_experts
    hits = np.zeros((len(start) - 1, layers), np.int64)
    place = np.full(gids, -1, np.int64)
    resident = np.empty(capacity, np.int64)
    size = 0
    use = np.zeros(gids, np.int64)
    seen = np.zeros(gids, np.int64)
    step = 0
    for f in range(len(start) - 1):
        for layer in range(layers):
            step += 1
            for t in range(start[f], start[f + 1]):
                for j in range(k):
                    if experts[t, layer, j] < 0:
                        continue
                    g = layer * num_experts + experts[t, layer, j]
                    use[g] = next_use[t, layer, j]
                    if seen[g] != step:
                        seen[g] = step
                        hits[f, layer] += place[g] >= 0
            for t in range(start[f], start[f + 1]):
                for j in range(k):
                    if experts[t, layer, j] < 0:
                        continue
                    g = layer * num_experts + experts[t, layer, j]
                    if place[g] >= 0:
                        continue
                    if size < capacity:
                        place[g] = size
                        resident[size] = g
                        size += 1
                        continue
                    victim = -1
                    for i in range(capacity):
                        h = resident[i]
                        if (bypass or seen[h] != step) and (victim < 0 or use[h] > use[resident[victim]]):
                            victim = i
                    if victim < 0 or (bypass and use[resident[victim]] <= use[g]):
                        continue
                    place[resident[victim]] = -1
                    resident[victim] = g
                    place[g] = victim
    return hits


@compiled()
def sequential_hits(keys: np.ndarray, num_keys: int, capacity: int, rule: int) -> int:
    """Hits when each key is judged and served on its own, as general cache simulators do.

    An expert of a step may then push out another of the same step, so the figures differ from those of a replay by steps.

    Parameters
    ----------
    keys : int64 array
    rule : int
        0: least recently used, 1: first in first out, 2: least often used since it came in, ties to the longest unused.
    """
    resident = np.zeros(num_keys, np.bool_)
    entered = np.zeros(num_keys, np.int64)
    used = np.zeros(num_keys, np.int64)
    count = np.zeros(num_keys, np.int64)
    size = hits = 0
    for now in range(len(keys)):
        key = keys[now]
        if resident[key]:
            hits += 1
            count[key] += 1
        else:
            if size == capacity:
                victim = -1
                for other in range(num_keys):
                    if not resident[other]:
                        continue
                    if victim < 0:
                        victim = other
                    elif rule == 1:
                        victim = other if entered[other] < entered[victim] else victim
                    elif rule == 2 and count[other] != count[victim]:
                        victim = other if count[other] < count[victim] else victim
                    elif used[other] < used[victim]:
                        victim = other
                resident[victim] = False
                size -= 1
            resident[key] = True
            entered[key] = now
            count[key] = 1
            size += 1
        used[key] = now
    return hits


@compiled()
def waiting_hits(
    experts: np.ndarray,
    start: np.ndarray,
    waits: np.ndarray,
    slots: np.ndarray,
    cache: np.ndarray,
    size: np.ndarray,
    held: np.ndarray,
    wait: np.ndarray,
    hits: np.ndarray,
) -> None:
    """Play passes through caches that evict the expert with the longest wait, judged step by step.

    A wait is counted in visits beyond its layer's next one; until that, a layer's distance counts too. Everything below `slots` is
    state, changed in place, so that a trace can be played in parts.

    Parameters
    ----------
    waits : float32 array ``[tokens, layers, num_experts]``
        As known after each token's visit of each layer.
    slots : int64 array ``[capacities]``
    cache : int64 array ``[capacities, layers * num_experts]``
        Slot of each expert, -1 for none.
    size : int64 array ``[capacities]``
        Slots taken.
    held : int64 array ``[capacities, slots]``
        Expert in each slot.
    wait : float32 array ``[layers, num_experts]``
        What was said of each expert last.
    hits : int64 array ``[capacities, passes, layers]``
    """
    layers, k = experts.shape[1:]
    width = waits.shape[2]
    wanted = np.empty(width, np.int64)
    seen = np.zeros(width, np.bool_)
    for f in range(len(start) - 1):
        for layer in range(layers):
            count = 0
            for t in range(start[f], start[f + 1]):
                for j in range(k):
                    e = experts[t, layer, j]
                    if e >= 0 and not seen[e]:
                        seen[e] = True
                        wanted[count] = e
                        count += 1
            wait[layer] = waits[start[f + 1] - 1, layer]
            for c in range(len(slots)):
                for i in range(count):
                    hits[c, f, layer] += cache[c, layer * width + wanted[i]] >= 0
                for i in range(count):
                    g = layer * width + wanted[i]
                    if cache[c, g] >= 0:
                        continue
                    place = size[c]
                    if place < slots[c]:
                        size[c] += 1
                    else:
                        longest = -1.0
                        place = -1
                        for slot in range(slots[c]):
                            other = held[c, slot]
                            home = other // width
                            if home == layer and seen[other - home * width]:
                                continue
                            score = ((home - layer - 1) % layers + 1) / layers + wait[home, other - home * width]
                            if score > longest:
                                longest, place = score, slot
                        if place < 0:
                            continue
                        cache[c, held[c, place]] = -1
                    held[c, place] = g
                    cache[c, g] = place
            for i in range(count):
                seen[wanted[i]] = False
