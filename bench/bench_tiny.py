"""Decode the tiny model from disk over a limited link, by several rules: does a fitted forecaster hide what the link model says it hides?

    python bench/bench_tiny.py [--rate 50e6 100e6] [--capacity 0.25] [--rounds 3] [--json FILE]

The model completes the prompts of ``examples/tiny_moe/prompts.json`` in plain torch (``examples/handwritten.py``), greedily. Two
prompts of each kind are recorded and fitted to; the first is decoded by every rule, in turn, `rounds` times. The prompts' own passes
are not timed. Every rule has the same history; all write the same tokens, which is checked.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from moecache import CacheOptions, History
from moecache._engine import FileLink, ThrottledLink
from moecache.lab import FitResult, fit, read_trace

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))
from handwritten import TINY, TinyMoE  # noqa: E402

LATENCY_S = 50e-6
RULES: dict[str, dict[str, Any]] = {
    "forecaster": {"policy": "expected-next-use"},
    "counts": {"policy": "counts"},
    "lru": {"policy": "lru"},
    "moe-infinity": {"policy": "moe-infinity"},
    "demand only": {"policy": "lru", "prefetch": False},
    "all resident": {"policy": "lru", "capacity": 1.0},
}


def learn(prompts: list[str], tokens: int) -> FitResult:
    """Record the completions of some prompts and fit to them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "routing.safetensors"
        model = TinyMoE(TINY, capacity=0.5)
        with model.cache.record(path, model="tiny_moe"):
            for prompt in prompts:
                list(model.generate(list(prompt.encode()), tokens))
        model.cache.close()
        return fit(read_trace(path))


def decode(
    rule: str, prompts: list[str], tokens: int, capacity: float, rate: float, history: Path
) -> tuple[dict[str, float], list[int]]:
    """Complete the prompts by one rule; facts of the completions' steps, and the completions."""
    link = ThrottledLink(FileLink(), rate, LATENCY_S)
    known = History.load(history)
    model = TinyMoE(
        TINY, **{"capacity": capacity, "options": CacheOptions(link=link), "history": known, "top_k": 4} | RULES[rule]
    )
    seconds, steps, written, waited = 0.0, 0, [], 0.0
    bytes_moved = hits = demands = 0
    if rule == "all resident":
        list(model.generate(list(b"warm"), 60))
    for prompt in prompts:
        began = 0.0
        for token in model.generate(list(prompt.encode()), tokens):
            written.append(token)
            if not began:
                model.cache.reset_stats()
                began = time.perf_counter()
                continue
            steps += 1
        seconds += time.perf_counter() - began
        stats = model.cache.stats()
        waited += stats.stall_s
        bytes_moved += stats.bytes_demand + stats.bytes_prefetch
        hits, demands = hits + stats.hits, demands + stats.demands
    model.cache.close()
    facts = {
        "ms": 1e3 * seconds / steps,
        "stall_ms": 1e3 * waited / steps,
        "kb": 1e-3 * bytes_moved / steps,
        "hit_rate": hits / demands,
    }
    return facts, written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, nargs="+", default=[50e6, 100e6], help="bytes a second")
    parser.add_argument("--capacity", type=float, default=0.25, help="fraction of the experts kept")
    parser.add_argument("--tokens", type=int, default=100, help="of each completion")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kinds = json.loads((EXAMPLES / "tiny_moe" / "prompts.json").read_text()).values()
    rows = []
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        asked, others = [prompts[0] for prompts in kinds], [p for prompts in kinds for p in prompts[1:]]
        with torch.inference_mode(False):
            result = learn(others, 2 * arguments.tokens)
        print(result.report)
        history = Path(folder) / "history"
        result.history.save(history)
        for rate in arguments.rate:
            found: dict[str, list[dict[str, float]]] = {rule: [] for rule in RULES}
            completions = set()
            for _ in range(arguments.rounds):
                for rule in RULES:
                    facts, written = decode(rule, asked, arguments.tokens, arguments.capacity, rate, history)
                    found[rule].append(facts)
                    completions.add(tuple(written))
            if len(completions) != 1:
                sys.exit("the rules did not write the same tokens")
            print(
                f"\n{rate / 1e6:g} MB/s, {arguments.capacity:.0%} of the experts, medians of {arguments.rounds} rounds"
            )
            print(f"{'':14}  {'ms a token':>10}  {'stall ms':>8}  {'of lru':>6}  {'KB a token':>10}  {'hits':>6}")
            middle = {rule: {key: median(r[key] for r in runs) for key in runs[0]} for rule, runs in found.items()}
            for rule, m in middle.items():
                share = m["stall_ms"] / middle["lru"]["stall_ms"]
                print(
                    f"{rule:14}  {m['ms']:10.2f}  {m['stall_ms']:8.2f}  {share:6.2f}  {m['kb']:10.0f}  {m['hit_rate']:6.1%}",
                    flush=True,
                )
                rows.append({"rate": rate, "rule": rule, **m})
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
