"""The commands of ``moecache``; they need the extra ``cli``."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from ..errors import FitError, HistoryFormatError, PolicyError
from ..files import write_atomically
from ..history import History
from ..policy import Score, score
from ..trace import Trace, check_same_model
from .command_history import histories, load
from .command_options import MAP, NUM_EXPERTS, REQUEST_TOKENS, TOP_K, capacities_of, capacity_texts, read
from .command_traces import traces
from .families import FAMILIES
from .fit import Settings, fit
from .link import MODELS, PROFILES, expert_nbytes_of, profile_from, replay_timed, stand_in
from .outcome import Outcome
from .progress import progress
from .provenance import package_version, provenance
from .recall import recall
from .replay import COUNTED_ONLY, REPLAY_NAMES, passes_of, replay, resolve_any
from .report import page
from .suite import gather, run_suite
from .suite_report import check_rows_path, suite_page, write_rows
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
application.add_typer(traces, name="trace")
application.add_typer(histories, name="history")


def _show_version(asked: bool) -> None:
    if asked:
        print(f"moecache {package_version()}")
        raise typer.Exit


@application.callback()
def main_options(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Say the version."),
) -> None:
    """Replay routing traces, look at them, convert and merge them."""


@application.command("replay")
def replay_command(
    context: typer.Context,
    paths: list[Path] = typer.Argument(..., metavar="TRACE...", help="Traces of any format that is read."),  # noqa: B008
    capacity: str = typer.Option("0.1,0.2,0.3,0.5", help="Such as 0.1, 10%, 64 or 8GiB, separated by commas."),
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
    num_experts: int = NUM_EXPERTS,
    top_k: int = TOP_K,
    request_tokens: int = REQUEST_TOKENS,
    mapping: list[str] = MAP,
    json_path: Path = typer.Option(None, "--json", help="Write the rows as JSON."),  # noqa: B008
    report: Path | None = typer.Option(None, help="Write a page with pictures (extra plot)."),  # noqa: B008
) -> None:
    """Play traces through policies, deciding as the runtime does."""
    job = _Job(
        capacities=capacity_texts(capacity),
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
        outcomes = [
            _replay_one(read(path, num_experts, top_k, request_tokens, mapping), history, job) for path in paths
        ]
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
    num_experts: int = NUM_EXPERTS,
    top_k: int = TOP_K,
    request_tokens: int = REQUEST_TOKENS,
    mapping: list[str] = MAP,
    json_path: Path = typer.Option(None, "--json", help="Write what was measured as JSON."),  # noqa: B008
    force: bool = typer.Option(False, "--force", help="Save a forecaster that hits less than the counts do, too."),
) -> None:
    """Fit the routing forecaster to traces, and keep it with a history.

    What was done so far stays beside the history (.fit) until the end: the same command goes on from there.
    """
    _check_outputs(json_path, history)
    found = [read(path, num_experts, top_k, request_tokens, mapping) for path in paths]
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


@application.command("suite")
def suite_command(
    context: typer.Context,
    paths: list[Path] = typer.Argument(None, metavar="[TRACE|FOLDER]...", help="By default MOECACHE_TRACES."),  # noqa: B008
    policy: str = typer.Option(",".join(REPLAY_NAMES), help="Names separated by commas."),
    capacity: str = typer.Option("0.1,0.2,0.3,0.5", help="Such as 0.1, 10% or 64, separated by commas."),
    split: str = typer.Option("7/10", help="Requests with number % 10 < 7 are history, the others are played."),
    max_tokens: int = typer.Option(2000, min=0, help="Tokens played of each trace, from all over it; 0: all."),
    seed: int = typer.Option(0, min=0, help="Of the synthetic traces and the intervals."),
    jobs: int = typer.Option(os.cpu_count() or 1, min=1, help="Processes."),
    report: Path = typer.Option(Path("suite.html"), help="The page."),  # noqa: B008
    rows_path: Path = typer.Option(Path("suite.json"), "--rows", help="The rows: .parquet, .json or .csv."),  # noqa: B008
) -> None:
    """Play fixed traces and synthetic ones through all policies, with intervals over requests."""
    _check_outputs(report, rows_path)
    check_rows_path(rows_path)
    folder = os.environ.get("MOECACHE_TRACES")
    found = gather(paths or ([Path(folder)] if folder else []))
    names = [name.strip() for name in policy.split(",")]
    for name in names:
        resolve_any(name)
    capacities = [value for text in capacity_texts(capacity) for value in _plain(text)]
    made = provenance(
        context.obj or [], found, policies=names, capacities=capacities, split=split, max_tokens=max_tokens, seed=seed
    )
    with progress("suite", len(found) + len(FAMILIES), "traces") as bar:
        rows = run_suite(
            found,
            names,
            capacities,
            split=split,
            max_tokens=max_tokens or None,
            seed=seed,
            jobs=jobs,
            done=lambda name: bar.update(1),
        )
    write_rows(rows_path, [row.row() for row in rows], made)
    write_atomically(report, suite_page(rows, made).encode("utf-8", "backslashreplace"))
    print(f"{report} and {rows_path}: {len(rows)} rows")


def _plain(text: str) -> list[int | float]:
    if text.endswith("%"):
        return [float(text[:-1]) / 100]
    try:
        return [float(text) if "." in text else int(text)]
    except ValueError:
        raise typer.BadParameter(f"{text}: traces of several models have experts of several sizes") from None


@dataclass(frozen=True)
class _Job:
    """What a replay shall do with each trace."""

    capacities: list[str]
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


def _replay_one(trace: Trace, history_path: Path | None, job: _Job) -> Outcome:
    trace = _shaped(trace, job.shape)
    history = None if history_path is None else _history(history_path, trace)
    outcome = Outcome(trace)
    nbytes = job.expert_nbytes or expert_nbytes_of(trace)
    capacities = capacities_of(job.capacities, trace, nbytes)
    with progress(trace.name, job.passes(trace), "passes") as bar:
        options = {**job.options, "history": history, "progress": bar}
        turns = {**options, "concurrency": job.concurrency, "expert_nbytes": nbytes}
        if job.hits:
            outcome.results = replay(trace, job.policies, capacities, **turns)
            for text in job.links:
                outcome.timed += replay_timed(
                    trace, job.clocked, capacities, profile_from(text), prefetch=job.prefetch, **turns
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


def _history(path: Path, trace: Trace) -> History:
    # A history of its own format, or activation counts; either must be of the trace's model.
    history = load(path)
    try:
        check_same_model(trace, history.fingerprint, "a history", str(path))
    except ValueError as error:
        raise HistoryFormatError(str(error)) from error
    return history


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
