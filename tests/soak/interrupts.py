"""Ctrl-C at random moments: over a hand-written loop, and over ``generate()``.

    python tests/soak/interrupts.py --count 100000

Every interrupt that is raised has to arrive, no slot may stay held, and what is computed afterwards is what it was before.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from patterns import Interrupts, assert_nothing_is_held, patterned_bank, use

from moecache import CacheOptions, ExpertCache
from moecache._engine import HostLink, ThrottledLink

TINY = Path(__file__).parents[2] / "examples" / "tiny_moe" / "model"


def interrupted(work: Callable[[], object], count: int, seed: int = 0) -> Interrupts:
    """Do the work over and over, each time until it is interrupted: at any moment of it, or a little later."""
    began = time.perf_counter()
    for _ in range(5):
        work()
    with Interrupts(seed, 1.5 * (time.perf_counter() - began) / 5) as interrupts:
        while interrupts.raised < count:
            try:
                interrupts.arm()
                while interrupts.quiet:
                    work()
                interrupts.check()
            except KeyboardInterrupt:
                interrupts.caught()
        interrupts.check()
    return interrupts


def over_the_loop(count: int, capacity: int, slow: bool) -> dict[str, Any]:
    """A loop as README shows it, over a pool of the least size or a larger one.

    `slow`: over a link on which steps wait, so that interrupts strike there too.
    """
    link = ThrottledLink(HostLink(), 100e6, latency_s=100e-6, jitter_s=200e-6) if slow else None
    with (
        patterned_bank((12, 12), 500) as bank,
        ExpertCache(bank, capacity, options=CacheOptions(link=link), timeout=20) as cache,
    ):
        dice, checked = random.Random(1), 0

        def work() -> None:
            nonlocal checked
            checked += use(cache, dice, 5)

        began = time.perf_counter()
        interrupts = interrupted(work, count)
        assert_nothing_is_held(cache)
        assert checked > 0
        cache.resize(24)
        use(cache, dice, 100)
        return {"raised": interrupts.raised, "elsewhere": interrupts.elsewhere, "experts checked": checked,
                "seconds": round(time.perf_counter() - began, 1)}  # fmt: skip


def over_generate(count: int, capacity: float) -> dict[str, Any]:
    """The tiny model, its experts on disk, through transformers."""
    from transformers import AutoModelForCausalLM

    import moecache.hf

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(TINY, experts_implementation="moecache")
    cache = moecache.attach(model, capacity=capacity)
    prompt = torch.tensor([list(b"#include <std")])

    def answer(tokens: int) -> list[int]:
        made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False)
        return made[0].tolist()  # type: ignore[no-any-return]

    with cache:
        before, began = answer(12), time.perf_counter()
        answers = 0

        def work() -> None:
            nonlocal answers
            assert answer(12) == before
            answers += 1

        interrupts = interrupted(work, count)
        assert answer(12) == before
        assert_nothing_is_held(cache)
        return {"raised": interrupts.raised, "elsewhere": interrupts.elsewhere, "whole answers": answers,
                "seconds": round(time.perf_counter() - began, 1)}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--only", choices=("loop", "generate"))
    arguments = parser.parse_args()
    report = {}
    if arguments.only != "generate":
        report["loop, two slots"] = over_the_loop(arguments.count // 4, 2, slow=True)
        report["loop, half of the experts"] = over_the_loop(arguments.count // 4, 12, slow=False)
    if arguments.only != "loop":
        report["generate()"] = over_generate(arguments.count - arguments.count // 2, 0.25)
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
