"""Files that were right and then changed: refused with the library's own error, or read into something that is whole.

``MOECACHE_FUZZ_SECONDS`` says how long each target runs; without it, a few hundred examples.
"""

from __future__ import annotations

import json
import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from moecache import Fingerprint, Forecaster, History
from moecache.errors import HistoryFormatError, MoeCacheError, TraceFormatError
from moecache.forecaster import HORIZONS
from moecache.lab import Counts, Trace, read_trace, replay, write_trace

SECONDS = float(os.environ.get("MOECACHE_FUZZ_SECONDS", 0))
EXAMPLES = 60
SLOWEST_S = 20.0  # of one file: a hang, not a busy machine
# What reading may allocate: copies of the file, and room of small files (tables and a thousand requests' room).
PER_BYTE, ANYWAY = 64, 48 << 20

MODEL = Fingerprint((3, 2), 1, "abc")


def filled() -> History:
    random = np.random.default_rng(0)
    history = History(MODEL, 8)
    for n in range(3):
        history.add(random.integers(0, 400, 5), random.integers(0, 3, 5) * (n > 0), 9)
    for name in ("transitions", "origins", "successions", "followed"):
        table = history.store.learned()[name]
        table[:] = random.integers(0, 50, len(table))
    return history


def forecaster() -> Forecaster:
    random = np.random.default_rng(1)
    half, single, rank = np.float16, np.float32, 2
    pairs = sum(MODEL.num_experts[i] * MODEL.num_experts[1 - i] for i in range(2))
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
        "write": (half, (2, 5, rank)),
        "use_read": (half, (len(HORIZONS), 5, rank)),
        "use_bias": (single, (len(HORIZONS), 5)),
        "use_weights": (single, (len(HORIZONS), 1)),
        "ahead_read": (half, (5, rank)),
        "ahead_gain": (single, (1, rank)),
        "ahead_bias": (single, (1, 5)),
        "ahead_weights": (single, (1, 1)),
        "ahead_pairs": (half, (pairs,)),
    }
    arrays = {name: random.normal(size=shape).astype(dtype) for name, (dtype, shape) in shapes.items()}
    prior = random.random(5).astype(single)
    return Forecaster(fingerprint=MODEL, decay=np.array([1, 0.5], single), prior=prior, rectified=1, **arrays)


def traced(ids: int = 7) -> Trace:
    random = np.random.default_rng(2)
    return Trace(
        "a",
        random.integers(-1, ids, (6, 2, 2)),
        np.array([0, 0, 1, 1, 1, 2]),
        np.array([0, 1, 0, 1, 1, 1]),
        (ids, ids + 1),
        forward=np.arange(6),
        weights=random.random((6, 2, 2)),
        metadata={"model": "a", "source": "here"},
    )


# Changes to a file's bytes

NUMBERS = [0, 1, -1, 7, 255, 256, 65_536, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 10**8, 10**20, 10**400, 1.5, True]
VALUES: list[Any] = [*NUMBERS, None, "", "x", "\ud800", "9" * 5000, [], {}, [[]], [2] * 70_000]


@st.composite
def changed(draw: st.DrawFn, original: bytes) -> bytes:
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["flip", "byte", "cut", "insert", "repeat", "number", "header"]))
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        if not data:
            break
        if kind == "flip":
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "byte":
            data[at] = draw(st.integers(0, 255))
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=20))
        elif kind == "repeat":
            data[at:at] = data[at : at + draw(st.integers(1, 200))]
        elif kind == "number":
            data = bytearray(_another_number(bytes(data), at, str(draw(st.sampled_from(NUMBERS)))))
        else:
            data = bytearray(draw(_another_header(bytes(data))))
    return bytes(data)


def _another_number(data: bytes, at: int, number: str) -> bytes:
    # The next run of digits after `at` becomes another one.
    digits = b"0123456789"
    begin = next((i for i in range(at, len(data)) if data[i] in digits), None)
    if begin is None:
        return data
    end = next((i for i in range(begin, len(data)) if data[i] not in digits), len(data))
    return data[:begin] + number.encode() + data[end:]


@st.composite
def _another_header(draw: st.DrawFn, data: bytes) -> bytes:
    # One place of a safetensors header, or of a first line of JSON.
    if data[8:9] == b"{":
        size = struct.unpack("<Q", data[:8])[0]
        text, rest = data[8 : 8 + size], data[8 + size :]
    else:
        text, _, rest = data.partition(b"\n")
    try:
        header = json.loads(text.removeprefix(b"#"))
    except ValueError:
        return data
    if not isinstance(header, dict) or not header:
        return data
    inner = header
    if data[8:9] == b"{":
        name = draw(st.sampled_from(sorted(header)))
        inner = header[name] if isinstance(header[name], dict) and header[name] else header
    key = draw(st.sampled_from(sorted(inner)))
    value = draw(st.sampled_from(VALUES))
    inner[key] = str(value) if isinstance(inner[key], str) and draw(st.booleans()) else value
    if draw(st.booleans()):
        inner[draw(st.sampled_from(["model", "num_experts", "top_k", "tokens", "num_layers", "dtype", "shape"]))] = (
            value
        )
    new = json.dumps(header).encode()
    if data[8:9] == b"{":
        new += b" " * (-len(new) % 8)
        return struct.pack("<Q", len(new)) + new + rest
    return b"# " * text.startswith(b"#") + new + b"\n" + rest


def fuzz(name: str, original: bytes, read: Callable[[Path], None], folder: Path) -> None:
    """Read what became of a file, again and again."""
    path, end = folder / name, time.monotonic() + SECONDS

    @given(data=changed(original))
    @settings(
        max_examples=EXAMPLES if not SECONDS else 200,
        deadline=None,
        database=None,
        derandomize=not SECONDS,
        suppress_health_check=list(HealthCheck),
    )
    def one(data: bytes) -> None:
        path.write_bytes(data)
        begun = time.monotonic()
        tracemalloc.start()
        try:
            read(path)
        except (HistoryFormatError, TraceFormatError) as error:
            assert len(str(error)) < 1500  # noqa: PT017
        finally:
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert most < PER_BYTE * len(data) + ANYWAY
        assert time.monotonic() - begun < SLOWEST_S

    one()
    while time.monotonic() < end:
        one()


def contents(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    with safe_open(path, "np") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def read_history(path: Path) -> None:
    history = History.load(path)
    again = path.with_name("again")
    history.save(again)
    metadata, arrays = contents(again)
    for name, array in contents(path)[1].items():
        if array.dtype != np.uint32:  # counts beyond 31 bits are halved
            np.testing.assert_array_equal(arrays[name], array)
    History.load(again).save(again)
    same_metadata, same_arrays = contents(again)
    assert same_metadata == metadata
    assert {name: x.tobytes() for name, x in arrays.items()} == {name: x.tobytes() for name, x in same_arrays.items()}
    # It goes on working, and what is saved then can be read.
    size = sum(history.fingerprint.num_experts)
    history.add(np.ones(size, np.int64), np.ones(size, np.int64), 2)
    assert np.isfinite(history.match(np.ones(size, np.int64))).all()
    history.save(again)
    assert len(History.load(again)) == len(history)


def read_any_trace(path: Path) -> None:
    trace = read_trace(path)
    again = path.with_name("again.safetensors")
    trace.save(again)
    back = read_trace(again)
    for name in ("experts", "request", "decode", "forward", "counted", "weights", "token", "request_group"):
        np.testing.assert_array_equal(getattr(back, name), getattr(trace, name))
    assert back.num_experts == trace.num_experts
    if sum(trace.num_experts) < 5000:
        try:
            replay(trace, ["counts"], [1.0])
        except MoeCacheError as error:
            assert "capacity" in str(error)  # noqa: PT017


def read_counts(path: Path) -> None:
    assert len(Counts.read(path).history(8)) <= 8


@pytest.mark.failure("I35b")
@pytest.mark.timeout(0 if SECONDS else 300)
class TestChangedFiles:
    def test_history(self, tmp_path: Path) -> None:
        filled().save(tmp_path / "a")
        fuzz("a", (tmp_path / "a").read_bytes(), read_history, tmp_path)

    def test_forecaster(self, tmp_path: Path) -> None:
        history = filled()
        history.forecaster = forecaster()
        history.save(tmp_path / "a")
        fuzz("a", (tmp_path / "a").read_bytes(), read_history, tmp_path)

    @pytest.mark.parametrize("ending", [".safetensors", ".jsonl", ".csv", ".tsv.gz"])
    def test_trace(self, ending: str, tmp_path: Path) -> None:
        path = tmp_path / f"a{ending}"
        write_trace(traced(), path)
        fuzz(path.name, path.read_bytes(), read_any_trace, tmp_path)

    def test_archive(self, tmp_path: Path) -> None:
        path = tmp_path / "a.npz"
        trace = traced()
        np.savez(path, experts=trace.experts, request=trace.request, forward=trace.forward, num_experts=(7, 8))
        fuzz(path.name, path.read_bytes(), read_any_trace, tmp_path)

    def test_heat_map(self, tmp_path: Path) -> None:
        text = "layer,expert,count\n" + "".join(f"{n // 3},{n % 3},{n * n}\n" for n in range(9))
        fuzz("a.csv", text.encode(), read_counts, tmp_path)
