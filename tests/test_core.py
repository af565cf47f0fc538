"""Decisions of a core: hits and victims of whole traces, experts handed out, what it is refused."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from core_helpers import check_estimates, id_rows, make_core
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference_core import (
    SETTINGS,
    Estimates,
    HistoryReference,
    SlotTable,
    call_route,
    make_score,
    run_step,
)

from moecache import _core
from moecache.errors import LeaseError
from moecache.policy import Score
from moecache.policy import score as make_user_score

# Leases at the level of the core


def test_positions_are_handed_out_and_finished_once() -> None:
    core = make_core((4,), 4)
    step = call_route(core, core.begin_request(), 0, [[0, 1]])
    for i in (-1, 0, 2):
        with pytest.raises(LeaseError):
            core.dispatcher.finish(step, i)
    run_step(core, step)
    with pytest.raises(LeaseError):
        core.dispatcher.finish(step, 0)
    assert core.dispatcher.next_ready(step) == -1


def test_policies_and_scores_that_do_not_fit_are_refused() -> None:
    for policy, score in [("nonsense", 0), ("user", 0), ("lru", 1)]:
        with pytest.raises(ValueError, match="policy"):
            make_core((4,), 2, policy=policy, score=score)


def test_the_stub_lists_what_there_is() -> None:
    tree = ast.parse(Path(_core.__file__).with_name("_core.pyi").read_text())
    typed = {
        node.name: {member.target.id if isinstance(member, ast.AnnAssign) else member.name for member in node.body}  # type: ignore[union-attr, attr-defined]
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    for name, members in typed.items():
        public = {member for member in vars(getattr(_core, name)) if not member.startswith("_")}
        assert members - {"__init__"} == public, name
    assert set(typed) == {name for name in _core.__all__ if isinstance(getattr(_core, name), type)}


# Victims


FEATURES = ("now", "request_frequency", "fast", "slow", "prior")


@functools.cache
def feature_alone(name: str) -> Score:
    namespace: dict[str, Any] = {}
    exec(f"def alone({name}): return {name}", namespace)
    return make_user_score(namespace["alone"])


@pytest.mark.parametrize("policy", ["lru", "lfu", "expected-next-use", "moe-infinity", *FEATURES])
@given(data=st.data())
@settings(SETTINGS, max_examples=15)
def test_hits_and_victims_of_a_trace(policy: str, data: st.DataObject) -> None:
    """Every copy lands at once; hits, misses, evictions and the order of victims equal those of a dict."""
    num_experts = data.draw(st.sampled_from([(6,), (4, 4), (3, 6, 4)]))
    groups = data.draw(st.sampled_from([[0] * len(num_experts), [n % 2 for n in range(len(num_experts))]]))
    capacity = [data.draw(st.integers(2, 5)) for _ in range(max(groups) + 1)]
    if policy in FEATURES:
        core = make_core(num_experts, capacity, policy="user", score=feature_alone(policy).address, groups=groups)
    else:
        core = make_core(num_experts, capacity, policy=policy, groups=groups)
    history = HistoryReference(num_experts, 8)
    estimates = Estimates(history, 2)
    table = SlotTable(history.layout)
    for _ in range(data.draw(st.integers(1, 3))):
        pairs = [(core.begin_request(), estimates.begin()) for _ in range(data.draw(st.integers(1, 2)))]
        for n in range(data.draw(st.integers(1, 14))):
            state, request = pairs[n % len(pairs)]
            layer = n // len(pairs) % len(num_experts)
            rows, k = data.draw(st.sampled_from([(1, 1), (1, 2), (2, 1)]))
            ids = data.draw(id_rows(num_experts[layer], st.just(rows), st.just(k)))
            decode = data.draw(st.booleans())
            step = call_route(core, state, layer, ids, decode)
            estimates.observe(request, layer, ids, decode)
            check_estimates(core, estimates)
            gids = table.touch(layer, ids)
            candidates = [g for g in range(history.layout.total) if groups[history.layout.layer_of[g]] == groups[layer]]
            shares = request.ratios() if policy == "moe-infinity" else None
            score = make_score(policy, table, estimates, layer, request, shares)
            assume(not table.ambiguous(gids, candidates, score))
            check_fetches(step, table, gids, candidates, capacity[groups[layer]], score)
            run_step(core, step)
            core.release(step)
            assert {int(g): s for s, g in enumerate(core.slots.occupants) if g >= 0} == table.slots
            assert (core.demands, core.hits, core.slots.evictions) == (table.demands, table.hits, table.evictions)
        for state, request in pairs:
            keep = data.draw(st.booleans())
            core.end_request(state, keep)
            estimates.end(request, keep)
    assert core.misses == core.demands - core.hits


def check_fetches(
    step: Any, table: SlotTable, gids: list[int], candidates: list[int], capacity: int, score: Callable[[int], float]
) -> None:
    """What a step fetches, and in whose place; then the table does the same."""
    missing = [gid for gid in gids if gid not in table.slots]
    wanted = max(0, len(missing) - (capacity - sum(gid in table.slots for gid in candidates)))
    fetched = step.plan.fetches
    assert fetched[:, 0].tolist() == missing
    occupant = {slot: gid for gid, slot in table.slots.items()}
    victims = [occupant[slot] for slot in fetched[:, 1].tolist() if slot in occupant]
    assert victims == table.victims(gids, candidates, wanted, score)
    assert all(slot not in occupant for slot in fetched[: len(missing) - wanted, 1].tolist())
    for gid, slot, _ in fetched.tolist():
        table.place(gid, slot)
    table.demands += len(gids)
    table.hits += len(gids) - len(missing)


@pytest.mark.failure("1")
def test_an_expert_loaded_in_a_step_is_not_a_victim_of_the_step() -> None:
    # lfu, and the residents have been used more often than the newcomers.
    core = make_core((8,), 3, policy="lfu")
    request = core.begin_request()
    for _ in range(3):
        step = call_route(core, request, 0, [[0, 1, 2]])
        run_step(core, step)
        core.release(step)
    step = call_route(core, request, 0, [[5, 6, 7]])
    assert sorted(core.slots.occupants) == [5, 6, 7]
    assert len(set(step.slot_list())) == 3


def test_all_is_classified_as_it_stood_before_the_step() -> None:
    # 3 evicts one of 0..2; which of them, the step's own 0 and 1 must both be hits.
    core = make_core((8,), 3, policy="lru")
    request = core.begin_request()
    for expert in (0, 1, 2):
        step = call_route(core, request, 0, [[expert]])
        run_step(core, step)
        core.release(step)
    step = call_route(core, request, 0, [[3, 0, 1]])
    assert (step.hits, step.missing) == (2, 1)
    assert sorted(core.slots.occupants) == [0, 1, 3]
