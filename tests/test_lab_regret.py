"""The rules that weigh counts never do worse than recency alone, whatever is routed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moecache.lab import Trace, read_trace, replay

TRACES = Path(os.environ.get("MOECACHE_TRACES", Path(__file__).parent.parent.parent / "shared" / "traces"))
TINY = Path(__file__).parent.parent / "examples" / "tiny_moe"
LAYERS, EXPERTS, TOP_K = 6, 24, 3
ONE_TOKEN = TOP_K / EXPERTS
# Worse than LRU by at most so much of the demands.
REGRET = 0.005


def made(experts: np.ndarray, request: np.ndarray | None = None, num_experts: int = EXPERTS) -> Trace:
    tokens, layers, _ = experts.shape
    request = np.zeros(tokens, np.int32) if request is None else request.astype(np.int32)
    return Trace("made", experts.astype(np.int16), request, np.ones(tokens, np.uint8), (num_experts,) * layers)


def chosen(chance: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The k of every layer, without repetition, by unequal chances ``[L, E]`` (the largest of perturbed logarithms)."""
    return np.argsort(-np.log(chance + 1e-30) - random.gumbel(size=chance.shape), axis=-1)[:, :TOP_K]


def uniform(random: np.random.Generator) -> Trace:
    return made(np.array([chosen(np.ones((LAYERS, EXPERTS)), random) for _ in range(1500)]))


def scan(random: np.random.Generator) -> Trace:
    """All experts in turn."""
    steps = np.arange(1200)[:, None, None] * TOP_K + np.arange(TOP_K)
    return made(np.broadcast_to(steps % EXPERTS, (1200, LAYERS, TOP_K)))


def sliding_window(random: np.random.Generator) -> Trace:
    """Experts come into use, stay for a while and never return before all others had their turn."""
    window = np.arange(1500)[:, None, None] // 6 + np.array([random.permutation(9)[:TOP_K] for _ in range(1500)])[:, None]
    return made(np.broadcast_to(window % EXPERTS, (1500, LAYERS, TOP_K)))


def topics(random: np.random.Generator, tokens: int = 50, requests: int = 1) -> Trace:
    """Other favourites every `tokens` tokens."""
    rows = []
    for t in range(1500):
        if t % tokens == 0:
            chance = random.dirichlet(np.full(EXPERTS, 0.25), LAYERS)
        rows.append(chosen(chance, random))
    return made(np.array(rows), np.arange(1500) * requests // 1500)


def sticky(random: np.random.Generator, stay: float = 0.85) -> Trace:
    """Every expert of a token is one of the last token's, or any: recency is all there is to know."""
    rows = [chosen(np.ones((LAYERS, EXPERTS)), random)]
    while len(rows) < 1500:
        chance = np.full((LAYERS, EXPERTS), (1 - stay) / EXPERTS)
        np.put_along_axis(chance, rows[-1], 50 * stay, axis=1)
        rows.append(np.where(random.random((LAYERS, 1)) < stay, rows[-1], chosen(chance, random)))
    return made(np.array(rows))


def by_recency(random: np.random.Generator) -> Trace:
    """The next experts by their place in the order of last use: what LRU is the best rule for."""
    rows = []
    order = np.array([random.permutation(EXPERTS) for _ in range(LAYERS)])
    weight = 1 / (1 + np.arange(EXPERTS)) ** 1.2
    for _ in range(1500):
        places = chosen(np.broadcast_to(weight, (LAYERS, EXPERTS)), random)
        rows.append(np.take_along_axis(order, places, 1))
        for layer in range(LAYERS):
            rest = np.delete(order[layer], places[layer])
            order[layer] = np.concatenate([rows[-1][layer], rest])
    return made(np.array(rows))


def misleading_history(random: np.random.Generator) -> Trace:
    """Ten requests alike, then others that share nothing with them."""
    first, then = random.dirichlet(np.full(EXPERTS, 0.15), (2, LAYERS))
    return made(
        np.array([chosen(first if t < 1000 else then[:, ::-1], random) for t in range(1500)]), np.arange(1500) // 100
    )


def always_the_same(random: np.random.Generator) -> Trace:
    return made(np.tile(np.arange(TOP_K), (600, LAYERS, 1)))


def two_habits(random: np.random.Generator) -> Trace:
    """Two sets of experts that take turns every third token."""
    habit = np.arange(1200)[:, None, None] // 3 % 2
    return made(np.broadcast_to(habit * TOP_K + np.arange(TOP_K), (1200, LAYERS, TOP_K)))


def prompts(random: np.random.Generator) -> Trace:
    """Passes of many tokens between those of one."""
    trace = topics(random, tokens=75, requests=20)
    place = np.arange(1500) % 75
    forward = np.cumsum((place == 0) | (place >= 20)) - 1
    return replace(trace, forward=forward.astype(np.int32), decode=(place >= 20).astype(np.uint8))


MADE = [
    uniform, scan, sliding_window, topics, sticky, by_recency, misleading_history, always_the_same, two_habits, prompts,
]  # fmt: skip


def check_regret(trace: Trace, capacities: list[float], policy: str, **options: object) -> None:
    lru, ours = (replay(trace, [name], capacities, **options) for name in ("lru", policy))  # type: ignore[arg-type]
    worse = {
        f"{n.capacity_experts} slots": (round(100 * a.hit_rate, 2), round(100 * n.hit_rate, 2))
        for a, n in zip(lru, ours, strict=True)
        if n.hit_rate < a.hit_rate - REGRET
    }
    assert not worse


@pytest.mark.parametrize("policy", ["expected-next-use", "counts"])
@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_made_traces(make: Callable[[np.random.Generator], Trace], concurrency: int, policy: str) -> None:
    trace = make(np.random.default_rng(5))
    if concurrency == 2:
        if trace.requests == 1:
            trace = replace(trace, request=(np.arange(trace.tokens) * 2 // trace.tokens).astype(np.int32))
        if (np.bincount(trace.forward) > 1).any():
            pytest.skip("prompts in one pass are played one after another")
    capacities = [ONE_TOKEN / 2, 0.9 * ONE_TOKEN, 1.2 * ONE_TOKEN, 0.25, 0.4, 0.6, 0.85]
    check_regret(trace, capacities, policy, concurrency=concurrency)
