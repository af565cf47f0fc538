"""The commands of ``moecache``; they need the extra ``cli``."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..errors import HistoryFormatError, PolicyError
from ..files import write_atomically
from ..forecaster import HORIZONS
from ..history import History
from ..policy import Score, score
from .fit import FitResult, Settings, fit
from .link import MODELS, PROFILES, TimedResult, expert_nbytes_of, profile_from, replay_timed, stand_in
from .recall import RecallResult, recall
from .replay import Result, passes_of, replay, resolve_any
from .trace import Counts, Trace, check_same_model, merge, read_tensors, read_trace

__all__ = ["Outcome", "application"]

_POLICIES = "lru,lfu,moe-infinity,counts,expected-next-use,belady"

application = typer.Typer(
    help="Replay routing traces, look at them, convert and merge them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
traces = typer.Typer(help="Look at routing traces, convert and merge them.", no_args_is_help=True)
application.add_typer(traces, name="trace")


@application.command("replay")
def replay_command(
    paths: list[Path] = typer.Argument(..., metavar="TRACE...", help="Traces: .safetensors, .jsonl or .csv."),  # noqa: B008
    capacity: str = typer.Option("0.1,0.2,0.3,0.5", help="Experts, or fractions of all, separated by commas."),
    policy: list[str] = typer.Option([_POLICIES], help="Names separated by commas, or FILE.py:NAME for a score."),  # noqa: B008
    split: str = typer.Option(None, help="7/10: requests with number % 10 < 7 are history, the others are played."),
    history: Path = typer.Option(None, help="What is known before: a history, or a file of activation counts."),  # noqa: B008
    history_capacity: int = typer.Option(1000, min=1, help="Requests kept in the history."),
    link: list[str] = typer.Option([], help="Add a clock: a profile, or BYTES_PER_S,LATENCY_S."),  # noqa: B008
    profile: list[str] = typer.Option([], help="The same as --link."),  # noqa: B008
    prefetch: bool = typer.Option(True, help="Whether a replay with a clock may fetch ahead."),
    expert_bytes: int = typer.Option(None, min=1, help="Bytes of an expert, where the trace's model is not known."),
    stand_in_for: str = typer.Option(None, "--as", help="Stretch the routing to the shape of a model without a trace."),
    concurrency: int = typer.Option(None, min=1, help="Requests that take turns, one forward pass each."),
    max_tokens: int = typer.Option(None, min=1, help="End after the first request that passes this many tokens."),
    recall: bool = typer.Option(False, help="Measure what the predictors know of coming layers, instead of policies."),
    num_experts: int = typer.Option(None, min=1, help="Experts of a layer, for text traces."),
    json_path: Path = typer.Option(None, "--json", help="Write the rows as JSON."),  # noqa: B008
    report: Path = typer.Option(None, help="Write a page with pictures (extra plot)."),  # noqa: B008
) -> None:
    """Play traces through policies, deciding as the runtime does."""
    job = _Job(
        capacities=_capacities(capacity),
        policies=_policies(policy),
        links=[name for text in (*link, *profile) for name in _link_names(text)],
        prefetch=prefetch,
        expert_nbytes=expert_bytes,
        shape=stand_in_for,
        concurrency=concurrency,
        hits=not recall or report is not None,
        recall=recall,
        options={"split": split, "history_capacity": history_capacity, "max_tokens": max_tokens},
    )
    try:
        outcomes = [_replay_one(path, num_experts, history, job) for path in paths]
        _write(outcomes, job, json_path, report)
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        sys.exit(130)


@application.command("fit")
def fit_command(
    paths: list[Path] = typer.Argument(..., metavar="TRACE...", help="Traces of one model."),  # noqa: B008
    history: Path = typer.Option(..., help="The history that gets the forecaster; made if there is none."),  # noqa: B008
    split: str = typer.Option(
        None, help="7/10: requests with number % 10 < 7 are learned from, the others measured on."
    ),
    add: bool = typer.Option(True, help="Whether the history gets the requests learned from, too."),
    rank: int = typer.Option(128, min=1, help="Components of the state."),
    distances: int = typer.Option(8, min=1, help="Coming layers to forecast."),
    epochs: int = typer.Option(None, min=1, help="At most so many passes over the tokens; by default by their number."),
    seed: int = typer.Option(0, min=0, help="The same seed on the same machine gives the same weights."),
    device: str = typer.Option(None, help="cpu or cuda; by default a GPU if there is one."),
    max_tokens: int = typer.Option(10_000, min=1, help="Measure up to the first request that passes this many tokens."),
    num_experts: int = typer.Option(None, min=1, help="Experts of a layer, for text traces."),
    json_path: Path = typer.Option(None, "--json", help="Write what was measured as JSON."),  # noqa: B008
) -> None:
    """Fit the routing forecaster to traces, and keep it with a history.

    What was done so far stays beside the history (.fit) until the end: the same command goes on from there.
    """
    found = [read_trace(path, num_experts) for path in paths]
    known = _history(history, found[0]) if history.exists() else None
    checkpoint = history.with_name(f"{history.name}.fit")
    from tqdm import tqdm

    try:
        with tqdm(desc=found[0].name, unit="chunk", disable=None, leave=False) as bar:
            result = fit(
                found,
                split=split,
                history=known,
                settings=Settings(rank=rank, distances=distances, epochs=epochs, seed=seed),
                add=add,
                max_tokens=max_tokens,
                device=device,
                checkpoint=checkpoint,
                progress=bar,
            )
    except KeyboardInterrupt:
        print(f"interrupted; {history} is as it was, and the same command goes on from {checkpoint}", file=sys.stderr)
        sys.exit(130)
    if json_path is not None:
        write_atomically(json_path, json.dumps(result.report.row(), indent=1).encode())
    _print_fit(result)
    result.history.save(history)
    checkpoint.unlink(missing_ok=True)
    print(f"{history}: {len(result.history)} requests, forecaster of {result.forecaster.nbytes / 1e6:.1f} MB")


@traces.command("info")
def info_command(
    path: Path, num_experts: int = typer.Option(None, min=1, help="Experts of a layer, for text traces.")
) -> None:
    """Say what a trace holds."""
    for name, value in _describe(read_trace(path, num_experts)):
        print(f"{name:<18} {value}")


@traces.command("convert")
def convert_command(
    source: Path,
    target: Path,
    num_experts: int = typer.Option(None, min=1, help="Experts of a layer, for text traces."),
    model: str = typer.Option(None, help="The model's name, for the metadata."),
) -> None:
    """Write a trace in the format of another file ending."""
    trace = read_trace(source, num_experts)
    if model is not None:
        trace = replace(trace, metadata={**trace.metadata, "model": model})
    trace.save(target)


@traces.command("merge")
def merge_command(
    sources: list[Path] = typer.Argument(..., metavar="TRACE..."),  # noqa: B008
    output: Path = typer.Option(..., "--output", "-o", help="Where to write."),  # noqa: B008
) -> None:
    """Put traces of one model one after another."""
    merge([read_trace(path) for path in sources], output.stem).save(output)


@dataclass(frozen=True)
class _Job:
    """What a replay shall do with each trace."""

    capacities: list[int | float]
    policies: list[str | Score]
    links: list[str]
    prefetch: bool
    expert_nbytes: int | None
    shape: str | None
    concurrency: int | None
    hits: bool
    recall: bool
    options: dict[str, Any]

    @property
    def clocked(self) -> list[str | Score]:
        return [policy for policy in self.policies if policy != "belady-bypass"]

    def passes(self, trace: Trace) -> int:
        """Forward passes that all of it will play."""
        names = {policy if isinstance(policy, str) else policy.__name__ for policy in self.policies}
        rounds = (
            self.hits * len(names | {"lru", "belady"})
            + self.recall
            + len(self.links) * sum(1 + (self.prefetch and p != "belady") for p in self.clocked) * len(self.capacities)
        )
        return rounds * passes_of(trace, self.options["split"], self.options["max_tokens"])


class Outcome:
    """What came out for one trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.results: list[Result] = []
        self.timed: list[TimedResult] = []
        self.recalled: list[RecallResult] = []

    def rows(self) -> list[dict[str, Any]]:
        """One row for each policy and capacity, with its clocked results under ``links``."""
        rows = [result.row() for result in self.results]
        for row in rows:
            row["links"] = [
                t.row()
                for t in self.timed
                if (t.policy, t.capacity_experts) == (row["policy"], row["capacity_experts"])
            ]
        return rows


def _replay_one(path: Path, num_experts: int | None, history_path: Path | None, job: _Job) -> Outcome:
    trace = _shaped(read_trace(path, num_experts), job.shape)
    history = None if history_path is None else _history(history_path, trace)
    outcome = Outcome(trace)
    nbytes = job.expert_nbytes or expert_nbytes_of(trace)
    with _progress(trace.name, job.passes(trace)) as bar:
        options = {**job.options, "history": history, "progress": bar}
        turns = {**options, "concurrency": job.concurrency, "expert_nbytes": nbytes}
        if job.hits:
            outcome.results = replay(trace, job.policies, job.capacities, **turns)
            for text in job.links:
                outcome.timed += replay_timed(
                    trace, job.clocked, job.capacities, profile_from(text), prefetch=job.prefetch, **turns
                )
        if job.recall:
            outcome.recalled = recall(trace, **options)
    return outcome


def _shaped(trace: Trace, shape: str | None) -> Trace:
    if shape is None:
        return trace
    if shape not in MODELS:
        raise PolicyError(f"no model is called {shape!r}: expected one of {', '.join(MODELS)}")
    return stand_in(trace, MODELS[shape])


@contextlib.contextmanager
def _progress(name: str, passes: int) -> Iterator[Any]:
    from tqdm import tqdm

    with tqdm(total=passes, desc=name, unit="pass", disable=None, leave=False, delay=1.0) as bar:
        yield bar


def _write(outcomes: list[Outcome], job: _Job, json_path: Path | None, report: Path | None) -> None:
    # Everything is computed before the first byte is written.
    recalled = not job.hits
    if json_path is not None:
        rows = [row for o in outcomes for row in ([r.row() for r in o.recalled] if recalled else o.rows())]
        write_atomically(json_path, json.dumps(rows, indent=1).encode())
    if report is not None:
        from .report import page

        write_atomically(report, page(outcomes).encode())
    for outcome in outcomes:
        _print(outcome, recalled)


def _print(outcome: Outcome, recalled: bool) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    if recalled:
        console.print(_recall_table(outcome))
        return
    results = outcome.results
    title = f"{outcome.trace.name}: hits in %, {results[0].tokens:,} tokens of {len(results[0].request_hits)} requests"
    console.print(_capacity_table(results, title, lambda r: f"{100 * r.hit_rate:.1f}"))
    gaps = "share of the way from LRU to Belady, in %"
    console.print(
        _capacity_table(results, gaps, lambda r: "-" if r.gap_closed is None else f"{round(100 * r.gap_closed)}")
    )
    for link in dict.fromkeys(t.link for t in outcome.timed):
        console.print(_link_table(outcome, link))


def _print_fit(result: FitResult) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    report = result.report
    seen = f"{report.tokens:,} tokens of {report.requests} requests"
    console.print(
        f"fitted to {report.training_tokens:,} tokens in {len(report.losses) - 1} passes; held-out loss "
        + " ".join(f"{loss:.3f}" for loss in report.losses)
    )
    distances = range(1, len(report.recall) + 1)
    table = _table(f"recall of the experts used, in %, {seen}", ["layer"], [f"{d} ahead" for d in distances])
    for layer in range(report.recall.shape[1]):
        table.add_row(str(layer), *(f"{100 * report.recall[d - 1, layer]:.0f}" for d in distances))
    table.add_row("mean", *(f"{100 * report.recall_ahead(d):.1f}" for d in distances))
    console.print(table)
    ends = ["1", "2", *(f"{a + 1}-{b}" for a, b in itertools.pairwise(HORIZONS[1:]))]
    table = _table("chance of use within so many visits, given none before", ["visits"], ends)
    table.add_row("calibration error", *(f"{x:.3f}" for x in report.calibration_error))
    console.print(table)
    console.print(_capacity_table(report.hits, f"hits in %, {seen}", lambda r: f"{100 * r.hit_rate:.1f}"))
    gaps = "share of the way from LRU to Belady, in %"
    console.print(
        _capacity_table(report.hits, gaps, lambda r: "-" if r.gap_closed is None else f"{round(100 * r.gap_closed)}")
    )


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Any:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _capacity_table(results: Sequence[Result], title: str, value: Callable[[Result], str]) -> Any:
    capacities = {r.capacity_experts: f"{r.capacity_experts:,}\n{r.fraction:.0%}" for r in results}
    table = _table(title, ["policy"], list(capacities.values()))
    for policy in dict.fromkeys(r.policy for r in results):
        table.add_row(policy, *(value(r) for r in results if r.policy == policy))
    return table


def _link_table(outcome: Outcome, link: str) -> Any:
    head = [
        "experts",
        "hit %",
        "ms/token",
        "without",
        "floor",
        "waiting %",
        "idle link %",
        "MB/token",
        "useful",
        "late",
    ]
    head += ["wasted", "wasted MB", "wasted %"]
    table = _table(f"{outcome.trace.name} on {link}", ["policy"], head)
    for t in outcome.timed:
        if t.link == link:
            table.add_row(
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
            )
    return table


def _recall_table(outcome: Outcome) -> Any:
    title = f"{outcome.trace.name}: recall of the experts used, in %"
    table = _table(title, ["target", "predictor"], ["@k", "@1.5k", "@2k", "calibration error"])
    for r in outcome.recalled:
        table.add_row(
            r.row()["target"], r.predictor, *(f"{100 * x:.1f}" for x in r.recall), f"{r.calibration_error:.3f}"
        )
    return table


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


def _history(path: Path, trace: Trace) -> History:
    # A history of its own format, or activation counts; either must be of the trace's model.
    metadata, tensors = read_tensors(path)
    history = Counts.read(path).history() if "counts" in tensors else History.load(path)
    try:
        check_same_model(trace, history.fingerprint, metadata.get("model", "a history"), str(path))
    except ValueError as error:
        raise HistoryFormatError(str(error)) from error
    return history


def _capacities(text: str) -> list[int | float]:
    try:
        return [float(part) if "." in part else int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}: expected experts or fractions separated by commas, such as 0.1,0.25 or 64"
        ) from None


def _policies(texts: Sequence[str]) -> list[str | Score]:
    found: list[str | Score] = []
    for part in (part.strip() for text in texts for part in text.split(",")):
        found.append(_score(part) if ".py:" in part else part)
        resolve_any(found[-1])
    return found


def _score(text: str) -> Score:
    # FILE.py:NAME, a function made with moecache.policy.score, or a plain one.
    path, _, name = text.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise FileNotFoundError(f"no policy file {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        raise PolicyError(f"{path} has no function {name!r}")
    return found if isinstance(found, Score) else score(found)


def _link_names(text: str) -> list[str]:
    # Commas separate profiles, except in RATE,LATENCY.
    names = text.split(",")
    if not all(name in PROFILES for name in names):
        profile_from(text)
        return [text]
    return names
