"""What releasing the GIL costs and brings: a step beside a busy Python thread, and two requests in two threads.

    python bench/bench_gil.py

A loop that releases the GIL has to take it back: at once where nobody wants it, after up to the interpreter's switch
interval (5 ms) behind a thread that computes in Python. So the core releases it only for long work, and not while taking the
GIL back has just lasted longer than the work (`HistoryStore.release`). Printed for never, where it pays (the default) and
always.
"""

import argparse
import contextlib
import statistics
import threading
import time
from collections.abc import Iterator

import numpy as np

from moecache._core import Core, HistoryStore

LAYERS, EXPERTS, TOP_K = 26, 64, 6
RELEASE = {"never": 0, "where it pays": 1, "always": 2}


def filled_core(stored: int) -> Core:
    random = np.random.default_rng(0)
    store = HistoryStore(np.full(LAYERS, EXPERTS, np.int32), stored)
    counts = np.minimum(random.poisson(8 * random.gamma(0.5, size=(500, LAYERS * EXPERTS))), 255)
    nothing = np.zeros(LAYERS * EXPERTS, np.int64)
    for n in range(stored):
        store.add(nothing, np.roll(counts[n % 500], n // 500 * 7), 100)
    slots = LAYERS * EXPERTS
    return Core(store, np.zeros(LAYERS, np.int32), np.array([slots], np.int32), np.zeros(slots, np.int32), top_k=TOP_K)


class Steps:
    """Steps of one request, routed through the core alone: no bytes move."""

    def __init__(self, core: Core, tokens: int, seed: int) -> None:
        self.core, self.request, self.at = core, core.begin_request(), 0
        random = np.random.default_rng(seed)
        self.ids = [np.argsort(random.random((tokens, EXPERTS)))[:, :TOP_K].copy() for _ in range(LAYERS)]

    def __call__(self) -> None:
        core, ids = self.core, self.ids[self.at % LAYERS]
        step = core.route(self.request, self.at % LAYERS, ids.ctypes.data, 8, len(ids), TOP_K, TOP_K, 1, len(ids) == 1)
        core.slots.complete[:] = core.slots.generations
        core.release(step)
        self.at += 1


@contextlib.contextmanager
def busy_python_thread() -> Iterator[None]:
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(100))

    thread = threading.Thread(target=spin)
    thread.start()
    yield
    stop.set()
    thread.join()


def latencies(steps: Steps, seconds: float) -> list[float]:
    taken, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        steps()
        taken.append((time.perf_counter() - begin) * 1e6)
    return taken


def beside_a_busy_thread(core: Core, what: str, tokens: int, seconds: float) -> None:
    print(f"\n{what}: median and mean microseconds a step, alone and beside a busy Python thread")
    for name, release in RELEASE.items():
        core.store.gil.mode = release
        steps = Steps(core, tokens, 1)
        steps()
        alone = latencies(steps, seconds)
        with busy_python_thread():
            # A thread that waits for the GIL at all, as the start of every measurement does, pays once.
            beside = latencies(steps, seconds)
        core.end_request(steps.request, keep=False)
        print(
            f"  release {name:13}  alone {statistics.median(alone):9.1f} {statistics.fmean(alone):9.1f}   "
            f"beside {statistics.median(beside):9.1f} {statistics.fmean(beside):9.1f}"
        )


def two_requests(core: Core, what: str, tokens: int, count: int) -> None:
    print(f"\n{what}: two requests of {count} steps, one after the other and in two threads")
    for name in ("never", "where it pays"):
        core.store.gil.mode = RELEASE[name]
        both = [Steps(core, tokens, seed) for seed in (1, 2)]

        def run(steps: Steps) -> None:
            for _ in range(count):
                steps()

        times = []
        for _ in range(5):
            begin = time.perf_counter()
            for steps in both:
                run(steps)
            middle = time.perf_counter()
            threads = [threading.Thread(target=run, args=(steps,)) for steps in both]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            times.append((middle - begin, time.perf_counter() - middle))
        serial, threaded = (min(column) for column in zip(*times, strict=True))
        for steps in both:
            core.end_request(steps.request, keep=False)
        print(
            f"  release {name:13}  {serial * 1e3:8.1f} ms and {threaded * 1e3:8.1f} ms: {serial / threaded:.2f} times as fast"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stored", type=int, nargs="+", default=[1_000, 100_000])
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    args = parser.parse_args()
    for stored in args.stored:
        core = filled_core(stored)
        for tokens in (1, 512):
            what = f"{stored:,} stored, {'a decode step' if tokens == 1 else f'{tokens} tokens of a prompt'}"
            beside_a_busy_thread(core, what, tokens, args.seconds)
            two_requests(core, what, tokens, max(20, min(5000, 200_000_000 // stored // min(tokens * TOP_K, EXPERTS))))


if __name__ == "__main__":
    main()
