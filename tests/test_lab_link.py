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


def test_what_is_moved_is_needed_or_wasted_and_waste_is_bounded() -> None:
    # Hints that are wrong three times out of four, sure of themselves: the bound holds all the same.
    trace = cycle(600)
    random = np.random.default_rng(0)
    hints = np.zeros((600, 4, 16), np.float32)
    right = random.random((600, 4)) < 0.25
    named = np.where(right, trace.experts[:, :, 0], random.integers(0, 16, (600, 4)))
    np.put_along_axis(hints, named[:, :, None], 1.0, 2)
    nbytes = 1 << 19
    wasted = {}
    for share in (0.0, 0.1, 0.5):
        result = replay_timed(trace, ["lru"], [8], SLOW, expert_nbytes=nbytes, hints=hints, prefetch_waste=share)[0]
        needed = result.bytes_demand + result.bytes_prefetch - result.bytes_wasted
        assert needed == result.demands * nbytes  # nothing is used twice: each use was moved once, ahead or not
        assert 0 <= result.bytes_wasted <= share * needed + 40 * nbytes
        wasted[share] = result.bytes_wasted
    assert wasted[0.0] < wasted[0.5]


def test_a_link_without_idle_time_is_left_alone() -> None:
    hints = np.full((200, 4, 16), 0.5, np.float32)
    busy = Profile("busy", rate=1e8, latency_s=0.0, chunk_nbytes=1 << 20, layer_s=1e-5, pass_s=0.0)
    result = replay_timed(cycle(), ["expected-next-use"], [8], busy, expert_nbytes=1 << 20, hints=hints)[0]
    assert result.seconds_without is not None
    assert result.seconds <= 1.002 * result.seconds_without


def test_prefetching_begins_layers_ahead_where_a_copy_takes_longer_than_a_layer() -> None:
    # A copy takes two and a half layers. Told one layer ahead it comes late; told a token ahead it is in time.
    trace = cycle(200, layers=8)
    hints = np.zeros((200, 8, 16), np.float32)
    rare = np.arange(8) == 7  # only the last layer's expert is known, and only it is missing in the end
    np.put_along_axis(
        hints, trace.experts.astype(np.int64), np.where(rare[None, :, None], 1.0, 0.0).astype(np.float32), 2
    )
    result = replay_timed(trace, ["lru"], [16], SLOW, expert_nbytes=2_500_000, hints=hints)[0]
    assert result.prefetch_useful > 100
    assert result.seconds_without is not None
    assert result.seconds < result.seconds_without


def test_the_floor_is_what_belady_misses() -> None:
    trace = skewed(11, tokens=100)
    nbytes = 1 << 20
    belady = replay(trace, ["belady"], [9])[0]
    timed = replay_timed(trace, ["lru", "belady"], [9], SLOW, expert_nbytes=nbytes)
    for result in timed:
        assert result.floor_s == pytest.approx(belady.misses * nbytes / SLOW.rate)
        assert result.seconds >= result.floor_s
    assert timed[1].seconds_without is None


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
