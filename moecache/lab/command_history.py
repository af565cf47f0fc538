"""``moecache history``: make, look at, merge and shorten histories."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import typer

from ..errors import HistoryFormatError
from ..history import History
from ..trace import check_same_model, merge
from .command_options import MAP, NUM_EXPERTS, REQUEST_TOKENS, TOP_K, read
from .counts import Counts, holds_counts
from .replay import trained_history

__all__ = ["histories", "load"]

histories = typer.Typer(help="Make histories, look at them, merge and shorten them.", no_args_is_help=True)


def load(path: Path) -> History:
    """A history, or one made of a file of activation counts."""
    return Counts.read(path).history() if holds_counts(path) else History.load(path)


@histories.command("make")
def make_command(
    sources: list[Path] = typer.Argument(..., metavar="TRACE|COUNTS..."),  # noqa: B008
    output: Path = typer.Option(..., "--output", "-o", help="Where to write."),  # noqa: B008
    capacity: int = typer.Option(1000, min=1, help="Requests kept."),
    num_experts: int = NUM_EXPERTS,
    top_k: int = TOP_K,
    request_tokens: int = REQUEST_TOKENS,
    mapping: list[str] = MAP,
) -> None:
    """Make a history of traces of one model, or of one file of activation counts (layer,expert,count)."""
    if len(sources) == 1 and _is_counts(sources[0]):
        history = Counts.read(sources[0]).history(capacity)
    else:
        traces = [read(path, num_experts, top_k, request_tokens, mapping) for path in sources]
        trace = traces[0] if len(traces) == 1 else merge(traces)
        history = trained_history(trace, np.arange(trace.requests), None, capacity)
    history.save(output)
    print(f"{output}: {len(history)} requests")


def _is_counts(path: Path) -> bool:
    # A heat map is told from a trace by its first line.
    if path.suffix.lower() not in (".csv", ".tsv", ".safetensors"):
        return False
    if path.suffix.lower() == ".safetensors":
        return holds_counts(path)
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        return next((line for line in file if not line.startswith("#")), "").strip().lower().endswith("count")


@histories.command("info")
def info_command(path: Path) -> None:
    """Say what a history holds."""
    history = load(path)
    forecaster = history.forecaster
    for name, value in (
        ("model", str(history.fingerprint)),
        ("requests", f"{len(history):,} of at most {history.capacity:,}"),
        ("tokens", f"{history.store.tokens:,}"),
        ("forecaster", "none" if forecaster is None else f"{forecaster.nbytes / 1e6:.1f} MB, rank {forecaster.rank}"),
    ):
        print(f"{name:<12} {value}")


@histories.command("merge")
def merge_command(
    sources: list[Path] = typer.Argument(..., metavar="HISTORY..."),  # noqa: B008
    output: Path = typer.Option(..., "--output", "-o", help="Where to write."),  # noqa: B008
) -> None:
    """Put histories of one model together; where they are more requests than fit, those stay that stand best for all."""
    first, *others = [load(path) for path in sources]
    first.merge(*others)
    first.save(output)
    print(f"{output}: {len(first)} requests")


@histories.command("forget")
def forget_command(
    path: Path,
    keep: int = typer.Option(..., min=0, help="So many of the newest requests stay."),
    forecaster: bool = typer.Option(True, help="Whether a forecaster stays."),
    trace: Path | None = typer.Option(None, help="Check that the history is of this trace's model first."),  # noqa: B008
) -> None:
    """Forget all but the newest requests, and which expert followed which, which belongs to no single request."""
    history = History.load(path)
    if trace is not None:
        try:
            check_same_model(read(trace), history.fingerprint, "a history", str(path))
        except ValueError as error:
            raise HistoryFormatError(str(error)) from error
    shorter = History(history.fingerprint, history.capacity)
    store = history.store
    routed = len(history.fingerprint.num_experts) * max(history.fingerprint.top_k, 1)
    newest = store.order()[max(len(history) - keep, 0) :]
    for entry in newest.tolist():
        prompt, decode = np.array(store.prompt_counts[entry]), np.array(store.decode_counts[entry])
        shorter.add(prompt, decode, round((prompt.sum(dtype=np.int64) + decode.sum(dtype=np.int64)) / routed))
    for name, value in store.weights.arrays().items():
        shorter.store.weights.arrays()[name][:] = value
    shorter.forecaster = history.forecaster if forecaster else None
    shorter.save(path)
    print(f"{path}: {len(shorter)} of {len(history)} requests")
