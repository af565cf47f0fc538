"""Plain references for the deciding part: NumPy in float64, dicts, one token at a time. Nothing imports ``_core``."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray

Counts = NDArray[np.int64]

CI = bool(os.environ.get("CI"))
SETTINGS = settings(
    deadline=None,
    derandomize=CI,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)

# Documented constants of the policies.
FAST, SLOW = 0.3, 0.02
EDGES = (0, 1, 2, 4, 8, 16, 32)  # of the token intervals
INTERVALS = list(pairwise(EDGES))
PRIOR_TOKENS = 16.0
RECENT_USES = 64
TRANSITION_PRIOR = 8.0
MAX_SUCCESSION = 128

# The compiled core keeps chances in float32: two scores closer than this are the same to it, whatever float64 says. Shares near 1
# lose most: of 1 - 0.9998 three digits are left.
CLOSE = 2e-3


class Layout:
    """Global numbers of experts in layers of differing size."""

    def __init__(self, num_experts: Sequence[int]) -> None:
        self.num_experts = tuple(num_experts)
        self.layers = len(self.num_experts)
        self.offset = [sum(self.num_experts[:layer]) for layer in range(self.layers + 1)]
        self.total = self.offset[-1]
        self.layer_of = [layer for layer, n in enumerate(self.num_experts) for _ in range(n)]

    def rows(self, layer: int) -> slice:
        return slice(self.offset[layer], self.offset[layer + 1])


class HistoryReference:
    """Finished requests: a list of matrices, searched by flat cosine."""

    def __init__(self, num_experts: Sequence[int], capacity: int) -> None:
        self.layout = Layout(num_experts)
        self.capacity = capacity
        self.prompt: list[Counts] = []
        self.decode: list[Counts] = []
        self.written: list[int] = []  # how many requests had been kept before the entry's own
        self.total = np.zeros(self.layout.total, np.int64)
        self.tokens = self.replaced = 0
        following = [*num_experts[1:], num_experts[0]]
        self.transitions = [np.zeros((a, b), np.int64) for a, b in zip(num_experts, following, strict=True)]
        self.origins = np.zeros(self.layout.total, np.int64)
        self.successions = [np.zeros((n, n), np.int64) for n in num_experts]
        self.followed = np.zeros(self.layout.total, np.int64)
        # The same of a window: halved where an expert was used twice as often, on the mean, as is kept.
        self.recent = [np.zeros((n, n), np.int64) for n in num_experts]
        self.recent_followed = np.zeros(self.layout.total, np.int64)

    def succeed(self, layer: int, row: list[int], following: list[int]) -> None:
        rows = self.layout.rows(layer)
        for e in row:
            for followed, table in ((self.followed, self.successions), (self.recent_followed, self.recent)):
                followed[self.layout.offset[layer] + e] += 1
                table[layer][e, following] += 1
        if self.recent_followed[rows].sum() >= 2 * RECENT_USES * len(self.recent[layer]):
            self.recent_followed[rows] >>= 1
            self.recent[layer] >>= 1

    @property
    def entries(self) -> list[Counts]:
        return [np.minimum(p + d, 65535) for p, d in zip(self.prompt, self.decode, strict=True)]

    def similarities(self, counts: Counts) -> NDArray[np.float64]:
        return np.array([cosine(counts, entry) for entry in self.entries], np.float64)

    def ranked(self, counts: Counts, oldest_first: bool = False) -> list[int]:
        """Entries that have anything in common with `counts`: most similar first, the newest first of equal ones."""
        keys = {}
        for i, entry in enumerate(self.entries):
            dot = int(counts.astype(object) @ entry.astype(object))
            if dot:
                keys[i] = Fraction(dot * dot, int(entry.astype(object) @ entry.astype(object)))
        sign = 1 if oldest_first else -1
        return sorted(keys, key=lambda i: (-keys[i], sign * self.written[i]))

    def replaceable(self, counts: Counts) -> int:
        """The entry that a full store evicts for `counts`: the most similar, the oldest of equal ones."""
        return next(iter(self.ranked(counts, oldest_first=True)), int(np.argmin(self.written)))

    def add(self, prompt: Counts, decode: Counts, tokens: int) -> int:
        """The entry written, -1 for an empty request."""
        if not (prompt + decode).any():
            return -1
        kept = [np.minimum(counts, 65535) for counts in (prompt, decode)]
        if len(self.prompt) < self.capacity:
            entry = len(self.prompt)
            self.prompt.append(kept[0])
            self.decode.append(kept[1])
            self.written.append(len(self.written))
        else:
            entry = self.replaceable(prompt + decode)
            self.prompt[entry], self.decode[entry] = kept
            self.written[entry] = max(self.written) + 1
            self.replaced += 1
        self.total += prompt + decode
        self.tokens += tokens
        return entry


def cosine(a: Counts, b: Counts) -> float:
    norm = float(np.linalg.norm(a.astype(np.float64)) * np.linalg.norm(b.astype(np.float64)))
    return float(a.astype(np.float64) @ b.astype(np.float64)) / norm if norm else 0.0


def log_odds(share: NDArray[np.float64]) -> NDArray[np.float64]:
    share = np.clip(share, 1e-4, 0.9999)
    result: NDArray[np.float64] = np.log(share / (1 - share))
    return result


def sigmoid(z: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-np.clip(z, -15, 15)))


class WeightsReference:
    """Logistic weights ``[6, 1 + 5]`` of the conditional hazards, and their curvatures ``[6, 6, 6]``."""

    def __init__(self) -> None:
        self.weights = np.array(
            [
                [0.2, 0.5, 0.05, 0.5, 0.45, 0.0],
                [0.0, 0.7, 0.05, 0.2, 0.15, 0.0],
                [0.7, 0.7, 0.05, 0.2, 0.12, 0.0],
                [1.2, 0.6, 0.08, 0.2, 0.1, 0.0],
                [1.7, 0.5, 0.1, 0.25, 0.1, 0.0],
                [1.7, 0.35, 0.1, 0.25, 0.1, 0.0],
            ]
        )
        self.curvature = np.zeros((6, 6, 6))

    def hazards(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        """``[6, n]``: chances of a use within each interval, given none before it, from features ``[n, 5]``."""
        return np.array([sigmoid(w[0] + (features * w[1:]).sum(1)) for w in self.weights])

    def learn(self, features: NDArray[np.float64], first: NDArray[np.int64], seen: int) -> None:
        """One Newton step for every interval that is over; `first`: the visit of each first use, 0 for none yet."""
        design = np.column_stack([np.ones(len(features)), features])
        for i, (low, high) in enumerate(INTERVALS):
            if high > seen:
                break
            among = (first == 0) | (first > low)
            x, used = design[among], ((first > low) & (first <= high))[among]
            chance = sigmoid(x @ self.weights[i])
            self.curvature[i] = 0.999 * self.curvature[i] + (x * (chance * (1 - chance))[:, None]).T @ x
            step = np.linalg.solve(self.curvature[i] + np.eye(6), x.T @ (chance - used))
            self.weights[i] = np.clip(self.weights[i] - np.clip(step, -0.5, 0.5), -10, 10)


def reuse_times(hazards: NDArray[np.float64], layers: int) -> NDArray[np.float64]:
    """Layer steps beyond the next visit until each expert is worth its slot: from the best uses per token, by definition."""
    best = np.full(hazards.shape[1], 1e-5)
    for i in range(len(INTERVALS)):
        # The chance of a first use in each interval up to i, and the tokens that keeping it until then takes.
        alive = np.cumprod(np.vstack([np.ones(hazards.shape[1]), 1 - hazards]), axis=0)
        tokens = sum(
            alive[j] * (hazards[j] * (high - low + 1) / 2 + (1 - hazards[j]) * (high - low))
            for j, (low, high) in enumerate(INTERVALS[: i + 1])
        )
        best = np.maximum(best, (1 - alive[i + 1]) / tokens)
    return layers * (1 / np.minimum(best, 1.0) - 1)


@dataclass
class Snapshot:
    """What was known at a visit of a layer, and when each expert was used first after it."""

    age: int  # visits since; below 0: visits until it is taken
    features: NDArray[np.float64] | None = None
    first: NDArray[np.int64] | None = None


class RequestReference:
    """Counts, decayed frequencies, hazards and snapshots of one request, updated token after token."""

    def __init__(self, history: HistoryReference, prior: NDArray[np.float64], weights: WeightsReference) -> None:
        self.history, self.layout, self.weights = history, history.layout, weights
        self.prompt = np.zeros(self.layout.total, np.int64)
        self.decode = np.zeros(self.layout.total, np.int64)
        self.fast, self.slow = prior.copy(), prior.copy()
        self.lift = np.ones(self.layout.total)
        self.last: dict[int, list[list[int]]] = {}
        self.rows = 1
        self.k = 0
        self.prompt_tokens = self.decode_tokens = 0
        self.previous: tuple[int, list[list[int]]] | None = None
        self.hazards = np.zeros((len(INTERVALS), self.layout.total))
        self.seen: tuple[int, list[list[int]], bool] = (0, [], False)
        self.snapshots = [Snapshot(-1 - 7 * layer % 32) for layer in range(self.layout.layers)]

    @property
    def counts(self) -> Counts:
        return self.prompt + self.decode

    def observe(
        self, layer: int, ids: Sequence[Sequence[int]], decode: bool, counted: Sequence[bool] | None = None
    ) -> None:
        offset, rows = self.layout.offset[layer], self.layout.rows(layer)
        seen = [
            sorted({e for e in row if e >= 0}) if counted is None or counted[t] else [] for t, row in enumerate(ids)
        ]
        for row in seen:
            if row:
                self.fast[rows] *= 1 - FAST
                self.slow[rows] *= 1 - SLOW
            for e in row:
                (self.decode if decode else self.prompt)[offset + e] += 1
                self.fast[offset + e] += FAST
                self.slow[offset + e] += SLOW
        width = max((len(row) for row in ids), default=0)
        if seen:
            one_token = not decode or len(seen) == 1
            self.lift[rows] = self._lift(layer, seen[-1], width) if one_token else 1.0
        tokens = sum(bool(row) for row in seen)
        self._age(layer, seen[0] if decode and len(seen) == tokens == 1 else None)
        self.k = width
        if layer == 0 and decode:
            self.decode_tokens += tokens
            self.rows = max(tokens, 1)
        elif layer == 0:
            self.prompt_tokens += tokens
        self.seen = layer, seen, decode

    def record(self) -> None:
        """What the step observed last says of what follows what, for all requests."""
        layer, seen, decode = self.seen
        if seen:
            self._succeed(layer, seen, decode, self.k)
        self._learn(layer, seen, decode)

    def _age(self, layer: int, used: list[int] | None) -> None:
        # One decode token is one more visit for the layer's snapshot; anything else ends it.
        snapshot = self.snapshots[layer]
        if used is None:
            snapshot.age = -1
            return
        snapshot.age += 1
        if snapshot.age > 0:
            assert snapshot.first is not None
            snapshot.first[[e for e in used if snapshot.first[e] == 0]] = snapshot.age
        if snapshot.age == EDGES[-1]:
            self._learn_from(snapshot)
            snapshot.age = 0

    def _learn_from(self, snapshot: Snapshot) -> None:
        assert snapshot.features is not None
        assert snapshot.first is not None
        self.weights.learn(snapshot.features, snapshot.first, snapshot.age)

    def finish(self) -> None:
        for snapshot in self.snapshots:
            if snapshot.age > 0:
                self._learn_from(snapshot)

    def look(self, layer: int, prior: NDArray[np.float64], k: int) -> None:
        """Hazards of one layer, and its snapshot when one is due."""
        rows = self.layout.rows(layer)
        best = self.history.ranked(self.counts)[:1]
        matched = k * self._shares(self.history.entries[best[0]])[rows] if best else prior[rows]
        features = np.column_stack(
            [
                log_odds(self.slow[rows]),
                log_odds(self.fast[rows]),
                log_odds(prior[rows]),
                np.log(np.clip(self.lift[rows], 3e-4, 3e3)),
                log_odds(matched),
            ]
        )
        self.hazards[:, rows] = 1 - (1 - self.weights.hazards(features)) ** self.rows
        if self.snapshots[layer].age == 0:
            self.snapshots[layer] = Snapshot(0, features, np.zeros(len(features), np.int64))

    def _lift(self, layer: int, experts: list[int], k: int) -> NDArray[np.float64]:
        history, rows = self.history, self.layout.rows(layer)
        used = history.recent_followed[rows].astype(np.float64)
        usual = (used + k / len(used)) / (used.sum() / k + 1)
        product = np.ones(len(used))
        for e in experts:
            follows = history.recent[layer][e] + TRANSITION_PRIOR * usual
            product *= follows / (used[e] + TRANSITION_PRIOR) / usual
        return product

    def _succeed(self, layer: int, seen: list[list[int]], decode: bool, k: int) -> None:
        pairs = []
        if len(self.last.get(layer, [])) == len(seen):
            pairs += list(zip(self.last[layer], seen, strict=True))
        if not decode:
            pairs += list(pairwise(seen[:512]))
        for row, following in pairs:
            self.history.succeed(layer, row, following)
        kept = seen if decode else seen[-1:]
        self.last[layer] = kept if len(kept) * k <= MAX_SUCCESSION else []

    def _learn(self, layer: int, seen: list[list[int]], decode: bool) -> None:
        if self.previous is not None and len(self.previous[1]) == len(seen):
            before = self.previous[0]
            if before + 1 == layer or (decode and layer == 0 and before == self.layout.layers - 1):
                for row, following in zip(self.previous[1], seen, strict=True):
                    for e in row:
                        self.history.origins[self.layout.offset[before] + e] += 1
                        self.history.transitions[before][e, following] += 1
        self.previous = layer, seen

    def ratios(self) -> NDArray[np.float64]:
        """Shares within the layers of the best match; of the request itself before there is any."""
        best = self.history.ranked(self.counts)[:1]
        return self._shares(self.history.entries[best[0]] if best else self.counts)

    def _shares(self, matrix: Counts) -> NDArray[np.float64]:
        shares = np.zeros(self.layout.total)
        for layer in range(self.layout.layers):
            row = matrix[self.layout.rows(layer)]
            shares[self.layout.rows(layer)] = row / row.sum() if row.any() else 0.0
        return shares


class Estimates:
    """Hazards and reuse times over all running requests, refreshed when the runtime refreshes them."""

    def __init__(self, history: HistoryReference, top_k: int) -> None:
        self.history, self.layout, self.top_k = history, history.layout, top_k
        self.weights = WeightsReference()
        self.requests: list[RequestReference] = []
        self.chance = np.zeros(self.layout.total)
        self.reuse_time = np.zeros(self.layout.total)
        self.prior = np.zeros(self.layout.total)
        self.refresh_prior()
        self.refresh()

    def refresh_prior(self) -> None:
        tokens = self.history.tokens
        for layer in range(self.layout.layers):
            row = self.history.total[self.layout.rows(layer)].astype(np.float64)
            per_token = row.sum() / tokens if tokens and row.any() else max(self.top_k, 1)
            prior = (row + PRIOR_TOKENS * per_token / len(row)) / (tokens + PRIOR_TOKENS)
            self.prior[self.layout.rows(layer)] = np.minimum(prior, 1.0)

    def begin(self) -> RequestReference:
        request = RequestReference(self.history, self.prior, self.weights)
        self.requests.append(request)
        self._look_everywhere([request])
        self.refresh()
        return request

    def observe(
        self,
        request: RequestReference,
        layer: int,
        ids: Sequence[Sequence[int]],
        decode: bool,
        counted: Sequence[bool] | None = None,
    ) -> None:
        self.observe_all(layer, [(request, ids, decode, counted)])

    def observe_all(
        self,
        layer: int,
        parts: Sequence[tuple[RequestReference, Sequence[Sequence[int]], bool, Sequence[bool] | None]],
    ) -> None:
        """One step whose rows belong to several requests."""
        for request, ids, decode, counted in parts:
            request.observe(layer, ids, decode, counted)
            request.look(layer, self.prior, max((len(row) for row in ids), default=0))
        for request, *_ in parts:
            request.record()
        self.refresh(layer)

    def end(self, request: RequestReference, keep: bool) -> None:
        self.requests.remove(request)
        request.finish()
        if keep:
            self.history.add(request.prompt, request.decode, request.prompt_tokens + request.decode_tokens)
            self.refresh_prior()
        self._look_everywhere(self.requests)
        self.refresh()

    def _look_everywhere(self, requests: Sequence[RequestReference]) -> None:
        for request in requests:
            for layer in range(self.layout.layers):
                request.look(layer, self.prior, request.k)

    def refresh(self, layer: int | None = None) -> None:
        for n in range(self.layout.layers) if layer is None else [layer]:
            rows = self.layout.rows(n)
            unused = np.ones((len(INTERVALS), self.layout.num_experts[n]))
            for request in self.requests:
                unused *= 1 - request.hazards[:, rows]
            if not self.requests:
                lengths = np.array([high - low for low, high in INTERVALS])
                unused = (1 - self.prior[rows]) ** lengths[:, None]
            self.chance[rows] = 1 - unused[0]
            self.reuse_time[rows] = reuse_times(1 - unused, self.layout.layers)


Score = Callable[[int], float]


@dataclass
class SlotTable:
    """Who is where, as a dict, with every copy landing at once. Told which vacant slots were used; says who must go."""

    layout: Layout
    slots: dict[int, int] = field(default_factory=dict)  # gid -> slot
    last: dict[int, int] = field(default_factory=lambda: defaultdict(lambda: -1))
    frequency: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    clock: int = 0
    demands: int = 0
    hits: int = 0
    evictions: int = 0

    def touch(self, layer: int, ids: Sequence[Sequence[int]], counted: Sequence[bool] | None = None) -> list[int]:
        """Count a step; returns its distinct gids in ascending order."""
        self.clock += 1
        for t, row in enumerate(ids):
            for e in {e for e in row if e >= 0}:
                gid = self.layout.offset[layer] + e
                self.last[gid] = self.clock
                self.frequency[gid] += counted is None or bool(counted[t])
        return sorted({self.layout.offset[layer] + e for row in ids for e in row if e >= 0})

    def victims(self, step: Sequence[int], candidates: Sequence[int], wanted: int, score: Score) -> list[int]:
        """Residents to evict, best first: largest score, longest unused, lowest slot; never one of the step."""
        free = [gid for gid in candidates if gid in self.slots and gid not in step]
        return sorted(free, key=lambda gid: (-score(gid), self.last[gid], self.slots[gid]))[:wanted]

    def ambiguous(self, step: Sequence[int], candidates: Sequence[int], score: Score) -> bool:
        """Whether two scores differ by less than float32 resolves without being equal."""
        scores = sorted({score(gid) for gid in candidates if gid in self.slots and gid not in step})
        return any(b - a < CLOSE * max(1.0, abs(a)) for a, b in pairwise(scores))

    def place(self, gid: int, slot: int) -> None:
        for other in [g for g, s in self.slots.items() if s == slot]:
            del self.slots[other]
            self.evictions += 1
        self.slots[gid] = slot


def make_score(
    policy: str,
    table: SlotTable,
    estimates: Estimates,
    now: int,
    request: RequestReference,
    shares: NDArray[np.float64] | None,
) -> Score:
    """The documented score of a policy, or a feature on its own; the largest is evicted."""
    layout = table.layout

    def distance(gid: int) -> int:
        return (layout.layer_of[gid] - now - 1) % layout.layers + 1

    def expected_next_use(gid: int) -> float:
        return float(estimates.reuse_time[gid]) + distance(gid)

    def moe_infinity(gid: int) -> float:
        assert shares is not None
        return -(float(shares[gid]) + 1e-6) * (1 - layout.layer_of[gid] / layout.layers)

    scores: dict[str, Score] = {
        "lru": lambda gid: 0.0,
        "lfu": lambda gid: -float(table.frequency[gid]),
        "expected-next-use": expected_next_use,
        "moe-infinity": moe_infinity,
        "now": lambda gid: float(now),
        "request_frequency": lambda gid: float(request.counts[gid]),
        "fast": lambda gid: float(request.fast[gid]),
        "slow": lambda gid: float(request.slow[gid]),
        "prior": lambda gid: float(estimates.prior[gid]),
    }
    return scores[policy]


# How a core is called, and a mover that lands everything at once.


def strides_of(ids: NDArray[Any]) -> tuple[int, int]:
    return ids.strides[0] // ids.itemsize, ids.strides[1] // ids.itemsize


def call_route(
    core: Any,
    request: Any,
    layer: int,
    ids: Any,
    decode: bool | None = None,
    counted: Sequence[bool] | None = None,
    padding_id: int = -1,
) -> Any:
    """`Core.route` with an array instead of an address."""
    array = np.asarray(ids, np.int64 if not isinstance(ids, np.ndarray) else None)
    mask = None if counted is None else np.array(counted, np.bool_)
    row, column = strides_of(array)
    return core.route(
        request,
        layer,
        array.ctypes.data,
        -1 if array.dtype == np.uint8 else array.itemsize,
        array.shape[0],
        array.shape[1],
        row,
        column,
        array.shape[0] == 1 if decode is None else decode,
        0 if mask is None else mask.ctypes.data,
        padding_id,
    )


def call_route_batch(
    core: Any,
    batch: Any,
    layer: int,
    parts: Sequence[tuple[Any, Sequence[Sequence[int]], bool]],
    counted: Sequence[bool] | None = None,
) -> Any:
    """`Core.route_batch` with the rows of each request instead of an address."""
    array = np.array([row for _, rows, _ in parts for row in rows], np.int64)
    mask = None if counted is None else np.array(counted, np.bool_)
    row, column = strides_of(array)
    return core.route_batch(
        batch,
        [request for request, _, _ in parts],
        [len(rows) for _, rows, _ in parts],
        [decode for _, _, decode in parts],
        layer,
        array.ctypes.data,
        array.itemsize,
        array.shape[1],
        row,
        column,
        0 if mask is None else mask.ctypes.data,
    )


def call_match(match: Any, layer: int, ids: Sequence[int]) -> tuple[int, float]:
    """`RunningMatch.match_step` with a list instead of an address."""
    array = np.array(ids, np.int32)
    found: tuple[int, float] = match.match_step(layer, array.ctypes.data, len(array))
    return found


def run_step(core: Any, step: Any) -> list[int]:
    """Land every copy, compute every expert, in waves if it must; returns the experts in order. Does not release."""
    order = []
    land(core, step.plan)
    while step.done < step.unique:
        i = core.dispatcher.next_ready(step)
        if i < 0:
            assert core.dispatcher.retry(step), "a lone step can always go on"
            land(core, step.plan)
            continue
        order.append(step.item(i)[0])
        if core.dispatcher.finish(step, i):
            land(core, step.plan)
    return order


def land(core: Any, plan: Any) -> None:
    for _, slot, generation in [*plan.fetches.tolist(), *plan.prefetches.tolist()]:
        core.slots.complete[slot] = generation
