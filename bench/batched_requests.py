"""What a request for each sequence of a batch is worth against one for the whole batch: hit rates of `counts`, by replay.

python bench/batched_requests.py TRACE [--batches 4 16] [--tokens 12000]

The requests that are kept apart (split 7/10), an even sample of them, run in batches: their prompts in one pass, then a token of each at a
time until the last has ended. Both ways the steps are the same. Also prints microseconds that a step's decision takes.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from moecache._core import BatchState, Core, RequestState
from moecache.history import History
from moecache.lab import Trace, read_trace
from moecache.lab.replay import make_core, resolve_any, slots_of, trained_history
from moecache.lab.schedule import schedule, split_requests

FRACTIONS = (0.1, 0.2, 0.3, 0.5)


class Player:
    """One batch: its steps as one request's, or as those of a request for each sequence."""

    def __init__(self, core: Core, size: int, apart: bool) -> None:
        batch = core.begin_batch()
        assert batch is not None
        self.core: Core = core
        self.batch: BatchState = batch
        self.requests: list[RequestState | None] = [core.begin_request() for _ in range(size if apart else 1)]
        self.apart = apart

    def step(self, layer: int, ids: np.ndarray, members: list[int], lengths: list[int], decode: bool) -> None:
        """Ids int16 ``[tokens, k]``: so many rows of each of these sequences."""
        requests = [self.requests[member] for member in members] if self.apart else self.requests
        rows = lengths if self.apart else [len(ids)]
        step = self.core.route_batch(
            self.batch, requests, rows, [decode] * len(rows), layer, ids.ctypes.data, 2, ids.shape[1], ids.shape[1], 1
        )
        assert step is not None
        for _, slot, generation in step.plan.fetches.tolist():
            self.core.slots.complete[slot] = generation
        self.core.release(step)

    def end(self, member: int) -> None:
        """The answer of a sequence has ended."""
        request = self.requests[member]
        if request is not None:
            self.core.end_request(request)
            self.requests[member] = None


def rows_of(trace: Trace, request: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids int16 ``[tokens, layers, k]`` of a request's prompt and of its completion."""
    mine = np.flatnonzero(trace.request == request)
    # A trace that does not say which tokens shared a pass is played as it would be decoded.
    decode = np.ones(len(mine), bool) if trace.forward is None else trace.decode[mine].astype(bool)
    experts = trace.experts[mine].astype(np.int16)
    return experts[~decode], experts[decode]


def play(trace: Trace, batches: list[list[int]], history: History, slots: int, apart: bool) -> tuple[float, float]:
    """(hits per demand, microseconds a decode step)."""
    core = make_core(trace, slots, resolve_any("counts"), history.copy())
    steps, seconds = 0, 0.0
    for requests in batches:
        player = Player(core, len(requests), apart)
        parts = [rows_of(trace, request) for request in requests]
        lengths = [len(prompt) for prompt, _ in parts]
        if sum(lengths):
            prompts = np.concatenate([prompt for prompt, _ in parts])
            for layer in range(trace.layers):
                player.step(layer, np.ascontiguousarray(prompts[:, layer]), list(range(len(parts))), lengths, False)
        for n in range(max(len(decode) for _, decode in parts)):
            members = [i for i, (_, decode) in enumerate(parts) if n < len(decode)]
            tokens = np.stack([parts[i][1][n] for i in members])
            began = time.perf_counter()
            for layer in range(trace.layers):
                player.step(layer, np.ascontiguousarray(tokens[:, layer]), members, [1] * len(members), True)
            seconds += time.perf_counter() - began
            steps += trace.layers
            for i, (_, decode) in enumerate(parts):
                if apart and n == len(decode) - 1:
                    player.end(i)
        for i in range(len(player.requests)):
            player.end(i)
        core.end_batch(player.batch)
    return core.hits / core.demands, 1e6 * seconds / max(steps, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--batches", type=int, nargs="*", default=[4, 16])
    parser.add_argument("--tokens", type=int, default=12_000)
    given = parser.parse_args()
    trace = read_trace(given.trace)
    seen, apart = split_requests(trace, "7/10")
    history = trained_history(trace, seen)
    chosen = schedule(trace, apart, None, given.tokens).origin.tolist()
    print(f"{trace.name}: {len(chosen)} requests; hits with one request / one a sequence, microseconds a step")
    for size in given.batches:
        if len(chosen) < size:
            raise SystemExit(f"{len(chosen)} requests make no batch of {size}; ask for more --tokens")
        batches = [chosen[first : first + size] for first in range(0, len(chosen) - size + 1, size)]
        for fraction in FRACTIONS:
            merged, alone = (play(trace, batches, history, slots_of(trace, fraction), apart) for apart in (False, True))
            print(
                f"{size:>3} at a time, {fraction:>4.0%} of the experts: {merged[0]:6.1%} / {alone[0]:6.1%}"
                f" {100 * (alone[0] - merged[0]):+5.1f} points, {merged[1]:.1f} / {alone[1]:.1f} us",
                flush=True,
            )


if __name__ == "__main__":
    main()
