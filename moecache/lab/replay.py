"""Replay of routing traces, without weights, through the objects that decide in the runtime.

All experts of a step are judged against the cache as it stood before the step, then the missing ones are served; none of the step is a
victim of the step. One cache serves all layers. Every copy lands at once; :mod:`moecache.lab.link` puts a clock to it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .._core import Core
from ..errors import CapacityError, PolicyError
from ..history import History
from ..policy import NAMES, Resolved, Score, resolve
from ..trace import Trace
from ._replay import Replay as _Replay
from .offline import belady_hits
from .rivals import RIVALS, play_rival
from .schedule import Schedule, schedule, split_requests

__all__ = ["REPLAY_NAMES", "Result", "make_core", "replay", "trained_history"]

REPLAY_NAMES = (*NAMES, *RIVALS, "belady", "belady-bypass")
"""Policies of a replay: those of the runtime, those of others, and the two that know the future."""

COUNTED_ONLY = (*RIVALS, "belady-bypass")
"""Policies that no core plays, so that a replay counts their hits and has no clock for them."""

_BLOCK = 256  # forward passes between two looks at the progress bar and at Ctrl-C


@dataclass(frozen=True)
class Result:
    """What one policy did at one capacity.

    Attributes
    ----------
    demands, hits : int
        A demand is one distinct expert of one step.
    misses_cold : int
        First uses, which no policy can serve.
    gap_closed : float or None
        Share of the way from LRU to Belady.
    bytes_per_token : float or None
        Demanded bytes, where the size of an expert is known.
    layer_demands, layer_hits : tuple of int
    request_demands, request_hits : tuple of int
        In order of first play.
    """

    trace: str
    model: str
    policy: str
    fraction: float
    capacity_experts: int
    tokens: int
    steps: int
    demands: int
    hits: int
    evictions: int
    misses_cold: int
    layer_demands: tuple[int, ...]
    layer_hits: tuple[int, ...]
    request_demands: tuple[int, ...]
    request_hits: tuple[int, ...]
    bytes_per_token: float | None = None
    gap_closed: float | None = None

    @property
    def hit_rate(self) -> float:
        return self.hits / self.demands if self.demands else 0.0

    @property
    def misses(self) -> int:
        return self.demands - self.hits

    @property
    def request_spread(self) -> tuple[float, float, float]:
        """Hit rate of the worst tenth of requests, the median request and the best tenth."""
        rates = np.asarray(self.request_hits) / np.maximum(self.request_demands, 1)
        low, middle, high = np.quantile(rates, (0.1, 0.5, 0.9))
        return float(low), float(middle), float(high)

    def row(self) -> dict[str, Any]:
        """The result as plain Python values."""
        low, middle, high = self.request_spread
        return {
            "trace": self.trace,
            "model": self.model,
            "policy": self.policy,
            "fraction": self.fraction,
            "capacity_experts": self.capacity_experts,
            "tokens": self.tokens,
            "demands": self.demands,
            "hits": self.hits,
            "hit_rate": self.hit_rate,
            "evictions": self.evictions,
            "bytes_per_token": self.bytes_per_token,
            "gap_closed": self.gap_closed,
            "request_hit_rate_p10": low,
            "request_hit_rate_p50": middle,
            "request_hit_rate_p90": high,
            "layer_hit_rate": [h / d if d else None for h, d in zip(self.layer_hits, self.layer_demands, strict=True)],
        }


class _Quiet:
    # What a progress bar looks like to the replay when there is none.
    def update(self, n: int) -> None:
        pass


def replay(
    trace: Trace,
    policies: Sequence[str | Score] = ("lru", "expected-next-use", "belady"),
    capacities: Sequence[int | float] = (0.1, 0.2, 0.3, 0.5),
    *,
    split: str | None = None,
    history: History | None = None,
    history_capacity: int = 1000,
    concurrency: int | None = None,
    max_tokens: int | None = None,
    expert_nbytes: float | None = None,
    progress: Any = None,
) -> list[Result]:
    """Play a trace through each policy at each capacity.

    Parameters
    ----------
    trace : Trace
    policies : sequence of str or Score
        Of :data:`REPLAY_NAMES`, or scores made with :func:`moecache.policy.score`.
    capacities : sequence of int or float
        Experts, or fractions in (0, 1] of all.
    split : str, optional
        ``"7/10"``: the first 7 of every 10 requests make the history, the others are played.
    history : History, optional
        What is known before; the split's requests are added to it. Not changed.
    history_capacity : int
        Requests kept in a history made here.
    concurrency, max_tokens
        As in :func:`moecache.lab.schedule.schedule`.
    expert_nbytes : float, optional
        Bytes of an expert, for bytes per token.
    progress : tqdm, optional
        ``update(n)`` is called with forward passes done.

    Returns
    -------
    list of Result
        Policy by policy, in the order of `capacities`.

    Raises
    ------
    PolicyError, CapacityError, TraceFormatError
    """
    resolved = [resolve_any(policy) for policy in policies]
    slots = [slots_of(trace, capacity) for capacity in capacities]
    known, played = split_requests(trace, split)
    plan = schedule(trace, played, concurrency, max_tokens)
    bar = progress or _Quiet()
    base = trained_history(trace, known, history, history_capacity)
    needed = [*resolved, *(resolve_any(name) for name in ("lru", "belady") if name not in {x.name for x in resolved})]
    seen = schedule(trace, known) if len(known) and any(policy.name in RIVALS for policy in needed) else None
    results = {policy.name: _play(trace, plan, policy, slots, base, bar, seen) for policy in needed}
    return [
        replace(
            result,
            gap_closed=_gap_closed(result, results["lru"][i], results["belady"][i]),
            bytes_per_token=None if expert_nbytes is None else result.misses * expert_nbytes / max(result.tokens, 1),
        )
        for policy in resolved
        for i, result in enumerate(results[policy.name])
    ]


def passes_of(trace: Trace, split: str | None, max_tokens: int | None = None) -> int:
    """Forward passes that are played for each policy."""
    _, played = split_requests(trace, split)
    return schedule(trace, played, max_tokens=max_tokens).passes


def slots_of(trace: Trace, capacity: int | float) -> int:
    """Experts that a capacity stands for.

    Raises
    ------
    CapacityError
        Out of range, or below the experts of one token.
    """
    total = sum(trace.num_experts)
    whole = isinstance(capacity, (int, np.integer)) and not isinstance(capacity, bool)
    slots = int(capacity) if whole else int(capacity * total + 1e-9)
    if not (1 <= capacity <= total if whole else 0.0 < capacity <= 1.0):
        raise CapacityError(
            f"capacity {capacity} is out of range: expected experts up to {total}, or a fraction in (0, 1]"
        )
    if slots < trace.top_k:
        raise CapacityError(
            f"capacity {capacity} gives {slots} slots, and one token of {trace.model} needs {trace.top_k} in a layer"
        )
    return slots


def make_core(
    trace: Trace,
    slots: int,
    policy: Resolved,
    history: History,
    prefetch: bool = False,
    prefetch_waste: float = 0.25,
) -> Core:
    """A deciding core without an engine: all layers share `slots` places."""
    return Core(
        history.store,
        np.zeros(trace.layers, np.int32),
        np.array([slots], np.int32),
        np.zeros(slots, np.int32),
        policy.code,
        policy.address,
        prefetch,
        trace.top_k,
        prefetch_waste,
    )


def trained_history(
    trace: Trace, requests: Sequence[int] | np.ndarray, history: History | None = None, capacity: int = 1000
) -> History:
    """A history that has seen `requests` of the trace, as a cache that holds every expert would have made it."""
    base = History(trace.fingerprint, capacity) if history is None else history.copy()
    if len(requests):
        core = make_core(trace, sum(trace.num_experts), resolve("lru"), base)
        plan = schedule(trace, requests)
        native = _Replay([core], *plan.arrays())
        for first, end in _blocks(plan.passes):
            native.run(first, end)
    return base


def resolve_any(policy: str | Score) -> Resolved:
    """As :func:`moecache.policy.resolve`, with the policies that know the future."""
    if isinstance(policy, str) and policy in COUNTED_ONLY:
        return Resolved(policy, 0, policy)
    try:
        return resolve(policy, extra=("belady",))
    except PolicyError:
        near = difflib.get_close_matches(str(policy), REPLAY_NAMES, n=2)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise PolicyError(
            f"no policy is called {policy!r}{hint} There are: {', '.join(REPLAY_NAMES)}, and scores made with moecache.policy.score"
        ) from None


def _play(
    trace: Trace,
    plan: Schedule,
    policy: Resolved,
    slots: list[int],
    base: History,
    bar: Any,
    seen: Schedule | None,
) -> list[Result]:
    cold = _cold_misses(plan)
    if policy.code in COUNTED_ONLY:
        results = [_counted(trace, plan, policy.name, n, cold, seen) for n in slots]
        bar.update(plan.passes)
        return results
    history = base.copy()
    cores = [make_core(trace, n, policy, history) for n in slots]
    native = _Replay(cores, *plan.arrays(), plan.next_use if policy.code == "belady" else None)
    for first, end in _blocks(plan.passes):
        native.run(first, end)
        bar.update(end - first)
    return [
        Result(
            trace=trace.name,
            model=trace.model,
            policy=policy.name,
            fraction=n / sum(trace.num_experts),
            capacity_experts=n,
            tokens=plan.tokens,
            steps=core.slots.steps,
            demands=core.demands,
            hits=core.hits,
            evictions=core.slots.evictions,
            misses_cold=cold,
            layer_demands=tuple(core.layer_demands.tolist()),
            layer_hits=tuple(core.layer_hits.tolist()),
            request_demands=tuple(native.demands.tolist()),
            request_hits=tuple(native.hits[i].tolist()),
        )
        for i, (n, core) in enumerate(zip(slots, cores, strict=True))
    ]


def _counted(trace: Trace, plan: Schedule, name: str, slots: int, cold: int, seen: Schedule | None) -> Result:
    if name == "belady-bypass":
        demands = step_demands(plan)
        hits = belady_hits(plan.experts, plan.start, plan.next_use, max(plan.num_experts), slots, True)
        evictions = max(int(demands.sum() - hits.sum()) - slots, 0)
    else:
        demands, hits, evictions = play_rival(name, plan, slots, seen)
    by_request = [np.bincount(plan.request, x.sum(1)).astype(np.int64) for x in (demands, hits)]
    return Result(
        trace=trace.name,
        model=trace.model,
        policy=name,
        fraction=slots / sum(trace.num_experts),
        capacity_experts=slots,
        tokens=plan.tokens,
        steps=int((demands > 0).sum()),
        demands=int(demands.sum()),
        hits=int(hits.sum()),
        evictions=evictions,
        misses_cold=cold,
        layer_demands=tuple(demands.sum(0).tolist()),
        layer_hits=tuple(hits.sum(0).tolist()),
        request_demands=tuple(by_request[0].tolist()),
        request_hits=tuple(by_request[1].tolist()),
    )


def step_demands(plan: Schedule) -> np.ndarray:
    """int64 array ``[passes, layers]``: distinct experts of each step."""
    layers, widest = plan.experts.shape[1], max(plan.num_experts)
    passes = np.repeat(np.arange(plan.passes), np.diff(plan.start))
    steps = passes[:, None, None] * layers + np.arange(layers)[None, :, None]
    keys = np.unique((steps * widest + plan.experts)[plan.experts >= 0])
    return np.bincount(keys // widest, minlength=plan.passes * layers).reshape(plan.passes, layers)


def _cold_misses(plan: Schedule) -> int:
    layer = np.arange(plan.experts.shape[1])[None, :, None] * max(plan.num_experts)
    return len(np.unique((plan.experts + layer)[plan.experts >= 0]))


def _gap_closed(result: Result, lru: Result, belady: Result) -> float | None:
    gap = belady.hits - lru.hits
    return (result.hits - lru.hits) / gap if gap else None


def _blocks(passes: int) -> Iterator[tuple[int, int]]:
    for first in range(0, passes, _BLOCK):
        yield first, min(first + _BLOCK, passes)
