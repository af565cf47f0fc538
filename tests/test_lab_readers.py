"""Routing as other systems publish it: files of their shape are read as they are, and nothing is dropped without a count."""

from __future__ import annotations

import base64
import bz2
import io
import json
import logging
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from test_lab_formats import EXPERTS, LAYERS, REQUEST, ROUTED, TOKENS, check, records, rows, written

from moecache.errors import TraceFormatError
from moecache.lab import Counts, Trace, read_trace, replay

WEIGHTS = np.linspace(0, 1, ROUTED.size, dtype=np.float16).reshape(ROUTED.shape)


def passes_of(trace: Trace) -> list[int]:
    assert trace.forward is not None
    return np.bincount(trace.forward).tolist()


@pytest.mark.failure("I37")
def test_vllm_routing_loggers_with_a_header(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines: list[dict[str, Any]] = [{"type": "meta", "model_id": "m", "layers_logged": [0, 1, 2], "top_k": 2}]
    for t in range(TOKENS):
        for layer in range(LAYERS):
            who = {"type": "route", "req_id": f"req-{REQUEST[t]}", "token_idx": t % 3, "layer": layer}
            lines.append(
                {**who, "topk_ids": ROUTED[t, layer].tolist(), "topk_weights": WEIGHTS[t, layer].tolist(), "pid": 9}
            )
    with caplog.at_level(logging.WARNING, "moecache"):
        trace = read_trace(written(tmp_path / "moe_routes.jsonl", lines))
    check(trace)
    np.testing.assert_array_equal(trace.weights, WEIGHTS)
    assert trace.metadata["model_id"] == "m"
    assert f"pid ({TOKENS * LAYERS})" in caplog.text
    del lines[-1]["topk_weights"]
    with caplog.at_level(logging.WARNING, "moecache"):
        assert read_trace(written(tmp_path / "a.jsonl", lines)).weights is None
    assert f"2 of {ROUTED.size} experts have no weight" in caplog.text


@pytest.mark.failure("I37")
def test_records_of_router_collectors(tmp_path: Path) -> None:
    names = {"layer": "layer_idx", "token": "token_idx", "experts": "selected_ids", "request": "rid"}
    entries = [{**record, "gate_weights": [0.75, 0.25]} for record in records(**names)]
    trace = read_trace(written(tmp_path / "a.jsonl", entries))
    check(trace)
    assert trace.weights is not None
    (tmp_path / "a.json").write_text(json.dumps(entries))
    check(read_trace(tmp_path / "a.json"))


@pytest.mark.failure("I37")
def test_moepager_csv_of_one_expert_a_row(tmp_path: Path) -> None:
    lines = ["t_ns,token,layer,expert"]
    lines += [f"{7 * t},{t},{layer},{e}" for t in range(TOKENS) for layer in range(LAYERS) for e in ROUTED[t, layer]]
    check(read_trace(written(tmp_path / "a.csv", lines)), request=np.zeros(TOKENS, np.int32))


@pytest.mark.failure("I37")
@pytest.mark.parametrize("pruned", [False, True])
def test_llama_cpp_moe_trace_of_layers_and_experts_alone(
    pruned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # A prompt of four tokens in one pass, layer after layer, then two passes of one; the last layer of a prompt is often computed for
    # its last token alone.
    lines, layers = ["layer,expert"], range(2, 2 + LAYERS)
    for first, end in ((0, 4), (4, 5), (5, 6)):
        for place, layer in enumerate(layers):
            some = range(end - 1 if pruned and place == LAYERS - 1 else first, end)
            lines += [f"{layer},{e}" for t in some for e in ROUTED[t, place]]
    with caplog.at_level(logging.WARNING, "moecache"):
        trace = read_trace(written(tmp_path / "moe_trace.csv", lines))
    kept = [3, 4, 5] if pruned else list(range(6))
    check(trace, ROUTED[kept], np.zeros(len(kept), np.int32))
    assert passes_of(trace) == ([1, 1, 1] if pruned else [4, 1, 1])
    assert trace.decode.tolist() == ([0, 1, 1] if pruned else [0, 0, 0, 0, 1, 1])
    assert trace.metadata["moe_layers"] == "[2, 3, 4]"
    assert ("3 of 6 tokens lack" in caplog.text) == pruned
    assert trace.metadata.get("incomplete_tokens") == ("3" if pruned else None)


@pytest.mark.failure("I37")
def test_rows_of_experts_need_their_number_where_none_can_tell_it(tmp_path: Path) -> None:
    lines = ["layer,expert", *(f"{layer},{e}" for layer in range(LAYERS) for t in range(4) for e in ROUTED[t, layer])]
    path = written(tmp_path / "prompt.csv", lines)
    with pytest.raises(TraceFormatError, match="--top-k"):
        read_trace(path)
    trace = read_trace(path, top_k=2)
    check(trace, ROUTED[:4], np.zeros(4, np.int32))
    assert passes_of(trace) == [4]


@pytest.mark.failure("I37")
@pytest.mark.parametrize("calls", ["by layer", "by pass"])
def test_colibri_route_traces(calls: str, tmp_path: Path) -> None:
    lines, call = [], 0
    for first, end in ((0, 4), (4, 5), (5, 6)):
        for layer in range(LAYERS):
            for row, t in enumerate(range(first, end)):
                pairs = zip(ROUTED[t, layer], WEIGHTS[t, layer], strict=True)
                lines.append(f"{call} {row} {layer + 3} " + " ".join(f"{e}:{w:.4f}" for e, w in pairs))
            call += calls == "by layer"
        call += calls == "by pass"
    trace = read_trace(written(tmp_path / "run.trace", lines))
    check(trace, request=np.zeros(TOKENS, np.int32))
    assert passes_of(trace) == [4, 1, 1]
    assert trace.decode.tolist() == [0, 0, 0, 0, 1, 1]
    np.testing.assert_allclose(np.asarray(trace.weights, float), WEIGHTS.astype(float), atol=1e-3)
    for bad in ("0 0 3", "0 0 3 1", "0 0 3 1:x", "0 -1 3 1:0.5", "0 0 3 99999:0.5"):
        with pytest.raises(TraceFormatError, match=r"line 19: .* expected call row layer"):
            read_trace(written(tmp_path / "bad.txt", [*lines, bad]))


@pytest.mark.failure("I37")
def test_vllm_routed_experts_of_requests(tmp_path: Path) -> None:
    one = ROUTED[:3].astype(np.int16)
    np.save(tmp_path / "one.npy", one)
    check(read_trace(tmp_path / "one.npy"), ROUTED[:3], np.zeros(3, np.int32))
    (tmp_path / "one.npy.xz").write_bytes(lzma.compress((tmp_path / "one.npy").read_bytes()))
    check(read_trace(tmp_path / "one.npy.xz"), ROUTED[:3], np.zeros(3, np.int32))
    np.savez(tmp_path / "requests.npz", **{"chat-1": ROUTED[:3], "chat-2": ROUTED[3:]})
    check(read_trace(tmp_path / "requests.npz"))
    packed = io.BytesIO()
    np.save(packed, one)
    encoded = [packed.getvalue(), ROUTED[3:].astype("<i4").tobytes()]
    for listed, head in (
        ([ROUTED[:3].tolist(), ROUTED[3:].tolist()], []),
        ([base64.b64encode(data).decode() for data in encoded], [{"num_layers": LAYERS, "top_k": 2}]),
    ):
        lines = [{"request_id": f"cmpl-{n}", "routed_experts": part} for n, part in enumerate(listed)]
        check(read_trace(written(tmp_path / "a.jsonl", [*head, *lines])))
    for bad in ("*", base64.b64encode(b"abcd").decode()):
        with pytest.raises(TraceFormatError, match="base64"):
            read_trace(written(tmp_path / "b.jsonl", [{"request_id": "a", "routed_experts": bad}]))


@pytest.mark.failure("I37")
def test_megatron_router_replay_and_routing_maps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids = torch.from_numpy(ROUTED.astype(np.int64))
    maps = torch.zeros(TOKENS, LAYERS, EXPERTS, dtype=torch.bool).scatter_(2, ids, True)
    one = np.zeros(TOKENS, np.int32)
    torch.save([ids[:, layer].clone() for layer in range(LAYERS)], tmp_path / "replay.pt")
    check(read_trace(tmp_path / "replay.pt"), request=one)
    torch.save(
        {f"decoder.layers.{n}.mlp.router": [ids[:2, n].clone(), ids[2:, n].clone()] for n in range(LAYERS)},
        tmp_path / "batches.pt",
    )
    check(read_trace(tmp_path / "batches.pt"), request=one)
    for name in ("map.pt", "map.safetensors"):
        arrays = {f"layer_{n + 1}": maps[:, n].clone() for n in range(LAYERS)}
        if name == "map.pt":
            torch.save({**arrays, "iteration": torch.tensor(7)}, tmp_path / name)
        else:
            save_file({key: value.numpy() for key, value in arrays.items()}, tmp_path / name)
        with caplog.at_level(logging.WARNING, "moecache"):
            trace = read_trace(tmp_path / name, request_tokens=3)
        check(trace, np.sort(ROUTED, axis=2))
        assert trace.metadata["moe_layers"] == "[1, 2, 3]"
    assert "1 arrays are no part of a routing trace and are not kept: iteration" in caplog.text
    torch.save({"f": check}, tmp_path / "code.pt")
    with pytest.raises(TraceFormatError, match="plain arrays"):
        read_trace(tmp_path / "code.pt")
    torch.save(
        {"a": torch.zeros(2, 2, dtype=torch.int64), "b": torch.zeros(3, 2, dtype=torch.int64)}, tmp_path / "odd.pt"
    )
    with pytest.raises(TraceFormatError, match="its number in the name"):
        read_trace(tmp_path / "odd.pt")


@pytest.mark.failure("I37")
def test_flame_moe_folders_of_one_table_a_layer(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder = tmp_path / "iter_0540"
    folder.mkdir()
    for layer in range(LAYERS):
        ids, scores = (
            pyarrow.array(ROUTED[:, layer].tolist(), pyarrow.list_(pyarrow.int16())),
            WEIGHTS[:, layer].tolist(),
        )
        parquet.write_table(pyarrow.table({"scores": scores, "indices": ids}), folder / f"layer_{layer + 2:02}.parquet")
    trace = read_trace(folder, request_tokens=3)
    check(trace)
    np.testing.assert_array_equal(trace.weights, WEIGHTS)
    assert trace.metadata["moe_layers"] == "[2, 3, 4]"
    one = read_trace(folder / "layer_03.parquet")
    np.testing.assert_array_equal(one.experts, ROUTED[:, 1:2])
    assert one.metadata["moe_layers"] == "[3]"
    with pytest.raises(TraceFormatError, match="layer_02"):
        read_trace(tmp_path)


@pytest.mark.failure("I37")
def test_parquet_of_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    entries: list[dict[str, Any]] = [
        {**record, "request": f"chat-{record['request']}", "phase": "decode", "topk_weights": [0.5, 0.25], "cost": 1.0}
        for record in records(experts="topk_ids")
    ]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(entries), path, compression="zstd")
    with caplog.at_level(logging.WARNING, "moecache"):
        trace = read_trace(path)
    check(trace)
    assert trace.weights is not None
    assert f"cost ({len(entries)} values each)" in caplog.text
    for entry in entries:
        entry["topk_ids"] = " ".join(map(str, entry["topk_ids"]))
    parquet.write_table(pyarrow.Table.from_pylist(entries), path)
    check(read_trace(path))
    single = [
        {"token": t, "layer": n, "expert": int(e)} for t in range(TOKENS) for n in range(LAYERS) for e in ROUTED[t, n]
    ]
    parquet.write_table(pyarrow.Table.from_pylist(single), path)
    check(read_trace(path), request=np.zeros(TOKENS, np.int32))
    for changes, message in (
        ({"layer": None}, "say no layer"),
        ({"layer": 0.5}, "expected whole numbers"),
        ({"expert": 40_000}, "out of range"),
        ({"expert": None}, "name no experts"),
    ):
        parquet.write_table(pyarrow.Table.from_pylist([*single, {**single[0], "token": 99, **changes}]), path)
        with pytest.raises(TraceFormatError, match=message):
            read_trace(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(TraceFormatError, match="no whole Parquet file"):
        read_trace(path)


@pytest.mark.failure("I37")
def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pyarrow" else find(name))
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(TraceFormatError, match=r"pip install 'moecache\[tables\]'"):
        read_trace(tmp_path / "a.parquet")


@pytest.mark.failure("I37")
def test_names_that_nobody_foresaw_are_said(tmp_path: Path) -> None:
    names = {"experts": "who", "layer": "depth"}
    for path in (written(tmp_path / "a.jsonl", records(**names)), written(tmp_path / "a.csv", rows(",", **names))):
        with pytest.raises(TraceFormatError):
            read_trace(path)
        check(read_trace(path, mapping={"experts": "who", "layer": "depth"}))
    # A name that is known for something else gives way to what is said.
    swapped = [{**record, "token_idx": 7} for record in records()]
    check(read_trace(written(tmp_path / "b.jsonl", swapped), mapping={"token": "token"}))
    with pytest.raises(TraceFormatError, match="no field is called 'expertz'"):
        read_trace(tmp_path / "a.csv", mapping={"expertz": "who"})
    np.savez(tmp_path / "a.npz", who=ROUTED, conversation=REQUEST)
    check(read_trace(tmp_path / "a.npz", mapping={"experts": "who", "request": "conversation"}))


@pytest.mark.failure("I37")
def test_passes_of_several_requests(tmp_path: Path) -> None:
    # Two requests side by side: each pass routes two tokens of the one and one of the other.
    lines = []
    for step in range(2):
        for layer in range(LAYERS):
            for request, tokens in ((0, (2 * step, 2 * step + 1)), (1, (4 + step,))):
                lines += [
                    {"step": step, "request": f"r{request}", "layer": layer, "experts": ROUTED[t, layer].tolist()}
                    for t in tokens
                ]
    trace = read_trace(written(tmp_path / "a.jsonl", lines))
    order = [0, 1, 4, 2, 3, 5]
    np.testing.assert_array_equal(trace.experts, ROUTED[order])
    assert trace.request.tolist() == [0, 0, 1, 0, 0, 1]
    assert passes_of(trace) == [2, 1, 2, 1]
    assert replay(trace, ["lru"], [8])[0].hits > 0


@pytest.mark.failure("I37", "I38")
def test_tokens_that_lack_layers_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entries = records()
    with caplog.at_level(logging.WARNING, "moecache"):
        trace = read_trace(written(tmp_path / "a.jsonl", entries[:-1]))
    check(trace, ROUTED[:-1], REQUEST[:-1])
    assert (
        "1 of 6 tokens lack some of the 3 layers and are left out (token 2 of request 1 lacks layer 2)" in caplog.text
    )
    assert trace.metadata["incomplete_tokens"] == "1"
    # A file that says how many follow, and one in which most lack some, are refused.
    with pytest.raises(TraceFormatError, match="promises 6 tokens, 5 are there"):
        read_trace(written(tmp_path / "b.jsonl", [{"tokens": 6}, *entries[:-1]]))
    sparse = [record for record in entries if record["layer"] != 1 or record["token"] == 0]
    with pytest.raises(TraceFormatError, match="so 4 of 6 tokens lack some"):
        read_trace(written(tmp_path / "c.jsonl", sparse))


@pytest.mark.failure("I37")
@pytest.mark.parametrize("name", ["a.csv.bz2", "a.jsonl.xz", "heat.csv.bz2"])
def test_text_packed_in_other_ways(name: str, tmp_path: Path) -> None:
    heat = ["layer,expert,count", *(f"{layer},{e},{e}" for layer in (1, 2) for e in range(4))]
    lines = heat if "heat" in name else records() if "json" in name else rows(",")
    plain = written(tmp_path / "plain", lines).read_bytes()
    pack = bz2.compress if name.endswith(".bz2") else lzma.compress
    (tmp_path / name).write_bytes(pack(plain))
    if "heat" in name:
        assert len(Counts.read(tmp_path / name).history()) == 1
        return
    check(read_trace(tmp_path / name))
    (tmp_path / name).write_bytes(pack(plain)[:-9])
    with pytest.raises(TraceFormatError, match="no whole"):
        read_trace(tmp_path / name)
    (tmp_path / name).write_bytes(pack(b" " * 10**8))
    with pytest.raises(TraceFormatError, match="unfolds"):
        read_trace(tmp_path / name)
