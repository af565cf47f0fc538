"""Short synthetic traces with something to learn, a cache that learns from them, and the process that fits for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cache_helpers import make_bank

from moecache import ExpertCache, Request
from moecache.lab import Trace
from moecache.lab.fit import Settings

RAGGED = (5, 3, 6)


def follows(
    requests: int = 12, tokens: int = 150, num_experts: tuple[int, ...] = RAGGED, k: int = 2, seed: int = 0
) -> Trace:
    """Requests with something to learn: the subject of a stretch of tokens, and the layer before, say which experts come."""
    random = np.random.default_rng(seed)
    subjects = [random.dirichlet(np.full(n, 0.3), 3) for n in num_experts]
    experts, request = [], []
    for r in range(requests):
        length = int(tokens * random.uniform(0.5, 1.5))
        subject = np.repeat(random.integers(0, 3, length // 10 + 1), 10)[:length]
        for t in range(length):
            row, shift = [], 0
            for layer, n in enumerate(num_experts):
                chance = np.roll(subjects[layer][subject[t]], shift) + 0.02
                row.append(random.choice(n, min(k, n), False, chance / chance.sum()))
                shift = int(row[-1][0])
            experts.append(row)
            request.append(r)
    array = np.array(experts, np.int16)
    array[random.random(array.shape) < 0.02] = -1
    return Trace("made", array, np.array(request, np.int32), np.ones(len(request), np.uint8), num_experts)


SMALL = Settings(rank=16, distances=2, epochs=3, learning_rate=2e-2)

ENOUGH = 12  # requests of follows()


def make_cache(learn: Any, num_experts: tuple[int, ...] = RAGGED, **options: Any) -> ExpertCache:
    return ExpertCache(make_bank(num_experts), 8, learn=learn, top_k=2, **options)


def take(request: Request, trace: Trace, row: int) -> None:
    for layer in range(trace.layers):
        with request.route(layer, torch.from_numpy(trace.experts[row, layer][None].astype(np.int64))):
            pass


def serve(cache: ExpertCache, trace: Trace, numbers: range) -> int:
    """Play whole requests; returns their tokens."""
    rows = 0
    for number in numbers:
        with cache.request() as request:
            for row in np.flatnonzero(trace.request == number).tolist():
                take(request, trace, row)
                rows += 1
    return rows


def serve_until(cache: ExpertCache, done: Callable[[], bool]) -> None:
    """Requests that route nothing, until something has happened."""
    deadline = time.monotonic() + 240
    while not done():
        assert time.monotonic() < deadline, (cache.stats(), sorted(cache._learner.folder.iterdir()))
        cache.request().close()
        time.sleep(0.05)


def process_of(cache: ExpertCache) -> int:
    assert cache._learner is not None
    assert cache._learner._fit._process is not None, "no fit is under way"
    return cache._learner._fit._process.pid


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def names(folder: Path) -> set[str]:
    return {path.name.split("-")[0] for path in folder.iterdir()}
