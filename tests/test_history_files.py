"""History files: damaged, impossible, of another kind, and written while something fails."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from history_helpers import MODEL, assert_same, filled
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_core import SETTINGS
from safetensors.numpy import load_file, save_file

from moecache import Fingerprint, History, history
from moecache.errors import HistoryFormatError
from moecache.history_file import LEARNED, VERSION

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
