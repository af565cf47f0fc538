"""Steps that need more experts than there are slots, or slots that others pin, one by one."""

from __future__ import annotations

import pytest
from core_helpers import fill, make_core
from reference_core import call_route, land, run_step


@pytest.mark.failure("2")
@pytest.mark.parametrize("slots", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("policy", ["lru", "expected-next-use"])
def test_a_step_larger_than_the_pool_hands_out_everything_once(slots: int, policy: str) -> None:
    core = make_core((12, 12), slots, policy=policy)
    request = core.begin_request()
    for layer in (0, 1, 0):
        step = call_route(core, request, layer, [[e, (e + 1) % 12] for e in range(12)])
        assert step.deferred == 12 - slots
        assert sorted(run_step(core, step)) == list(range(12))
        assert (core.slots.occupants >= 0).sum() == slots
        core.release(step)
        assert not core.slots.pin_counts.any()
    assert core.counters()["waves"] == 3


def test_the_first_wave_keeps_most_of_its_slots() -> None:
    # 8 slots, 16 experts; 0..7 are the busiest and come first. Later waves use the slots of a few of the least busy.
    core = make_core((16,), 8)
    request = core.begin_request()
    ids = [[e, 8 + e] for e in range(8)] + [[e, e] for e in range(8)] + [[e, -1] for e in range(4)]
    step = call_route(core, request, 0, ids)
    assert [e for e, slot in zip(step.expert_list(), step.slot_list(), strict=True) if slot >= 0] == list(range(8))
    run_step(core, step)
    core.release(step)
    kept = set(core.slots.occupants.tolist()) & set(range(8))
    assert len(kept) >= 8 - 2
    assert {0, 1, 2, 3} <= kept


@pytest.mark.failure("3")
def test_everything_pinned_hands_out_no_slot_and_recovers() -> None:
    core = make_core((8,), 2)
    request = core.begin_request()
    first = call_route(core, request, 0, [[0, 1]])
    run_step(core, first)
    second = call_route(core, request, 0, [[2]])
    assert (second.deferred, second.slot_list(), second.plan.empty) == (1, [-1], True)
    assert not core.dispatcher.retry(second)
    assert core.slots.pinned_experts() == [(0, 0), (0, 1)]
    core.release(first)
    assert run_step(core, second) == [2]
    core.release(second)
    assert not core.slots.pin_counts.any()


@pytest.mark.failure("3")
def test_a_prefetch_finds_no_slot_when_all_are_pinned() -> None:
    # Two layers, both slots leased: whatever is forecast, nothing is given away.
    core = make_core((2, 2), 2, prefetch=True, top_k=1)
    request = core.begin_request()
    for _ in range(40):
        for layer in (0, 1):
            step = call_route(core, request, layer, [[0]])
            run_step(core, step)
            core.release(step)
    leases = [call_route(core, request, layer, [[1]]) for layer in (0, 1)]
    for step in leases:
        run_step(core, step)
    assert sorted(core.slots.occupants) == [1, 3]
    for step in leases:
        core.release(step)


@pytest.mark.failure("18")
def test_two_leases_on_one_expert_join_one_copy() -> None:
    core = make_core((4,), 2)
    a, b = core.begin_request(), core.begin_request()
    first, second = call_route(core, a, 0, [[3]]), call_route(core, b, 0, [[3]])
    assert first.plan.fetches.tolist() == second.plan.fetches.tolist()
    slot = first.slot_list()[0]
    assert core.slots.pin_counts[slot] == 2
    core.release(first)
    assert core.slots.pin_counts[slot] == 1
    fill(core, a, 0, [0, 1, 2, 0, 1, 2])
    assert core.slots.occupants[slot] == 3
    run_step(core, second)
    core.release(second)
    assert core.slots.pin_counts[slot] == 0


def test_an_expert_of_a_later_wave_that_another_request_brought_is_joined() -> None:
    core = make_core((6,), 3)
    a, b = core.begin_request(), core.begin_request()
    large = call_route(core, a, 0, [[0, 0], [1, 1], [2, 3], [2, 3]])
    assert large.slot_list().count(-1) == 1
    core.release(call_route(core, b, 0, [[4]]))  # nothing is free: it gets no slot
    other = call_route(core, b, 0, [[0]])
    land(core, large.plan)
    assert run_step(core, other) == [0]
    core.release(other)
    assert sorted(run_step(core, large)) == [0, 1, 2, 3]
    core.release(large)
    assert len(set(core.slots.occupants)) == 3


def test_an_expert_waiting_for_a_slot_never_gets_a_second_one() -> None:
    # `first` pins both slots; `second` and `third` wait for the same expert, and `third` is served first.
    core = make_core((6,), 2)
    request = core.begin_request()
    first, second, third = (call_route(core, request, 0, ids) for ids in ([[0, 1]], [[5]], [[5]]))
    run_step(core, first)
    core.release(first)
    assert run_step(core, third) == [5]
    assert core.dispatcher.retry(second)
    assert second.plan.empty
    assert run_step(core, second) == [5]
    assert core.slots.occupants.tolist().count(5) == 1
    assert core.slots.pin_counts.sum() == 2
    for step in (second, third):
        core.release(step)
    assert not core.slots.pin_counts.any()


def test_a_failed_copy_gives_its_slot_back_when_the_last_holder_lets_go() -> None:
    core = make_core((4,), 1)
    request = core.begin_request()
    step = call_route(core, request, 0, [[3]])
    slot, generation = step.slot_list()[0], int(core.slots.generations[0])
    core.slots.complete[slot] = -generation
    core.slots.fail(slot, generation)
    assert core.slots.resident().tolist() == []
    blocked = call_route(core, request, 0, [[2]])
    assert blocked.deferred == 1
    core.release(step)
    assert run_step(core, blocked) == [2]
    core.release(blocked)
    core.slots.fail(slot, generation)  # news of an earlier tenancy
    assert core.slots.resident().tolist() == [2]


def test_a_failed_prefetch_or_an_unseen_failure_is_fetched_again() -> None:
    core = make_core((4,), 2)
    request = core.begin_request()
    step = call_route(core, request, 0, [[3]])
    generation = step.plan.fetches[0, 2]
    core.release(step)
    core.slots.complete[step.plan.fetches[0, 1]] = -generation
    again = call_route(core, request, 0, [[3]])
    assert (again.hits, len(again.plan.fetches)) == (0, 1)
    assert run_step(core, again) == [3]
    core.release(again)
    assert not core.slots.pin_counts.any()


def test_an_evicted_copy_in_flight_is_dropped_and_is_no_eviction() -> None:
    core = make_core((4,), 1)
    request = core.begin_request()
    first = call_route(core, request, 0, [[0]])
    core.release(first)
    second = call_route(core, request, 0, [[1]])
    assert second.plan.drops.tolist() == first.plan.fetches[:, 1:].tolist()
    assert core.slots.evictions == 0
    run_step(core, second)
    core.release(second)
    call_route(core, request, 0, [[2]])
    assert core.slots.evictions == 1
