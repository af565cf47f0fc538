"""What one step costs must not grow with the model: no Python loop over experts, one look at the slots."""

from __future__ import annotations

import ctypes
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from core_helpers import make_core
from reference_core import call_route, run_step

from moecache import ExpertBank, ExpertCache


def python_lines(layers: int, experts: int) -> list[int]:
    """Lines of Python run by each of some steps, all alike: two experts, one of them missing."""
    bank = ExpertBank.from_tensors([{"weight": torch.zeros(experts, 2)} for _ in range(layers)])
    counted: list[int] = []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if "moecache" not in frame.f_code.co_filename:
            return None
        if event == "line":
            counted[-1] += 1
        return trace

    with ExpertCache(bank, layers * 4, top_k=2, policy="lru", prefetch=False) as cache, cache.request() as request:
        for n in range(30):
            ids = torch.tensor([[0, 1 + n // layers % (experts - 1)]])
            counted.append(0)
            before = sys.gettrace()
            sys.settrace(trace)
            try:
                with request.route(n % layers, ids) as lease:
                    cache._engine.drain(10)  # so that no wait is counted
                    assert len(list(lease.ready())) == 2
            finally:
                sys.settrace(before)
    return counted


def test_the_python_part_of_a_step_does_not_grow_with_the_model() -> None:
    small, large = python_lines(2, 8), python_lines(61, 256)
    assert max(large) <= max(small)


@pytest.mark.failure("61")
@pytest.mark.parametrize("missing", [1, 2, 5])
def test_the_slots_are_ranked_once_for_all_that_a_step_misses(missing: int) -> None:
    looked: list[int] = []
    count = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.POINTER(ctypes.c_double))(lambda x: looked.append(1) or 0.0)
    address = ctypes.cast(count, ctypes.c_void_p).value
    assert address is not None
    core = make_core((64,), 40, policy="user", score=address)
    request = core.begin_request()
    for first in range(0, 40, 5):
        step = call_route(core, request, 0, [list(range(first, first + 5))])
        run_step(core, step)
        core.release(step)
    looked.clear()
    step = call_route(core, request, 0, [[*range(40, 40 + missing), *range(5 - missing)]])
    assert step.missing == missing
    assert len(looked) <= 40
    core.release(step)


@pytest.mark.failure("61")
def test_a_history_says_what_it_takes() -> None:
    # 5 bytes for each request and expert, and little else; the counts of what follows what are the model's, not the
    # requests'.
    small, large = (make_core((64, 64), 8, history=n).store for n in (64, 6464))
    assert (large.nbytes - small.nbytes) / 6400 == pytest.approx(5 * 128, rel=0.05)
    large.add(np.full(128, 300), np.zeros(128, int), 1)
    assert (large.nbytes - small.nbytes) / 6400 == pytest.approx(6 * 128, rel=0.06)
