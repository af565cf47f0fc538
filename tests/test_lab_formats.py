"""Traces as others write them: read as they are, or refused by name with what to do."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_core import SETTINGS
from safetensors.numpy import save_file

from moecache import Fingerprint, History
from moecache.errors import HistoryFormatError, TraceFormatError
from moecache.lab import Counts, Trace, read_trace, replay, write_trace

LAYERS, EXPERTS, TOP_K, TOKENS = 3, 8, 2, 6
ROUTED = np.array(
    [[[(t + layer) % EXPERTS, (t + layer + 3) % EXPERTS] for layer in range(LAYERS)] for t in range(TOKENS)], np.int16
)
REQUEST = np.array([0, 0, 0, 1, 1, 1], np.int32)
ONES = np.ones(TOKENS, np.uint8)


def written(path: Path, lines: Sequence[object], **options: Any) -> Path:
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)}\n" for line in lines)
    data = text.encode(options.get("encoding", "utf-8"))
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def records(**names: str) -> list[dict[str, object]]:
    """A record for each (token, layer), with the columns called as said."""
    found = []
    for t in range(TOKENS):
        for layer in range(LAYERS):
            values = {
                "layer": layer,
                "token": t % 3,
                "experts": ROUTED[t, layer].tolist(),
                "request": int(REQUEST[t]),
            }
            found.append({names.get(name, name): value for name, value in values.items()})
    return found


def rows(separator: str, **names: str) -> list[str]:
    columns = [names.get(name, name) for name in ("layer", "token", "experts", "request")]
    lines = [separator.join(columns)]
    for record in records(**names):
        values = [" ".join(map(str, v)) if isinstance(v, list) else str(v) for v in (record[c] for c in columns)]
        lines.append(separator.join(values))
    return lines


def check(trace: Trace, routed: np.ndarray = ROUTED, request: np.ndarray = REQUEST) -> None:
    np.testing.assert_array_equal(trace.experts, routed)
    np.testing.assert_array_equal(trace.request, request)
    assert replay(trace, ["lru"], [4])[0].demands > 0


@pytest.mark.failure("I37")
@pytest.mark.parametrize(
    "names",
    [
        {"layer": "layer_id", "experts": "topk_ids", "token": "token_idx", "request": "req_id"},
        {"layer": "layer_idx", "experts": "expert_ids", "token": "position", "request": "seq_id"},
        {"layer": "Layer", "experts": "selected_experts"},
    ],
)
def test_columns_under_other_names(names: dict[str, str], tmp_path: Path) -> None:
    check(read_trace(written(tmp_path / "a.jsonl", records(**names))))
    check(read_trace(written(tmp_path / "a.csv", rows(",", **names))))
    check(read_trace(written(tmp_path / "a.tsv", rows("\t", **names))))


@pytest.mark.failure("I37")
def test_packed_marked_and_separated_text(tmp_path: Path) -> None:
    strange = [{"model": "a\u2028b\u0085c"}, *records()]
    trace = read_trace(written(tmp_path / "a.jsonl", strange))
    assert trace.model == "a\u2028b\u0085c"
    check(trace)
    check(read_trace(written(tmp_path / "b.jsonl", records(), encoding="utf-8-sig")))
    check(read_trace(written(tmp_path / "b.csv", rows(","), encoding="utf-8-sig")))
    for name in ("a.csv.gz", "A.TSV.gz", "a.jsonl.gz"):
        lines = records() if "json" in name else rows("\t" if "TSV" in name else ",")
        check(read_trace(written(tmp_path / name, lines)))
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[:-9])
        with pytest.raises(TraceFormatError, match="gzip"):
            read_trace(tmp_path / name)
    with pytest.raises(TraceFormatError, match="not UTF-8"):
        read_trace(written(tmp_path / "c.csv", rows(","), encoding="utf-16"))


@pytest.mark.failure("I37", "49")
def test_layers_that_have_other_numbers(tmp_path: Path) -> None:
    shifted = [{**record, "layer": 3 + 2 * int(str(record["layer"]))} for record in records()]
    trace = read_trace(written(tmp_path / "a.jsonl", shifted))
    check(trace)
    assert trace.metadata["moe_layers"] == "[3, 5, 7]"


@pytest.mark.failure("I37")
def test_requests_with_names_that_take_turns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    named = [{**record, "request": f"chat-{record['request']}"} for record in records()]
    check(read_trace(written(tmp_path / "a.jsonl", named)))
    per_token = [named[i : i + LAYERS] for i in range(0, len(named), LAYERS)]
    turns = [line for t in (0, 3, 1, 4, 2, 5) for line in per_token[t]]
    with caplog.at_level(logging.WARNING, "moecache"):
        check(read_trace(written(tmp_path / "b.jsonl", turns)))
    assert "take turns" in caplog.text


@pytest.mark.failure("I37")
def test_one_record_an_expert_or_a_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = ["t_ns,request,token,layer,expert"]
    for n, record in enumerate(records()):
        lines += [f"{n},{record['request']},{record['token']},{record['layer']},{e}" for e in record["experts"]]  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING, "moecache"):
        check(read_trace(written(tmp_path / "a.csv", lines)))
    assert "t_ns" in caplog.text
    tokens = [{"req_id": int(REQUEST[t]), "topk_ids": ROUTED[t].tolist()} for t in range(TOKENS)]
    check(read_trace(written(tmp_path / "a.jsonl", tokens)))


@pytest.mark.failure("I37")
def test_tokens_without_numbers_are_counted_by_their_layers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = [{"layer_id": r["layer"], "expert_ids": r["experts"]} for r in records()]
    with caplog.at_level(logging.WARNING, "moecache"):
        check(read_trace(written(tmp_path / "a.jsonl", plain)), request=np.zeros(TOKENS, np.int32))
    assert "names no tokens" in caplog.text
    plain[4]["expert_ids"] = [1, 2, 3, 4]
    with pytest.raises(TraceFormatError, match="number the tokens"):
        read_trace(written(tmp_path / "b.jsonl", plain))


@pytest.mark.failure("I37")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.feather", "read_feather"),
        ("a.pkl", "a pickle may run code"),
        ("a.parquet.gz", "unpack it"),
        ("a.csv.zst", "unpack it"),
    ],
)
def test_formats_that_are_not_read_say_what_to_do(name: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path / name, records())
    with pytest.raises(TraceFormatError, match=message):
        read_trace(path)
    with pytest.raises(TraceFormatError, match="not saved"):
        write_trace(Trace("a", ROUTED, REQUEST, ONES, (EXPERTS,) * LAYERS), tmp_path / name)
    with pytest.raises(TraceFormatError, match="token_id may be"):
        read_trace(written(tmp_path / "b.csv", ["token_id,layer,expert", "5,0,1"]))
    assert read_trace(tmp_path / "b.csv", mapping={"token": "token_id"}).tokens == 1


@pytest.mark.failure("I37", "54")
def test_a_heat_map_seeds_a_history_and_is_no_trace(tmp_path: Path) -> None:
    lines = ["layer,expert,count", *(f"{layer},{e},{10 * layer + e}" for layer in (1, 2) for e in range(4))]
    path = written(tmp_path / "heat.csv", lines)
    counts = Counts.read(path)
    assert counts.counts.tolist() == [[[10, 11, 12, 13], [20, 21, 22, 23]]]
    assert len(counts.history()) == 1
    with pytest.raises(TraceFormatError, match="no order of tokens"):
        read_trace(path)
    for bad in ("1,0,5", "1,9,-1", "1,9", "1,999999999,1", f"1,9,{2**60}"):
        with pytest.raises(TraceFormatError):
            Counts.read(written(tmp_path / "bad.csv", [*lines, bad]))


@pytest.mark.failure("I37", "58")
def test_numpy_archives_of_plain_arrays(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, topk_ids=np.asfortranarray(ROUTED.astype(np.int64)), request=REQUEST)
    check(read_trace(path))
    for arrays, message in (
        ({"experts": np.array([[[{}]]], dtype=object)}, "plain numbers"),
        ({"experts": ROUTED[0]}, r"expected an array experts \[tokens, layers, k\]"),
        ({"experts": ROUTED, "more": REQUEST}, "no part of a routing trace"),
        ({"experts": np.zeros((10**7, 1, 1), np.int8)}, "unfolds"),
    ):
        np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
        with pytest.raises(TraceFormatError, match=message):
            read_trace(path)


@pytest.mark.failure("I38")
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".csv.gz"])
def test_text_cut_at_a_token_s_end_is_noticed(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    write_trace(Trace("a", ROUTED, REQUEST, ONES, (EXPERTS,) * LAYERS), path)
    check(read_trace(path))
    data = gzip.decompress(path.read_bytes()) if suffix == ".csv.gz" else path.read_bytes()
    cut = b"".join(data.splitlines(keepends=True)[:-LAYERS])
    path.write_bytes(gzip.compress(cut) if suffix == ".csv.gz" else cut)
    with pytest.raises(TraceFormatError, match="promises 6 tokens, 5 are there"):
        read_trace(path)


@pytest.mark.failure("I38")
def test_text_says_what_it_leaves_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = Trace(
        "a",
        ROUTED,
        REQUEST,
        ONES,
        (EXPERTS,) * LAYERS,
        weights=np.ones(ROUTED.shape, np.float32),
        forward=np.arange(TOKENS),
        counted=np.array([1, 1, 1, 1, 1, 0]),
        request_group=np.array([0, 0]),
        metadata={"digest": "abc"},
    )
    with caplog.at_level(logging.WARNING, "moecache"):
        write_trace(trace, tmp_path / "a.csv")
    assert len(caplog.records) == 1
    assert "no place for request_group, 1 tokens that were not counted;" in caplog.text
    back = read_trace(tmp_path / "a.csv")
    assert (back.tokens, back.fingerprint.digest) == (TOKENS - 1, "abc")
    np.testing.assert_array_equal(back.weights, np.ones((TOKENS - 1, *ROUTED.shape[1:])))
    np.testing.assert_array_equal(back.forward, np.arange(TOKENS - 1))


@st.composite
def made(draw: st.DrawFn) -> dict[str, Any]:
    """What a Trace may be made of, and some that it may not."""
    tokens, layers, k = draw(st.integers(1, 6)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    experts = draw(st.sampled_from([2, 7, 256, 257, 4000]))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = random.integers(draw(st.sampled_from([-1, 0])), experts, (tokens, layers, k))
    ragged = draw(st.booleans())
    request = np.sort(random.integers(0, 3, tokens))
    number = np.unique(request, return_inverse=True)[1]
    forward = draw(st.sampled_from([None, np.arange(tokens), np.arange(tokens) * 2**20 + 5]))
    if forward is not None and draw(st.booleans()):
        number = np.unique(random.permutation(number), return_inverse=True)[1]
    return {
        "name": "a",
        "experts": ids.astype(draw(st.sampled_from([np.int16, np.int32, np.int64, np.float32, object]))),
        "request": number.astype(draw(st.sampled_from([np.int32, np.int64, np.uint16, np.int8]))),
        "decode": draw(st.sampled_from([np.ones(tokens, bool), np.zeros(tokens, np.int64), [1] * tokens])),
        "num_experts": tuple(
            draw(st.sampled_from([np.int64, int]))(experts + (layer if ragged else 0)) for layer in range(layers)
        ),
        "forward": forward,
        "counted": draw(st.sampled_from([None, random.random(tokens) < 0.7])),
        "weights": draw(st.sampled_from([None, random.random(ids.shape), np.full(ids.shape, np.nan)])),
        "token": draw(st.sampled_from([None, random.integers(0, 2**31, tokens), np.array([2**40] * tokens)])),
        "request_group": draw(st.sampled_from([None, np.arange(int(number.max()) + 1), np.arange(9)])),
        "metadata": draw(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2)),
    }


@pytest.mark.failure("I36")
@given(fields=made())
@settings(SETTINGS, max_examples=60)
def test_whatever_a_trace_accepts_can_be_saved_and_read(
    fields: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    try:
        trace = Trace(**fields)
    except TraceFormatError:
        return
    folder = tmp_path_factory.mktemp("trace")
    trace.save(folder / "a.safetensors")
    back = read_trace(folder / "a.safetensors")
    for name in ("experts", "request", "decode", "forward", "counted", "weights", "token", "request_group"):
        mine, theirs = getattr(trace, name), getattr(back, name)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)
    assert back.num_experts == trace.num_experts
    assert dict(trace.metadata).items() <= {**trace.metadata, **back.metadata}.items()
    capacity = sum(trace.num_experts)
    if capacity >= trace.top_k:
        assert replay(back, ["lru"], [capacity])[0].hits == replay(trace, ["lru"], [capacity])[0].hits
    if trace.counted is not None and not trace.counted.any():
        with pytest.raises(TraceFormatError):
            write_trace(trace, folder / "a.jsonl")
        return
    kept = slice(None) if trace.counted is None else trace.counted.astype(bool)
    for ending in (".jsonl", ".csv", ".tsv.gz"):
        write_trace(trace, folder / f"a{ending}")
        text = read_trace(folder / f"a{ending}")
        np.testing.assert_array_equal(text.experts, trace.experts[kept])
        first = list(dict.fromkeys(trace.request[kept].tolist()))
        assert text.request.tolist() == [first.index(r) for r in trace.request[kept].tolist()]
        np.testing.assert_array_equal(text.decode, trace.decode[kept])
        assert text.num_experts == trace.num_experts


@pytest.mark.failure("I36")
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_ids_of_any_integer_type_are_replayed(dtype: Any) -> None:
    trace = Trace("a", ROUTED.astype(dtype), REQUEST.astype(np.int64), ONES, (EXPERTS,) * LAYERS)
    assert trace.experts.dtype == np.int16
    check(trace)


# Numbers that are believed


@pytest.mark.failure("I35b", "56")
@pytest.mark.parametrize(
    "metadata",
    [
        {"num_experts": str(10**8)},
        {"num_experts": "[" * 3000 + "]" * 3000},
        {"num_experts": "9" * 5000},
        {"num_experts": "[8, 8, 60000]"},
        {"num_experts": "true"},
        {"num_layers": "3.0"},
        {"num_layers": "\u0663"},
        {"top_k": "-2"},
    ],
)
def test_what_metadata_claim_is_bounded(metadata: dict[str, str], tmp_path: Path) -> None:
    strings = {"model": "a", "num_layers": "3", "num_experts": "8", "top_k": "2", **metadata}
    arrays = {"experts": ROUTED, "request": REQUEST, "decode": np.ones(TOKENS, np.uint8)}
    save_file(arrays, tmp_path / "a.safetensors", strings)
    with pytest.raises(TraceFormatError) as refused:
        read_trace(tmp_path / "a.safetensors")
    assert len(str(refused.value)) < 600


@pytest.mark.failure("I35b")
def test_text_fields_of_any_length(tmp_path: Path) -> None:
    for name, lines in {
        "long.csv": ["layer,token,experts", f"0,0,{'1 ' * 100_000}"],
        "quoted.csv": ["layer,token,experts", '0,0,"1 2'],
        "deep.jsonl": ['{"layer": 0, "token": 0, "experts": ' + "[" * 3000 + "]" * 3000 + "}"],
        "wide.jsonl": [{"layer": 0, "token": t, "experts": [1] * (4000 if t == 5 else 1)} for t in range(3000)],
        "many.jsonl": [{"layer": n, "token": n, "experts": [1]} for n in range(20_000)],
        "top.jsonl": [{"top_k": 4096}, *({"layer": 0, "token": t, "experts": [1]} for t in range(3000))],
    }.items():
        with pytest.raises(TraceFormatError) as refused:
            read_trace(written(tmp_path / name, lines))
        assert len(str(refused.value)) < 600 + len(str(tmp_path))


@pytest.mark.failure("I35b")
@pytest.mark.parametrize("num_experts", [(65_536,), (20_000,) * 2, (2,) * 10_001, (110,) * 10_000, (2**31,), (0,)])
def test_a_history_of_more_experts_than_tables_can_be_kept_of(num_experts: tuple[int, ...]) -> None:
    with pytest.raises(HistoryFormatError, match="no history can be kept"):
        History(Fingerprint(num_experts, 2, ""))
