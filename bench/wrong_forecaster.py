"""What a forecaster that is wrong of the coming layers costs: stall on a link, beside no forecaster and the one it was made of.

python bench/wrong_forecaster.py TRACE [--tokens 1500]

A small forecaster is fitted to the history requests (split 7/10). The wrong one says the opposite of every coming layer, as surely; what it
says of evictions stays.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from moecache import Forecaster
from moecache.lab import Settings, fit, read_trace
from moecache.lab.link import PROFILES, replay_timed

CAPACITIES = (0.2, 0.5)


def contrary(forecaster: Forecaster) -> Forecaster:
    """Says the opposite of coming layers."""
    return replace(
        forecaster,
        ahead_gain=-forecaster.ahead_gain,
        ahead_bias=-forecaster.ahead_bias,
        ahead_weights=-forecaster.ahead_weights,
        ahead_pairs=-forecaster.ahead_pairs,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--tokens", type=int, default=1500)
    given = parser.parse_args()
    trace = read_trace(given.trace)
    fitted = fit(trace, split="7/10", settings=Settings(rank=32, distances=8, epochs=2), max_tokens=2000, add=False)
    for name, forecaster in (("none", None), ("fitted", fitted.forecaster), ("contrary", contrary(fitted.forecaster))):
        fitted.history.forecaster = forecaster
        results = replay_timed(
            trace,
            ["expected-next-use"],
            CAPACITIES,
            PROFILES["pcie5"],
            split="7/10",
            history=fitted.history,
            max_tokens=given.tokens,
        )
        for r in results:
            print(
                f"{name:<9} {r.fraction:>4.0%} of the experts: stall {1e3 * r.stall_s / r.tokens:6.2f} ms a token, "
                f"{1e3 * r.seconds / r.tokens:6.2f} in all ({1e3 * (r.seconds_without or 0) / r.tokens:6.2f} without prefetching)",
                flush=True,
            )


if __name__ == "__main__":
    main()
