"""Requests as a forecaster sees them: what is known after each token and layer, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..forecaster import FLOOR, HORIZONS
from ..jit import compiled
from ..trace import Trace

__all__ = ["AT_RISK", "CHUNK", "UNKNOWN", "Batch", "Sequences"]

CHUNK = 32
"""Tokens that are worked on together; a request's last chunk may hold fewer."""

UNKNOWN = 8
"""Codes below are the interval of the first use; ``UNKNOWN + n``: not used in the first n intervals, and no more is known."""

AT_RISK = UNKNOWN + 1
"""Of a question with one interval: not used. 0 is used, UNKNOWN is not known."""


@dataclass(frozen=True)
class Batch:
    """Chunks of requests: row 0 of each is the state before its first token, row j the one after its j-th.

    Attributes
    ----------
    averages : float32 array ``[L, chunks, CHUNK + 1, S, E]``
        Usage averages less the prior.
    logs : float32 array ``[S - 1, L, chunks, CHUNK + 1, E]``
        Logarithms of the decayed averages, less the prior's.
    first : uint8 array ``[L, chunks, CHUNK, E]``
        When each expert is used first after rows 1..CHUNK.
    used : uint8 array ``[L, chunks, CHUNK + 2, E]``
        Whether the token of each row, and the next one after the chunk, uses an expert.
    tokens : int array ``[chunks]``
        Tokens of each chunk that exist; what follows them is unknown throughout.
    """

    averages: np.ndarray
    logs: np.ndarray
    first: np.ndarray
    used: np.ndarray
    tokens: np.ndarray


class Sequences:
    """Requests of a trace, cut into chunks.

    Layers with fewer experts are filled up with experts that are never used and of whom nothing is asked.

    Parameters
    ----------
    trace : Trace
    requests : sequence of int
        In the order in which they shall stand.
    decay : float array ``[S]``
    prior : float array ``[L, E]``, optional
        By default the mean over these requests of each expert's share of the tokens.
    """

    def __init__(
        self, trace: Trace, requests: Sequence[int] | np.ndarray, decay: np.ndarray, prior: np.ndarray | None = None
    ) -> None:
        counted = np.ones(trace.tokens, bool) if trace.counted is None else trace.counted.astype(bool)
        place = np.full(trace.requests, -1)
        place[np.asarray(requests, np.int64)] = np.arange(len(requests))
        rows = np.flatnonzero(counted & (place[trace.request] >= 0))
        # Requests may be interleaved in a trace; each one's tokens are in order.
        self.rows = rows[np.argsort(place[trace.request[rows]], kind="stable")]
        self.experts = np.ascontiguousarray(trace.experts[self.rows])
        owner = place[trace.request[self.rows]]
        self.num_experts = np.array(trace.num_experts, np.int64)
        self.width = int(self.num_experts.max())
        self.decay = np.asarray(decay, np.float32)
        present = np.flatnonzero(np.bincount(owner, minlength=len(requests)))
        begin = np.searchsorted(owner, present)
        end = np.searchsorted(owner, present, side="right")
        self.prior = shares(self.experts, begin, end, self.width) if prior is None else np.asarray(prior, np.float32)
        self.begin = np.concatenate([np.arange(b, e, CHUNK) for b, e in zip(begin, end, strict=True)] or [begin])
        self.end = np.concatenate([np.full(-(-(e - b) // CHUNK), e) for b, e in zip(begin, end, strict=True)] or [end])
        self.kept = np.empty((len(self.begin), len(self.decay), trace.layers, self.width), np.float32)
        _keep(self.experts, self.begin, self.end, self.decay, self.prior, self.kept)

    @property
    def tokens(self) -> int:
        return len(self.experts)

    @property
    def chunks(self) -> int:
        return len(self.begin)

    def batch(self, chunks: np.ndarray) -> Batch:
        """The chunks of these numbers."""
        layers, scales, n = self.experts.shape[1], len(self.decay), len(chunks)
        averages = np.empty((layers, n, CHUNK + 1, scales, self.width), np.float32)
        decayed = np.empty((scales - 1, layers, n, CHUNK + 1, self.width), np.float32)
        first = np.empty((layers, n, CHUNK, self.width), np.uint8)
        used = np.empty((layers, n, CHUNK + 2, self.width), np.uint8)
        begin, end = self.begin[chunks], self.end[chunks]
        _unroll(self.experts, begin, end, self.decay, self.prior, self.kept[chunks], averages, decayed)
        _look_ahead(self.experts, begin, end, self.num_experts, np.array(HORIZONS), first, used)
        logs = np.log(decayed + np.float32(FLOOR), out=decayed)
        logs -= np.log(self.prior + np.float32(FLOOR))[None, :, None, None, :]
        return Batch(averages, logs, first, used, np.minimum(end - begin, CHUNK))

    def batches(self, size: int, order: np.ndarray | None = None) -> Iterator[Batch]:
        """All chunks, `size` at a time."""
        order = np.arange(self.chunks) if order is None else order
        for at in range(0, len(order), size):
            yield self.batch(order[at : at + size])

    def exposure(self) -> tuple[np.ndarray, np.ndarray]:
        """How often first uses fell into each interval, and how often they could have.

        Returns
        -------
        float64 arrays ``[L, 6, E]``
        """
        uses, risks = np.zeros((2, self.experts.shape[1], len(HORIZONS), self.width))
        for batch in self.batches(16):
            for i in range(len(HORIZONS)):
                uses[:, i] += (batch.first == i).sum((1, 2))
                risks[:, i] += at_risk(batch.first, i).sum((1, 2))
        return uses, risks


def at_risk(code: np.ndarray, interval: int) -> np.ndarray:
    """Where it is known whether the first use falls into an interval, and it did not come before."""
    return np.where(code < UNKNOWN, code >= interval, code > UNKNOWN + interval)


@compiled()
def shares(experts: np.ndarray, begin: np.ndarray, end: np.ndarray, width: int) -> np.ndarray:
    """float32 ``[L, width]``: mean over requests of each expert's share of the request's tokens."""
    out = np.zeros((experts.shape[1], width))
    for r in range(len(begin)):
        for layer in range(experts.shape[1]):
            for t in range(begin[r], end[r]):
                for j in range(experts.shape[2]):
                    if experts[t, layer, j] >= 0:
                        out[layer, experts[t, layer, j]] += 1.0 / (end[r] - begin[r]) / len(begin)
    return out.astype(np.float32)


@compiled()
def _advance(average: np.ndarray, a: float, ids: np.ndarray) -> None:
    average *= np.float32(1 - a)
    for j in range(len(ids)):
        if ids[j] >= 0:
            average[ids[j]] += np.float32(a)


@compiled()
def _keep(
    experts: np.ndarray, begin: np.ndarray, end: np.ndarray, decay: np.ndarray, prior: np.ndarray, kept: np.ndarray
) -> None:
    # kept[c]: the averages before chunk c.
    for layer in range(experts.shape[1]):
        for s in range(len(decay)):
            average = prior[layer].copy()
            for c in range(len(begin)):
                if c == 0 or end[c] != end[c - 1]:
                    average[:] = prior[layer]
                kept[c, s, layer] = average
                for t in range(begin[c], min(begin[c] + CHUNK, end[c])):
                    _advance(average, decay[s], experts[t, layer])


@compiled()
def _unroll(
    experts: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    decay: np.ndarray,
    prior: np.ndarray,
    kept: np.ndarray,
    averages: np.ndarray,
    decayed: np.ndarray,
) -> None:
    for layer in range(experts.shape[1]):
        for c in range(len(begin)):
            for s in range(len(decay)):
                average = kept[c, s, layer]
                for row in range(CHUNK + 1):
                    t = begin[c] + row - 1
                    if row > 0 and t < end[c]:
                        _advance(average, decay[s], experts[t, layer])
                    averages[layer, c, row, s] = average - prior[layer]
                    if s > 0:
                        decayed[s - 1, layer, c, row] = average


@compiled()
def _look_ahead(
    experts: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    num_experts: np.ndarray,
    horizons: np.ndarray,
    first: np.ndarray,
    used: np.ndarray,
) -> None:
    last = horizons[-1]
    interval = np.zeros(last + 1, np.uint8)
    for i in range(len(horizons) - 1, -1, -1):
        interval[: horizons[i] + 1] = i
    coming = np.empty(first.shape[3], np.int64)
    for layer in range(experts.shape[1]):
        present = num_experts[layer]
        for c in range(len(begin)):
            for row in range(CHUNK + 2):
                t = begin[c] + row - 1
                used[layer, c, row] = UNKNOWN
                if row > 0 and t < end[c]:
                    used[layer, c, row, :present] = AT_RISK
                    for j in range(experts.shape[2]):
                        if experts[t, layer, j] >= 0:
                            used[layer, c, row, experts[t, layer, j]] = 0
            coming[:] = end[c] + last
            for t in range(min(begin[c] + CHUNK + last, end[c]) - 1, begin[c] - 1, -1):
                row = t - begin[c]  # of the state after token t
                if row < CHUNK:
                    observed = 0
                    while observed < len(horizons) and horizons[observed] <= end[c] - 1 - t:
                        observed += 1
                    for e in range(present):
                        gap = coming[e] - t
                        first[layer, c, row, e] = interval[gap] if gap <= last else UNKNOWN + observed
                    first[layer, c, row, present:] = UNKNOWN
                for j in range(experts.shape[2]):
                    if experts[t, layer, j] >= 0:
                        coming[experts[t, layer, j]] = t
            for row in range(max(end[c] - begin[c], 0), CHUNK):
                first[layer, c, row] = UNKNOWN
