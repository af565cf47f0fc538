"""What a CUDA device does with it: the link, copies under arithmetic, and decoding models of real shapes from host memory.

python bench/bench_device.py link|overlap|deepseek|mixtral [--device cuda|cpu] [--scale full|small] [--traces FOLDER] [--json FILE]
python bench/bench_device.py trace FILE.safetensors     the routing of the tiny model, for want of others
python bench/bench_device.py report FILE.json ...      the results as markdown

On the CPU (``--scale small``) it runs the same way, which shows that it runs; its figures then say nothing about a device.
``bench/device.sh`` runs all of it. A section's file is written again after every figure, so a section that is stopped
leaves what it has measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import linear, silu

import moecache
from moecache._engine import Engine, Sources
from moecache.history import Fingerprint
from moecache.lab import Trace, read_trace
from moecache.lab.replay import trained_history
from moecache.lab.schedule import split_requests

TINY = Path(__file__).parent.parent / "examples" / "tiny_moe" / "model"
WAIT = 120.0
KNOWN = 7  # of ten requests, those the history holds; the others are decoded
MIB = 1 << 20


# ---- the device, or the CPU in its place


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began


def median_of(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    call()
    return statistics.median(seconds(call, device) for _ in range(rounds))


class Results:
    """Facts of a section, written to its file as they come."""

    def __init__(self, section: str, path: Path | None, device: torch.device) -> None:
        self.path = path
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        self.facts: dict[str, Any] = {"section": section, "device": name, "torch": torch.__version__}

    def add(self, **facts: Any) -> None:
        self.facts.update(facts)
        for name, value in facts.items():
            print(f"{self.facts['section']}: {name} = {value}", flush=True)
        if self.path is not None:
            self.path.write_text(json.dumps(self.facts, indent=1))

    def row(self, table: str, **row: Any) -> None:
        self.facts.setdefault(table, []).append(row)
        print(f"{self.facts['section']}: {table}: {row}", flush=True)
        if self.path is not None:
            self.path.write_text(json.dumps(self.facts, indent=1))


# ---- the link


def plain_rate(device: torch.device, nbytes: int, rounds: int, locked: bool = True) -> float:
    """Bytes per second of one copy of host memory."""
    source = torch.ones(nbytes, dtype=torch.uint8, pin_memory=locked and device.type == "cuda")
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return nbytes / median_of(lambda: target.copy_(source, non_blocking=True), device, rounds)


def patterned(count: int, nbytes: int) -> torch.Tensor:
    """uint8 ``[count, nbytes]``, no two rows alike."""
    row = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return row[None] + torch.arange(count, dtype=torch.uint8)[:, None]


class Rig:
    """An engine from host memory, or a file, to as many slots on the device."""

    def __init__(
        self,
        device: torch.device,
        source: torch.Tensor,
        memory: str = "locked",
        *,
        path: Path | None = None,
        chunk_bytes: int = 2 * MIB,
        window_bytes: int = 4 * MIB,
    ) -> None:
        count, nbytes = source.shape
        self.device, self.count, self.nbytes = device, count, nbytes
        self.target = torch.zeros((count, nbytes), dtype=torch.uint8, device=device)
        self.generation = 0
        base = source.data_ptr() if path is None else 0
        sources = Sources(
            segment_start=np.arange(count + 1),
            segment_file=np.full(count, -1 if path is None else 0, np.int32),
            segment_source=(base + np.arange(count) * nbytes).astype(np.uint64),
            segment_nbytes=np.full(count, nbytes),
            segment_region=np.zeros(count, np.int32),
            segment_offset=np.zeros(count, np.int64),
            files=() if path is None else (str(path),),
        )
        self.copies = None
        if device.type == "cuda":
            from moecache.cuda import CudaCopies

            ranges = [(source.data_ptr(), source.numel())] if path is None else []
            limit = None if memory == "locked" else 0
            locks = {"driver": None}.get(memory, lambda runtime: runtime.lock(ranges, limit_nbytes=limit))
            self.copies = CudaCopies(device.index, count, lock=locks, files=path is not None)
        self.engine = Engine(
            sources,
            np.array([self.target.data_ptr()], np.uint64),
            np.array([nbytes]),
            np.zeros(count, np.int32),
            link=None if self.copies is None else self.copies.link,
            threads=2 if path is not None else 1,
            chunk_bytes=chunk_bytes,
            window_bytes=window_bytes,
            owner=(source, self.target),
        )

    def rows(self, experts: np.ndarray) -> np.ndarray:
        return np.stack([experts, experts, np.full(len(experts), self.generation)], axis=1).astype(np.int32)

    def prefetch(self, count: int | None = None) -> None:
        self.generation += 1
        rows = self.rows(np.arange(self.count if count is None else count))
        self.engine.submit(prefetch=rows, priority=np.zeros(len(rows), np.float32))

    def everything(self) -> None:
        """All experts as prefetches: the I/O thread alone."""
        self.prefetch()
        self.engine.drain(WAIT)

    def demand(self, expert: int) -> None:
        """Fetch one and let the device have it."""
        rows = self.rows(np.array([expert]))
        self.engine.submit(fetch=rows)
        self.engine.wait_all(rows[:, 1].copy(), rows[:, 2].copy(), WAIT)
        if self.copies is not None:
            self.copies.before_reading(rows[:, 1].copy())
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        self.engine.drain(WAIT)
        self.engine.close()
        if self.copies is not None:
            self.copies.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def link(results: Results, device: torch.device, small: bool) -> None:
    rounds, count, nbytes = (3, 8, 1 * MIB) if small else (9, 32, 17_301_504)
    many = patterned(count + 1 if small else 101, nbytes)
    source = many[:count]
    whole = count * nbytes
    plain = plain_rate(device, min(whole, 256 * MIB), rounds)
    pageable = plain_rate(device, min(whole, 256 * MIB), rounds, locked=False)
    results.add(plain_GB_per_s=round(plain / 1e9, 2), plain_pageable_GB_per_s=round(pageable / 1e9, 2))

    def measure(rig: Rig, **row: Any) -> None:
        with rig:
            rate = whole / median_of(rig.everything, device, rounds)
            ok = torch.equal(rig.target.cpu(), source)
        results.row("rates", **row, GB_per_s=round(rate / 1e9, 2), over_plain=round(rate / plain, 3), exact=ok)

    for memory in ("locked", "staged", "driver") if device.type == "cuda" else ("locked",):
        measure(Rig(device, source, memory), memory=memory, chunk_MiB=2, window_MiB=4)
    for chunk in (0.5, 1, 4, 8):
        rig = Rig(device, source, chunk_bytes=int(chunk * MIB), window_bytes=int(2 * chunk * MIB))
        measure(rig, memory="locked", chunk_MiB=chunk, window_MiB=2 * chunk)
    for window in (2, 8, 16):
        measure(Rig(device, source, window_bytes=window * MIB), memory="locked", chunk_MiB=2, window_MiB=window)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experts"
        source.numpy().tofile(path)
        measure(Rig(device, source, path=path), memory="file", chunk_MiB=2, window_MiB=4)
    with Rig(device, many) as rig:
        rig.everything()
        last = rig.count - 1
        target = torch.empty(nbytes, dtype=torch.uint8, device=device)
        pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        alone = median_of(lambda: target.copy_(pinned, non_blocking=True), device, 30)

        def one() -> None:
            rig.generation += 1
            rig.demand(rig.generation % rig.count)

        results.add(one_expert_us=round(1e6 * median_of(one, device, 30), 1), one_plain_copy_us=round(1e6 * alone, 1))
        for queued in sorted({1, min(10, last), last}):
            times = []
            for _ in range(rounds):
                rig.prefetch(queued)
                times.append(seconds_of(lambda: rig.demand(last)))
                rig.engine.drain(WAIT)
            results.row("demand_behind", prefetches=queued, ms=round(1e3 * statistics.median(times), 3))


def seconds_of(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def overlap(results: Results, device: torch.device, small: bool) -> None:
    """Copies and arithmetic alone, then at once: what share of the shorter is hidden behind the longer."""
    count, nbytes, side, rounds = (8, 1 * MIB, 256, 3) if small else (64, 17_301_504, 8192, 5)
    source = patterned(count, nbytes)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    square = torch.randn(side, side, device=device, dtype=dtype)
    column = torch.randn(1, side, device=device, dtype=dtype)
    with Rig(device, source) as rig:
        copying = median_of(rig.everything, device, rounds)
        for name, left in (("GEMM", square), ("GEMV", column)):
            once = median_of(lambda left=left: [linear(left, square) for _ in range(10)], device, rounds) / 10  # type: ignore[misc]
            times = max(1, round(copying / once))

            def compute(left: torch.Tensor = left, times: int = times) -> None:
                for _ in range(times):
                    linear(left, square)

            def both(compute: Callable[[], None] = compute) -> None:
                rig.prefetch()
                compute()
                rig.engine.drain(WAIT)

            computing = median_of(compute, device, rounds)
            together = median_of(both, device, rounds)
            hidden = (copying + computing - together) / min(copying, computing)
            results.row(
                "overlap",
                work=name,
                copies_ms=round(1e3 * copying, 2),
                work_ms=round(1e3 * computing, 2),
                both_ms=round(1e3 * together, 2),
                hidden=round(hidden, 3),
            )


# ---- decoding


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


# ---- what came out


def report(paths: list[Path]) -> str:
    lines: list[str] = []
    for path in paths:
        try:
            facts = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            lines += [f"## {path.name}", "", f"nothing: {error}", ""]
            continue
        lines += [f"## {facts['section']} on {facts['device']}, torch {facts['torch']}", ""]
        lines += [
            f"* {key}: {value}" for key, value in facts.items() if not isinstance(value, list) and key not in HEAD
        ]
        for table, rows in facts.items():
            if isinstance(rows, list):
                columns = list(dict.fromkeys(key for row in rows for key in row))
                lines += ["", f"{table}:", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
                lines += [f"| {' | '.join(str(row.get(key, '')) for key in columns)} |" for row in rows]
        lines.append("")
    return "\n".join(lines)


HEAD = ("section", "device", "torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=("link", "overlap", "deepseek", "mixtral", "trace", "report"))
    parser.add_argument("files", nargs="*", type=Path, help="for trace and report")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", choices=("full", "small"), default="full")
    parser.add_argument("--traces", type=Path, help="folder with routing traces; by default the tiny model is recorded")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.section == "report":
        print(report(arguments.files))
        return
    if arguments.section == "trace":
        tiny_trace().save(arguments.files[0])
        return
    device, small = torch.device(arguments.device), arguments.scale == "small"
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    if arguments.traces is not None and not arguments.traces.is_dir():
        print(f"no folder {arguments.traces}: the tiny model's routing is recorded", file=sys.stderr)
        arguments.traces = None
    results = Results(arguments.section, arguments.json, device)
    with torch.inference_mode():
        if arguments.section == "link":
            link(results, device, small)
        elif arguments.section == "overlap":
            overlap(results, device, small)
        else:
            decode(results, arguments.section, device, small, arguments.traces)
    results.add(finished=True)


if __name__ == "__main__":
    main()
