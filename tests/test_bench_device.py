"""The benchmark for a device, run small on the CPU: a first run on a device must not fail for its own mistakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from moecache.lab import Trace

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
import bench_device
import device_decode
from device_decode import KNOWN, SHAPES, decode, find_trace, folded
from device_link import link, overlap
from device_results import Results


def trace_of(tokens: int = 120, layers: int = 3, experts: int = 12, k: int = 2) -> Trace:
    random = np.random.default_rng(0)
    routed = random.random((tokens, layers, experts)).argsort(2)[:, :, :k].astype(np.int16)
    request = (np.arange(tokens) // 12).astype(np.int32)
    return Trace("made", routed, request, (np.arange(tokens) % 12 > 1).astype(np.uint8), (experts,) * layers)


def test_a_folded_trace_fits_the_shape_and_keeps_repeats() -> None:
    shape = SHAPES["deepseek", "small"]
    trace = trace_of()
    trace.experts[14:20] = trace.experts[14]
    made = folded(trace, shape)
    assert made.experts.shape == (100, shape.layers, shape.top_k)
    assert made.num_experts == (shape.experts,) * shape.layers
    assert all(len(set(row)) == shape.top_k for row in made.experts.reshape(-1, shape.top_k).tolist())
    assert (made.experts[10:16] == made.experts[10]).all()
    assert len(np.unique(made.experts)) > shape.experts // 2
    assert np.unique(made.request).tolist() == list(range(10))
    # A trace of the very shape stays as it is.
    same = trace_of(layers=shape.layers, experts=shape.experts, k=shape.top_k)
    assert (folded(same, shape).experts == same.experts[same.decode == 1]).all()


@pytest.mark.parametrize("name", ["deepseek", "mixtral"])
def test_decoding_gives_the_same_results_whatever_is_cached(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace_of().save(tmp_path / "made.safetensors")
    results = Results(name, tmp_path / "facts.json", torch.device("cpu"))
    with torch.inference_mode():
        decode(results, name, torch.device("cpu"), True, tmp_path)
    facts = json.loads((tmp_path / "facts.json").read_text())
    runs = {(row["run"], row["cached"]): row for row in facts["decode"]}
    assert len(runs) == 8
    assert all(row.get("identical", True) for row in runs.values())
    assert runs["cache of all", 1.0]["missed_MB"] == 0
    for cached in (0.25, 0.5):
        assert runs["demand only", cached]["moved_MB"] == runs["demand only", cached]["missed_MB"] > 0
        assert runs["lru", cached]["prefetched"] == 0
    text = bench_device.report([tmp_path / "facts.json", tmp_path / "missing.json"])
    assert "| default | 0.25 |" in text
    assert "## missing.json" in text


def test_the_link_moves_every_byte(tmp_path: Path) -> None:
    results = Results("link", tmp_path / "facts.json", torch.device("cpu"))
    link(results, torch.device("cpu"), True)
    overlap(results, torch.device("cpu"), True)
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert {row["memory"] for row in facts["rates"]} == {"locked", "file"}
    assert all(row["exact"] for row in facts["rates"])
    assert [row["work"] for row in facts["overlap"]] == ["GEMM", "GEMV"]


def test_without_traces_the_tiny_model_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    shape = SHAPES["mixtral", "small"]
    trace = find_trace(None, shape)
    assert trace.requests == 10
    for name in ("deepseek", "mixtral"):
        full = SHAPES[name, "full"]
        _, others = device_decode.split_requests(trace, f"{KNOWN}/10")
        assert np.isin(folded(trace, full).request, others).sum() >= full.warm + full.tokens
