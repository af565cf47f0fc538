"""Memory that runs out in the middle of a decision is an error that gives everything back, never a plan that lacks something."""

from __future__ import annotations

import numpy as np
import pytest
from core_helpers import make_core
from reference_core import call_route, land, run_step

_testcapi = pytest.importorskip("_testcapi", reason="this interpreter comes without its own test module")


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("slots", [12, 3])
def test_a_decision_without_memory_is_an_error_and_holds_no_slot(slots: int, prefetch: bool) -> None:
    core = make_core((8, 8, 8), slots, policy="expected-next-use", prefetch=prefetch, top_k=2)
    core.prefetcher.set_pace(1e-3, 1e-4, 1e-5)
    request = core.begin_request()
    for n in range(12):
        step = call_route(core, request, n % 3, [[n % 2, 2 + n % 3]])
        run_step(core, step)
        core.release(step)
    failed = 0
    for at in range(60):
        ids = np.array([[at % 8, (at + 3) % 8], [(at + 1) % 8, (at + 5) % 8]], np.int64)
        layer, address = at % 3, ids.ctypes.data
        step = None
        _testcapi.set_nomemory(at // 2, at // 2 + 1)
        try:
            step = core.route(request, layer, address, 8, 2, 2, 2, 1, True)
        except MemoryError:
            failed += 1
        finally:
            _testcapi.remove_mem_hooks()
        if step is None:
            assert core.slots.pinned() == 0
            assert core.open_steps.count() == 0
            step = core.route(request, layer, address, 8, 2, 2, 2, 1, True)
        assert step.expert_list() == sorted(set(ids.ravel().tolist()))
        # What the failed call asked nobody to fetch is fetched now.
        assert len(step.plan.fetches) >= step.missing - step.deferred
        land(core, step.plan)
        run_step(core, step)
        core.release(step)
        assert core.slots.pinned() == 0
    assert failed > 5
    core.end_request(request)
    assert core.counters()["prefetch_pending"] == 0
