"""Results as tables on a terminal of any width, or in a log."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from ..forecaster import HORIZONS
from .fit import FitResult
from .outcome import Outcome
from .replay import Result

__all__ = ["print_fit", "print_outcome"]

_WIDTH = 120  # where it is not known


def print_outcome(outcome: Outcome) -> None:
    """What a replay gave for one trace."""
    results, gap = outcome.results, "share of the way from LRU to Belady, in %"
    if results:
        title = (
            f"{outcome.trace.name}: hits in %, {results[0].tokens:,} tokens of {len(results[0].request_hits)} requests"
        )
        _print_capacities(results, title, lambda r: f"{100 * r.hit_rate:.1f}")
        _print_capacities(results, gap, _gap)
    for link in dict.fromkeys(t.link for t in outcome.timed):
        _print_link(outcome, link)
    if outcome.recalled:
        head = ["target", "predictor"], ["@k", "@1.5k", "@2k", "calibration error"]
        rows = [
            [r.row()["target"], r.predictor, *(f"{100 * x:.1f}" for x in r.recall), f"{r.calibration_error:.3f}"]
            for r in outcome.recalled
        ]
        _print(f"{outcome.trace.name}: recall of the experts used, in %", *head, rows)


def print_fit(result: FitResult) -> None:
    """What a fit gave."""
    report = result.report
    seen = f"{report.tokens:,} tokens of {report.requests} requests"
    print(
        f"fitted to {report.training_tokens:,} tokens in {len(report.losses) - 1} passes; held-out loss "
        + " ".join(f"{loss:.3f}" for loss in report.losses)
    )
    distances = range(1, len(report.recall) + 1)
    rows = [
        [str(layer), *(f"{100 * report.recall[d - 1, layer]:.0f}" for d in distances)]
        for layer in range(report.recall.shape[1])
    ]
    rows.append(["mean", *(f"{100 * report.recall_ahead(d):.1f}" for d in distances)])
    _print(f"recall of the experts used, in %, {seen}", ["layer"], [f"{d} ahead" for d in distances], rows)
    ends = ["1", "2", *(f"{a + 1}-{b}" for a, b in itertools.pairwise(HORIZONS[1:]))]
    errors = [["calibration error", *(f"{x:.3f}" for x in report.calibration_error)]]
    _print("chance of use within so many visits, given none before", ["visits"], ends, errors)
    _print_capacities(report.hits, f"hits in %, {seen}", lambda r: f"{100 * r.hit_rate:.1f}")
    _print_capacities(report.hits, "share of the way from LRU to Belady, in %", _gap)


def _gap(result: Result) -> str:
    return "-" if result.gap_closed is None else f"{round(100 * result.gap_closed)}"


def _print_capacities(results: Sequence[Result], title: str, value: Callable[[Result], str]) -> None:
    capacities = {r.capacity_experts: f"{r.capacity_experts:,}\n{r.fraction:.0%}" for r in results}
    rows = [
        [policy, *(value(r) for r in results if r.policy == policy)]
        for policy in dict.fromkeys(r.policy for r in results)
    ]
    _print(title, ["policy"], list(capacities.values()), rows)


def _print_link(outcome: Outcome, link: str) -> None:
    head = ["hit %", "ms/token", "without", "floor", "waiting %", "idle link %", "MB/token"]
    head += ["useful", "late", "wasted", "wasted MB", "wasted %"]
    rows = [
        [
            t.policy,
            f"{t.capacity_experts:,}",
            f"{100 * t.hit_rate:.1f}",
            f"{1e3 * t.seconds / t.tokens:.2f}",
            "-" if t.seconds_without is None else f"{1e3 * t.seconds_without / t.tokens:.2f}",
            f"{1e3 * t.floor_s / t.tokens:.2f}",
            f"{100 * t.stall_s / t.seconds:.0f}",
            f"{100 * t.link_idle:.0f}",
            f"{(t.bytes_demand + t.bytes_prefetch) / t.tokens / 1e6:.1f}",
            f"{t.prefetch_useful:,}",
            f"{t.prefetch_late:,}",
            f"{t.prefetch_wasted:,}",
            f"{t.bytes_wasted / t.tokens / 1e6:.1f}",
            f"{100 * t.waste_share:.1f}",
        ]
        for t in outcome.timed
        if t.link == link
    ]
    _print(f"{outcome.trace.name} on {link}", ["policy", "experts"], head, rows)


def _print(title: str, left: Sequence[str], right: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    # `left` names the columns that say what a row is. Where a table is too wide, they stand before every part of it.
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, markup=False, emoji=False, width=_WIDTH)
    widths = [
        3 + max(len(line) for cell in column for line in str(cell).splitlines() or [""])
        for column in zip((*left, *right), *rows, strict=True)
    ]
    for n, part in enumerate(_parts(widths, len(left), console.width)):
        heading = title if n == 0 else f"{title} (continued)"
        table = Table(title=heading, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
        for name in left:
            table.add_column(name, overflow="fold")
        for at in part:
            table.add_column(right[at], justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*row[: len(left)], *(row[len(left) + at] for at in part))
        console.print(table)


def _parts(widths: Sequence[int], left: int, most: int) -> Iterable[list[int]]:
    # Columns right of `left` that fit beside them, at least one at a time.
    width_left, part = most - sum(widths[:left]) - 2, list[int]()
    used = 0
    for at, width in enumerate(widths[left:]):
        if part and used + width > width_left:
            yield part
            part, used = [], 0
        part.append(at)
        used += width
    yield part
