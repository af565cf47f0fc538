"""What a forecaster knows and what it is worth, on requests it has not seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..forecaster import HORIZONS, wait_beyond
from ..history import History
from ..trace import Trace
from .network import Network
from .offline import waiting_hits
from .replay import Result, _gap_closed, replay, slots_of
from .schedule import Schedule, schedule
from .sequences import CHUNK, Sequences, at_risk

__all__ = ["FitReport", "measure"]

CAPACITIES = (0.1, 0.2, 0.3, 0.5)
_BINS = 20


@dataclass(frozen=True)
class FitReport:
    """Measured on requests that were not fitted to.

    Attributes
    ----------
    losses : tuple of float
        Held-out loss before the first and after each pass over the training tokens.
    training_tokens, requests, tokens : int
        Fitted to; measured on.
    recall : float64 array ``[D, L]``
        Of the experts a layer uses, the share among the k likeliest from d + 1 layers before (of the same token where it has such a layer,
        else of the one before).
    reliability : float64 array ``[6, 20, 3]``
        Hazards of each interval by twentieths: how many, their mean, how many came true.
    hits : list of Result
        ``lru``, ``counts``, ``forecaster`` and ``belady``; the forecaster alone decides, without the counts beside it.
    nbytes : int
        Of the forecaster.
    """

    losses: tuple[float, ...]
    training_tokens: int
    requests: int
    tokens: int
    recall: np.ndarray
    reliability: np.ndarray
    hits: list[Result]
    nbytes: int

    def recall_ahead(self, distance: int) -> float:
        """Mean recall of layers `distance` ahead in the same token."""
        ahead = self.recall[distance - 1, distance:]
        return float(ahead.mean()) if len(ahead) else float("nan")

    @property
    def below_counts(self) -> bool:
        """Whether the forecaster hits less than the counts do, over all capacities together."""
        return self._hits("forecaster") < self._hits("counts")

    def _hits(self, policy: str) -> int:
        return sum(r.hits for r in self.hits if r.policy == policy)

    @property
    def calibration_error(self) -> np.ndarray:
        """float64 ``[6]``: mean distance between hazard and share that came true."""
        count, mean, came = np.moveaxis(self.reliability, 2, 0)
        return np.asarray(np.abs(mean * count - came).sum(1) / np.maximum(count.sum(1), 1))

    def __str__(self) -> str:
        """One line."""
        middle = min(self.hits, key=lambda r: abs(r.fraction - 0.2)).capacity_experts
        rates = ", ".join(f"{r.policy} {100 * r.hit_rate:.1f}" for r in self.hits if r.capacity_experts == middle)
        return (
            f"fitted to {self.training_tokens:,} tokens; held-out loss {self.losses[0]:.3f} before, {min(self.losses):.3f} after; "
            f"hits in % with {middle} experts: {rates}"
        )

    def row(self) -> dict[str, Any]:
        """The report as plain Python values."""
        return {
            "losses": list(self.losses),
            "training_tokens": self.training_tokens,
            "requests": self.requests,
            "tokens": self.tokens,
            "nbytes": self.nbytes,
            "recall": self.recall.tolist(),
            "recall_ahead": [self.recall_ahead(d) for d in range(1, len(self.recall) + 1)],
            "calibration_error": self.calibration_error.tolist(),
            "reliability": self.reliability.tolist(),
            "hits": [result.row() for result in self.hits],
        }


def measure(
    network: Network,
    learned: Sequences,
    trace: Trace,
    requests: Sequence[int] | np.ndarray,
    history: History,
    max_tokens: int | None,
    losses: Sequence[float],
) -> FitReport:
    """Measure a fitted network on some requests of the trace.

    Parameters
    ----------
    network : Network
    learned : Sequences
        What it was fitted to.
    history : History
        That the counts have.
    max_tokens : int or None
        End after the first request that passes this many tokens.
    """
    chosen = schedule(trace, requests, max_tokens=max_tokens).origin
    seen = Sequences(trace, chosen, learned.decay, learned.prior)
    played = subtrace(trace, seen.rows)
    watch = _Watch(network, trace.top_k)
    slots = [slots_of(trace, capacity) for capacity in CAPACITIES if capacity * sum(trace.num_experts) >= trace.top_k]
    plan = schedule(played)
    hits = _play(seen, plan, slots, watch.outlook(seen))
    results = replay(played, ("lru", "counts", "belady"), slots, history=history)
    by_policy = [results[i : i + len(slots)] for i in range(0, len(results), len(slots))]
    own = [
        replace(
            lru,
            policy="forecaster",
            hits=int(hits[i].sum()),
            layer_hits=tuple(hits[i].sum(0).tolist()),
            request_hits=tuple(np.bincount(plan.request, hits[i].sum(1)).astype(np.int64).tolist()),
            evictions=max(lru.demands - int(hits[i].sum()) - slots[i], 0),
        )
        for i, lru in enumerate(by_policy[0])
    ]
    own = [replace(r, gap_closed=_gap_closed(r, a, b)) for r, a, b in zip(own, by_policy[0], by_policy[2], strict=True)]
    return FitReport(
        losses=tuple(losses),
        training_tokens=learned.tokens,
        requests=len(chosen),
        tokens=seen.tokens,
        recall=watch.found / np.maximum(watch.sought, 1),
        reliability=watch.reliability(),
        hits=[*by_policy[0], *by_policy[1], *own, *by_policy[2]],
        nbytes=history.forecaster.nbytes if history.forecaster is not None else 0,
    )


class _Watch:
    """Looks at every chunk once: hazards to rank by, and how often they and the coming layers came true."""

    def __init__(self, network: Network, top_k: int) -> None:
        self.network, self.top_k = network, top_k
        self.found, self.sought = np.zeros((2, network.distances, network.layers))
        self.bins = np.zeros((3, len(HORIZONS), _BINS))

    @torch.no_grad()
    def outlook(self, sequences: Sequences) -> Iterator[np.ndarray]:
        """float32 ``[tokens, L, E]`` for chunk after chunk: how long each expert must be kept to be worth it."""
        distances = list(range(1, self.network.distances + 1))
        for batch in sequences.batches(8):
            hazards, *coming = self.network(batch, distances)
            chances = torch.sigmoid(hazards.logits()).cpu().numpy()
            self._count(chances, hazards.code.cpu().numpy())
            for d, question in zip(distances, coming, strict=True):
                self._recall(d, question.logits()[:, :, 0], question.code == 0)
            waits = wait_beyond(np.moveaxis(chances, 2, -1)).swapaxes(0, 1)
            for i, tokens in enumerate(batch.tokens.tolist()):
                yield waits[i * CHUNK : i * CHUNK + tokens]

    def _count(self, chances: np.ndarray, code: np.ndarray) -> None:
        for i in range(len(HORIZONS)):
            open_ = at_risk(code, i)
            chance, came = chances[:, :, i][open_], code[open_] == i
            place = np.minimum((chance * _BINS).astype(np.int64), _BINS - 1)
            for row, weight in enumerate((None, chance, came)):
                self.bins[row, i] += np.bincount(place, weight, _BINS)

    def _recall(self, distance: int, logits: torch.Tensor, used: torch.Tensor) -> None:
        layers = self.network.layers
        for layer in range(layers):
            there = (layer + distance) % layers
            likeliest = logits[layer, :, : self.network.num_experts[there]].topk(
                min(self.top_k, self.network.num_experts[there])
            )
            self.found[distance - 1, there] += int(used[layer].gather(1, likeliest.indices).sum())
            self.sought[distance - 1, there] += int(used[layer].sum())

    def reliability(self) -> np.ndarray:
        """float64 ``[6, 20, 3]``, as :class:`FitReport` has it."""
        count, chance, came = self.bins
        return np.stack([count, chance / np.maximum(count, 1), came], 2)


def subtrace(trace: Trace, rows: np.ndarray) -> Trace:
    """Some tokens as a trace of their own, one request after another where `rows` has them so."""
    _, request = np.unique(trace.request[rows], return_inverse=True)
    first = np.unique(request, return_index=True)[1]
    rank = np.argsort(np.argsort(first))
    forward = None if trace.forward is None else np.cumsum(np.diff(trace.forward[rows], prepend=-1) != 0)
    return replace(
        trace,
        experts=trace.experts[rows],
        request=rank[request].astype(np.int32),
        decode=trace.decode[rows],
        forward=None if forward is None else forward.astype(np.int32),
        counted=None,
        weights=None,
        token=None,
        request_group=None,
    )


def _play(sequences: Sequences, plan: Schedule, slots: Sequence[int], outlook: Iterator[np.ndarray]) -> np.ndarray:
    # int64 [capacities, passes, L]: hits when the longest wait is evicted first.
    layers, total = plan.experts.shape[1], len(slots)
    cache = np.full((total, layers * sequences.width), -1, np.int64)
    size, held = np.zeros(total, np.int64), np.zeros((total, max(slots)), np.int64)
    wait = np.zeros((layers, sequences.width), np.float32)
    hits = np.zeros((total, plan.passes, layers), np.int64)
    pending: list[np.ndarray] = []
    done = row = 0
    for waits in outlook:
        pending.append(waits)
        row += len(waits)
        # Whole passes only, and enough of them to be worth a call.
        upto = int(np.searchsorted(plan.start, row, side="right")) - 1
        if upto > done and (row == sequences.tokens or row - plan.start[done] >= 1024):
            rows = np.concatenate(pending)
            begin, end = plan.start[done], plan.start[upto]
            waiting_hits(
                plan.experts[begin:end],
                plan.start[done : upto + 1] - begin,
                np.ascontiguousarray(rows[: end - begin]),
                np.asarray(slots, np.int64),
                cache,
                size,
                held,
                wait,
                hits[:, done:upto],
            )
            pending, done = [rows[end - begin :]], upto
    return hits
