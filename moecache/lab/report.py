"""A replay as one HTML page, pictures embedded."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .html import document, table
from .link import PROFILES, TimedResult
from .offline import reuse_distances
from .outcome import Outcome
from .recall import EXPLAINED
from .replay import Result
from .schedule import schedule

__all__ = ["page"]

# Colours that stay apart for most kinds of colour blindness; a policy keeps its own on every picture.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b")
_MARKERS = "osD^vPX*"
_RECALL_HEAD = ("target", "predictor", "@k", "@1.5k", "@2k", "calibration error")


def page(outcomes: Sequence[Outcome], made: Mapping[str, Any]) -> str:
    """The whole page.

    Parameters
    ----------
    outcomes : sequence of Outcome
        What the command replayed, trace by trace.
    made : mapping
        How, as :func:`moecache.lab.provenance.provenance` gives it.
    """
    import matplotlib

    matplotlib.use("agg")
    parts = [_section(number, outcome) for number, outcome in enumerate(outcomes)]
    links = "".join(f'<a href="#t{i}">{html.escape(o.trace.name)}</a>' for i, o in enumerate(outcomes))
    return document(
        "Expert cache replay",
        '<p class="note">A demand is one distinct expert of one step (one call of one MoE layer). All experts of a step are '
        "judged against the cache as it stood before the step. One cache serves all layers. "
        "Belady knows the future: no policy that must hold a step's experts can do better.</p>"
        f"{'<nav>' + links + '</nav>' if len(outcomes) > 1 else ''}{''.join(parts)}",
        made,
    )


def _section(number: int, outcome: Outcome) -> str:
    trace, results = outcome.trace, outcome.results
    colours = {name: i for i, name in enumerate(dict.fromkeys(r.policy for r in results))}
    first = results[0]
    size = "" if first.bytes_per_token is None or not first.misses else f", experts of {_expert_size(first)}"
    parts = [
        f'<h2 id="t{number}">{html.escape(trace.name)}</h2>',
        f"<p>{html.escape(trace.model)}: {trace.layers} MoE layers, {sum(trace.num_experts):,} experts, top-{trace.top_k}{size}. Played: "
        f"{first.tokens:,} tokens of {len(first.request_hits)} requests, {first.demands:,} demands, "
        f"{100 * first.misses_cold / first.demands:.1f} % of them first uses.</p>",
        "<h3>Hit rate</h3>",
        _hit_table(results),
        _picture(
            _draw_hits,
            (8.5, 4.6),
            results,
            colours,
            "Hit rate against capacity, a line for each policy, with Belady and capacity/N",
        ),
        '<p class="note">Dotted: what a cache would hit that held a random capacity/N of all experts.</p>',
        "<h3>Gap closed between LRU and Belady</h3>",
        _picture(
            _draw_gap, (8.5, 3.6), results, colours, "Share of the way from LRU to Belady, a line for each policy"
        ),
        *_layers(results),
        "<h3>Reuse distance</h3>",
        _picture(
            _draw_reuse,
            (8.5, 3.6),
            outcome,
            colours,
            "Share of demands whose expert was used within so many other experts",
        ),
        '<p class="note">How many other experts were used between two uses of the same one: read at a capacity, the share that LRU '
        "could hit if experts came one by one. Dotted: the capacities played.</p>",
        *_links(outcome.timed, colours),
        *_recalls(outcome),
    ]
    return "".join(parts)


def _expert_size(result: Result) -> str:
    nbytes = (result.bytes_per_token or 0) * result.tokens / result.misses
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.1f} kB"


def _hit_table(results: Sequence[Result]) -> str:
    capacities = list(dict.fromkeys(r.capacity_experts for r in results))
    fraction = {r.capacity_experts: r.fraction for r in results}
    head = [
        "hits in %\nat capacity",
        *(f"{n:,}\n{fraction[n]:.0%}" for n in capacities),
        "spread\nof requests",
        "MB\na token",
    ]
    rows = []
    for policy in dict.fromkeys(r.policy for r in results):
        mine = [r for r in results if r.policy == policy]
        middle = mine[len(mine) // 2]
        low, _, high = middle.request_spread
        moved = "-" if middle.bytes_per_token is None else f"{middle.bytes_per_token / 1e6:,.1f}"
        rows.append([policy, *(f"{100 * r.hit_rate:.1f}" for r in mine), f"{100 * low:.0f} to {100 * high:.0f}", moved])
    middle_capacity = capacities[len(capacities) // 2]
    note = f'<p class="note">Spread (the worst and best tenth of requests) and bytes per token at {middle_capacity:,} experts.</p>'
    return table(head, rows) + note + _coinciding(results)


def _coinciding(results: Sequence[Result]) -> str:
    # Two lines on top of each other look like one that is missing.
    hits: dict[tuple[int, ...], list[str]] = {}
    for policy in dict.fromkeys(r.policy for r in results):
        hits.setdefault(tuple(r.hits for r in results if r.policy == policy), []).append(policy)
    same = [" and ".join(names) for names in hits.values() if len(names) > 1]
    return "".join(f'<p class="note">The same at every capacity: {html.escape(names)}.</p>' for names in same)


def _picture(draw: Any, size: tuple[float, float], *arguments: Any) -> str:
    # `arguments` end with the text that stands in for the picture.
    from matplotlib.figure import Figure

    figure = Figure(size, layout="constrained")
    draw(figure, *arguments[:-1])
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=130)
    code = base64.b64encode(data.getvalue()).decode()
    return f'<img alt="{html.escape(arguments[-1])}" src="data:image/png;base64,{code}">'


def _axes(figure: Any, xlabel: str, ylabel: str) -> Any:
    axes = figure.subplots()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _line(axes: Any, name: str, index: int, x: Sequence[float], y: Sequence[float]) -> None:
    knows = name.startswith("belady")
    axes.plot(
        x,
        y,
        label=name,
        color="black" if knows else _COLOURS[index % len(_COLOURS)],
        linestyle=("--" if name == "belady" else ":") if knows else "-",
        marker=None if knows else _MARKERS[index % len(_MARKERS)],
        markersize=5,
    )


def _draw_hits(figure: Any, results: Sequence[Result], colours: dict[str, int]) -> None:
    axes = _axes(figure, "capacity, % of all experts", "hits, % of demands")
    for name, index in colours.items():
        mine = sorted((r for r in results if r.policy == name), key=lambda r: r.capacity_experts)
        _line(axes, name, index, [100 * r.fraction for r in mine], [100 * r.hit_rate for r in mine])
    most = 100 * max(r.fraction for r in results)
    axes.plot([0, most], [0, most], color="#888888", linestyle=(0, (1, 3)), label="capacity/N")
    axes.set_ylim(0, 102)
    axes.set_xlim(0, most * 1.02)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _draw_gap(figure: Any, results: Sequence[Result], colours: dict[str, int]) -> None:
    axes = _axes(figure, "capacity, % of all experts", "gap closed, %")
    for name, index in colours.items():
        mine = sorted(
            (r for r in results if r.policy == name and r.gap_closed is not None), key=lambda r: r.capacity_experts
        )
        if name not in ("lru", "belady", "belady-bypass") and mine:
            _line(axes, name, index, [100 * r.fraction for r in mine], [100 * (r.gap_closed or 0) for r in mine])
    axes.axhline(0, color="black", linewidth=1)
    axes.annotate("LRU", (0.005, 0), xycoords=("axes fraction", "data"), va="bottom", fontsize=9)
    axes.set_xlim(0, 102 * max(r.fraction for r in results))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _layers(results: Sequence[Result]) -> list[str]:
    capacities = list(dict.fromkeys(r.capacity_experts for r in results))
    chosen = capacities[len(capacities) // 2]
    mine = [r for r in results if r.capacity_experts == chosen]
    return [
        "<h3>Hit rate by layer</h3>",
        _picture(
            _draw_layers,
            (8.5, 1.3 + 0.36 * len(mine)),
            mine,
            f"Heat map of the hit rate of each layer at {chosen:,} experts",
        ),
        f'<p class="note">At {chosen:,} experts.</p>',
    ]


def _draw_layers(figure: Any, results: Sequence[Result]) -> None:
    axes = figure.subplots()
    rates = np.array(
        [[100 * h / d if d else np.nan for h, d in zip(r.layer_hits, r.layer_demands, strict=True)] for r in results]
    )
    image = axes.imshow(rates, aspect="auto", cmap="viridis", vmin=0, vmax=100)
    axes.set_yticks(range(len(results)), [r.policy for r in results])
    axes.set_xlabel("MoE layer")
    figure.colorbar(image, ax=axes, label="hits, %", pad=0.01)


def _draw_reuse(figure: Any, outcome: Outcome, colours: dict[str, int]) -> None:
    del colours
    plan = schedule(outcome.trace, max_tokens=20_000)
    histogram = reuse_distances(plan.experts, plan.start, max(plan.num_experts))
    total = sum(plan.num_experts)
    axes = _axes(figure, "other experts used in between, % of all experts", "demands up to there, %")
    axes.plot(
        100 * np.arange(1, total + 1) / total, 100 * np.cumsum(histogram[:total]) / histogram.sum(), color=_COLOURS[0]
    )
    for fraction in dict.fromkeys(r.fraction for r in outcome.results):
        axes.axvline(100 * fraction, color="#888888", linewidth=0.8, linestyle=":")
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 102)


def _links(timed: Sequence[TimedResult], colours: dict[str, int]) -> list[str]:
    parts = []
    for link in dict.fromkeys(t.link for t in timed):
        mine = [t for t in timed if t.link == link]
        capacities = list(dict.fromkeys(t.capacity_experts for t in mine))
        chosen = capacities[len(capacities) // 2]
        profile = PROFILES.get(link)
        fraction = {t.capacity_experts: t.fraction for t in mine}
        head = [
            "policy",
            "capacity",
            "tokens/s",
            "of all\nresident",
            "ms\na token",
            "without\nprefetching",
            "floor",
            "waiting",
            "link\nidle",
            "MB\na token",
            "useful",
            "late",
            "wasted",
            "wasted\nMB a token",
        ]
        parts += [
            f"<h3>On {html.escape(link)}</h3>",
            f'<p class="note">{html.escape(profile.source)}.</p>' if profile else "",
            table(["tokens/s\nat capacity", *(f"{n:,}\n{fraction[n]:.0%}" for n in capacities)], _rates(mine)),
            f"<details><summary>All figures</summary>{table(head, (_timed_row(t) for t in mine))}",
            '<p class="note">Useful, late and wasted are prefetches: landed before its layer asked, asked for while still on its way, and '
            "not asked for. The floor is what Belady's policy misses, in bytes, over the link's rate.</p></details>",
            _picture(
                _draw_time,
                (8.5, 1.4 + 0.36 * len(colours)),
                [t for t in mine if t.capacity_experts == chosen],
                "Where the time of a token goes",
            ),
            f'<p class="note">The time of a token at {chosen:,} experts.</p>',
        ]
    return parts


def _rates(timed: Sequence[TimedResult]) -> Iterable[list[str]]:
    for policy in dict.fromkeys(t.policy for t in timed):
        yield [policy, *(f"{t.tokens_per_s:,.1f}" for t in timed if t.policy == policy)]


def _timed_row(t: TimedResult) -> list[str]:
    return [
        t.policy,
        f"{t.capacity_experts:,}",
        f"{t.tokens_per_s:,.1f}",
        f"{t.tokens_per_s / t.resident_tokens_per_s:.0%}",
        f"{1e3 * t.seconds / t.tokens:.2f}",
        "-" if t.seconds_without is None else f"{1e3 * t.seconds_without / t.tokens:.2f}",
        f"{1e3 * t.floor_s / t.tokens:.2f}",
        f"{t.stall_s / t.seconds:.0%}",
        f"{t.link_idle:.0%}",
        f"{(t.bytes_demand + t.bytes_prefetch) / t.tokens / 1e6:,.1f}",
        f"{t.prefetch_useful:,}",
        f"{t.prefetch_late:,}",
        f"{t.prefetch_wasted:,}",
        f"{t.bytes_wasted / t.tokens / 1e6:,.1f}",
    ]


def _draw_time(figure: Any, timed: Sequence[TimedResult]) -> None:
    axes = _axes(figure, "ms a token", "")
    names = [t.policy for t in timed]
    computing = np.array([1e3 / t.resident_tokens_per_s for t in timed])
    stalled = np.array([1e3 * t.stall_s / t.tokens for t in timed])
    axes.barh(names, computing, color=_COLOURS[2], label="computing")
    axes.barh(names, stalled, left=computing, color=_COLOURS[1], label="waiting for experts")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)


def _recalls(outcome: Outcome) -> list[str]:
    if not outcome.recalled:
        return []
    targets = {r.distance: r.row()["target"].replace(" ahead", "\nahead") for r in outcome.recalled}
    found = {(r.predictor, r.distance): f"{100 * r.recall[0]:.0f} ({100 * r.recall[2]:.0f})" for r in outcome.recalled}
    names = dict.fromkeys(r.predictor for r in outcome.recalled)
    short = [[name, *(found.get((name, d), "-") for d in targets)] for name in names]
    rows = [
        [r.row()["target"], r.predictor, *(f"{100 * x:.1f}" for x in r.recall), f"{r.calibration_error:.3f}"]
        for r in outcome.recalled
    ]
    legend = "; ".join(f"{name}: {text}" for name, text in EXPLAINED.items())
    return [
        "<h3>What is known of coming layers</h3>",
        "<p>Recall, in %: how many of the experts used are among the k (in brackets 2 k) likeliest.</p>",
        table(["", *targets.values()], short),
        f'<p class="note">{html.escape(legend)}.</p>',
        f"<details><summary>All figures</summary>{table(_RECALL_HEAD, rows)}</details>",
        _picture(_draw_reliability, (7.0, 4.2), outcome, "Share of experts used against the chance stated"),
        '<p class="note">For the same layer of the next token. On the diagonal a stated chance comes true as often as it says.</p>',
    ]


def _draw_reliability(figure: Any, outcome: Outcome) -> None:
    axes = _axes(figure, "chance stated", "share used")
    axes.plot([0, 1], [0, 1], color="#888888", linewidth=0.8)
    nearest = min(r.distance for r in outcome.recalled)
    for i, r in enumerate(r for r in outcome.recalled if r.distance == nearest):
        points = [(stated, used) for n, stated, used in r.reliability if n >= 50]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                label=r.predictor,
                color=_COLOURS[i % len(_COLOURS)],
                marker=_MARKERS[i % 8],
                markersize=3,
            )
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
