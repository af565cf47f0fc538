"""Top-k ids of every dtype, stride and kind of padding, grouped as torch would."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from core_helpers import id_rows, make_core
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_core import (
    SETTINGS,
    call_route,
    run_step,
)

from moecache.errors import RoutingError

INTEGERS = [np.int8, np.uint8, np.int16, np.int32, np.int64]


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("layout", ["C", "F", "sliced", "broadcast", "reversed"])
def test_ids_of_every_dtype_and_stride(dtype: type, layout: str) -> None:
    plain = np.array([[5, 1, 2], [0, 5, 3], [7, 7, 6], [2, 4, 0]])
    if layout == "broadcast":
        plain = np.broadcast_to(plain[:1], plain.shape)
    ids = plain.astype(dtype)
    if layout == "F":
        ids = np.asfortranarray(ids)
    elif layout == "sliced":
        wide = np.full((8, 9), 99, dtype)
        wide[::2, 1::3] = plain
        ids = wide[::2, 1::3]
    elif layout == "broadcast":
        ids = np.broadcast_to(ids[:1], ids.shape)
    elif layout == "reversed":
        ids = ids[::-1].copy()[::-1]
    core = make_core((8, 8))
    request = core.begin_request()
    step = call_route(core, request, 1, ids)
    assert step.expert_list() == sorted(set(plain.ravel().tolist()))
    counts = np.zeros((2, 8), np.int64)
    for row in plain:
        counts[1, list(set(row.tolist()))] += 1
    np.testing.assert_array_equal(request.match.counts.reshape(2, 8), counts)


@given(st.data())
@settings(SETTINGS, max_examples=50)
def test_pairs_are_grouped_as_torch_where_lists_the_one_hot_mask(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 9))
    ids = data.draw(id_rows(experts, st.integers(1, 7), st.integers(1, 5)))
    core = make_core((experts,))
    step = call_route(core, core.begin_request(), 0, ids)
    # -1 gets a class of its own, which is dropped.
    mask = torch.nn.functional.one_hot(torch.tensor(ids) + 1, experts + 1).permute(2, 1, 0)[1:]
    present = [e for e in range(experts) if mask[e].any()]
    assert step.expert_list() == present
    for i, e in enumerate(present):
        expert, _, begin, end = step.item(i)
        position, token = torch.where(mask[e])
        assert expert == e
        np.testing.assert_array_equal(step.topk_position[begin:end], position)
        if len(ids) > 1:
            np.testing.assert_array_equal(step.token_index[begin:end], token)
        else:
            assert step.token_index is None
            assert not token.any()


def test_a_long_prompt_is_grouped_the_same_way() -> None:
    # Above 4,096 pairs the ids are read without the GIL.
    ids = np.random.default_rng(0).integers(-1, 16, (1500, 4))
    core = make_core((16,))
    step = call_route(core, core.begin_request(), 0, ids)
    mask = torch.nn.functional.one_hot(torch.from_numpy(ids) + 1, 17).permute(2, 1, 0)[1:]
    for i in range(16):
        expert, _, begin, end = step.item(i)
        position, token = torch.where(mask[expert])
        np.testing.assert_array_equal(step.topk_position[begin:end], position)
        np.testing.assert_array_equal(step.token_index[begin:end], token)
    ids[1400, 2] = 16
    with pytest.raises(RoutingError, match="token 1400, position 2"):
        call_route(core, core.begin_request(), 0, ids)


@pytest.mark.failure("38")
@pytest.mark.parametrize("bad", [-2, 8, 10**9, -(10**12), 2**31, 2**32, 2**63 - 1])
def test_ids_out_of_range_change_nothing(bad: int) -> None:
    core = make_core((8, 8), 4)
    request = core.begin_request()
    step = call_route(core, request, 0, [[1, 2]])
    run_step(core, step)
    core.release(step)
    before = (
        core.counters(),
        request.match.counts.copy(),
        core.estimates.probability.copy(),
        core.slots.occupants.copy(),
        core.estimates.last_use.copy(),
    )
    with pytest.raises(RoutingError, match=f"layer 1: expert id {bad} of token 1, position 0.*0..7"):
        call_route(core, request, 1, [[3, 4], [bad, 5]])
    after = (
        core.counters(),
        request.match.counts,
        core.estimates.probability,
        core.slots.occupants,
        core.estimates.last_use,
    )
    assert before[0] == after[0]
    for a, b in zip(before[1:], after[1:], strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(IndexError):
        call_route(core, request, 1, [[bad]])


@pytest.mark.failure("38")
@pytest.mark.failure("37")
@pytest.mark.parametrize("layer", [-1, 2, 10**6])
def test_a_layer_out_of_range_is_refused(layer: int) -> None:
    core = make_core((8, 8), 4)
    with pytest.raises(RoutingError, match=f"layer {layer} is out of range.*0..1"):
        call_route(core, core.begin_request(), layer, [[1]])
    assert core.counters()["steps"] == 0


@pytest.mark.failure("37")
def test_padding_is_neither_loaded_nor_counted() -> None:
    core = make_core((4,), 4)
    request = core.begin_request()
    step = call_route(core, request, 0, [[0, -1], [-1, -1]])
    assert step.expert_list() == [0]
    assert (step.tokens, step.counted_tokens) == (2, 1)
    np.testing.assert_array_equal(request.match.counts, [1, 0, 0, 0])
    assert core.counters()["tokens"] == 1


@pytest.mark.failure("38")
def test_a_padding_id_counts_as_padding_only_when_named() -> None:
    core = make_core((4,), 4)
    request = core.begin_request()
    assert call_route(core, request, 0, [[4, 0], [2, -1]], padding_id=4).expert_list() == [0, 2]
    with pytest.raises(RoutingError):
        call_route(core, request, 0, [[4, 0]])
    # An unsigned byte has no -1; 255 is what it looks like.
    assert call_route(core, request, 0, np.array([[255, 0]], np.uint8), padding_id=255).expert_list() == [0]
    with pytest.raises(RoutingError, match="expert id 255"):
        call_route(core, request, 0, np.array([[255, 0]], np.uint8))


@pytest.mark.failure("39", "40")
@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (0, 0)])
def test_empty_batches(shape: tuple[int, int]) -> None:
    core = make_core((4,), 4)
    request = core.begin_request()
    step = call_route(core, request, 0, np.zeros(shape, np.int64))
    assert (step.unique, step.expert_list(), step.plan.empty, step.done) == (0, [], True, 0)
    assert step.topk_position.shape == (0,)
    assert run_step(core, step) == []
    core.release(step)
    assert not request.match.counts.any()
    assert core.counters()["demands"] == 0


@pytest.mark.failure("39")
def test_an_expert_named_twice_in_a_row_is_served_twice_and_counted_once() -> None:
    core = make_core((4,), 4)
    request = core.begin_request()
    step = call_route(core, request, 0, [[2, 2], [3, 2]])
    assert step.plan.fetches[:, 0].tolist() == [2, 3]
    assert step.item(0)[2:] == (0, 3)
    np.testing.assert_array_equal(step.token_index, [0, 0, 1, 1])
    np.testing.assert_array_equal(request.match.counts, [0, 0, 2, 1])
    assert core.counters()["demands"] == 2


def test_rows_that_are_not_counted_are_served_all_the_same() -> None:
    core = make_core((4,), 4)
    request = core.begin_request()
    step = call_route(core, request, 0, [[0, 1], [2, 3], [0, 3]], counted=[True, False, True])
    assert step.expert_list() == [0, 1, 2, 3]
    np.testing.assert_array_equal(step.token_index, [0, 2, 0, 1, 1, 2])
    np.testing.assert_array_equal(request.match.counts, [2, 1, 0, 1])
    assert (step.counted_tokens, core.counters()["tokens"]) == (2, 2)


@pytest.mark.failure("45")
def test_one_expert_a_layer_and_all_experts_a_token() -> None:
    core = make_core((1, 3), 4)
    request = core.begin_request()
    assert call_route(core, request, 0, [[0]]).expert_list() == [0]
    assert call_route(core, request, 1, [[2, 0, 1]]).expert_list() == [0, 1, 2]
    assert call_route(core, request, 1, [[2, 0, 1, 1, 2]]).expert_list() == [0, 1, 2]
    np.testing.assert_array_equal(request.match.counts, [1, 2, 2, 2])
