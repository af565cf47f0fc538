"""Prefetches: when they are made, used, and not made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from core_helpers import make_core
from reference_core import call_route, run_step

from moecache.errors import LeaseError


def skewed(core: Any, tokens: int, seed: int = 0, late: bool = False) -> None:
    """Experts follow experts: layer l + 1 uses what layer l did, one further on."""
    rng = np.random.default_rng(seed)
    request = core.begin_request()
    layers, experts = core.layout.num_layers, int(core.store.layout.num_experts[0])
    for _ in range(tokens):
        e = int(rng.integers(experts))
        for layer in range(layers):
            step = call_route(core, request, layer, [[(e + layer) % experts]])
            prefetched = step.plan.prefetches.tolist()
            for _, slot, generation in step.plan.fetches.tolist() + ([] if late else prefetched):
                core.slots.complete[slot] = generation
            run_demanded(core, step)
            core.release(step)
    core.end_request(request)


def run_demanded(core: Any, step: Any) -> None:
    while step.done < step.unique:
        core.dispatcher.finish(step, core.dispatcher.next_ready(step))


@pytest.mark.failure("60")
@pytest.mark.parametrize("late", [False, True])
def test_a_predictable_trace_is_prefetched_and_the_prefetches_are_used(late: bool) -> None:
    core = make_core((8, 8, 8, 8), 8, policy="expected-next-use", prefetch=True, top_k=1)
    skewed(core, 300, late=late)
    n = core.counters()
    assert n["prefetch_issued"] > 100
    assert n["prefetch_late" if late else "prefetch_useful"] > 0.8 * n["prefetch_issued"]
    assert n["prefetch_useful" if late else "prefetch_late"] == 0
    assert n["prefetch_issued"] == n["prefetch_useful"] + n["prefetch_late"] + n["prefetch_wasted"]
    without = make_core((8, 8, 8, 8), 8, policy="expected-next-use", top_k=1)
    skewed(without, 300)
    assert without.counters()["prefetch_issued"] == 0
    if not late:
        assert core.hits > without.hits


@pytest.mark.failure("13")
def test_a_pool_below_one_token_prefetches_nothing() -> None:
    core = make_core((8, 8, 8, 8), 3, policy="expected-next-use", prefetch=True, top_k=1)
    skewed(core, 100)
    assert core.counters()["prefetch_issued"] == 0


@pytest.mark.failure("16")
def test_a_prefetch_does_not_evict_an_expert_that_is_needed_sooner() -> None:
    # Every layer uses expert 0 always; layer 1 is predicted to use a cold expert now and then, with all slots warm.
    core = make_core((4, 4), 2, policy="expected-next-use", prefetch=True, top_k=1)
    request = core.begin_request()
    for _ in range(100):
        for layer in (0, 1):
            step = call_route(core, request, layer, [[0]])
            run_step(core, step)
            core.release(step)
    hits = core.hits
    for _ in range(30):
        for layer in (0, 1):
            step = call_route(core, request, layer, [[0]])
            assert not set(step.plan.prefetches[:, 1].tolist()) & set(step.slot_list())
            run_step(core, step)
            core.release(step)
    assert core.hits == hits + 60


def test_a_lease_never_finishes_what_it_was_not_given() -> None:
    core = make_core((4,), 2)
    step = call_route(core, core.begin_request(), 0, [[0], [1], [2], [3]])
    deferred = [i for i, slot in enumerate(step.slot_list()) if slot < 0]
    with pytest.raises(LeaseError):
        core.dispatcher.finish(step, deferred[0])
