"""The link model and recall: the same decisions, with a clock or a judge beside them."""

from __future__ import annotations

import numpy as np
import pytest
from test_lab_replay import skewed

from moecache.errors import PolicyError
from moecache.lab import Trace, replay
from moecache.lab.link import MODELS, PROFILES, Profile, model_for, profile_from, replay_timed
from moecache.lab.recall import recall

POLICIES = ["lru", "moe-infinity", "expected-next-use", "belady"]
SLOW = Profile("slow", rate=1e9, latency_s=0.0, chunk_nbytes=1 << 16, layer_s=1e-3, pass_s=0.0)


@pytest.mark.parametrize("nbytes", [1000, 1 << 20])
def test_the_clock_changes_no_decision(nbytes: int) -> None:
    trace = skewed(9, tokens=150)
    plain = replay(trace, POLICIES, [6, 12])
    timed = replay_timed(trace, POLICIES, [6, 12], PROFILES["nvme"], expert_nbytes=nbytes, prefetch=False)
    assert [(r.policy, r.demands, r.hits) for r in plain] == [(r.policy, r.demands, r.hits) for r in timed]
    assert all(r.bytes_demand == (r.demands - r.hits) * nbytes and r.bytes_prefetch == 0 for r in timed)


def test_time_adds_up() -> None:
    # Every expert is used once: all misses, nothing to overlap with but the experts already computed.
    experts = np.arange(8, dtype=np.int16).reshape(4, 2, 1)
    trace = Trace("once", experts, np.zeros(4, np.int32), np.ones(4, np.uint8), (8, 8))
    nbytes = 1 << 20
    result = replay_timed(trace, ["lru"], [2], SLOW, expert_nbytes=nbytes, prefetch=False)[0]
    move, compute = nbytes / SLOW.rate, nbytes / SLOW.memory_rate
    assert result.seconds == pytest.approx(8 * (SLOW.layer_s + move + compute))
    assert result.stall_s == pytest.approx(8 * move)
    assert result.link_idle == pytest.approx(1 - 8 * move / result.seconds)
    assert result.resident_tokens_per_s == pytest.approx(4 / (8 * (SLOW.layer_s + compute)))


def cycle(tokens: int = 200, layers: int = 4) -> Trace:
    # Which expert follows is sure, and none is used again soon: only fetching ahead can help.
    experts = np.array([[[(t * 3 + layer) % 16] for layer in range(layers)] for t in range(tokens)], np.int16)
    return Trace("cycle", experts, np.zeros(tokens, np.int32), np.ones(tokens, np.uint8), (16,) * layers)


def test_prefetching_in_time_saves_the_stall() -> None:
    nbytes = 1 << 19
    without = replay_timed(cycle(), ["expected-next-use"], [8], SLOW, expert_nbytes=nbytes, prefetch=False)[0]
    ahead = replay_timed(cycle(), ["expected-next-use"], [8], SLOW, expert_nbytes=nbytes)[0]
    assert ahead.prefetch_useful > 100
    assert ahead.prefetch_late == 0
    assert ahead.stall_s < 0.6 * without.stall_s
    assert ahead.tokens_per_s > without.tokens_per_s


def test_a_demand_waits_for_one_chunk_of_a_prefetch_at_most() -> None:
    slow = replay_timed(cycle(), ["expected-next-use"], [8], Profile("s", 1e8, 0.0, 1 << 14), expert_nbytes=1 << 20)[0]
    move = (1 << 20) / 1e8
    assert slow.prefetch_late > 0
    assert slow.stall_s <= (slow.demands - slow.hits) * (move + (1 << 14) / 1e8)


def test_profiles_and_models() -> None:
    assert {"pcie4-24", "pcie4-32", "pcie5", "nvme"} <= set(PROFILES)
    assert all(profile.source for profile in PROFILES.values())
    assert MODELS["mixtral-8x7b"].expert_nbytes == 352_321_536
    assert MODELS["qwen3-30b-a3b"].expert_nbytes == 9_437_184
    assert profile_from("24e9,5e-6").latency_s == 5e-6
    with pytest.raises(PolicyError, match="nvme"):
        profile_from("usb")
    with pytest.raises(PolicyError, match="expert_nbytes"):
        replay_timed(skewed(0), ["lru"], [4])
    assert model_for(skewed(0)) is None


def test_recall_of_a_sure_thing() -> None:
    results = {(r.distance, r.predictor): r for r in recall(cycle(400), split=None)}
    for distance in (1, 2):
        assert results[distance, "transitions"].recall[0] > 0.9
    assert results[1, "forecast"].recall[2] > 0.9
    assert results[0, "prior"].recall[0] < 0.3
    assert (0, "transitions") not in results
    assert (4, "transitions") not in results  # no layer lies four ahead of the first of four


def test_recall_counts_what_was_used() -> None:
    trace = skewed(10, tokens=100)
    by_distance = {r.distance: r for r in recall(trace, distances=(0, 1, 2))}
    assert by_distance[1].used == 100 * 2 * 2
    assert by_distance[2].used == 100 * 1 * 2
    assert by_distance[0].used == (100 - 4) * 3 * 2
    for result in recall(trace, distances=(0, 1)):
        low, middle, high = result.recall
        assert 0 <= low <= middle <= high <= 1
        assert sum(n for n, _, _ in result.reliability) * trace.top_k == result.used * trace.num_experts[0]
