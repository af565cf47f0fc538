"""Fixed traces, policies and capacities against one another, with intervals over requests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TraceFormatError
from ..trace import Trace
from .families import FAMILIES
from .formats import READ, read_trace
from .replay import REPLAY_NAMES, Result, replay

__all__ = ["CAPACITIES", "SuiteRow", "gather", "run_suite"]

CAPACITIES = (0.1, 0.2, 0.3, 0.5)
_RESAMPLES = 1000


@dataclass(frozen=True)
class SuiteRow:
    """What one policy did on one trace at one capacity.

    Attributes
    ----------
    trace, policy, split : str
    digest : str
        SHA-256 of the trace's file; of a synthetic one its seed.
    capacity, fraction : int and float
        Experts.
    tokens, requests, demands, hits : int
        Of the requests that were played.
    hit_rate, hit_rate_low, hit_rate_high : float
        With the middle 95 % of what requests drawn anew give.
    gap_closed, gap_closed_low, gap_closed_high : float or None
        The share of the way from LRU to Belady, likewise, LRU and Belady on the same requests.
    optimum : float or None
        What the best policy hits, where that is known.
    seed : int
    """

    trace: str
    policy: str
    split: str
    digest: str
    capacity: int
    fraction: float
    tokens: int
    requests: int
    demands: int
    hits: int
    hit_rate: float
    hit_rate_low: float
    hit_rate_high: float
    gap_closed: float | None
    gap_closed_low: float | None
    gap_closed_high: float | None
    optimum: float | None
    seed: int

    def row(self) -> dict[str, Any]:
        """The result as plain Python values."""
        return asdict(self)


def gather(paths: Sequence[Path]) -> list[Path]:
    """Files of traces: those given, and all in the folders given. Files of activation counts are passed over.

    Raises
    ------
    FileNotFoundError
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"no routing trace at {path}")
        inside = [p for p in sorted(path.iterdir()) if p.suffix.lower() in READ] if path.is_dir() else []
        found += [p for p in inside if not p.stem.endswith("-counts")] or [path]
    return found


def run_suite(
    paths: Sequence[Path] = (),
    policies: Sequence[str] = REPLAY_NAMES,
    capacities: Sequence[int | float] = CAPACITIES,
    *,
    split: str = "7/10",
    max_tokens: int | None = 2000,
    seed: int = 0,
    families: bool = True,
    jobs: int = 1,
    done: Callable[[str], None] = lambda name: None,
) -> list[SuiteRow]:
    """Play traces, and the synthetic :data:`moecache.lab.families.FAMILIES`.

    Parameters
    ----------
    paths : sequence of path
        Of traces.
    policies, capacities, split, max_tokens
        As of :func:`moecache.lab.replay`.
    seed : int
        Of the synthetic traces and of the intervals.
    families : bool
        Whether synthetic traces are played.
    jobs : int
        Processes.
    done : callable (name)
        Called as traces are done.

    Returns
    -------
    list of SuiteRow
        Trace by trace, policy by policy.

    Raises
    ------
    PolicyError, CapacityError, TraceFormatError
    """
    names: list[str | Path] = [*paths, *(FAMILIES if families else ())]
    if not names:
        raise TraceFormatError("nothing to play: name a trace, or a folder of traces")
    tasks = [(name, tuple(policies), tuple(capacities), split, max_tokens, seed) for name in names]
    rows: list[SuiteRow] = []
    if jobs == 1:
        for task in tasks:
            rows += _play(task)
            done(str(task[0]))
        return rows
    with ProcessPoolExecutor(min(jobs, len(tasks)), get_context("spawn")) as pool:
        for task, some in zip(tasks, pool.map(_play, tasks), strict=True):
            rows += some
            done(str(task[0]))
    return rows


_Task = tuple[str | Path, tuple[str, ...], tuple[int | float, ...], str, int | None, int]


def _play(task: _Task) -> list[SuiteRow]:
    name, policies, capacities, split, max_tokens, seed = task
    family = FAMILIES[name] if isinstance(name, str) else None
    trace = family.trace(seed) if family is not None else read_trace(name)
    digest = f"seed {seed}" if isinstance(name, str) else hashlib.sha256(name.read_bytes()).hexdigest()
    capacities = tuple(dict.fromkeys(_at_least(trace, capacity) for capacity in capacities))
    asked = list(dict.fromkeys((*policies, "lru", "belady")))
    results = replay(trace, asked, capacities, split=split, max_tokens=max_tokens)
    at = {(r.policy, r.capacity_experts): r for r in results}
    return [
        _row(
            r,
            at["lru", r.capacity_experts],
            at["belady", r.capacity_experts],
            split,
            digest,
            seed,
            None if family is None else family.optimum,
        )
        for r in results
        if r.policy in policies
    ]


def _at_least(trace: Trace, capacity: int | float) -> int:
    # Enough for one token in a layer; a small model's tenth may be less.
    total = sum(trace.num_experts)
    slots = int(capacity * total + 1e-9) if isinstance(capacity, float) else capacity
    return max(slots, trace.top_k)


def _row(
    r: Result,
    lru: Result,
    belady: Result,
    split: str,
    digest: str,
    seed: int,
    optimum: Callable[[int], float] | None,
) -> SuiteRow:
    demands = np.array(r.request_demands, float)
    hits, least, most = (np.array(x.request_hits, float) for x in (r, lru, belady))
    drawn = np.random.default_rng(seed).integers(0, len(demands), (_RESAMPLES, len(demands)))
    rate = np.quantile(hits[drawn].sum(1) / np.maximum(demands[drawn].sum(1), 1), (0.025, 0.975))
    gap = (most - least)[drawn].sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        closed = (hits - least)[drawn].sum(1) / gap
    low, high = (float(x) for x in np.quantile(closed, (0.025, 0.975))) if (gap > 0).all() else (None, None)
    return SuiteRow(
        trace=r.trace,
        policy=r.policy,
        split=split,
        digest=digest,
        capacity=r.capacity_experts,
        fraction=r.fraction,
        tokens=r.tokens,
        requests=len(demands),
        demands=r.demands,
        hits=r.hits,
        hit_rate=r.hit_rate,
        hit_rate_low=float(rate[0]),
        hit_rate_high=float(rate[1]),
        gap_closed=r.gap_closed,
        gap_closed_low=low,
        gap_closed_high=high,
        optimum=None if optimum is None else optimum(r.capacity_experts),
        seed=seed,
    )
