"""Runs scenes as processes that end as processes do: each is forked off one that has imported everything.

Lines of JSON come in: {"code", "output", "cwd"} starts a scene and answers its process id, {"wait": pid} answers how it ended.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import torch

from moecache import CacheOptions, ExpertBank, ExpertCache

LAYERS, EXPERTS, TOP_K = 3, 8, 2


def make_cache(history: Any = None, learn: Any = False, **options: Any) -> ExpertCache:
    """A small cache; `options` are those of CacheOptions."""
    bank = ExpertBank.from_tensors([{"w": torch.zeros(EXPERTS, 2, 2)} for _ in range(LAYERS)])
    return ExpertCache(
        bank, 12, prefetch=False, top_k=TOP_K, history=history, learn=learn, options=CacheOptions(**options)
    )


def one_token(request: Any, n: int) -> None:
    for layer in range(LAYERS):
        with request.route(
            layer, torch.tensor([[(n + layer) % EXPERTS, (n + layer + 1 + n // EXPERTS % 3) % EXPERTS]])
        ):
            pass


def serve(cache: ExpertCache, requests: int, first: int = 0, tokens: int = 4) -> None:
    """Whole requests, each unlike the others."""
    for number in range(first, first + requests):
        with cache.request() as request:
            for n in range(tokens):
                one_token(request, number * 5 + n * n)


def routed(number: int, tokens: int = 4) -> np.ndarray:
    """What request `number` of :func:`serve` counts: [LAYERS * EXPERTS]."""
    counts = np.zeros((LAYERS, EXPERTS), np.int64)
    for n in (number * 5 + n * n for n in range(tokens)):
        for layer in range(LAYERS):
            counts[layer, [(n + layer) % EXPERTS, (n + layer + 1 + n // EXPERTS % 3) % EXPERTS]] += 1
    return counts.ravel()


def main() -> dict[str, Any]:
    while line := sys.stdin.readline():
        job = json.loads(line)
        if "wait" in job:
            print(os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1]), flush=True)
            continue
        pid = os.fork()
        if not pid:
            return job  # type: ignore[no-any-return]
        print(pid, flush=True)
    os._exit(0)


if __name__ == "__main__":
    _job = main()
    _output = os.open(_job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(_output, 1)
    os.dup2(_output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(_job["cwd"])
    exec(compile(_job["code"], "<scene>", "exec"))
