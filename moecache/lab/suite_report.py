"""A suite's rows as one page, and as one Parquet or JSON file."""

from __future__ import annotations

import html
import importlib.util
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import OptionError
from ..files import write_atomically
from .families import FAMILIES
from .html import document, table
from .rivals import RIVALS
from .suite import SuiteRow

__all__ = ["check_rows_path", "suite_page", "write_rows"]


def check_rows_path(path: Path) -> None:
    """Whether rows can be written as the file's ending says.

    Raises
    ------
    OptionError
        Another ending than .parquet, .json and .csv, or Parquet without pyarrow.
    """
    if path.suffix not in (".parquet", ".json", ".csv"):
        raise OptionError(f"{path}: rows are written as .parquet, .json or .csv")
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise OptionError(
            f"{path}: Parquet is written with pyarrow: pip install 'moecache[tables]', or use .json or .csv"
        )


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], made: Mapping[str, Any]) -> None:
    """Write rows of plain values with how they were made, whole or not at all.

    Raises
    ------
    OptionError
        As :func:`check_rows_path`.
    """
    check_rows_path(path)
    if path.suffix == ".json":
        write_atomically(path, json.dumps({"made": made, "rows": rows}, indent=1).encode())
        return
    if path.suffix == ".csv":
        write_atomically(path, _csv(rows, made).encode())
        return
    import pyarrow
    from pyarrow import parquet

    found = pyarrow.Table.from_pylist(list(rows)).replace_schema_metadata({"made": json.dumps(made)})
    data = io.BytesIO()
    parquet.write_table(found, data, compression="zstd")
    write_atomically(path, data.getvalue())


def _csv(rows: Sequence[Mapping[str, Any]], made: Mapping[str, Any]) -> str:
    import csv

    text = io.StringIO()
    text.write(f"# {json.dumps(made)}\n")
    if rows:
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def suite_page(rows: Sequence[SuiteRow], made: Mapping[str, Any]) -> str:
    """All of it as HTML: for each trace the hits and the gap closed, with intervals."""
    parts = [
        "<p>Hits in %, and in brackets where the middle 95 % of requests drawn anew lie. The share of the way from LRU to Belady likewise, "
        "LRU and Belady on the same requests. Steps are judged whole: see docs/policies.md.</p>"
    ]
    for trace in dict.fromkeys(row.trace for row in rows):
        mine = [row for row in rows if row.trace == trace]
        first = mine[0]
        capacities = list(dict.fromkeys((row.capacity, row.fraction) for row in mine))
        head = [f"{n:,}\n{fraction:.0%}" for n, fraction in capacities]
        hits, gaps = [], []
        for policy in dict.fromkeys(row.policy for row in mine):
            some = [row for row in mine if row.policy == policy]
            hits.append([policy, *(_interval(r.hit_rate, r.hit_rate_low, r.hit_rate_high, 1) for r in some)])
            gaps.append([policy, *(_interval(r.gap_closed, r.gap_closed_low, r.gap_closed_high, 0) for r in some)])
        if first.optimum is not None:
            best = {row.capacity: row.optimum or 0.0 for row in mine}
            known = FAMILIES[trace].known_by if trace in FAMILIES else ""
            hits.append([f"best of {known}", *(f"{100 * best[n]:.1f}" for n, _ in capacities)])
        parts += [
            f"<h2>{html.escape(trace)}</h2><p>{first.tokens:,} tokens of {first.requests} requests, split {html.escape(first.split)}; "
            f"{html.escape(first.digest)}.</p>",
            table(["hits", *head], hits),
            table(["gap closed", *head], gaps),
        ]
    legend = "".join(f"<li><code>{html.escape(name)}</code>: {html.escape(text)}</li>" for name, text in RIVALS.items())
    parts.append(f"<h2>What others evict first</h2><ul>{legend}</ul>")
    return document("Expert cache suite", "".join(parts), made)


def _interval(value: float | None, low: float | None, high: float | None, digits: int) -> str:
    if value is None:
        return "-"
    if low is None or high is None:
        return f"{100 * value:.{digits}f}"
    return f"{100 * value:.{digits}f} ({100 * low:.{digits}f} to {100 * high:.{digits}f})"
