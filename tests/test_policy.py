"""Policies by name and scores of users: what they are given, what is refused, and the built-in ones written as scores."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from cache_helpers import make_bank, run
from core_helpers import id_rows, make_core
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_core import SETTINGS, call_route, run_step

from moecache import ExpertCache, policy
from moecache.errors import PolicyError
from moecache.policy import NAMES, resolve, score


@pytest.mark.parametrize("name", NAMES)
def test_every_name_runs(name: str) -> None:
    with make_bank((6, 6)) as bank, ExpertCache(bank, 4, policy=name) as cache, cache.request() as request:
        assert cache.policy == name
        for n in range(20):
            run(request, n % 2, [[n % 6, (n * 5) % 6]])
        assert cache.stats().evictions > 0


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lruu", "did you mean lru"),
        ("LFU", "There are"),
        ("moe_infinity", "did you mean moe-infinity"),
        ("expected-next", "did you mean expected-next-use"),
        ("", "There are"),
        ("belady", "There are"),
        ("user", "There are"),
        (None, "There are"),
        (3, "There are"),
        (lambda age: age, "scores made with moecache.policy.score"),
    ],
)
def test_names_that_do_not_exist(name: object, hint: str) -> None:
    with pytest.raises(PolicyError, match=hint) as caught:
        resolve(name)
    assert all(known in str(caught.value) for known in NAMES)


def test_what_a_choice_means() -> None:
    assert resolve("counts") == ("counts", 0, "counts")
    assert resolve("belady", extra=("belady",)).code == "belady"
    made = score(lambda age: age)
    assert resolve(made) == ("user", made.address, "<lambda>")
    assert made.address != 0


# Scores


def test_a_score_keeps_its_name_and_can_be_called() -> None:
    @score
    def stale_and_rare(age: float, frequency: float) -> float:
        """Old and rare."""
        return age / (1.0 + frequency)

    assert stale_and_rare(3.0, 2.0) == 1.0
    assert stale_and_rare.__doc__ == "Old and rare."
    assert "stale_and_rare(age" in repr(stale_and_rare)


def takes_a_typo(frequncy: float) -> float:
    return frequncy


def takes_anything(*args: float) -> float:
    return 0.0


def uses_a_string(age: float) -> float:
    return f"{age}".splitlines()


def uses_an_unknown_name(age: float) -> float:
    return age + nowhere  # noqa: F821


def returns_nothing(age: float) -> None:
    return None


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (takes_a_typo, "no number is called 'frequncy'; did you mean frequency"),
        (takes_anything, "no number is called 'args'"),
        (uses_a_string, "uses_a_string cannot be compiled by Numba"),
        (uses_an_unknown_name, "uses_an_unknown_name cannot be compiled by Numba"),
        (returns_nothing, "returns_nothing cannot be compiled by Numba"),
    ],
)
def test_scores_that_cannot_work(function: Callable[..., float], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        score(function)


def victims(policy_name: str, address: int, trace: list[tuple[int, list[list[int]]]]) -> list[list[int]]:
    core = make_core((4, 6, 5), [3, 4], policy=policy_name, score=address, groups=[0, 1, 0], history=3)
    tables = []
    request = core.begin_request()
    for n, (layer, ids) in enumerate(trace):
        if n % 9 == 8:
            core.end_request(request)
            request = core.begin_request()
        step = call_route(core, request, layer, ids)
        run_step(core, step)
        core.release(step)
        tables.append(core.slots.occupants.tolist())
    return tables


@st.composite
def traces(draw: st.DrawFn) -> list[tuple[int, list[list[int]]]]:
    num_experts = (4, 6, 5)
    return [
        (n % 3, draw(id_rows(num_experts[n % 3], st.integers(1, 2), st.integers(1, 2))))
        for n in range(draw(st.integers(5, 40)))
    ]


@score
def like_lru(age: float) -> float:
    return age


@score
def like_lfu(frequency: float) -> float:
    return -frequency


@score
def like_moe_infinity(matched: float, layer: float, num_layers: float) -> float:
    return -(matched + 1e-6) * (1.0 - layer / num_layers)


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("lru", like_lru),
        ("lfu", like_lfu),
        ("moe-infinity", like_moe_infinity),
    ],
)
@given(trace=traces())
@settings(SETTINGS, max_examples=15)
def test_a_built_in_written_as_a_score_evicts_the_same(
    name: str, made: policy.Score, trace: list[tuple[int, list[list[int]]]]
) -> None:
    assert victims(name, 0, trace) == victims("user", made.address, trace)


def test_a_score_of_nan_or_infinity_does_no_harm() -> None:
    for value in ("age * np.nan", "np.inf", "-np.inf", "age / (age - age)"):
        namespace: dict[str, object] = {"np": np}
        exec(f"def odd(age): return {value}", namespace)
        made = score(namespace["odd"])
        core = make_core((6,), 3, policy="user", score=made.address)
        request = core.begin_request()
        for n in range(30):
            step = call_route(core, request, 0, [[n * 5 % 6], [n % 6]])
            run_step(core, step)
            core.release(step)
            assert len(set(core.slots.occupants[core.slots.occupants >= 0])) == (core.slots.occupants >= 0).sum()


def test_a_score_decides_in_the_cache() -> None:
    with make_bank((8,)) as bank, ExpertCache(bank, 2, policy=like_lru) as cache, cache.request() as request:
        for e in (0, 1, 0, 2):
            run(request, 0, [[e]])
        assert cache.policy == "like_lru"
        assert cache.resident() == {(0, 0), (0, 2)}
