"""Decoding models of real shapes on a device, their experts in host memory."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from device_link import plain_rate
from device_results import MIB, WAIT, Results, synchronize
from torch.nn.functional import linear, silu

import moecache
from moecache.history import Fingerprint
from moecache.lab import Trace, read_trace
from moecache.lab.replay import trained_history
from moecache.lab.schedule import split_requests

TINY = Path(__file__).parent.parent / "examples" / "tiny_moe" / "model"
KNOWN = 7  # of ten requests, those the history holds; the others are decoded


class Shape(NamedTuple):
    """The sizes of a model that matter here."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    inter: int
    other: int  # rows of one matrix with as many weights as a layer's attention and shared experts
    warm: int  # tokens before measuring
    tokens: int


SHAPES = {
    # deepseek-ai/DeepSeek-V2-Lite: 26 of 27 layers have experts; of 15.7e9 weights 14.4e9 are theirs, 0.4e9 embeddings.
    ("deepseek", "full"): Shape(26, 64, 6, 2048, 1408, 15_600, 48, 96),
    # mistralai/Mixtral-8x7B: 8 of its 32 layers.
    ("mixtral", "full"): Shape(8, 8, 2, 4096, 14_336, 10_240, 16, 32),
    ("deepseek", "small"): Shape(4, 16, 3, 64, 96, 128, 6, 12),
    ("mixtral", "small"): Shape(3, 8, 2, 64, 256, 128, 6, 12),
}


def tiny_trace() -> Trace:
    """Routing of the tiny model of the examples, recorded now."""
    from transformers import AutoModelForCausalLM

    import moecache.hf

    model = AutoModelForCausalLM.from_pretrained(TINY, dtype="auto", experts_implementation="moecache")
    with tempfile.TemporaryDirectory() as folder:
        with moecache.attach(model, capacity=1.0, bank="ram") as cache:
            recorder = cache.record(Path(folder) / "tiny.safetensors", "tiny_moe")
            for seed in range(10):
                ids = torch.randint(0, 256, (1, 8), generator=torch.Generator().manual_seed(seed))
                tokens = 20 if seed < KNOWN else 52  # what is decoded later needs more of them
                model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
            recorder.close()
        return read_trace(Path(folder) / "tiny.safetensors")


def find_trace(folder: Path | None, shape: Shape) -> Trace:
    """The shared trace whose model is nearest in shape, or the tiny model's."""
    paths = [] if folder is None else sorted(folder.glob("*.safetensors"))
    found = []
    for path in paths:
        try:
            found.append(read_trace(path))
        except (ValueError, OSError):
            continue  # counts, or something else
    if not found:
        return tiny_trace()
    return min(found, key=lambda t: (abs(t.top_k - shape.top_k), abs(max(t.num_experts) - shape.experts)))


def folded(trace: Trace, shape: Shape) -> Trace:
    """The trace as one of a model of another shape: the answers' tokens only, layers and experts wrapped around.

    Where the trace has fewer experts per token, those of the layers after it, moved up, fill the row: what comes again
    in one token after another still does.
    """
    rows = np.flatnonzero(trace.decode == 1)
    experts, request = trace.experts[rows], trace.request[rows]
    numbers = np.unique(request, return_inverse=True)[1].astype(np.int32)
    made = np.empty((len(rows), shape.layers, shape.top_k), np.int16)
    for layer in range(shape.layers):
        parts = [
            (experts[:, (layer + i) % trace.layers].astype(int) + i * max(trace.num_experts)) % shape.experts
            for i in range(1 + 3 * shape.top_k // trace.top_k)
        ]
        wide = np.concatenate(parts, axis=1)
        for row, candidates in enumerate(wide):
            chosen = list(dict.fromkeys(candidates.tolist()))[: shape.top_k]
            chosen += [e for e in range(shape.experts) if e not in chosen][: shape.top_k - len(chosen)]
            made[row, layer] = chosen
    return Trace(f"{trace.name}, folded", made, numbers, np.ones(len(rows), np.uint8), (shape.experts,) * shape.layers)


class Model:
    """Random weights of a shape: all experts in host memory, the rest on the device."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        sizes = {"gate_up": (2 * shape.inter, shape.hidden), "down": (shape.hidden, shape.inter)}
        layer = {name: self._random(shape.experts, *size) for name, size in sizes.items()}
        self.experts = []
        for _ in range(shape.layers):
            host = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in layer.items()}
            for name, tensor in layer.items():
                host[name].copy_(tensor)
            self.experts.append(host)
        self.bank = moecache.ExpertBank.from_tensors(self.experts)
        self.other = [self._random(shape.other, shape.hidden) for _ in range(shape.layers)]
        self.tokens = self._random(256, shape.hidden) * shape.hidden**0.5

    def _random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, device=self.device, dtype=self.dtype) * size[-1] ** -0.5

    def decode(self, token: int, layer_of: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """One token; ``layer_of(layer, x)`` is the experts' part."""
        x = self.tokens[token % 256][None]
        for layer, matrix in enumerate(self.other):
            mixed = linear(x, matrix)
            x = x + torch.tanh(mixed[:, : self.shape.hidden] if matrix.shape[0] >= self.shape.hidden else x)
            x = x + layer_of(layer, x)
            x = x * torch.rsqrt(x.float().pow(2).mean() + 1e-6).to(x.dtype)
        return x


def expert(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = linear(x, gate_up).chunk(2, dim=-1)
    return linear(silu(gate) * up, down)


def in_order(products: dict[int, torch.Tensor]) -> torch.Tensor:
    """Their sum in ascending order of experts: the same bits whatever was resident."""
    first, *others = (products[e] for e in sorted(products))
    for product in others:
        first = first + product
    return first


def timed(
    model: Model,
    trace: Trace,
    steps: np.ndarray,
    start: Callable[[int], Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]],
    measuring: Callable[[], None],
) -> tuple[list[float], float]:
    """Seconds of each measured token, and a sum over all results that any wrong byte would change."""
    shape, times, digest = model.shape, [], 0.0
    ids = torch.from_numpy(trace.experts[steps].astype(np.int64)).to(model.device)
    experts: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    for n, step in enumerate(steps.tolist()):
        if experts is None or trace.request[step] != trace.request[steps[n - 1]]:
            experts = start(int(trace.request[step]))
        if n == shape.warm:
            measuring()
        synchronize(model.device)
        began = time.perf_counter()
        x = model.decode(step, lambda layer, x, n=n, experts=experts: experts(layer, x, ids[n, layer : layer + 1]))  # type: ignore[misc]
        digest += float(x.double().sum())  # as the next token would, this waits for the device
        if n >= shape.warm:
            times.append(time.perf_counter() - began)
    return times, digest


@contextmanager
def through(cache: moecache.ExpertCache) -> Iterator[Callable[[int], Any]]:
    """The experts' part through a cache, request after request."""
    open_request: list[moecache.Request] = []

    def start(number: int) -> Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]:
        while open_request:
            open_request.pop().close()
        request = cache.request()
        open_request.append(request)

        def experts(layer: int, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            products = {}
            with request.route(layer, ids) as lease:
                weights = lease.weights
                for number, slot, _ in lease.ready():
                    products[number] = expert(x, weights["gate_up"][slot], weights["down"][slot])
            return in_order(products)

        return experts

    try:
        yield start
    finally:
        while open_request:
            open_request.pop().close()


def fill(cache: moecache.ExpertCache, shape: Shape) -> None:
    """Ask for every expert once."""
    with cache.request() as request:
        for layer in range(shape.layers):
            with request.route(layer, torch.arange(shape.experts)[:, None]) as lease:
                for _ in lease.ready():
                    pass


def resident_experts(model: Model) -> Callable[[int], Any]:
    """The experts' part with all of them on the device and no cache."""
    home = [{key: tensor.to(model.device) for key, tensor in layer.items()} for layer in model.experts]

    def experts(layer: int, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        weights = home[layer]
        return in_order({e: expert(x, weights["gate_up"][e], weights["down"][e]) for e in ids[0].tolist()})

    return lambda number: experts


def played(name: str, small: bool, traces: Path | None) -> tuple[Shape, Trace, list[int], np.ndarray]:
    """The shape, the trace, its requests for the history, and which of its tokens are decoded."""
    shape = SHAPES[name, "small" if small else "full"]
    trace = folded(find_trace(traces, shape), shape)
    known, others = split_requests(trace, f"{KNOWN}/10")
    steps = np.flatnonzero(np.isin(trace.request, others))[: shape.warm + shape.tokens]
    if len(steps) < shape.warm + shape.tokens:
        raise SystemExit(f"the trace has {len(steps)} tokens to play; {shape.warm + shape.tokens} are needed")
    return shape, trace, known, steps


RUNS: tuple[tuple[str, float, dict[str, Any]], ...] = (
    ("cache of all", 1.0, {}),
    *(
        (run, cached, options)
        for cached in (0.5, 0.25)
        for run, options in (
            ("default", {}),
            ("lru", {"policy": "lru", "prefetch": False}),
            ("demand only", {"prefetch": False}),
        )
    ),
)


def decode(results: Results, name: str, device: torch.device, small: bool, traces: Path | None) -> None:
    """Milliseconds per token, resident and through a cache.

    ``floor_ms`` is what the missed experts' bytes would take at the rate of one plain copy of page-locked memory.
    """
    shape, trace, known, steps = played(name, small, traces)
    began = time.perf_counter()
    model = Model(shape, device)
    results.add(
        trace=trace.name,
        tokens=shape.tokens,
        expert_MB=round(model.bank.expert_nbytes(0) / 1e6, 1),
        experts_GB=round(model.bank.nbytes / 1e9, 2),
        weights_made_s=round(time.perf_counter() - began, 1),
    )
    rate = plain_rate(device, (1 if small else 256) * MIB, 9)
    # Kept open: the memory stays locked from one run to the next.
    began = time.perf_counter()
    keeper = moecache.ExpertCache(model.bank, shape.top_k, device=device, top_k=shape.top_k)
    stats = keeper.stats()
    results.add(
        plain_GB_per_s=round(rate / 1e9, 2),
        first_cache_s=round(time.perf_counter() - began, 1),
        host_locked_GB=round(stats.host_locked_bytes / 1e9, 2),
        host_pageable_GB=round(stats.host_pageable_bytes / 1e9, 2),
    )
    times, expected = timed(model, trace, steps, resident_experts(model), lambda: None)
    base = 1e3 * statistics.median(times)
    results.row(
        "decode", run="resident", cached=1.0, ms=round(base, 3), mean_ms=round(1e3 * statistics.fmean(times), 3)
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()
    digest = Fingerprint.of(model.bank, shape.top_k).digest
    history = trained_history(replace(trace, metadata={"digest": digest}), known)
    for run, cached, options in RUNS:
        cache = moecache.ExpertCache(
            model.bank, cached, device=device, top_k=shape.top_k, history=history.copy(), timeout=WAIT, **options
        )
        with cache, through(cache) as start:
            if cached == 1.0:
                fill(cache, shape)
            times, found = timed(model, trace, steps, start, cache.reset_stats)
            stats = cache.stats()
        missed = stats.misses * model.bank.expert_nbytes(0) / shape.tokens
        median = 1e3 * statistics.median(times)
        results.row(
            "decode",
            run=run,
            cached=cached,
            ms=round(median, 3),
            mean_ms=round(1e3 * statistics.fmean(times), 3),
            over_resident=round(median / base, 3),
            floor_ms=round(1e3 * missed / rate, 3),
            stall_ms=round(1e3 * stats.stall_s / shape.tokens, 3),
            hit_rate=round(stats.hit_rate, 4),
            missed_MB=round(missed / 1e6, 2),
            moved_MB=round((stats.bytes_demand + stats.bytes_prefetch) / shape.tokens / 1e6, 2),
            prefetched=stats.prefetch_issued,
            useful=stats.prefetch_useful,
            identical=found == expected,
        )
    keeper.close()
