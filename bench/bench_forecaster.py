"""What the forecaster is worth, by rank, time scales, training size, and on groups of requests it has never seen.

    python bench/bench_forecaster.py deepseek-v2-lite.safetensors --table rank,scales,size,groups

Each row is a fit of its own, measured on the same requests (number % 10 >= 7; groups: all requests of the group left out).
Rows are printed as Markdown as soon as they are there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from moecache.lab import FitResult, Settings, Trace, fit, read_trace
from moecache.lab.fit_report import subtrace

RANKS = (32, 64, 128, 256)
SCALES = ((1.0, 0.2), (1.0, 0.45, 0.02), (1.0, 0.45, 0.2, 0.02), (1.0, 0.45, 0.2, 0.02, 0.005))
SIZES = (1, 2, 4, 7)  # of every 10 requests


def row(name: str, result: FitResult, seconds: float) -> str:
    report = result.report
    hits = {(r.policy, r.fraction): r for r in report.hits}
    fractions = sorted({fraction for _, fraction in hits})

    def rates(policy: str) -> str:
        return " / ".join(f"{100 * hits[policy, f].hit_rate:.1f}" for f in fractions)

    gaps = " / ".join(f"{round(100 * (hits['forecaster', f].gap_closed or 0))}" for f in fractions)
    distances = [d for d in (1, 4, 8) if d <= len(report.recall)]
    recall = " / ".join(f"{100 * report.recall_ahead(d):.1f}" for d in distances)
    return (
        f"| {name} | {report.training_tokens:,} | {report.nbytes / 1e6:.1f} | {rates('lru')} | {rates('counts')} | {rates('forecaster')} | "
        f"{rates('belady')} | {gaps} | {recall} | {report.calibration_error[0]:.3f} | {seconds:.0f} |"
    )


def variants(trace: Trace, table: str, base: Settings) -> Iterator[tuple[str, Trace, object, Settings]]:
    """(name, trace, split, settings) of each row."""
    if table == "base":
        yield f"rank {base.rank}", trace, "7/10", base
    if table == "rank":
        for rank in RANKS:
            yield f"rank {rank}", trace, "7/10", replace(base, rank=rank)
        yield f"rank {base.rank}, nothing rectified", trace, "7/10", replace(base, rectified=0)
    if table == "scales":
        for decay in SCALES:
            yield "decays " + ", ".join(f"{a:g}" for a in decay), trace, "7/10", replace(base, decay=decay)
    if table == "size":
        number = np.arange(trace.requests)
        for n in SIZES:
            part = subtrace(trace, np.flatnonzero((trace.request % 10 < n) | (trace.request % 10 >= 7)))
            kept = number[(number % 10 < n) | (number % 10 >= 7)]
            yield f"{n} of 10 requests", part, np.flatnonzero(kept % 10 < n), base
    if table == "groups":
        yield from groups(trace, base)


def groups(trace: Trace, base: Settings) -> Iterator[tuple[str, Trace, object, Settings]]:
    """Fits that have not seen a group; names such as ``mmlu_test/law`` count by their first part."""
    if trace.request_group is None:
        raise SystemExit(f"{trace.name} says nothing about groups")
    names = json.loads(trace.metadata["groups"])
    family = np.array([names[g].split("/")[0].split("_")[0] for g in trace.request_group])
    number = np.arange(trace.requests)
    tokens = np.bincount(trace.request, minlength=trace.requests)
    names = [name for name in sorted(set(family)) if tokens[family == name].sum() >= 1000]
    for unseen in (True, False):
        for name in names:
            # Measured on the same requests, those that never train.
            train, measured = (number % 10 < 7) & ~(unseen & (family == name)), (number % 10 >= 7) & (family == name)
            if not measured.any() or tokens[train].sum() < 1000:
                continue
            part = subtrace(trace, np.flatnonzero((train | measured)[trace.request]))
            kept = number[train | measured]
            label = f"{name}, never seen" if unseen else f"{name}, seen"
            yield label, part, np.flatnonzero(train[kept]), base


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--table", default="base", help="base, rank, scales, size, groups, separated by commas")
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--rank", type=int, default=Settings().rank)
    parser.add_argument("--max-tokens", type=int, default=9000)
    options = parser.parse_args()
    trace = read_trace(options.trace)
    base = replace(Settings(), epochs=options.epochs, rank=options.rank)
    print(
        "| | tokens fitted to | MB | LRU | counts | forecaster | Belady | of the way, % | recall 1 / 4 / 8 ahead | calibration | CPU s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for table in options.table.split(","):
        for name, part, split, settings in variants(trace, table, base):
            start = time.process_time()
            result = fit(part, split=split, settings=settings, max_tokens=options.max_tokens)  # type: ignore[arg-type]
            print(row(name, result, time.process_time() - start), flush=True)


if __name__ == "__main__":
    main()
