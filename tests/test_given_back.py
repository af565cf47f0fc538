"""What native code takes it gives back, whatever Python runs in between: exceptions, signals, dropped objects."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from cache_helpers import make_bank, run

from moecache import CacheOptions, ExpertBank, ExpertCache
from moecache._engine import FaultyLink, HostLink
from moecache.errors import ClosedError, LeaseError, RoutingError, TransferError

pytestmark = pytest.mark.failure("E16")


@pytest.fixture
def bank() -> Iterator[ExpertBank]:
    with make_bank() as bank:
        yield bank


def test_a_lease_that_is_dropped_gives_its_slots_back(bank: ExpertBank) -> None:
    with ExpertCache(bank, 4) as cache, cache.request() as request:
        lease = request.route(0, torch.tensor([[0, 1, 2, 3]]))
        assert cache._core.slots.pinned() == 4
        items = lease.ready()
        next(items)
        del lease, items
        assert cache._core.slots.pinned() == 0
        cache.resize(6)


def test_a_lease_in_a_cycle_gives_its_slots_back_when_it_is_collected(bank: ExpertBank) -> None:
    with ExpertCache(bank, 4) as cache, cache.request() as request:
        gc.disable()
        try:
            cycle: list[Any] = [request.route(0, torch.tensor([[0, 1]]))]
            cycle.append(cycle)
            del cycle
            assert cache._core.slots.pinned() == 2
            gc.collect()
        finally:
            gc.enable()
        assert cache._core.slots.pinned() == 0


def test_a_collection_in_the_middle_of_a_decision_waits_until_it_is_over() -> None:
    # Every allocation of a container collects: the steps of other requests end while slots are given out.
    with make_bank((16, 16), sizes=[2, 2]) as bank, ExpertCache(bank, 12, top_k=2) as cache:
        before = gc.get_threshold()
        gc.set_threshold(1)
        try:
            with cache.request() as request, cache.request() as other:
                for n in range(300):
                    cycle: list[Any] = [other.route(n % 2, torch.tensor([[n % 16, (n + 5) % 16]]))]
                    cycle.append(cycle)
                    del cycle
                    run(request, n % 2, [[(3 * n) % 16, (3 * n + 1) % 16]])
        finally:
            gc.set_threshold(*before)
        gc.collect()
        assert cache._core.slots.pinned() == 0
        assert cache.stats().evictions > 0


def test_closing_a_request_ends_its_leases(bank: ExpertBank) -> None:
    with ExpertCache(bank, 4) as cache:
        request, other = cache.request(), cache.request()
        lease = request.route(0, torch.tensor([[0, 1]]))
        held = other.route(0, torch.tensor([[1, 2]]))
        request.close()
        assert set(cache._core.slots.pinned_experts()) == {(0, 1), (0, 2)}
        with pytest.raises(LeaseError, match="has ended"):
            next(lease.ready())
        held.release()
        other.close()


def test_an_item_that_an_exception_swallowed_is_handed_out_again(bank: ExpertBank) -> None:
    with ExpertCache(bank, 4) as cache, cache.request() as request:
        with request.route(0, torch.tensor([[0, 1, 2]])) as lease:
            cache._engine.drain(10)
            assert cache._core.dispatcher.next_ready(lease._step) >= 0  # as if interrupted between this and the yield
            assert sorted(expert for expert, _, _ in lease.ready()) == [0, 1, 2]
        assert cache._core.slots.pinned() == 0


@pytest.mark.failure("A4b", "19")
def test_a_step_finds_slots_that_the_other_thread_frees_a_moment_later() -> None:
    # Room for one step of two experts: the other thread's pins must be seen together with their holder, and waited for.
    with make_bank((6,)) as bank, ExpertCache(bank, 2, top_k=2) as cache:
        errors: list[BaseException] = []

        def steps(seed: int) -> None:
            draw = torch.Generator().manual_seed(seed)
            try:
                with cache.request() as request:
                    for _ in range(400):
                        run(request, 0, torch.randint(0, 6, (1, 2), generator=draw))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=steps, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert errors == []
        assert cache._core.slots.pinned() == 0
        assert cache.stats().slot_wait_s >= 0


@pytest.mark.failure("E16b")
def test_an_interrupt_while_waiting_for_a_slot_hangs_nobody(bank: ExpertBank) -> None:
    with ExpertCache(bank, 2, timeout=20) as cache:
        holding, done = threading.Event(), threading.Event()

        def hold() -> None:
            with cache.request() as request, request.route(0, torch.tensor([[0, 1]])):
                holding.set()
                done.wait(20)

        holder = threading.Thread(target=hold)
        holder.start()
        holding.wait(10)
        with cache.request() as request:
            for _ in range(3):
                with alarm(0.1, interrupt), pytest.raises(KeyboardInterrupt):
                    run(request, 0, [[2]])
        done.set()
        holder.join(10)
        with cache.request() as request:
            run(request, 0, [[2, 3]])
        assert cache._core.slots.pinned() == 0


def interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class alarm:
    """A signal in so many seconds; whatever comes, none after the block."""

    def __init__(self, seconds: float, handler: Callable[[int, FrameType | None], None]) -> None:
        self.seconds, self.handler = seconds, handler

    def __enter__(self) -> None:
        self.before = signal.signal(signal.SIGALRM, self.handler)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)


def closer(cache: ExpertCache) -> Callable[[int, FrameType | None], None]:
    return lambda *_: cache.close()


def use_for_ever(cache: ExpertCache, draw: random.Random) -> None:
    while True:
        with cache.request() as request:
            for n in range(6):
                run(request, n % 2, [[n, (n + 3) % 8]])
            if draw.random() < 0.2:
                cache.resize(draw.randint(3, 8))


@pytest.mark.failure("E18")
def test_a_signal_handler_may_close_the_cache_at_any_moment(bank: ExpertBank) -> None:
    draw = random.Random(7)
    for _ in range(150):
        cache = ExpertCache(bank, 4, top_k=2)
        with alarm(draw.uniform(1e-4, 8e-3), closer(cache)), pytest.raises(ClosedError):
            use_for_ever(cache, draw)
        assert cache._core.slots.pinned() == 0
        assert cache._engine.closed


@pytest.mark.failure("G28")
def test_a_timeout_is_kept_while_a_copy_stands_still(bank: ExpertBank) -> None:
    link = FaultyLink(HostLink(), stall_at=1)
    with ExpertCache(bank, 4, options=CacheOptions(link=link), timeout=0.3) as cache, cache.request() as request:
        began = time.monotonic()
        with pytest.raises(TransferError, match=r"not complete after 0\.3 s: layer 0, expert 1"):
            run(request, 0, [[1]])
        assert time.monotonic() - began < 5
        link.release()
        run(request, 0, [[1]])


@pytest.mark.failure("J39")
def test_errors_name_layer_and_expert_and_stay_short() -> None:
    with make_bank((300,)) as bank:
        link = FaultyLink(HostLink(), fail_at=1)
        with ExpertCache(bank, 250, options=CacheOptions(link=link)) as cache, cache.request() as request:
            with pytest.raises(TransferError, match=r"the copy of layer 0, expert 7 of layers\.0 .* failed") as failed:
                run(request, 0, [[7]])
            assert failed.value.__cause__ is not None
            with (
                request.route(0, torch.arange(250).reshape(1, -1)),
                pytest.raises(LeaseError, match="and 242 more") as full,
                request.route(0, torch.tensor([[299]])) as lease,
            ):
                next(lease.ready())
            assert len(str(full.value)) < 1000


@pytest.mark.failure("B6", "J39")
def test_what_holds_addresses_cannot_be_copied(bank: ExpertBank) -> None:
    with ExpertCache(bank, 4) as cache, cache.request() as request, request.route(0, torch.tensor([[1]])) as lease:
        for thing in (cache, request, lease, cache._core):
            for way in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(TypeError, match="cannot be pickled"):
                    way(thing)


def test_a_request_in_two_threads_at_once_is_refused_or_right(bank: ExpertBank) -> None:
    with ExpertCache(bank, 8) as cache, cache.request() as request:
        unexpected: list[BaseException] = []

        def steps() -> None:
            for n in range(200):
                try:
                    run(request, n % 2, [[n % 8, (n + 1) % 8]])
                except BaseException as error:
                    if not (isinstance(error, RoutingError) and "another thread" in str(error)):
                        unexpected.append(error)

        threads = [threading.Thread(target=steps) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert unexpected == []
        assert cache._core.slots.pinned() == 0


@pytest.mark.failure("138", "140")
def test_counters_add_up_per_request_per_layer_and_in_time(bank: ExpertBank) -> None:
    with ExpertCache(bank, 5, top_k=2) as cache:
        kept = []
        for n in range(3):
            with cache.request() as request:
                for step in range(10):
                    run(request, step % 2, [[(n + step) % 8, (n + step + 3) % 8]])
                kept.append(request.stats())
        stats = cache.stats()
        assert stats.hits + stats.misses == stats.demands == sum(r.demands for r in kept) == sum(stats.layer_demands)
        assert stats.hits == sum(r.hits for r in kept) == sum(stats.layer_hits)
        assert stats.misses == sum(r.misses for r in kept)
        assert stats.tokens == sum(r.prompt_tokens + r.decode_tokens for r in kept)
        assert stats.stall_s == pytest.approx(sum(r.stall_s for r in kept))
        ended = stats.prefetch_useful + stats.prefetch_late + stats.prefetch_wasted
        assert stats.prefetch_issued == ended + stats.prefetch_pending
        shares = (stats.deciding_s, stats.stall_s, stats.slot_wait_s, stats.computing_s, stats.elsewhere_s)
        assert all(share >= 0 for share in shares)
        assert sum(shares) == pytest.approx(stats.requests_s)
        assert stats.deciding_s > 0
        assert stats.computing_s > 0
        assert stats.bytes_demand + stats.bytes_prefetch > 0
        assert stats.copying_s > 0
