"""In which order the forward passes of a trace are played."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..errors import TraceFormatError
from ..trace import Trace
from .offline import next_uses

__all__ = ["Schedule", "schedule", "split_requests"]


@dataclass(frozen=True)
class Schedule:
    """Forward passes in the order of play.

    Attributes
    ----------
    experts : int16 array ``[tokens, layers, k]``
    counted : uint8 array ``[tokens]``
    start : int64 array ``[passes + 1]``
        Rows ``start[f]:start[f + 1]`` are pass f.
    request : int32 array ``[passes]``
        Renumbered in order of first play.
    decode, last : uint8 array ``[passes]``
        Whether the pass counts as decode, and whether its request ends with it.
    origin : int32 array ``[requests]``
        The number each request has in the trace.
    num_experts : tuple of int
    """

    experts: np.ndarray
    counted: np.ndarray
    start: np.ndarray
    request: np.ndarray
    decode: np.ndarray
    last: np.ndarray
    origin: np.ndarray
    num_experts: tuple[int, ...]

    @property
    def passes(self) -> int:
        return len(self.request)

    @property
    def tokens(self) -> int:
        return int(self.counted.sum())

    @cached_property
    def next_use(self) -> np.ndarray:
        """int64 array ``[tokens, layers, k]``: the layer step in which each routed expert is used next, or one beyond all."""
        return next_uses(self.experts, self.start, max(self.num_experts))

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What the native replay takes, in its order."""
        return self.experts, self.start, self.request, self.decode, self.last, self.counted


def split_requests(trace: Trace, split: str | None) -> tuple[np.ndarray, np.ndarray]:
    """(history, test): request numbers; ``"7/10"`` sends request r to the history when ``r % 10 < 7``. None tests on all.

    Raises
    ------
    TraceFormatError
        A split that is no fraction, or leaves no request to test on.
    """
    requests = np.arange(trace.requests)
    if split is None:
        return requests[:0], requests
    part, slash, whole = split.partition("/")
    if not (slash and part.isdigit() and whole.isdigit() and 0 < int(part) < int(whole)):
        raise TraceFormatError(
            f"split {split!r} is not understood: expected for example 7/10, the first 7 of every 10 requests as history"
        )
    in_history = requests % int(whole) < int(part)
    if in_history.all():
        raise TraceFormatError(f"split {split} leaves none of the {trace.requests} requests of {trace.name} to test on")
    return requests[in_history], requests[~in_history]


def schedule(
    trace: Trace,
    requests: Sequence[int] | np.ndarray | None = None,
    concurrency: int | None = None,
    max_tokens: int | None = None,
) -> Schedule:
    """Put forward passes in order.

    Parameters
    ----------
    trace : Trace
    requests : sequence of int, optional
        Play only these.
    concurrency : int, optional
        How many requests take turns, one forward pass each; the next one joins as one ends. By default the order of the trace.
    max_tokens : int, optional
        Play only requests from all over the trace, of all groups alike, up to the first that passes this many tokens.
    """
    wanted = np.ones(trace.requests, bool)
    if requests is not None:
        wanted[:] = False
        wanted[np.asarray(requests, np.int64)] = True
    if max_tokens is not None:
        chosen = np.flatnonzero(wanted)
        wanted[:] = False
        wanted[_spread(trace, chosen, max_tokens)] = True
    number = np.arange(trace.tokens) if trace.forward is None else trace.forward
    begin = np.flatnonzero(np.diff(number, prepend=-1))
    end = np.append(begin[1:], trace.tokens)
    kept = wanted[trace.request[begin]]
    begin, end = begin[kept], end[kept]
    if concurrency is not None and concurrency > 0:
        order = _take_turns(trace.request[begin], concurrency)
        begin, end = begin[order], end[order]
    if len(begin) == 0:
        raise TraceFormatError(f"{trace.name}: no requests left to play")
    size = end - begin
    start = np.concatenate([[0], np.cumsum(size)])
    rows = np.arange(start[-1]) + np.repeat(begin - start[:-1], size)
    origin, first, request = np.unique(trace.request[begin], return_index=True, return_inverse=True)
    rank = np.empty(len(origin), np.int64)
    rank[np.argsort(first)] = np.arange(len(origin))
    last = np.zeros(len(begin), np.uint8)
    last[[np.flatnonzero(request == r)[-1] for r in range(len(origin))]] = 1
    # A trace that does not say which tokens shared a pass is played as it would be decoded: token by token.
    decode = trace.decode[begin] if trace.forward is not None else np.ones(len(begin), np.uint8)
    return Schedule(
        experts=np.ascontiguousarray(trace.experts[rows]),
        counted=np.ones(len(rows), np.uint8) if trace.counted is None else np.ascontiguousarray(trace.counted[rows]),
        start=start.astype(np.int64),
        request=rank[request].astype(np.int32),
        decode=np.ascontiguousarray(decode, np.uint8),
        last=last,
        origin=origin[np.argsort(first)].astype(np.int32),
        num_experts=trace.num_experts,
    )


def _spread(trace: Trace, chosen: np.ndarray, most: int) -> np.ndarray:
    # Of these requests, some whose tokens pass `most` with the last. Files are sorted by what their requests are about, so that the
    # first ones would stand for one group alone.
    group = np.zeros(len(chosen), np.int64) if trace.request_group is None else trace.request_group[chosen]
    place = np.empty(len(chosen))
    for one in np.unique(group):
        mine = np.flatnonzero(group == one)
        place[mine] = (np.argsort(np.argsort(_bit_reversed(len(mine)))) + 0.5) / len(mine)
    order = chosen[np.argsort(place, kind="stable")]
    tokens = np.bincount(trace.request, minlength=trace.requests)[order]
    return order[: 1 + int(np.searchsorted(np.cumsum(tokens), most, side="right"))]


def _bit_reversed(n: int) -> np.ndarray:
    # Keys in whose order the first few of n places lie evenly among all of them, however many are taken.
    bits = max(n - 1, 1).bit_length()
    places = np.arange(n)
    return sum(((places >> bit & 1) << (bits - 1 - bit) for bit in range(bits)), np.zeros(n, np.int64))


def _take_turns(request: np.ndarray, concurrency: int) -> np.ndarray:
    # Passes of each request stay in order; `concurrency` requests are open at a time.
    waiting = [np.flatnonzero(request == r).tolist() for r in dict.fromkeys(request.tolist())]
    waiting.reverse()
    running: list[list[int]] = []
    order: list[int] = []
    while waiting or running:
        while waiting and len(running) < concurrency:
            running.append(waiting.pop()[::-1])
        order += [passes.pop() for passes in running]
        running = [passes for passes in running if passes]
    return np.array(order, np.int64)
