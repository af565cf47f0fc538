"""``moecache trace``: look at traces, convert, merge, select, split and compare them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import typer

from ..errors import TraceFormatError
from ..trace import Trace, merge
from .command_options import MAP, NUM_EXPERTS, REQUEST_TOKENS, TOP_K, read
from .formats import write_trace
from .schedule import split_requests
from .selection import compare, select

__all__ = ["traces"]

traces = typer.Typer(
    help="Look at routing traces, convert, merge, select, split and compare them.", no_args_is_help=True
)


@traces.command("info")
def info_command(
    path: Path,
    num_experts: int = NUM_EXPERTS,
    top_k: int = TOP_K,
    request_tokens: int = REQUEST_TOKENS,
    mapping: list[str] = MAP,
) -> None:
    """Say what a trace holds."""
    for name, value in _describe(read(path, num_experts, top_k, request_tokens, mapping)):
        print(f"{name:<18} {value}")


@traces.command("convert")
def convert_command(
    source: Path,
    target: Path,
    num_experts: int = NUM_EXPERTS,
    top_k: int = TOP_K,
    request_tokens: int = REQUEST_TOKENS,
    mapping: list[str] = MAP,
    model: str = typer.Option(None, help="The model's name, for the metadata."),
) -> None:
    """Write a trace in the format of another file ending."""
    trace = read(source, num_experts, top_k, request_tokens, mapping)
    if model is not None:
        trace = replace(trace, metadata={**trace.metadata, "model": model})
    write_trace(trace, target)


@traces.command("merge")
def merge_command(
    sources: list[Path] = typer.Argument(..., metavar="TRACE..."),  # noqa: B008
    output: Path = typer.Option(..., "--output", "-o", help="Where to write."),  # noqa: B008
) -> None:
    """Put traces of one model one after another."""
    write_trace(merge([read(path) for path in sources], output.stem), output)


@traces.command("select")
def select_command(
    source: Path,
    target: Path,
    requests: str | None = typer.Option(None, help="Numbers and ranges, such as 0-9,15."),
    group: int | None = typer.Option(None, min=0, help="Requests of this group."),
) -> None:
    """Write some of a trace's requests, numbered anew."""
    trace = read(source)
    chosen = np.arange(trace.requests) if requests is None else _numbers(requests)
    if group is not None:
        if trace.request_group is None:
            raise TraceFormatError(f"{source}: its requests have no groups")
        chosen = chosen[np.isin(chosen, np.flatnonzero(trace.request_group == group))]
    write_trace(select(trace, chosen), target)


@traces.command("split")
def split_command(
    source: Path,
    first: Path,
    second: Path,
    by: str = typer.Option(
        "7/10", help="7/10: requests with number % 10 < 7 go to the first file, the others to the second."
    ),
) -> None:
    """Write a trace's requests to two files, as --split parts them."""
    trace = read(source)
    parts = [select(trace, part) for part in split_requests(trace, by)]
    for path, part in zip((first, second), parts, strict=True):
        write_trace(part, path)


@traces.command("compare")
def compare_command(one: Path, other: Path) -> None:
    """Say what two traces of one model have in common."""
    found = compare(read(one), read(other))
    print(f"{'tokens':<18} {found['tokens'][0]:,} and {found['tokens'][1]:,}")
    print(f"{'alike up to token':<18} {found['equal_tokens']:,}")
    print(f"{'experts alike':<18} {100 * found['experts_alike']:.2f} %")
    print(f"{'usage similarity':<18} {found['usage_similarity']:.4f}")


def _numbers(text: str) -> np.ndarray:
    try:
        ranges = [part.split("-") for part in text.split(",")]
        return np.unique(np.concatenate([np.arange(int(r[0]), int(r[-1]) + 1) for r in ranges if len(r) <= 2]))
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected numbers and ranges, such as 0-9,15") from None


def _describe(trace: Trace) -> Iterator[tuple[str, str]]:
    sizes = sorted(set(trace.num_experts))
    tokens = np.bincount(trace.request)
    yield "model", trace.model
    yield "layers", f"{trace.layers}"
    yield "experts per layer", f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    yield "top-k", f"{trace.top_k}"
    yield "tokens", f"{trace.tokens:,} ({int((trace.decode == 0).sum()):,} of prompts)"
    yield "requests", f"{trace.requests:,} of {tokens.min():,} to {tokens.max():,} tokens"
    yield "forward passes", "each token its own" if trace.forward is None else f"{len(np.unique(trace.forward)):,}"
    for name, value in sorted(trace.metadata.items()):
        if name not in ("model", "num_layers", "num_experts", "top_k", "groups"):
            yield name, value
