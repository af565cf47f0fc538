"""What every fuzz target shares: how long it runs, and what no input may do."""

from __future__ import annotations

import functools
import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings

#: Seconds for each target; without them a target runs once, over few examples.
SECONDS = float(os.environ.get("MOECACHE_FUZZ_SECONDS", "0"))

SETTINGS = settings(
    max_examples=2000 if SECONDS else 150,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
)


def for_seconds(test: Callable[..., None]) -> Callable[..., None]:
    """Run a hypothesis test from one seed after the other until `SECONDS` are over."""

    @functools.wraps(test, assigned=("__name__", "__doc__", "__module__", "pytestmark"), updated=())
    def repeated(**fixtures: Any) -> None:
        end, number = time.monotonic() + SECONDS, 0
        while number == 0 or time.monotonic() < end:
            seed(number)(test)(**fixtures)
            number += 1

    return repeated


@contextmanager
def bounded(input_nbytes: int) -> Iterator[None]:
    """What Python allocates for an input stays within a multiple of its size."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 2_000_000 + 400 * input_nbytes, f"{peak:,} bytes were allocated for an input of {input_nbytes:,}"
