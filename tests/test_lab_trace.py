"""Trace files: what is read is what was written, and nothing damaged is read in part."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from moecache import ExpertBank, ExpertCache
from moecache.errors import HistoryFormatError, TraceFormatError
from moecache.lab import Counts, Trace, merge, read_trace, replay, write_trace
from moecache.trace import metadata_of, tensors_of

LAYERS, EXPERTS, TOP_K = 2, 6, 2


def made(**changes: object) -> Trace:
    random = np.random.default_rng(0)
    fields = {
        "name": "made",
        "experts": np.array([[random.permutation(EXPERTS)[:TOP_K] for _ in range(LAYERS)] for _ in range(7)], np.int16),
        "request": np.array([0, 0, 0, 1, 1, 2, 2], np.int32),
        "decode": np.ones(7, np.uint8),
        "num_experts": (EXPERTS,) * LAYERS,
        "metadata": {"model": "toy"},
        **changes,
    }
    return Trace(**fields)  # type: ignore[arg-type]


def same(a: Trace, b: Trace) -> bool:
    names = ("experts", "request", "decode", "forward", "counted", "weights")
    return a.num_experts == b.num_experts and all(np.array_equal(getattr(a, n), getattr(b, n)) for n in names)


@pytest.mark.parametrize("suffix", [".safetensors", ".jsonl", ".csv"])
def test_round_trip(suffix: str, tmp_path: Path) -> None:
    trace = made()
    path = tmp_path / f"made{suffix}"
    write_trace(trace, path)
    back = read_trace(path, EXPERTS)
    assert same(trace, back)
    assert [r.hits for r in replay(back, ["lru"], [3])] == [r.hits for r in replay(trace, ["lru"], [3])]


def test_round_trip_of_what_a_recording_holds(tmp_path: Path) -> None:
    experts = made().experts.copy()
    experts[2] = -1
    trace = made(
        experts=experts,
        request=np.array([0, 0, 1, 1, 0, 1, 2], np.int32),
        forward=np.array([0, 0, 1, 1, 2, 3, 9], np.int32),
        decode=np.array([0, 0, 0, 0, 1, 1, 1], np.uint8),
        counted=np.array([1, 1, 0, 1, 1, 1, 1], np.uint8),
        weights=np.full((7, LAYERS, TOP_K), 0.5, np.float16),
    )
    trace.save(tmp_path / "made.safetensors")
    assert same(trace, read_trace(tmp_path / "made.safetensors"))
    kept = [0, 1, 3, 4, 5, 6]
    for name in ("made.csv", "made.jsonl", "made.tsv.xz"):
        write_trace(trace, tmp_path / name)
        back = read_trace(tmp_path / name)
        for field in ("experts", "request", "decode", "weights"):
            np.testing.assert_array_equal(getattr(back, field), getattr(trace, field)[kept])
        assert back.forward is not None
        assert back.forward.tolist() == [0, 0, 1, 2, 3, 4]


def test_layers_may_differ(tmp_path: Path) -> None:
    experts = np.zeros((3, 2, 1), np.int16)
    experts[:, 1] = 5
    trace = made(experts=experts, request=np.zeros(3, np.int32), decode=np.ones(3, np.uint8), num_experts=(2, 8))
    trace.save(tmp_path / "made.safetensors")
    back = read_trace(tmp_path / "made.safetensors")
    assert back.num_experts == (2, 8)
    assert replay(back, ["lru"], [2])[0].hits == 4


def test_cut_at_any_byte(tmp_path: Path) -> None:
    whole = tmp_path / "whole.safetensors"
    made().save(whole)
    data = whole.read_bytes()
    cut = tmp_path / "cut.safetensors"
    for n in [*range(0, 64), *range(64, len(data), 7), len(data) - 1]:
        cut.write_bytes(data[:n])
        with pytest.raises(TraceFormatError):
            read_trace(cut)


def test_json_lines_cut_at_any_byte(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    write_trace(made(), whole)
    data = whole.read_bytes()
    cut = tmp_path / "cut.jsonl"
    for n in range(len(data) - 1):
        cut.write_bytes(data[:n])
        with pytest.raises(TraceFormatError):
            read_trace(cut)


def test_csv_cut_within_a_token(tmp_path: Path) -> None:
    whole = tmp_path / "whole.csv"
    write_trace(made(), whole)
    lines = whole.read_text().splitlines(keepends=True)
    cut = tmp_path / "cut.csv"
    for text in ("".join(lines[:-1]), "".join(lines)[:-2], "".join(lines)[:-4]):
        cut.write_text(text)
        with pytest.raises(TraceFormatError):
            read_trace(cut)


@pytest.mark.failure("38")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"experts": np.full((7, LAYERS, TOP_K), EXPERTS, np.int16)},
            "token 0, layer 0 routes to experts \\[6, 6\\]; expected 0..5",
        ),
        ({"experts": np.full((7, LAYERS, TOP_K), -2, np.int16)}, "expected 0..5"),
        ({"experts": np.zeros((0, LAYERS, TOP_K), np.int16)}, "nothing to replay"),
        ({"request": np.array([0, 0, 0, 1, 1, 3, 3], np.int32)}, "request 2 has no tokens"),
        ({"request": np.array([0, 0, 1, 0, 1, 2, 2], np.int32)}, "token 3 goes back to request 0"),
        ({"request": np.array([-1, 0, 0, 1, 1, 2, 2], np.int32)}, "negative"),
        ({"request_group": np.zeros(5, np.int32)}, "request_group"),
        ({"forward": np.array([0, 2, 1, 3, 4, 5, 6], np.int32)}, "not sorted"),
        ({"forward": np.array([0, 1, 2, 2, 3, 4, 5], np.int32)}, "two requests"),
        ({"decode": np.full(7, 2, np.uint8)}, "decode holds 2"),
        ({"weights": np.zeros((7, 1, 2), np.float16)}, "weights have shape"),
    ],
)
def test_impossible_numbers(changes: dict[str, object], message: str) -> None:
    with pytest.raises(TraceFormatError, match=message):
        made(**changes)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"model": None}, "lacks model"),
        ({"num_experts": "many"}, "num_experts is 'many'"),
        ({"num_experts": "[6, 6, 6]"}, "list of 2"),
        ({"num_layers": "3"}, "says 3 layers"),
        ({"top_k": "four"}, "whole number"),
    ],
)
def test_damaged_metadata(metadata: dict[str, str | None], message: str, tmp_path: Path) -> None:
    strings = {**metadata_of(made()), **metadata}
    save_file(tensors_of(made()), tmp_path / "bad.safetensors", {k: v for k, v in strings.items() if v is not None})
    with pytest.raises(TraceFormatError, match=message):
        read_trace(tmp_path / "bad.safetensors")


def test_tensors_that_are_missing_or_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    tensors = tensors_of(made())
    for name, bad, message in (
        ("request", None, "no tensor request"),
        ("experts", tensors["experts"].astype(np.float32), "experts are float32"),
        ("request", np.zeros(3, np.int32), "request is int32"),
        ("request", np.full(7, 2**40), "beyond int32"),
    ):
        changed = {k: v for k, v in {**tensors, name: bad}.items() if v is not None}
        save_file(changed, path, metadata_of(made()))
        with pytest.raises(TraceFormatError, match=message):
            read_trace(path)
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"layer": 0, "token": 0, "experts": [1]}', "{layer: 1}"], "line 2 is not JSON"),
        (['{"layer": 0, "token": 0, "experts": [1]}', "[1, 2]"], "line 2: expected an object"),
        (['{"layer": 0, "token": 0}'], "line 1 lacks experts"),
        (['{"layer": 0, "token": 0, "experts": [1.5]}'], "line 1: .* whole numbers"),
        (['{"layer": 0, "token": 0, "experts": [1]}'] * 2, "line 2: .* has layer 0 already"),
        (
            ['{"layer": 0, "token": 0, "experts": [1]}', '{"layer": 1, "token": 0, "experts": [1], "decode": 0}'],
            "line 2: .* prompt and completion both",
        ),
        (["[" * 3000 + "]" * 3000], "line 1 is not JSON: nested"),
        (['{"layer": 0, "token": 0, "experts": [1], "request": 1.5}'], "line 1: request"),
        (['{"layer": 0, "token": 100000000000000000000, "experts": [1]}'], "line 1: .* at most"),
        (['{"layer": 3, "token": 0, "experts": [1]}', '{"layer": 4, "token": 1, "experts": [1]}'], "lacks layer 4"),
        (['{"layer": -1, "token": 0, "experts": [1]}'], "negative"),
        (['{"layer": 0, "token": 0, "experts": [99999]}'], "out of range"),
        ([""], "no line routes"),
    ],
)
def test_damaged_json_lines(lines: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(TraceFormatError, match=message):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layer,token\n0,0\n", "line 1: expected the columns"),
        ("layer,token,experts\n0,0\n", "line 2: expected 3 values"),
        ("layer,token,experts\n0,x,1 2\n", "line 2: .* whole number"),
        ("layer,token,experts\n0,0,1 2\n0,1,1 a\n", "line 3: .* whole number"),
    ],
)
def test_damaged_csv(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(TraceFormatError, match=message):
        read_trace(path)


def test_text_without_a_word_about_the_model(tmp_path: Path) -> None:
    path = tmp_path / "plain.jsonl"
    path.write_text("\n".join(json.dumps({"layer": n % 2, "token": n // 2, "experts": [n % 3, 3]}) for n in range(8)))
    trace = read_trace(path)
    assert (trace.num_experts, trace.tokens, trace.requests) == ((4, 4), 4, 1)
    assert read_trace(path, 9).num_experts == (9, 9)


def test_merge() -> None:
    both = merge([made(), made()])
    assert (both.tokens, both.requests) == (14, 6)
    assert both.request.tolist()[5:9] == [2, 2, 3, 3]
    recorded = merge([made(), made(forward=np.arange(7, dtype=np.int32))])
    assert recorded.forward is not None
    assert recorded.forward.tolist() == list(range(14))
    with pytest.raises(TraceFormatError, match="another model"):
        merge([made(), made(num_experts=(EXPERTS, EXPERTS + 1))])


def test_counts_seed_a_history(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).integers(0, 200_000, (5, LAYERS, EXPERTS))
    save_file(
        {"counts": counts, "tokens": np.full(5, 10**6)}, tmp_path / "counts.safetensors", {"top_k": "2", "model": "toy"}
    )
    history = Counts.read(tmp_path / "counts.safetensors").history()
    assert len(history) == 5
    assert history.match(counts[3].reshape(-1)).argmax() == 3
    assert replay(made(), ["moe-infinity"], [4], history=history)[0].demands > 0
    with pytest.raises(TraceFormatError, match="no file of activation counts"):
        Counts.read(_saved(tmp_path))
    assert issubclass(HistoryFormatError, ValueError)


def _saved(folder: Path) -> Path:
    made().save(folder / "trace.safetensors")
    return folder / "trace.safetensors"


class TestRecording:
    def cache(self) -> ExpertCache:
        bank = ExpertBank.from_tensors([{"w": torch.randn(EXPERTS, 2, 2)} for _ in range(LAYERS)])
        return ExpertCache(bank, 6, prefetch=False, top_k=TOP_K)

    def test_two_requests_taking_turns(self, tmp_path: Path) -> None:
        path = tmp_path / "turns.safetensors"
        with self.cache() as cache, cache.record(path, model="toy") as recorder:
            with cache.request() as a, cache.request() as b:
                for request, tokens in ((a, 3), (b, 2), (a, 1), (b, 1), (a, 1)):
                    for layer in range(LAYERS):
                        with request.route(layer, torch.arange(tokens * TOP_K).reshape(tokens, TOP_K) % EXPERTS):
                            pass
            assert not path.exists()
            assert recorder.tokens == 8
        trace = read_trace(path)
        assert trace.request.tolist() == [0, 0, 0, 1, 1, 0, 1, 0]
        assert trace.forward is not None
        assert trace.forward.tolist() == [0, 0, 0, 1, 1, 2, 3, 4]
        assert trace.decode.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
        assert trace.model == "toy"
        assert [p.name for p in tmp_path.iterdir()] == [path.name]

    def test_padding_uncounted_rows_and_passes_cut_short(self, tmp_path: Path) -> None:
        path = tmp_path / "cut.safetensors"
        with self.cache() as cache:
            cache.record(path)
            with cache.request() as request:
                for ids, counted in (([[0, -1], [2, 3]], [False, True]), ([[1, 2], [3, 4]], None)):
                    mask = None if counted is None else torch.tensor(counted)
                    with request.route(0, torch.tensor(ids, dtype=torch.int32), token_mask=mask):
                        pass
        trace = read_trace(path)
        assert trace.experts.tolist() == [
            [[0, -1], [-1, -1]],
            [[2, 3], [-1, -1]],
            [[1, 2], [-1, -1]],
            [[3, 4], [-1, -1]],
        ]
        assert trace.counted is not None
        assert trace.counted.tolist() == [0, 1, 1, 1]

    def test_nothing_routed_leaves_nothing(self, tmp_path: Path) -> None:
        with self.cache() as cache:
            cache.record(tmp_path / "none.safetensors")
        assert list(tmp_path.iterdir()) == []

    def test_a_full_disk_ends_the_recording_not_the_model(self, tmp_path: Path) -> None:
        with self.cache() as cache:
            recorder = cache.record(tmp_path / "full.safetensors")
            recorder._spill.close()
            recorder._spill = open("/dev/full", "w+b", buffering=0)  # noqa: SIM115
            with cache.request() as request:
                for layer in range(LAYERS):
                    with request.route(layer, torch.tensor([[0, 1]])):
                        pass
            with pytest.raises(OSError, match="No space"):
                recorder.close()
        assert list(tmp_path.iterdir()) == []
