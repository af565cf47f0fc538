"""The commands of ``moecache``; they need the extra ``cli``."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import typer

from ..errors import FitError, HistoryFormatError, PolicyError
from ..files import write_atomically
from ..history import History
from ..policy import Score, score
from ..trace import Trace, check_same_model, merge
from .counts import Counts, holds_counts
from .fit import Settings, fit
from .formats import read_trace, write_trace
from .link import MODELS, PROFILES, expert_nbytes_of, profile_from, replay_timed, stand_in
from .outcome import Outcome
from .progress import progress
from .provenance import provenance
from .recall import recall
from .replay import COUNTED_ONLY, passes_of, replay, resolve_any
from .report import page
from .tables import print_fit, print_outcome

__all__ = ["application"]

_POLICIES = "lru,lfu,moe-infinity,counts,expected-next-use,belady"

application = typer.Typer(
    help="Replay routing traces, look at them, convert and merge them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
traces = typer.Typer(help="Look at routing traces, convert and merge them.", no_args_is_help=True)
application.add_typer(traces, name="trace")


@application.command("replay")
def replay_command(
    context: typer.Context,
    paths: list[Path] = typer.Argument(..., metavar="TRACE...", help="Traces: .safetensors, .jsonl or .csv."),  # noqa: B008
    capacity: str = typer.Option("0.1,0.2,0.3,0.5", help="Experts, or fractions of all, separated by commas."),
    policy: list[str] = typer.Option([_POLICIES], help="Names separated by commas, or FILE.py:NAME for a score."),  # noqa: B008
    split: str = typer.Option(None, help="7/10: requests with number % 10 < 7 are history, the others are played."),
    history: Path | None = typer.Option(None, help="What is known before: a history, or activation counts."),  # noqa: B008
    history_capacity: int = typer.Option(1000, min=1, help="Requests kept in the history."),
    link: list[str] = typer.Option([], help="Add a clock: a profile, or BYTES_PER_S,LATENCY_S."),  # noqa: B008
    prefetch: bool = typer.Option(True, help="Whether a replay with a clock may fetch ahead."),
    expert_bytes: int = typer.Option(None, min=1, help="Bytes of an expert, where the trace's model is not known."),
    stand_in_for: str = typer.Option(None, "--as", help="Stretch the routing to the shape of a model without a trace."),
    concurrency: int = typer.Option(None, min=1, help="Requests that take turns, one forward pass each."),
    max_tokens: int = typer.Option(
        None, min=1, help="Play requests from all over the trace, up to the first that passes this many tokens."
    ),
    recall: bool = typer.Option(False, help="Measure what the predictors know of coming layers, instead of policies."),
    num_experts: int = typer.Option(None, min=1, help="Experts of a layer, for text traces."),
    json_path: Path = typer.Option(None, "--json", help="Write the rows as JSON."),  # noqa: B008
    report: Path | None = typer.Option(None, help="Write a page with pictures (extra plot)."),  # noqa: B008
) -> None:
    """Play traces through policies, deciding as the runtime does."""
    job = _Job(
        capacities=_capacities(capacity),
        policies=_policies(policy),
        links=[name for text in link for name in _link_names(text)],
        prefetch=prefetch,
        expert_nbytes=expert_bytes,
        shape=stand_in_for,
        concurrency=concurrency,
        hits=not recall or report is not None,
        recall=recall,
        options={"split": split, "history_capacity": history_capacity, "max_tokens": max_tokens},
    )
    _check_outputs(json_path, report)
    if report is not None and not importlib.util.find_spec("matplotlib"):
        raise PolicyError("--report draws pictures with matplotlib: pip install 'moecache[plot]'")
    made = provenance(
        context.obj or [],
        [*paths, *([] if history is None else [history])],
        policies=[p if isinstance(p, str) else p.__name__ for p in job.policies],
        capacities=job.capacities,
        links=job.links,
        prefetch=prefetch,
        concurrency=concurrency,
        **job.options,
    )
    try:
        outcomes = [_replay_one(path, num_experts, history, job) for path in paths]
        _write(outcomes, made, json_path, report)
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        sys.exit(130)


@application.command("fit")
def fit_command(
    context: typer.Context,
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
    max_tokens: int = typer.Option(
        10_000, min=1, help="Measure on requests from all over, up to the first that passes this many tokens."
    ),
    num_experts: int = typer.Option(None, min=1, help="Experts of a layer, for text traces."),
    json_path: Path = typer.Option(None, "--json", help="Write what was measured as JSON."),  # noqa: B008
    force: bool = typer.Option(False, "--force", help="Save a forecaster that hits less than the counts do, too."),
) -> None:
    """Fit the routing forecaster to traces, and keep it with a history.

    What was done so far stays beside the history (.fit) until the end: the same command goes on from there.
    """
    _check_outputs(json_path, history)
    found = [read_trace(path, num_experts) for path in paths]
    known = _history(history, found[0]) if history.exists() else None
    checkpoint = history.with_name(f"{history.name}.fit")
    made = provenance(context.obj or [], [*paths, *([history] if history.exists() else [])], split=split, seed=seed)
    try:
        with progress(found[0].name, None, "chunks") as bar:
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
        _write_json(json_path, {"made": made, **result.report.row()})
    print_fit(result)
    if result.report.below_counts and not force:
        raise FitError(
            f"on requests it has not seen the forecaster hits less than the counts without it ({result.report}); {history} is as it was. "
            f"More or more varied traces may do better; --force saves it all the same ({checkpoint} keeps the fit)"
        )
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
    write_trace(trace, target)


@traces.command("merge")
def merge_command(
    sources: list[Path] = typer.Argument(..., metavar="TRACE..."),  # noqa: B008
    output: Path = typer.Option(..., "--output", "-o", help="Where to write."),  # noqa: B008
) -> None:
    """Put traces of one model one after another."""
    write_trace(merge([read_trace(path) for path in sources], output.stem), output)


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
        return [policy for policy in self.policies if policy not in COUNTED_ONLY]

    def passes(self, trace: Trace) -> int:
        """Forward passes that all of it will play."""
        names = {policy if isinstance(policy, str) else policy.__name__ for policy in self.policies}
        rounds = (
            self.hits * len(names | {"lru", "belady"})
            + self.recall
            + len(self.links) * sum(1 + (self.prefetch and p != "belady") for p in self.clocked) * len(self.capacities)
        )
        return rounds * passes_of(trace, self.options["split"], self.options["max_tokens"])


def _replay_one(path: Path, num_experts: int | None, history_path: Path | None, job: _Job) -> Outcome:
    trace = _shaped(read_trace(path, num_experts), job.shape)
    history = None if history_path is None else _history(history_path, trace)
    outcome = Outcome(trace)
    nbytes = job.expert_nbytes or expert_nbytes_of(trace)
    with progress(trace.name, job.passes(trace), "passes") as bar:
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


def _write(outcomes: list[Outcome], made: dict[str, Any], json_path: Path | None, report: Path | None) -> None:
    # Everything is computed before the first byte is written, and everything written before the first is shown.
    if json_path is not None:
        rows = [row for o in outcomes for row in o.rows()]
        recalled = [r.row() for o in outcomes for r in o.recalled]
        _write_json(json_path, {"made": made, "rows": rows, "recall": recalled})
    if report is not None:
        write_atomically(report, page(outcomes, made).encode("utf-8", "backslashreplace"))
    for outcome in outcomes:
        print_outcome(outcome)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=1).encode())


def _check_outputs(*paths: Path | None) -> None:
    # Said before minutes of work, not after.
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder; expected a file to write")
        if not path.absolute().parent.is_dir():
            raise FileNotFoundError(f"no folder {path.parent} to write {path.name} in")
        if not os.access(path.absolute().parent, os.W_OK):
            raise PermissionError(f"the folder of {path} cannot be written to")


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
    history = _known(path)
    try:
        check_same_model(trace, history.fingerprint, "a history", str(path))
    except ValueError as error:
        raise HistoryFormatError(str(error)) from error
    return history


def _known(path: Path) -> History:
    return Counts.read(path).history() if holds_counts(path) else History.load(path)


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
