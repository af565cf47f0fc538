"""What a history of other traffic costs: hit rates of `counts` on the odd requests of each group of a trace, by what the history has seen.

python bench/foreign_history.py TRACE
"""

from __future__ import annotations

import sys

import numpy as np

from moecache.lab import read_trace
from moecache.lab.replay import _play, _Quiet, resolve_any, slots_of, trained_history
from moecache.lab.schedule import schedule

FRACTIONS = (0.1, 0.2, 0.3, 0.5)


def main(path: str) -> None:
    trace = read_trace(path)
    if trace.request_group is None:
        raise SystemExit(f"{path} has no groups of requests")
    groups = np.asarray(trace.request_group)
    slots = [slots_of(trace, fraction) for fraction in FRACTIONS]
    policy = resolve_any("counts")
    print(f"{'group':>5}  {'history':<12}" + "".join(f"{fraction:>7.0%}" for fraction in FRACTIONS))
    for group in np.unique(groups):
        own, others = np.flatnonzero(groups == group), np.flatnonzero(groups != group)
        plan = schedule(trace, own[1::2], None, None)
        seen = {"nothing": own[:0], "others": others, "all": np.concatenate([own[::2], others]), "its own": own[::2]}
        for name, requests in seen.items():
            results = _play(trace, plan, policy, slots, trained_history(trace, requests), _Quiet())
            print(f"{group:>5}  {name:<12}" + "".join(f"{100 * r.hit_rate:>7.1f}" for r in results), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
