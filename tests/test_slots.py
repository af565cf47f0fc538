"""The slot table under anything that can happen: requests and leases side by side, late and failed copies, waves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from core_helpers import fill, id_rows, make_core
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reference_core import SETTINGS, Layout, call_route, run_step

from moecache.errors import LeaseError

MODELS = [
    ((6,), [0]),
    ((4, 4), [0, 0]),
    ((3, 6, 4), [0, 1, 0]),
    ((5, 5, 5, 5), [0, 0, 0, 0]),
]


@dataclass
class OpenLease:
    step: Any
    layer: int
    number: int = -1  # of its request
    held: dict[int, int] = field(default_factory=dict)  # slot -> generation
    handed: list[int] = field(default_factory=list)  # experts, in the order handed out
    taken: int = -1


class Mover:
    """Lands copies when told to, and writes what really is in each slot."""

    def __init__(self, complete: np.ndarray) -> None:
        self.complete = complete
        self.memory = [-1] * len(complete)
        self.jobs: dict[int, tuple[int, int]] = {}  # slot -> (gid, generation)
        self.newest = [0] * len(complete)

    def submit(self, plan: Any) -> None:
        for slot, generation in plan.drops.tolist():
            if slot in self.jobs and self.jobs[slot][1] == generation:
                del self.jobs[slot]
        for gid, slot, generation in [*plan.fetches.tolist(), *plan.prefetches.tolist()]:
            if self.complete[slot] == generation or generation < self.newest[slot]:
                continue
            assert slot not in self.jobs or self.jobs[slot] == (gid, generation), (
                "a slot's earlier copy has to be dropped first"
            )
            self.newest[slot] = generation
            self.jobs[slot] = (gid, generation)
            self.memory[slot] = -1

    def land(self, slot: int) -> None:
        self.memory[slot], generation = self.jobs.pop(slot)
        self.complete[slot] = generation

    def fail(self, slot: int) -> tuple[int, int]:
        _, generation = self.jobs.pop(slot)
        self.complete[slot] = -generation
        return slot, generation


class Slots(RuleBasedStateMachine):
    """In any order of events no slot is given away under a reader, and every expert handed out is the right one."""

    @initialize(
        model=st.sampled_from(MODELS),
        capacity=st.lists(st.integers(1, 6), min_size=2, max_size=2),
        policy=st.sampled_from(["lru", "lfu", "expected-next-use", "moe-infinity"]),
        prefetch=st.booleans(),
    )
    def start(self, model: Any, capacity: list[int], policy: str, prefetch: bool) -> None:
        num_experts, groups = model
        self.layout = Layout(num_experts)
        self.groups = groups
        self.capacity = [
            min(n + (3 if prefetch else 0), self._experts_of(k)) for k, n in enumerate(capacity[: max(groups) + 1])
        ]
        self.core = make_core(
            num_experts, self.capacity, policy=policy, groups=groups, prefetch=prefetch, history=2, top_k=1
        )
        if prefetch:
            self._expect_the_same_number_next()
        self.mover = Mover(self.core.slots.complete)
        self.requests: list[Any] = []
        self.at: dict[int, int] = {}
        self.leases: list[OpenLease] = []
        self.generations = self.core.slots.generations.copy()
        self.occupants = self.core.slots.occupants.copy()
        self.demands = self.hits = 0
        self.begin()

    def _expect_the_same_number_next(self) -> None:
        # As if earlier requests had always gone from expert e to expert e of the next layer.
        store, at = self.core.store, 0
        for layer, experts in enumerate(self.layout.num_experts):
            following = self.layout.num_experts[(layer + 1) % self.layout.layers]
            for e in range(experts):
                store.transitions.counts[at + e * following + e % following] = 1000
            at += experts * following
        store.transitions.origins[:] = 1000

    def _experts_of(self, group: int) -> int:
        return sum(n for n, k in zip(self.layout.num_experts, self.groups, strict=True) if k == group)

    def _slots_of(self, group: int) -> range:
        begin = sum(self.capacity[:group])
        return range(begin, begin + self.capacity[group])

    # Events

    @precondition(lambda self: len(self.requests) < 3)
    @rule()
    def begin(self) -> None:
        self.requests.append(self.core.begin_request())
        self.at[self.requests[-1].account.number] = 0

    @precondition(lambda self: len(self.requests) > 1)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data: st.DataObject, keep: bool) -> None:
        request = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.core.end_request(request, keep)
        self.core.end_request(request, keep)
        self.leases = [lease for lease in self.leases if lease.number != request.account.number]

    @precondition(lambda self: self.requests and len(self.leases) < 3)
    @rule(data=st.data(), decode=st.booleans(), rows=st.integers(1, 6))
    def route(self, data: st.DataObject, decode: bool, rows: int) -> None:
        request = data.draw(st.sampled_from(self.requests))
        layer = self.at[request.account.number]
        self.at[request.account.number] = (layer + 1) % self.layout.layers
        ids = data.draw(id_rows(self.layout.num_experts[layer], st.just(rows), st.integers(1, 2)))
        self._route(request, layer, ids, decode)

    @precondition(lambda self: self.requests and not self.leases)
    @rule(data=st.data(), expert=st.integers(0, 5), prefetches_land=st.booleans())
    def token(self, data: st.DataObject, expert: int, prefetches_land: bool) -> None:
        """One token through all layers; what is fetched ahead may come in time or not."""
        request = data.draw(st.sampled_from(self.requests))
        for layer, experts in enumerate(self.layout.num_experts):
            lease = self._route(request, layer, [[expert % experts]], True)
            for slot in sorted(self.mover.jobs):
                if prefetches_land or slot in lease.held:
                    self.mover.land(slot)
            self._handed(lease, self.core.dispatcher.next_ready(lease.step))
            self._finish(lease)
            self.core.release(self.leases.pop().step)
            self.check_all()
        self.at[request.account.number] = 0

    def _route(self, request: Any, layer: int, ids: list[list[int]], decode: bool) -> OpenLease:
        before = self._snapshot()
        step = call_route(self.core, request, layer, ids, decode)
        lease = OpenLease(step, layer, request.account.number)
        self.leases.append(lease)
        self._hold_new(lease, [-1] * step.unique)
        self.mover.submit(step.plan)
        self._check_route(step, layer, ids, before)
        return lease

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), waiting=st.booleans())
    def advance(self, data: st.DataObject, waiting: bool) -> None:
        """Ask for the next item of a lease; when nothing is there, let a copy land or look for slots."""
        lease = data.draw(st.sampled_from(self.leases))
        self._finish(lease)
        i = self.core.dispatcher.next_ready(lease.step)
        if i >= 0:
            self._handed(lease, i)
        elif waiting:
            _, slots, _ = lease.step.pending()
            landing = [s for s in slots.tolist() if s in self.mover.jobs]
            if landing:
                self.mover.land(landing[0])
            elif not len(slots):
                self._retry(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Also in the middle: an exception in the expert's arithmetic."""
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.core.release(lease.step)
        self.core.release(lease.step)

    @precondition(lambda self: self.mover.jobs)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        self.mover.land(data.draw(st.sampled_from(sorted(self.mover.jobs))))

    @precondition(lambda self: self.mover.jobs)
    @rule(data=st.data(), noticed=st.booleans())
    def fail(self, data: st.DataObject, noticed: bool) -> None:
        slot, generation = self.mover.fail(data.draw(st.sampled_from(sorted(self.mover.jobs))))
        if noticed:
            self.core.slots.fail(slot, generation)
            self.core.slots.fail(slot, generation)

    # What each must leave behind

    def _snapshot(self) -> dict[str, Any]:
        core = self.core
        return {
            "expert": core.slots.occupants.copy(),
            "generation": core.slots.generations.copy(),
            "pins": core.slots.pin_counts.copy(),
            "complete": core.slots.complete.copy(),
        }

    def _check_route(self, step: Any, layer: int, ids: list[list[int]], before: dict[str, Any]) -> None:
        offset = self.layout.offset[layer]
        experts = sorted({e for row in ids for e in row if e >= 0})
        assert step.expert_list() == experts
        where = {int(gid): slot for slot, gid in enumerate(before["expert"]) if gid >= 0}
        # A hit: it was there, and whole, before the step.
        hits = [
            e
            for e in experts
            if offset + e in where and before["complete"][where[offset + e]] == before["generation"][where[offset + e]]
        ]
        # What the step finds failed is vacant from here on.
        failed = {
            where[offset + e]
            for e in experts
            if offset + e in where and before["complete"][where[offset + e]] == -before["generation"][where[offset + e]]
        }
        assert (step.hits, step.missing) == (len(hits), len(experts) - len(hits))
        self.demands += len(experts)
        self.hits += len(hits)
        for e, slot in zip(experts, step.slot_list(), strict=True):
            if slot >= 0:
                assert self.core.slots.occupants[slot] == offset + e
                assert slot in self._slots_of(self.groups[layer])
            if offset + e in where and where[offset + e] not in failed:
                assert slot == where[offset + e]
        # Free slots go first, and nobody goes without while one can be evicted.
        usable_slots = self._slots_of(self.groups[layer])
        own = {where[offset + e] for e in experts if offset + e in where} - failed
        usable = [s for s in usable_slots if s not in own and (before["pins"][s] == 0)]
        lacking = len(experts) - len(own)
        assert len([s for s in step.slot_list() if s >= 0]) == len(own) + min(lacking, len(usable))
        assert step.deferred == max(0, lacking - len(usable))
        vacant = [s for s in usable if before["expert"][s] < 0 or s in failed]
        fetched = {slot for _, slot, _ in step.plan.fetches.tolist()} - own
        dropped = set(
            step.plan.drops[:, 0].tolist()
        )  # in flight, or a prefetch that proved wrong: its slot is free from here on
        if any(before["expert"][s] >= 0 and s not in failed | dropped for s in fetched):
            assert fetched.issuperset(vacant)
        if step.deferred:
            self._check_busiest_first(
                step, own, {offset + e: s for e, s in zip(experts, step.slot_list(), strict=True)}, offset
            )

    def _check_busiest_first(self, step: Any, own: set[int], slots: dict[int, int], offset: int) -> None:
        pairs = {offset + e: end - begin for e, _, begin, end in (step.item(i) for i in range(step.unique))}
        given = [pairs[gid] for gid, slot in slots.items() if slot >= 0 and slot not in own]
        left = [pairs[gid] for gid, slot in slots.items() if slot < 0]
        assert not given or min(given) >= max(left)

    def _handed(self, lease: OpenLease, i: int) -> None:
        expert, slot, begin, end = lease.step.item(i)
        assert end > begin
        assert self.mover.memory[slot] == self.layout.offset[lease.layer] + expert, "another expert's bytes"
        assert lease.held[slot] == self.core.slots.generations[slot] == self.core.slots.complete[slot]
        assert expert not in lease.handed
        lease.handed.append(expert)
        lease.taken = i

    def _finish(self, lease: OpenLease) -> None:
        if lease.taken < 0:
            return
        i, lease.taken = lease.taken, -1
        slot = lease.step.item(i)[1]
        before, generation = lease.step.slot_list(), lease.held[slot]
        if self.core.dispatcher.finish(lease.step, i):
            if self.core.slots.generations[slot] != generation:
                # The next wave goes through a slot that only this lease holds.
                assert not any(other.held.get(slot) == generation for other in self.leases if other is not lease)
            self.mover.submit(lease.step.plan)
        self._hold_new(lease, before)

    def _hold_new(self, lease: OpenLease, before: list[int]) -> None:
        for e, old, new in zip(lease.step.expert_list(), before, lease.step.slot_list(), strict=True):
            if old < 0 <= new:
                assert self.core.slots.occupants[new] == self.layout.offset[lease.layer] + e
                lease.held[new] = int(self.core.slots.generations[new])

    def _retry(self, lease: OpenLease) -> None:
        if not lease.step.deferred:
            assert not self.core.dispatcher.retry(lease.step)
            return
        before = lease.step.slot_list()
        found = self.core.dispatcher.retry(lease.step)
        # What it has computed is unpinned; failed ones still are, by their pins.
        done = [lease.step.item(i)[1] for i in range(lease.step.unique) if lease.step.item(i)[0] in lease.handed]
        for slot in done:
            lease.held.pop(slot, None)
        assert found == (before.count(-1) > lease.step.slot_list().count(-1))
        self._hold_new(lease, before)
        self.mover.submit(lease.step.plan)

    # Always

    @invariant()
    def check_all(self) -> None:
        if hasattr(self, "core"):
            self.no_expert_has_two_slots()
            self.generations_number_the_tenancies()
            self.pins_are_the_open_leases()
            self.counters_add_up()

    def no_expert_has_two_slots(self) -> None:
        occupants = self.core.slots.occupants[self.core.slots.occupants >= 0].tolist()
        assert len(occupants) == len(set(occupants)) <= self.core.slots.num_slots
        assert sorted(self.core.slots.resident().tolist()) == sorted(occupants)
        for group in range(len(self.capacity)):
            for slot in self._slots_of(group):
                gid = self.core.slots.occupants[slot]
                assert gid < 0 or self.groups[self.layout.layer_of[gid]] == group

    def generations_number_the_tenancies(self) -> None:
        now, occupants = self.core.slots.generations, self.core.slots.occupants
        assert (now >= self.generations).all()
        changed = (occupants != self.occupants) & (occupants >= 0)
        assert (now > self.generations)[changed].all()
        self.generations, self.occupants = now.copy(), occupants.copy()

    def pins_are_the_open_leases(self) -> None:
        held = np.zeros(self.core.slots.num_slots, np.int32)
        for lease in self.leases:
            for slot, generation in lease.held.items():
                assert self.core.slots.generations[slot] == generation, "a slot was given away under its reader"
                held[slot] += 1
        np.testing.assert_array_equal(self.core.slots.pin_counts, held)

    def counters_add_up(self) -> None:
        n = self.core.counters()
        assert n["hits"] + n["misses"] == n["demands"] == self.demands == self.core.layer_demands.sum()
        assert n["hits"] == self.hits == self.core.layer_hits.sum()
        settled = n["prefetch_useful"] + n["prefetch_late"] + n["prefetch_wasted"]
        assert 0 <= n["prefetch_issued"] - settled <= self.core.slots.num_slots + 64
        assert n["prefetch_dropped"] <= n["prefetch_wasted"]

    def teardown(self) -> None:
        """Everything ends: all slots can be used again, and no prefetch is left unaccounted for."""
        if not hasattr(self, "core"):
            return
        for lease in self.leases:
            self.core.release(lease.step)
        self.leases = []
        for request in self.requests:
            self.core.end_request(request)
        n = self.core.counters()
        assert n["prefetch_issued"] == n["prefetch_useful"] + n["prefetch_late"] + n["prefetch_wasted"]
        assert not self.core.slots.pin_counts.any()
        assert self.core.slots.pinned_experts() == []
        for slot in list(self.mover.jobs):
            self.mover.land(slot)
        request = self.core.begin_request()
        for layer, experts in enumerate(self.layout.num_experts):
            for e in range(experts):
                step = call_route(self.core, request, layer, [[e]], False)
                assert step.deferred == 0
                run_step(self.core, step)
                self.core.release(step)
        for group, capacity in enumerate(self.capacity):
            assert (self.core.slots.occupants[list(self._slots_of(group))] >= 0).sum() == capacity


Slots.TestCase.settings = settings(SETTINGS, max_examples=70, stateful_step_count=30)
TestSlots = Slots.TestCase


# After a resize


def test_retained_experts_are_those_the_policy_would_evict_last() -> None:
    core = make_core((8,), 4, policy="lru")
    request = core.begin_request()
    fill(core, request, 0, [3, 1, 4, 5, 1])
    kept = [int(core.slots.occupants[slot]) for slot in core.retained(0, 2)]
    assert kept == [1, 5]
    smaller = make_core((8,), 2, policy="lru", store=core.store)
    for slot, gid in enumerate(kept):
        smaller.adopt(slot, gid)
    smaller.inherit(core)
    assert smaller.counters() == core.counters()
    step = call_route(smaller, request, 0, [[1, 5]])
    assert step.hits == 2
    smaller.release(step)
    fill(smaller, request, 0, [7])
    assert sorted(smaller.slots.occupants) in ([1, 7], [5, 7])
    for slot, gid in [(0, 3), (1, 7)]:
        with pytest.raises(LeaseError, match="not vacant"):
            smaller.adopt(slot, gid)
