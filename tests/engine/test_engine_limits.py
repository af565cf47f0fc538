"""Links around another: limited ones, and the faults that only some of them can have."""

from __future__ import annotations

from typing import Any

import pytest
from harness import order_of_completion, simple

from moecache._engine import FaultyLink, HostLink, ThrottledLink

pytestmark = pytest.mark.timeout(60)


def test_jitter_changes_neither_bytes_nor_order() -> None:
    link = ThrottledLink(HostLink(), 1e8, latency_s=1e-4, jitter_s=2e-3, seed=7)
    world = simple(12, 5000, 12, link=link, chunk_bytes=1000, window_bytes=20_000)
    with world.engine:
        jobs = world.fetch(*((source, source) for source in range(12)))
        assert order_of_completion(world, jobs) == list(range(12))
        assert all(world.holds(slot, slot) for slot in range(12))


def test_a_limited_link_measures_at_its_limit() -> None:
    """Not faster; how much slower is the machine's business."""
    world = simple(4, 500_000, 4, link=ThrottledLink(HostLink(), 1e8))
    with world.engine:
        world.wait_all(world.fetch(*((source, source) for source in range(4))))
        assert 0.0 < world.engine.link_rate <= 1.01e8


@pytest.mark.parametrize(
    "arguments",
    [
        {"bytes_per_s": 0.0},
        {"bytes_per_s": float("nan")},
        {"latency_s": -1.0},
        {"latency_s": float("nan")},
        {"jitter_s": float("inf")},
        {"jitter_s": -1e-9},
    ],
)
def test_invalid_rates_and_latencies_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="need bytes_per_s > 0"):
        ThrottledLink(HostLink(), **{"bytes_per_s": 1e9, **arguments})


def test_a_throttled_link_cannot_wrap_an_asynchronous_one() -> None:
    with pytest.raises(ValueError, match="synchronous inner link"):
        ThrottledLink(ThrottledLink(HostLink(), 1e9), 1e9)


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(ValueError, match="'end' is none of enter, begin, copy, landing"):
        FaultyLink(HostLink(), stage="end")
