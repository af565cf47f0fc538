"""Eviction policies of others: against another simulator, against figures of the papers, and against plain Python by steps."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from test_lab_replay import made, skewed

from moecache.errors import PolicyError
from moecache.lab import REPLAY_NAMES, Trace, replay
from moecache.lab.rivals import RIVALS, play_rival
from moecache.lab.schedule import schedule


def sequence(kind: str, uses: int = 4000, keys: int = 100) -> Trace:
    random = np.random.default_rng(0)
    share = 1 / np.arange(1, keys + 1)
    drawn = random.choice(keys, uses, p=share / share.sum())
    if kind == "loop":
        drawn = np.where(random.random(uses) < 0.5, random.integers(0, keys // 4, uses), np.arange(uses) // 3 % keys)
    return made(drawn.reshape(-1, 1, 1), keys)


def simulated(name: str, keys: list[int], capacity: int, **options: float) -> int:
    libcachesim = pytest.importorskip("libcachesim", reason="no wheel of libcachesim for this machine")
    cache, hits = getattr(libcachesim, name)(cache_size=capacity, **options), 0
    for now, key in enumerate(keys):
        request = libcachesim.Request()
        request.obj_id, request.obj_size, request.clock_time = key + 1, 1, now
        hits += cache.get(request)
    return hits


@pytest.mark.parametrize("kind", ["zipf", "loop"])
@pytest.mark.parametrize(
    ("rival", "theirs", "within"),
    # GDSF is LFUDA where all are of one size and cost; the two break ties otherwise. Their W-TinyLFU has a sketch, and a wider window.
    [
        ("sequential-lru", "LRU", 0),
        ("slru", "SLRU", 0),
        ("arc", "ARC", 0),
        ("s3-fifo", "S3FIFO", 0),
        ("lfuda", "GDSF", 60),
        ("w-tinylfu", "WTinyLFU", 140),
    ],
)
def test_one_expert_a_step_is_what_libcachesim_does(kind: str, rival: str, theirs: str, within: int) -> None:
    trace = sequence(kind)
    keys = trace.experts.reshape(-1).tolist()
    plan = schedule(trace)
    for capacity in (20, 40, 60, 80):
        played = play_rival(rival, plan, capacity)
        options = {"window_size": 0.1} if rival == "w-tinylfu" else {}
        assert abs(int(played.hits.sum()) - simulated(theirs, keys, capacity, **options)) <= within
        assert played.evictions > 0


def test_lru_2_finds_the_hot_pages_of_the_paper_s_two_pools() -> None:
    # E. O'Neil, P. O'Neil, G. Weikum, SIGMOD 1993, table 4.1: a reference to one of 100 pages, then to one of 10,000; hit ratios after
    # 1,000 references. LRU 0.22 and LRU-2 0.459 with 100 buffers.
    random = np.random.default_rng(1)
    uses = 12_000
    drawn = np.where(np.arange(uses) % 2, 100 + random.integers(0, 10_000, uses), random.integers(0, 100, uses))
    plan = schedule(made(drawn.reshape(-1, 1, 1), 10_100))
    rates = [play_rival(name, plan, 100).hits[1000:].mean() for name in ("sequential-lru", "lru-2")]
    np.testing.assert_allclose(rates, [0.22, 0.459], atol=0.015)


def plain(rival: str, steps: list[tuple[int, list[int]]], slots: int) -> list[int]:
    """Hits of each step of the rules that rank what is there, in dictionaries."""
    held: OrderedDict[tuple[int, int], int] = OrderedDict()  # key: forward pass of its last use; longest unused first
    uses: dict[tuple[int, int], int] = {}
    used_at: dict[tuple[int, int], int] = {}
    hits, layers = [], 1 + max(layer for layer, _ in steps)
    for now, (layer, experts) in enumerate(steps):
        keys = [(layer, e) for e in experts]
        hits.append(sum(key in held for key in keys))
        for key in sorted(keys, key=lambda key: key not in held):
            if key not in held and len(held) == slots:
                free = [other for other in held if other not in keys]
                if rival == "lfru":
                    victim = min(free, key=lambda other: uses[other] / (now - used_at[other]))
                else:
                    stale = [other for other in free if held[other] < now // layers]
                    passed = [other for other in stale if other[0] <= layer]
                    victim = (passed or stale or free)[0]
                del held[victim]
            uses[key], used_at[key] = uses.get(key, 0) + 1, now
            held[key] = now // layers
            held.move_to_end(key)
    return hits


@pytest.mark.parametrize("rival", ["lfru", "least-stale"])
def test_steps_of_several_experts_agree_with_plain_python(rival: str) -> None:
    trace = skewed(3, tokens=80, layers=4, num_experts=12, k=3)
    steps = [(layer, trace.experts[t, layer].tolist()) for t in range(80) for layer in range(4)]
    for slots in (6, 15, 30):
        played = play_rival(rival, schedule(trace), slots)
        assert played.hits.reshape(-1).tolist() == plain(rival, steps, slots)
        assert slots == 6 or played.hits.sum() > 0
        assert played.hits.sum() < played.demands.sum()


@pytest.mark.parametrize("rival", RIVALS)
def test_no_rival_beats_belady_nor_holds_more_than_it_may(rival: str) -> None:
    trace = skewed(5, tokens=200, layers=3, num_experts=16, k=3)
    capacities = [3, 9, 20, 47]
    mine = replay(trace, [rival], capacities, split="1/2")
    best = replay(trace, ["belady"], capacities, split="1/2")
    for one, belady in zip(mine, best, strict=True):
        assert (one.demands, one.misses_cold) == (belady.demands, belady.misses_cold)
        if rival != "sequential-lru":
            assert one.hits <= belady.hits
        assert one.misses - one.evictions <= one.capacity_experts
        assert sum(one.request_hits) == sum(one.layer_hits) == one.hits
    assert mine[-1].hits > mine[0].hits


def test_predictors_learn_from_the_history() -> None:
    # A loop that is longer than the cache: what comes next is always what was unused for longest.
    tokens = np.arange(400)
    trace = made((tokens % 16).reshape(-1, 1, 1), 16, tokens // 40)
    hits = {r.policy: r.hits for r in replay(trace, ["sequential-lru", "markov", "belady"], [15], split="1/2")}
    assert hits["markov"] > hits["sequential-lru"]
    alone = play_rival("markov", schedule(trace), 15)
    assert 0 < alone.hits.sum() < alone.demands.sum()
    hot = made(
        np.where(np.arange(300)[:, None, None] % 3 == 0, 0, np.arange(300)[:, None, None] % 29 + 1),
        30,
        np.arange(300) // 50,
    )
    pinned, lru = replay(hot, ["pinned-hot-10%", "sequential-lru"], [2], split="1/2")
    assert pinned.hits > lru.hits


def test_rivals_have_names_and_no_clock() -> None:
    assert set(RIVALS) <= set(REPLAY_NAMES)
    with pytest.raises(PolicyError, match="did you mean"):
        replay(skewed(0), ["s3-fif"], [8])
