"""Speed of the replay: steps per second for built-in policies and a score of one's own, one capacity and ten.

pytest bench/bench_replay.py --benchmark-only        tables of pytest-benchmark
python bench/bench_replay.py TRACE --split 7/10      CPU seconds for a whole trace
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache.lab import Trace, read_trace, replay
from moecache.lab.replay import _play, _Quiet, resolve_any, slots_of, trained_history
from moecache.lab.schedule import schedule, split_requests
from moecache.policy import score

TEN = [n / 11 for n in range(1, 11)]


@score
def stale_and_unlikely(age: float, probability: float) -> float:
    return age * (1.0 - probability)


POLICIES = ["lru", "lfu", "moe-infinity", "expected-next-use", "belady", stale_and_unlikely]


def synthetic(tokens: int = 500, layers: int = 24, num_experts: int = 32, k: int = 4) -> Trace:
    random = np.random.default_rng(0)
    favour = random.dirichlet(np.full(num_experts, 0.3), (5, layers)) * 0.9 + 0.1 / num_experts
    request = np.arange(tokens, dtype=np.int32) * 5 // tokens
    noise = random.gumbel(size=(tokens, layers, num_experts))
    experts = np.argsort(np.log(favour[request]) + noise, axis=2)[:, :, -k:]
    return Trace("synthetic", experts.astype(np.int16), request, np.ones(tokens, np.uint8), (num_experts,) * layers)


@pytest.mark.parametrize("capacities", [[0.5], TEN], ids=["one capacity", "ten capacities"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: getattr(p, "__name__", p))
def test_replay(benchmark: Any, policy: Any, capacities: list[float]) -> None:
    trace = synthetic()
    plan, base, resolved = schedule(trace), trained_history(trace, []), resolve_any(policy)
    slots = [slots_of(trace, c) for c in capacities]
    results = benchmark(lambda: _play(trace, plan, resolved, slots, base, _Quiet()))
    assert results[0].demands == 500 * 24 * 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--split", default="7/10")
    parser.add_argument("--max-tokens", type=int)
    arguments = parser.parse_args()
    trace = read_trace(arguments.trace)
    known, played = split_requests(trace, arguments.split)
    plan = schedule(trace, played, max_tokens=arguments.max_tokens)
    base = trained_history(trace, known)
    replay(trace, [stale_and_unlikely], [0.5], max_tokens=1)  # the kernels are compiled
    print(f"{trace.name}: {plan.tokens:,} tokens, {len(base)} requests stored; CPU seconds")
    print(f"{'policy':<24}{'at 10 %':>10}{'at 50 %':>10}{'ten at once':>14}")
    for policy in POLICIES:
        seconds = []
        for capacities in ([0.1], [0.5], TEN):
            slots = [slots_of(trace, c) for c in capacities]
            begin = time.process_time()
            _play(trace, plan, resolve_any(policy), slots, base, _Quiet())
            seconds.append(time.process_time() - begin)
        name = policy if isinstance(policy, str) else policy.__name__
        print(f"{name:<24}{seconds[0]:>10.2f}{seconds[1]:>10.2f}{seconds[2]:>14.2f}")


if __name__ == "__main__":
    main()
