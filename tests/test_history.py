"""History files: what was saved comes back, and everything else is refused whole."""

from __future__ import annotations

import copy
import json
import os
import pickle
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache_helpers import make_bank
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_core import SETTINGS, HistoryReference
from safetensors.numpy import load_file, save_file

from moecache import Fingerprint, History, history
from moecache.errors import HistoryFormatError
from moecache.history_file import LEARNED, VERSION

MODEL = Fingerprint((4, 3, 5), 2, "abc")


def filled(
    requests: int, fingerprint: Fingerprint = MODEL, capacity: int = 10, seed: int = 0, largest: int = 300
) -> History:
    rng = np.random.default_rng(seed)
    result = History(fingerprint, capacity)
    experts = sum(fingerprint.num_experts)
    for n in range(requests):
        prompt, decode = rng.integers(0, largest, (2, experts)) * (rng.random((2, experts)) < 0.5)
        # Some of prompt only, some of answer only.
        result.add(prompt * (n % 3 != 1), decode * (n % 3 != 2), int(rng.integers(1, 100)))
    for name in LEARNED:
        table = result.store.learned()[name]
        table[:] = rng.integers(0, 50, len(table))
    for kind in ("counts", "blend"):
        weights = getattr(result.store.weights, kind)
        rows = rng.normal(size=(*weights.shape, 2 * weights.shape[1]))
        weights[:] = rng.uniform(-10, 10, weights.shape)
        getattr(result.store.weights, f"{kind}_curvature")[:] = rows @ rows.transpose(0, 2, 1)
    return result


def assert_same(a: History, b: History) -> None:
    assert len(a) == len(b)
    assert a.fingerprint == b.fingerprint
    # Entries may lie elsewhere; their order by age is what a file keeps.
    for name in ("prompt_counts", "decode_counts"):
        np.testing.assert_array_equal(getattr(a.store, name)[a.store.order()], getattr(b.store, name)[b.store.order()])
    np.testing.assert_array_equal(a.store.total, b.store.total)
    for name in LEARNED:
        np.testing.assert_array_equal(a.store.learned()[name], b.store.learned()[name])
    assert a.store.tokens == b.store.tokens
    for name, value in a.store.weights.arrays().items():
        np.testing.assert_array_equal(value, b.store.weights.arrays()[name])


@given(requests=st.integers(0, 12), seed=st.integers(0, 100), largest=st.sampled_from([2, 300, 90_000]))
@settings(SETTINGS, max_examples=20)
def test_what_was_saved_comes_back(
    requests: int, seed: int, largest: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("history") / "a.history"
    saved = filled(requests, seed=seed, largest=largest)
    saved.save(path)
    loaded = History.load(path, MODEL)
    assert_same(saved, loaded)
    assert loaded.capacity == 10
    counts = np.random.default_rng(seed).integers(0, 9, 12)
    np.testing.assert_allclose(
        loaded.match(counts)[loaded.store.order()], saved.match(counts)[saved.store.order()], rtol=1e-14
    )


def test_match_is_the_flat_cosine() -> None:
    found = filled(6)
    reference = HistoryReference(MODEL.num_experts, 10)
    for n in range(6):
        reference.prompt.append(found.store.prompt_counts[n].astype(np.int64))
        reference.decode.append(found.store.decode_counts[n].astype(np.int64))
    counts = np.arange(12)
    np.testing.assert_allclose(found.match(counts), reference.similarities(counts), rtol=1e-6)
    assert found.match(np.zeros(12, np.int64)).tolist() == [0] * 6
    assert History(MODEL).match(counts).shape == (0,)


@given(
    requests=st.integers(0, 30),
    queries=st.integers(0, 5),
    largest=st.sampled_from([2, 300, 90_000]),
    seed=st.integers(0, 100),
)
@settings(SETTINGS, max_examples=25)
def test_many_matches_at_once_are_those_of_each(requests: int, queries: int, largest: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    found, reference = filled(0, capacity=20), HistoryReference(MODEL.num_experts, 20)
    for _ in range(requests):
        prompt, decode = rng.integers(0, largest, (2, 12)) * (rng.random((2, 12)) < 0.5)
        assert found.add(prompt, decode, 1) == reference.add(prompt, decode, 1)
    counts = rng.integers(0, largest, (queries, 12)) * (rng.random((queries, 12)) < 0.5)
    expected = np.array([reference.similarities(row) for row in counts]).reshape(queries, len(found))
    np.testing.assert_allclose(found.match_many(counts), expected, rtol=1e-14)
    entries, similarities = found.best_matches(counts, 3)
    assert entries.shape == similarities.shape == (queries, 3)
    for n, row in enumerate(counts):
        ranked = reference.ranked(row)[:3]
        assert entries[n].tolist() == ranked + [-1] * (3 - len(ranked))
        np.testing.assert_allclose(similarities[n, : len(ranked)], expected[n, ranked], rtol=1e-14)
        assert not similarities[n, len(ranked) :].any()


def test_many_matches_in_threads_are_the_same() -> None:
    found = filled(40, Fingerprint((64, 64), 2, "abc"), capacity=40)
    counts = np.random.default_rng(1).integers(0, 40, (9, 128))
    np.testing.assert_array_equal(found.match_many(counts, parallel=True), found.match_many(counts))


@pytest.mark.parametrize("counts", [np.zeros(12, int), np.zeros((2, 11), int), np.zeros((2, 12)), np.full((2, 12), -1)])
def test_counts_that_are_no_activation_matrices(counts: np.ndarray) -> None:
    with pytest.raises(HistoryFormatError, match=r"expected non-negative integers \[n, 12\]"):
        filled(2).match_many(counts)


def test_add_says_where() -> None:
    one = History(MODEL, 2)
    assert one.add(np.zeros(12, int), np.ones(12, int), 3) == 0
    assert one.add(np.zeros(12, int), np.zeros(12, int), 3) == -1
    assert len(one) == 1


@pytest.mark.parametrize("capacity", [0, -3])
def test_a_history_of_no_requests_is_refused(capacity: int) -> None:
    with pytest.raises(HistoryFormatError, match="at least 1"):
        History(MODEL, capacity)


def test_another_capacity_when_loading(tmp_path: Path) -> None:
    path = tmp_path / "a.history"
    saved = filled(8)
    saved.save(path)
    assert History.load(path, capacity=20).capacity == 20
    smaller = History.load(path, capacity=3)
    assert (len(smaller), smaller.capacity) == (3, 3)
    # What is known of all requests stays.
    np.testing.assert_array_equal(smaller.store.total, saved.store.total)
    assert smaller.store.tokens == saved.store.tokens


# Merging


def test_merging_adds_everything_once() -> None:
    one, two = filled(3, seed=1), filled(4, seed=2)
    total, tokens = one.store.total + two.store.total, one.store.tokens + two.store.tokens
    learned = {name: one.store.learned()[name] + two.store.learned()[name] for name in LEARNED}
    one.merge(two)
    assert len(one) == 7
    np.testing.assert_array_equal(one.store.total, total)
    for name, table in learned.items():
        np.testing.assert_array_equal(one.store.learned()[name], table)
    assert one.store.tokens == tokens
    np.testing.assert_array_equal(one.store.prompt_counts[3:7], two.store.prompt_counts[:4])


def test_merging_weighs_what_was_learned_by_how_sure_it_is() -> None:
    one, two, fresh = filled(2), filled(2, seed=1), History(MODEL, 10)
    curvature = [h.store.weights.counts_curvature.copy() for h in (one, two)]
    weights = [h.store.weights.counts.copy() for h in (one, two)]
    one.merge(two, fresh)
    joined = one.store.weights
    for i in range(6):
        sure = curvature[0][i] + curvature[1][i]
        mean = np.linalg.solve(sure, curvature[0][i] @ weights[0][i] + curvature[1][i] @ weights[1][i])
        np.testing.assert_allclose(joined.counts[i], np.clip(mean, -10, 10), rtol=0.02, atol=0.02)
        np.testing.assert_allclose(joined.counts_curvature[i], sure)
    # Where nobody has learned anything, nothing changes.
    first = History(MODEL, 10)
    before = first.store.weights.counts.copy()
    first.merge(fresh, History(MODEL, 10))
    np.testing.assert_allclose(first.store.weights.counts, before, rtol=1e-12)


def representation(kept: np.ndarray, rows: np.ndarray) -> float:
    """How well some of the rows stand for all: the sum of each row's largest cosine to a kept one."""
    unit = rows / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return float((unit @ unit[kept].T).max(1).sum())


@given(st.lists(st.integers(0, 12), min_size=2, max_size=4), st.integers(1, 4), st.integers(0, 1000))
@settings(SETTINGS, max_examples=25)
def test_a_merge_of_more_than_fits_keeps_those_that_stand_for_all(
    requests: list[int], capacity: int, seed: int
) -> None:
    histories = [filled(n, capacity=capacity if not i else 12, seed=seed + i) for i, n in enumerate(requests)]
    pooled = [
        (h.store.prompt_counts[e].astype(int), h.store.decode_counts[e].astype(int))
        for h in histories
        for e in h.store.order()
    ]
    total = sum(h.store.total for h in histories)
    histories[0].merge(*histories[1:])
    merged = histories[0].store
    assert len(histories[0]) == min(capacity, len(pooled))
    np.testing.assert_array_equal(merged.total, total)
    if not pooled:
        return
    rows = np.array([p + d for p, d in pooled])
    place = {(p.tobytes(), d.tobytes()): n for n, (p, d) in enumerate(pooled)}
    kept = [
        place[merged.prompt_counts[e].astype(int).tobytes(), merged.decode_counts[e].astype(int).tobytes()]
        for e in range(len(histories[0]))
    ]
    # The documented bound, against every choice there is.
    best = max(representation(np.array(c), rows) for c in combinations(range(len(rows)), len(kept)))
    assert representation(np.array(kept), rows) >= (1 - 1 / np.e) * best - 1e-9
    # Taken one after the other, each where it adds most.
    greedy: list[int] = []
    for _ in kept:
        gains = [-1.0 if n in greedy else representation(np.array([*greedy, n]), rows) for n in range(len(rows))]
        greedy.append(int(np.argmax(gains)))
    assert representation(np.array(kept), rows) == pytest.approx(representation(np.array(greedy), rows), rel=1e-3)


def test_of_equal_requests_a_merge_keeps_the_newest() -> None:
    one, two = History(MODEL, 2), History(MODEL, 4)
    nothing = np.zeros(12, int)
    first, second = np.eye(12, dtype=int)[0], np.eye(12, dtype=int)[1]
    one.add(first, nothing, 1)
    one.add(second, nothing, 1)
    two.add(3 * first, nothing, 1)
    one.merge(two)
    kept = one.store.prompt_counts[one.store.order()]
    np.testing.assert_array_equal(kept, [second, 3 * first])


def test_merging_several_is_all_or_nothing() -> None:
    one, before = filled(3), filled(3)
    with pytest.raises(HistoryFormatError):
        one.merge(filled(2, seed=5), filled(2, MODEL._replace(digest="abd")))
    assert_same(one, before)


def test_counts_that_would_not_fit_are_halved_together() -> None:
    # A layer's table and origins, so that every share stays; other layers keep theirs.
    one, two = filled(1), filled(1)
    for history_ in (one, two):
        history_.store.transitions.origins[:7] = 1 << 30
        history_.store.transitions.counts[:27] = np.arange(27) << 20
    rest = one.store.transitions.origins[7:] + two.store.transitions.origins[7:]
    one.merge(two)
    assert one.store.transitions.origins[:7].tolist() == [1 << 30] * 7
    np.testing.assert_array_equal(one.store.transitions.counts[:27], np.arange(27) << 20)
    np.testing.assert_array_equal(one.store.transitions.origins[7:], rest)


def test_merging_into_a_full_history_keeps_its_size(tmp_path: Path) -> None:
    one = filled(3, capacity=3)
    one.merge(filled(5, seed=3))
    assert len(one) == 3
    one.save(tmp_path / "a")
    assert_same(one, History.load(tmp_path / "a"))


def test_merging_another_model_is_refused_and_changes_nothing() -> None:
    one, before = filled(3), filled(3)
    for other in (Fingerprint((4, 3, 4), 2, "abc"), Fingerprint((4, 3, 5), 3, "abc"), Fingerprint((4, 3, 5), 2, "abd")):
        with pytest.raises(HistoryFormatError, match=r"expected .*4 layers|expected 3 layers .*found 3 layers"):
            one.merge(filled(2, other))
        assert_same(one, before)


# Fingerprints


@pytest.mark.failure("56")
def test_fingerprints_tell_models_apart() -> None:
    base = Fingerprint.of(make_bank((8, 8)), 2)
    assert base.fits(base)
    assert base.fits(Fingerprint.of(make_bank((8, 8), salt=1), 2)), "other weights are the same model to a history"
    assert base.fits(base._replace(top_k=0))
    assert base._replace(top_k=0).fits(base)
    assert not base.fits(base._replace(top_k=3))
    assert not base.fits(Fingerprint.of(make_bank((8, 16)), 2))
    assert not base.fits(Fingerprint.of(make_bank((8, 8), sizes=[6, 6]), 2))
    assert not base.fits(Fingerprint.of(make_bank((8, 8), sizes=[5, 6]), 2))
    assert "2 layers of 8 experts, top-2" in str(base)


@pytest.mark.failure("B6")
def test_a_history_can_be_copied_and_pickled() -> None:
    history = History(Fingerprint((4, 3), 2, ""), 5)
    history.add(np.array([1, 0, 2, 0, 0, 3, 0]), np.array([0, 1, 0, 0, 1, 0, 300]), 4)
    for other in (copy.deepcopy(history), copy.copy(history), pickle.loads(pickle.dumps(history))):
        other.add(np.array([0, 0, 0, 5, 5, 0, 0]), np.zeros(7, int), 5)
        assert (len(history), len(other)) == (1, 2)
        assert np.array_equal(other.store.decode_counts[0], history.store.decode_counts[0])
        assert other.match(np.array([1, 1, 2, 0, 1, 3, 300])).max() == pytest.approx(1)


@pytest.mark.failure("56", "125")
@pytest.mark.parametrize(
    "other",
    [
        Fingerprint((4, 16), 2, "abc"),
        Fingerprint((5, 8), 2, "abc"),
        MODEL._replace(digest="xyz"),
        MODEL._replace(top_k=4),
    ],
)
def test_a_file_of_another_model_is_refused_with_both_shown(tmp_path: Path, other: Fingerprint) -> None:
    path = tmp_path / "a.history"
    filled(2).save(path)
    with pytest.raises(HistoryFormatError) as caught:
        History.load(path, other)
    assert str(MODEL) in str(caught.value)
    assert str(other) in str(caught.value)


# Damaged files


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.history"
    filled(2, Fingerprint((2, 2), 1, "abc")).save(path)
    whole = path.read_bytes()
    cut = tmp_path / "cut.history"
    for n in [*range(0, len(whole), 7), len(whole) - 1]:
        cut.write_bytes(whole[:n])
        with pytest.raises(HistoryFormatError, match=r"cut\.history"):
            History.load(cut)


@given(at=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
@settings(SETTINGS, max_examples=100)
def test_a_changed_byte_is_refused_or_harmless(at: float, byte: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    # No checksum: a changed count goes unnoticed. But nothing else may come out than our error or a whole history.
    path = tmp_path_factory.mktemp("history") / "a.history"
    filled(2, Fingerprint((2, 2), 1, "abc")).save(path)
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] = byte
    path.write_bytes(content)
    try:
        loaded = History.load(path)
    except HistoryFormatError:
        return
    assert len(loaded) == 2


Change = Callable[[dict[str, Any], dict[str, str]], Any]


def drop(name: str) -> Change:
    return lambda tensors, metadata: tensors.pop(name)


def put(name: str, value: Any) -> Change:
    return lambda tensors, metadata: tensors.update({name: np.array(value(tensors[name]))})


def say(name: str, value: Any) -> Change:
    return lambda tensors, metadata: metadata.update({name: value if isinstance(value, str) else json.dumps(value)})


def swap(a: str, b: str) -> Change:
    return lambda tensors, metadata: tensors.update({a: tensors[b], b: tensors[a]})


@pytest.mark.parametrize(
    "change",
    [
        *(drop(name) for name in ("prompt", "decode", "total", *LEARNED)),
        swap("prompt", "total"),
        swap("total", "origins"),
        swap("transitions", "origins"),
        put("successions", lambda t: t[:-1]),
        swap("decode", "transitions"),
        put("total", lambda t: -t),
        put("total", lambda t: t * 0),
        put("prompt", lambda t: t[:1]),
        put("prompt", lambda t: t[:, :-1]),
        put("prompt", lambda t: t.astype(np.int32)),
        put("decode", lambda t: t.astype(np.float16)),
        put("prompt", lambda t: t[0, 0]),
        put("prompt", lambda t: t.reshape(-1)),
        put("origins", lambda t: t[1:]),
        say("format", "something"),
        say("version", "1"),
        say("tokens", "-1"),
        say("tokens", "many"),
        say("tokens", "NaN"),
        say("capacity", "0"),
        say("capacity", "-5"),
        say("capacity", str(2**31)),
        say("capacity", str(10**30)),
        say("fingerprint", "nonsense"),
        say("fingerprint", [[4, 3, 5], 2]),
        say("fingerprint", [[4, 3, 4], 2, "abc"]),
        say("fingerprint", [[], 2, "abc"]),
        say("fingerprint", [[12, 0], 2, "abc"]),
        say("fingerprint", [[-4, 16], 2, "abc"]),
        say("fingerprint", [[2**40], 2, "abc"]),
        say("fingerprint", [["a"], 2, "abc"]),
        say("fingerprint", [None, 2, "abc"]),
        say("fingerprint", {"a": 1}),
        say("fingerprint", "3"),
        lambda tensors, metadata: tensors.update(prompt=tensors["prompt"] * 0, decode=tensors["decode"] * 0),
        drop("online.counts"),
        swap("online.counts", "online.blend"),
        put("online.counts", lambda t: t.astype(np.float32)),
        put("online.counts", lambda t: t * np.nan),
        put("online.blend", lambda t: t + 21),
        put("online.counts_curvature", lambda t: t * np.inf),
        put("online.counts_curvature", lambda t: t + 1e13),
        put("online.blend_curvature", lambda t: -t),
        put("online.blend_curvature", lambda t: t - np.diag([0, 1e6, 0])),
        lambda tensors, metadata: metadata.clear(),
        lambda tensors, metadata: metadata.pop("fingerprint"),
    ],
)
def test_impossible_files_are_refused(tmp_path: Path, change: Change) -> None:
    path = tmp_path / "a.history"
    filled(3).save(path)
    tensors = load_file(path)
    metadata = {
        "format": "moecache.history",
        "version": VERSION,
        "fingerprint": json.dumps(MODEL),
        "tokens": "50",
        "capacity": "10",
    }
    save_file(tensors, path, metadata)
    assert len(History.load(path)) == 3
    change(tensors, metadata)
    save_file({name: np.ascontiguousarray(t) if t.ndim else t for name, t in tensors.items()}, path, metadata)
    with pytest.raises(HistoryFormatError, match=r"a\.history"):
        History.load(path)


def test_tensors_of_a_type_that_numpy_lacks_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file as save_torch

    path = tmp_path / "a.history"
    save_torch(
        {"prompt": torch.zeros(2, 12, dtype=torch.bfloat16)}, path, {"format": "moecache.history", "version": "1"}
    )
    with pytest.raises(HistoryFormatError):
        History.load(path)


@pytest.mark.failure("58")
def test_pickles_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.history"
    torch.save({"prompt": torch.zeros(3)}, path)
    with pytest.raises(HistoryFormatError):
        History.load(path)
    with path.open("wb") as file:
        np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(HistoryFormatError):
        History.load(path)


def test_what_is_not_there_and_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.history"):
        History.load(tmp_path / "missing.history")
    with pytest.raises(HistoryFormatError):
        History.load(tmp_path)


# Writing


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failing_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    path = tmp_path / "a.history"
    filled(2).save(path)
    before = path.read_bytes()

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(history.os, broken, fail)
        with pytest.raises(OSError, match="No space left"):
            filled(5).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.history"]
    filled(5).save(path)
    assert len(History.load(path)) == 5


@pytest.mark.failure("126")
def test_a_disk_that_fills_up_leaves_the_old_file(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    import signal

    path = tmp_path / "a.history"
    filled(2).save(path)
    before = path.read_bytes()
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with pytest.raises(OSError, match="large"):
            filled(9).save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.history"]


def test_saving_into_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        filled(1).save(tmp_path / "missing" / "a.history")


def test_saving_beside_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    filled(1).save("a.history")
    assert len(History.load("a.history")) == 1


@pytest.mark.failure("I35b")
@pytest.mark.parametrize(
    "change",
    [
        say("capacity", str(300_000_000)),
        say("tokens", str(10**20)),
        say("tokens", str(2**63 - 1)),
        say("tokens", "9" * 5000),
        say("tokens", "\u0661"),
        say("fingerprint", "[" * 3000 + "]" * 3000),
        say("fingerprint", [[4, 3, 5.0], 2, "abc"]),
        say("fingerprint", [[4, 3, True], 2, "abc"]),
        say("fingerprint", [[4, 3, 5], 10**9, "abc"]),
        say("fingerprint", [[4, 3, 5], 2, "a" * 100_000]),
        say("fingerprint", [[65_536], 2, "abc"]),
        say("fingerprint", [[1] * 200_000, 2, "abc"]),
        put("total", lambda t: t + 2**62),
        lambda tensors, metadata: tensors.update({"x" * 1000: np.zeros(1)}),
    ],
)
def test_numbers_that_a_file_may_not_claim(tmp_path: Path, change: Change) -> None:
    path = tmp_path / "a.history"
    filled(3).save(path)
    tensors, metadata = load_file(path), {"format": "moecache.history", "version": VERSION}
    metadata |= {"fingerprint": json.dumps(MODEL), "tokens": "50", "capacity": "10"}
    change(tensors, metadata)
    save_file(tensors, path, metadata)
    with pytest.raises(HistoryFormatError) as refused:
        History.load(path)
    assert len(str(refused.value)) < 600 + len(str(path))


@pytest.mark.failure("I35b")
def test_room_that_a_file_claims_is_given_when_it_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.history"
    filled(3).save(path)
    metadata = {"format": "moecache.history", "version": VERSION, "fingerprint": json.dumps(MODEL), "tokens": "50"}
    save_file(load_file(path), path, {**metadata, "capacity": "20_000_000".replace("_", "")})
    with pytest.raises(HistoryFormatError, match="pass the capacity"):
        History.load(path)
    assert History.load(path, capacity=5).capacity == 5
    assert History.load(path, expected_capacity=20_000_000).capacity == 20_000_000


@pytest.mark.failure("I35b")
def test_arrays_of_8_bit_floats_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file as load_torch
    from safetensors.torch import save_file as save_torch

    path = tmp_path / "a.history"
    filled(3).save(path)
    tensors = load_torch(path)
    tensors["online.counts"] = tensors["online.counts"].to(torch.float8_e4m3fn)
    save_torch(tensors, path, {"format": "moecache.history", "version": VERSION})
    with pytest.raises(HistoryFormatError, match="F8_E4M3"):
        History.load(path)


@pytest.mark.failure("I35b")
def test_counters_stop_instead_of_wrapping(tmp_path: Path) -> None:
    path, most = tmp_path / "a.history", 2**53
    filled(3).save(path)
    tensors = load_file(path)
    tensors["total"] = np.full(12, most)
    metadata = {"format": "moecache.history", "version": VERSION, "fingerprint": json.dumps(MODEL), "capacity": "10"}
    save_file(tensors, path, {**metadata, "tokens": str(most)})
    history = History.load(path)
    history.add(np.ones(12, np.int64), np.ones(12, np.int64), 5)
    other = history.copy()
    history.merge(other)
    history.save(path)
    assert_same(History.load(path), history)
    assert history.store.tokens == most


def test_a_copy_is_the_same_and_apart() -> None:
    history = filled(4)
    copy = history.copy()
    assert_same(history, copy)
    copy.add(np.ones(12, np.int64), np.ones(12, np.int64), 5)
    copy.store.weights.counts[:] = 0
    assert (len(history), len(copy)) == (4, 5)
    assert history.store.weights.counts.any()
