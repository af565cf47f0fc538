"""The native replay against plain Python, against another simulator, and against figures measured elsewhere."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from moecache import Fingerprint, History
from moecache.errors import CapacityError, PolicyError, TraceFormatError
from moecache.lab import REPLAY_NAMES, Trace, read_trace, replay, schedule
from moecache.lab._replay import Replay
from moecache.lab.offline import belady_hits, reuse_distances, sequential_hits
from moecache.lab.replay import make_core, step_demands
from moecache.lab.schedule import split_requests
from moecache.policy import resolve, score

TRACES = Path(os.environ.get("MOECACHE_TRACES", Path(__file__).parent.parent.parent / "shared" / "traces"))


def shared(name: str) -> Trace:
    path = TRACES / f"{name}.safetensors"
    if not path.exists():
        pytest.skip(f"no trace {path}; set MOECACHE_TRACES to the folder that holds it")
    return read_trace(path)


def made(experts: np.ndarray, num_experts: int, request: np.ndarray | None = None) -> Trace:
    tokens, layers, _ = experts.shape
    request = np.zeros(tokens, np.int32) if request is None else request.astype(np.int32)
    return Trace("made", experts.astype(np.int16), request, np.ones(tokens, np.uint8), (num_experts,) * layers)


def skewed(seed: int, tokens: int = 60, layers: int = 3, num_experts: int = 8, k: int = 2) -> Trace:
    random = np.random.default_rng(seed)
    chance = random.dirichlet(np.full(num_experts, 0.5), layers) * 0.9 + 0.1 / num_experts
    experts = np.array(
        [[random.choice(num_experts, k, False, chance[layer]) for layer in range(layers)] for _ in range(tokens)]
    )
    return made(experts, num_experts, np.arange(tokens) * 4 // tokens)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    num_experts, layers, tokens = draw(st.integers(2, 6)), draw(st.integers(1, 3)), draw(st.integers(1, 25))
    k = draw(st.integers(1, min(3, num_experts)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    experts = np.array([[random.permutation(num_experts)[:k] for _ in range(layers)] for _ in range(tokens)])
    if draw(st.booleans()):
        experts[random.random(experts.shape) < 0.1] = -1
    cuts = np.sort(random.integers(0, 3, tokens))
    return made(experts, num_experts, np.unique(cuts, return_inverse=True)[1])


@pytest.mark.parametrize("policy", ["lru", "lfu", "belady"])
@settings(max_examples=40, deadline=None)
@given(trace=traces(), spare=st.integers(0, 12))
def test_plain_python_agrees(policy: str, trace: Trace, spare: int) -> None:
    slots = min(trace.top_k + spare, sum(trace.num_experts))
    plan = schedule(trace)
    core = make_core(trace, slots, resolve(policy, extra=("belady",)), History(Fingerprint(trace.num_experts, 0, "")))
    tables = np.full((1, plan.passes * trace.layers, slots), -2, np.int32)
    Replay([core], *plan.arrays(), plan.next_use, tables).run(0, plan.passes)
    hits, expected = getattr(reference, policy)(reference.steps_of(trace.experts), slots)
    assert core.hits == hits
    found = tables[0][(tables[0] != -2).all(1)]
    expected = [
        [-1 if occupant is None else occupant[0] * trace.num_experts[0] + occupant[1] for occupant in row]
        for row in expected
    ]
    np.testing.assert_array_equal(found, np.array(expected, np.int32).reshape(found.shape))


@settings(max_examples=25, deadline=None)
@given(trace=traces(), spare=st.integers(0, 12))
def test_nothing_beats_belady(trace: Trace, spare: int) -> None:
    slots = min(trace.top_k + spare, sum(trace.num_experts))
    results = {r.policy: r for r in replay(trace, REPLAY_NAMES, [slots])}
    best = results["belady"].hits
    assert all(r.hits <= best for name, r in results.items() if name not in ("belady-bypass", "sequential-lru"))
    assert best <= results["belady-bypass"].hits
    whole = replay(trace, REPLAY_NAMES, [1.0])
    assert {r.hits for r in whole} == {whole[0].demands - whole[0].misses_cold}


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), spare=st.integers(0, 4))
def test_nothing_beats_belady_with_prompts_in_one_pass(seed: int, spare: int) -> None:
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 4, 10)
    experts = np.array([[random.permutation(8)[:2] for _ in range(2)] for _ in range(sizes.sum())])
    trace = made(experts, 8)
    trace = replace(
        trace,
        forward=np.repeat(np.arange(10), sizes).astype(np.int32),
        decode=np.repeat(sizes == 1, sizes).astype(np.uint8),
    )
    slots = int(step_demands(schedule(trace)).max()) + spare
    results = {r.policy: r.hits for r in replay(trace, REPLAY_NAMES, [slots])}
    assert (
        max(hits for name, hits in results.items() if name not in ("belady-bypass", "sequential-lru"))
        == results["belady"]
    )
    assert results["belady-bypass"] >= results["belady"]


@settings(max_examples=25, deadline=None)
@given(trace=traces())
def test_belady_is_the_best_there_is(trace: Trace) -> None:
    steps = reference.steps_of(trace.experts)[:12]
    slots = max([trace.top_k, *(len(step) for step in steps)]) + 1
    assert reference.belady(steps, slots)[0] == reference.best_possible(steps, slots)


def test_belady_kernel_agrees_with_the_core() -> None:
    trace = skewed(3, tokens=120)
    plan = schedule(trace)
    for result in replay(trace, ["belady"], [4, 9, 15]):
        hits = belady_hits(plan.experts, plan.start, plan.next_use, 8, result.capacity_experts, False)
        assert tuple(hits.sum(0)) == result.layer_hits
    assert tuple(step_demands(plan).sum(0)) == result.layer_demands


@pytest.mark.parametrize("rule", ["LRU", "FIFO", "LFU"])
def test_sequential_rules_agree_with_libcachesim(rule: str) -> None:
    libcachesim = pytest.importorskip("libcachesim", reason="no wheel of libcachesim for this machine")
    trace = skewed(11, tokens=400, num_experts=24, k=4)
    keys = (trace.experts.astype(np.int64) + 24 * np.arange(3)[None, :, None]).reshape(-1)
    for capacity in (6, 17, 40):
        cache = getattr(libcachesim, rule)(cache_size=capacity)
        hits = 0
        for now, key in enumerate(keys.tolist()):
            request = libcachesim.Request()
            request.obj_id, request.obj_size, request.clock_time = key + 1, 1, now
            hits += cache.get(request)
        assert sequential_hits(keys, 72, capacity, ("LRU", "FIFO", "LFU").index(rule)) == hits


def test_reuse_distances_give_the_lru_curve() -> None:
    # With one expert a step the two notions of LRU are the same.
    trace = skewed(5, tokens=300, k=1)
    plan = schedule(trace)
    histogram = reuse_distances(plan.experts, plan.start, 8)
    for result in replay(trace, ["lru"], [1, 3, 8, 20]):
        assert histogram[: result.capacity_experts].sum() == result.hits
    assert histogram.sum() == result.demands


@pytest.mark.parametrize(
    ("trace", "capacities"),
    [(skewed(2, tokens=150), [2, 5, 9, 14, 24]), (skewed(2, 150, 6, 48, 4), [40, 70, 140, 270])],
    ids=["few slots", "many"],
)
def test_capacities_in_one_pass_are_as_alone(trace: Trace, capacities: list[int]) -> None:
    for policy in ("expected-next-use", "moe-infinity", "lfu"):
        together = replay(trace, [policy], capacities)
        alone = [replay(trace, [policy], [n])[0] for n in capacities]
        assert together == alone


@score
def as_lru(age: float) -> float:
    return age


def test_a_score_of_ones_own() -> None:
    trace = skewed(8, tokens=200)
    lru, own = (replay(trace, [policy], [5, 12]) for policy in ("lru", as_lru))  # type: ignore[list-item]
    assert [r.hits for r in own] == [r.hits for r in lru]
    assert own[0].policy == "as_lru"


def test_concurrency_changes_the_order_not_the_demands() -> None:
    trace = skewed(4, tokens=80)
    plan = schedule(trace, concurrency=2)
    assert plan.request.tolist()[:6] == [0, 1, 0, 1, 0, 1]
    assert plan.last.sum() == trace.requests
    one, two = replay(trace, ["lru"], [8])[0], replay(trace, ["lru"], [8], concurrency=2)[0]
    assert one.layer_demands == two.layer_demands
    assert one.hits != two.hits


def test_split_and_max_tokens() -> None:
    trace = skewed(1, tokens=40)
    known, played = split_requests(trace, "3/4")
    assert known.tolist() == [0, 1, 2]
    assert played.tolist() == [3]
    assert schedule(trace, played).origin.tolist() == [3]
    assert schedule(trace, max_tokens=5).tokens == 10
    assert schedule(trace, max_tokens=10).tokens == 20
    with pytest.raises(TraceFormatError, match="7/10"):
        split_requests(trace, "70%")
    with pytest.raises(TraceFormatError, match="none of the 4 requests"):
        split_requests(trace, "9/10")


def test_the_history_of_a_split_is_used_and_not_changed() -> None:
    trace = skewed(6, tokens=120)
    history = History(trace.fingerprint, 10)
    first = replay(trace, ["moe-infinity"], [6], split="1/2", history=history)
    assert len(history) == 0
    assert first == replay(trace, ["moe-infinity"], [6], split="1/2")


def test_refused() -> None:
    trace = skewed(0)
    with pytest.raises(PolicyError, match="did you mean belady"):
        replay(trace, ["beladdy"], [4])
    with pytest.raises(CapacityError, match="out of range"):
        replay(trace, ["lru"], [1.5])
    with pytest.raises(CapacityError, match="needs 2 in a layer"):
        replay(trace, ["lru"], [1])


@pytest.mark.failure("63")
def test_figures_of_deepseek_v2_lite() -> None:
    trace = shared("deepseek-v2-lite")
    results = replay(trace, ["lru", "belady", "moe-infinity"], [0.2, 0.3, 0.5], split="7/10", history_capacity=120)
    assert results[0].tokens == 6400
    assert len(results[0].request_hits) == 40
    rates = [100 * r.hit_rate for r in results]
    assert rates[:3] == pytest.approx([39.6, 56.1, 75.9], abs=0.5)
    assert rates[3:6] == pytest.approx([69.0, 79.1, 90.5], abs=0.5)
    assert rates[6:] == pytest.approx([39.5, 51.5, 70.6], abs=2.0)


@pytest.mark.failure("63")
def test_counts_beat_lru_on_a_real_trace() -> None:
    results = replay(shared("gpt-oss-20b"), ["lru", "expected-next-use"], [0.1, 0.2, 0.3], max_tokens=1500)
    for lru, ours in zip(results[:3], results[3:], strict=True):
        assert ours.hit_rate > lru.hit_rate + 0.02
