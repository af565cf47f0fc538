"""Resizes beside everything else: threads that route by hand and ``generate()`` on one cache, resized all the while.

    python tests/soak/resizes.py --count 1000

Every expert that is handed out holds its own bytes, every answer is the one of a cache left alone, and no thread meets an
error.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from patterns import WrongBytesError, assert_nothing_is_held, join, patterned_bank, use
from transformers import AutoModelForCausalLM

import moecache.hf
from moecache import ExpertCache
from moecache.errors import LeaseError

TINY = Path(__file__).parents[2] / "examples" / "tiny_moe" / "model"
PATIENCE_S = 120.0


class Beside:
    """Threads that work until they are told to stop, and what went wrong in them."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.faults: list[str] = []
        self.done: dict[str, int] = {}
        self._threads: list[threading.Thread] = []

    def start(self, name: str, work: Callable[[], object]) -> None:
        self.done[name] = 0

        def run() -> None:
            try:
                while not self.stop.is_set():
                    work()
                    self.done[name] += 1
            except BaseException:
                self.faults.append(f"{name}: {traceback.format_exc(limit=-4)[-2000:]}")
                self.stop.set()

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def end(self) -> None:
        self.stop.set()
        stuck = join(self._threads, PATIENCE_S)
        assert not stuck, f"{stuck} did not end"
        assert not self.faults, "\n".join(self.faults)
        assert all(self.done.values()), self.done


def resized(cache: ExpertCache, count: int, smallest: int, beside: Beside, dice: random.Random) -> int:
    """Resize so many times, now and then to the least or to the same size; returns how many more were refused."""
    refused = done = 0
    end = time.monotonic() + PATIENCE_S + count
    while done < count and not beside.stop.is_set():
        wanted = dice.choice((smallest, cache.capacity, dice.randrange(smallest, sum(cache.num_experts) + 1)))
        try:
            cache.resize(wanted)
            assert cache.capacity == wanted
            done += 1
        except LeaseError:
            refused += 1
            assert time.monotonic() < end, (
                f"of {done + refused} resizes {refused} were refused; threads never let one in"
            )
        time.sleep(dice.uniform(0, 2e-3))
    return refused


def patterned(count: int, workers: int = 4, folder: Path | None = None) -> dict[str, Any]:
    """Steps of several threads over experts whose bytes say which they are."""
    with patterned_bank((16, 12, 16), 800, folder) as bank, ExpertCache(bank, 20, timeout=PATIENCE_S / 2) as cache:
        beside = Beside()
        for number in range(workers):
            dice = random.Random(number)
            beside.start(f"worker {number}", lambda dice=dice: use(cache, dice, 10, leave=0.02))
        refused = resized(cache, count, 2 * len(bank.shape_groups), beside, random.Random(99))
        beside.end()
        assert_nothing_is_held(cache)
        return {"resizes": count, "refused": refused, **beside.done}


def generating(count: int, workers: int = 4) -> dict[str, Any]:
    """``generate()`` and threads that route by hand, all on the cache of one model."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(TINY, experts_implementation="moecache")
    prompt = torch.tensor([list(b"def main(argume")])
    with moecache.attach(model, capacity=0.25) as cache:

        def answer() -> list[int]:
            made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10, do_sample=False)
            return made[0].tolist()  # type: ignore[no-any-return]

        before = answer()
        experts = {
            (layer, expert): cache.bank.expert(layer, expert)
            for layer, number in enumerate(cache.num_experts)
            for expert in range(number)
        }

        def generate() -> None:
            after = answer()
            assert after == before, f"expected {before}, found {after}"

        def route(dice: random.Random) -> None:
            with cache.request() as request:
                for layer, number in enumerate(cache.num_experts):
                    with request.route(layer, torch.tensor([dice.sample(range(number), 2)])) as lease:
                        for expert, slot, _ in lease.ready():
                            for name, tensor in experts[layer, expert].items():
                                if not torch.equal(lease.weights[name][slot], tensor):
                                    raise WrongBytesError(f"layer {layer} expert {expert}: {name} is another's")

        beside = Beside()
        beside.start("generate", generate)
        for number in range(workers):
            dice = random.Random(number)
            beside.start(f"worker {number}", lambda dice=dice: route(dice))
        refused = resized(cache, count, 4, beside, random.Random(7))
        beside.end()
        assert_nothing_is_held(cache)
        assert answer() == before
        return {"resizes": count, "refused": refused, **beside.done}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    arguments = parser.parse_args()
    print(json.dumps({"patterns": patterned(arguments.count), "generate()": generating(arguments.count)}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
