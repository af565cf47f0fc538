"""Several threads and several caches in one process."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from cache_helpers import make_bank, run

from moecache import ExpertBank, ExpertCache
from moecache.errors import ClosedError


@pytest.mark.failure("114")
def test_two_threads_with_two_requests() -> None:
    with make_bank((8, 8, 8)) as bank, ExpertCache(bank, 7, top_k=2, timeout=60) as cache:
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            try:
                for _ in range(3):
                    with cache.request() as request:
                        for n in range(120):
                            tokens = 1 if n % 10 else 6
                            run(request, n % 3, torch.from_numpy(rng.integers(0, 8, (tokens, 2))))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
        assert errors == []
        stats = cache.stats()
        assert stats.steps == 720
        assert stats.hits + stats.misses == stats.demands
        assert stats.prefetch_issued == stats.prefetch_useful + stats.prefetch_late + stats.prefetch_wasted
        assert cache._core.slots.pinned_experts() == []
        assert len(cache.history) == 6


@pytest.mark.failure("115")
def test_two_caches_in_one_process_are_independent() -> None:
    with make_bank() as one, make_bank((8, 8), salt=1) as two, ExpertCache(one, 3) as a, ExpertCache(two, 5) as b:
        with a.request() as first, b.request() as second:
            for n in range(20):
                run(first, n % 2, [[n % 8]])
                run(second, n % 2, [[(3 * n) % 8, 0]])
            assert first.counts[0].sum() == 10
            assert second.counts[1].sum() == 20
        assert (a.stats().steps, b.stats().steps) == (20, 20)
        assert (len(a.history), len(b.history)) == (1, 1)


def test_two_caches_on_one_bank_and_one_history(bank: ExpertBank) -> None:
    with ExpertCache(bank, 3) as a, ExpertCache(bank, 4, history=a.history) as b:
        with a.request() as first, b.request() as second:
            for n in range(16):
                run(first, n % 2, [[n % 8]])
                run(second, n % 2, [[7 - n % 8]])
        assert len(a.history) == 2


@pytest.mark.failure("137")
def test_nothing_global_is_touched() -> None:
    program = """
import logging, os, sys, threading, warnings
import torch
filters, environment, threads = list(warnings.filters), dict(os.environ), threading.active_count()
modules = set(sys.modules)
import moecache
assert threading.active_count() == threads
bank = moecache.ExpertBank.from_tensors([{"w": torch.rand(8, 4)}])
with moecache.ExpertCache(bank, 2) as cache, cache.request() as request, request.route(0, torch.tensor([[1]])) as lease:
    list(lease.ready())
assert logging.getLogger().handlers == []
assert logging.getLogger("moecache").handlers == []
assert list(warnings.filters) == filters
assert dict(os.environ) == environment
assert "transformers" not in sys.modules
assert not any(name.startswith("cuda") for name in set(sys.modules) - modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_lease_open_while_another_thread_closes_says_that_the_cache_is_closed() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    said: list[Exception] = []
    ended: list[Exception] = []
    try:
        for n in range(150):
            cache = ExpertCache(make_bank(), 8)
            begun = threading.Barrier(4, timeout=30)

            def use(cache: ExpertCache = cache, begun: threading.Barrier = begun, n: int = n) -> None:
                request = cache.request()
                run(request, 0, [[0, 1]])
                begun.wait()
                try:
                    for step in range(2000):
                        run(request, step % 2, [[(step + n) % 8, (step + 3) % 8]])
                except ClosedError as error:
                    said.append(error)
                except Exception as error:
                    ended.append(error)

            threads = [threading.Thread(target=use) for _ in range(3)]
            for thread in threads:
                thread.start()
            begun.wait()
            cache.close()
            for thread in threads:
                thread.join(30)
    finally:
        sys.setswitchinterval(interval)
    assert ended == []
    assert len(said) > 100
