"""The rules that weigh counts never do worse than recency alone, whatever is routed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_lab_reality import model_path  # noqa: F401  (a fixture)

from moecache.lab import Trace, read_trace, replay

TRACES = Path(os.environ.get("MOECACHE_TRACES", Path(__file__).parent.parent.parent / "shared" / "traces"))
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
    window = (
        np.arange(1500)[:, None, None] // 6 + np.array([random.permutation(9)[:TOP_K] for _ in range(1500)])[:, None]
    )
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


def check_regret(trace: Trace, capacities: list[float], allowed: float = REGRET, **options: Any) -> None:
    results = replay(trace, ["lru", "expected-next-use", "counts"], capacities, **options)
    lru = {n.capacity_experts: n.hit_rate for n in results if n.policy == "lru"}
    worse = [
        f"{n.policy}, {n.capacity_experts} slots: {n.hit_rate:.2%} instead of {lru[n.capacity_experts]:.2%}"
        for n in results
        if n.hit_rate < lru[n.capacity_experts] - allowed
    ]
    assert not worse


CAPACITIES = [ONE_TOKEN / 2, 0.9 * ONE_TOKEN, 1.2 * ONE_TOKEN, 0.25, 0.4, 0.6, 0.85]


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_one_request_after_the_other(make: Callable[[np.random.Generator], Trace]) -> None:
    check_regret(make(np.random.default_rng(5)), CAPACITIES)


@pytest.mark.parametrize("make", MADE[:-1], ids=lambda make: make.__name__)
def test_two_interleaved_requests(make: Callable[[np.random.Generator], Trace]) -> None:
    trace = make(np.random.default_rng(5))
    if trace.requests == 1:
        trace = replace(trace, request=(np.arange(trace.tokens) * 2 // trace.tokens).astype(np.int32))
    # Known: where the order of last use is all there is to know, and the slots are exactly those of the last two tokens, the
    # first thousand tokens of learning that cost more than the bound.
    check_regret(trace, CAPACITIES, 0.04 if make is by_recency else REGRET, concurrency=2)


@pytest.mark.failure("63")
@pytest.mark.parametrize("split", [None, "7/10"])
@pytest.mark.parametrize("name", ["deepseek-v2-lite", "gpt-oss-20b"])
def test_real_traces(name: str, split: str | None) -> None:
    path = TRACES / f"{name}.safetensors"
    if not path.exists():
        pytest.skip(f"no trace {path}; set MOECACHE_TRACES to the folder that holds it")
    trace = read_trace(path)
    trace = first_requests(trace, 20)
    check_regret(trace, [0.05, 0.1, 0.2, 0.3, 0.5, 0.8], max_tokens=700, split=split)
    check_regret(trace, [0.1, 0.3, 0.6], max_tokens=700, concurrency=2)


def first_requests(trace: Trace, n: int) -> Trace:
    """The first requests of a trace, at most 100 tokens of each."""
    place = np.arange(trace.tokens) - np.concatenate([[0], np.cumsum(np.bincount(trace.request))])[trace.request]
    kept = (trace.request < n) & (place < 100)
    return Trace(trace.name, trace.experts[kept], trace.request[kept], trace.decode[kept], trace.num_experts)


def test_the_tiny_model(model_path: Path, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("transformers")
    import torch

    from moecache import detach, load

    path = tmp_path / "tiny.safetensors"
    model = load(model_path, capacity=0.5)
    torch.manual_seed(0)
    with model.moecache.record(path), torch.inference_mode():
        for prompt in (b"def main(argv):", b"Once upon a time", b"<html>\n<head>", b"#include <stdio.h>"):
            model.generate(torch.tensor([list(prompt)]), max_new_tokens=60, do_sample=True, pad_token_id=258)
    detach(model)
    check_regret(read_trace(path), [0.1, 0.15, 0.2, 0.3, 0.5, 0.8])
