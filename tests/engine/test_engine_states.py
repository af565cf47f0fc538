"""Jobs through every state in any order, against models of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from harness import WAIT, World, settle, simple, until
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from queue_model import Model

from moecache._engine import FaultyLink, HostLink, ThrottledLink
from moecache.errors import TransferError

pytestmark = pytest.mark.timeout(60)


class Stepped:
    """An engine whose chunks land one at a time, on request, beside the model of it."""

    SOURCES, SLOTS, CHUNK = (0, 1, 700, 701, 2100, 3000), 4, 700

    def __init__(self, kind: str, window: int, stage: str, fail_at: int, fails: int) -> None:
        inner = HostLink() if kind == "host" else ThrottledLink(HostLink(), 1e12)
        self.link = FaultyLink(inner, stall_at=1, stage=stage, fail_at=fail_at, fails=fails)
        rng = np.random.default_rng(5)
        self.world = World(
            [[(0, 3, rng.bytes(nbytes))] for nbytes in self.SOURCES],
            [3010],
            self.SLOTS,
            options={"link": self.link, "chunk_bytes": self.CHUNK, "window_bytes": max(window, 1)},
        )
        chunks = [[min(self.CHUNK, n - at) for at in range(0, n, self.CHUNK)] for n in self.SOURCES]
        self.model = Model(
            chunks, self.SLOTS, self.CHUNK, 0 if kind == "host" else window, fail_at, fails if fail_at else 0, stage
        )
        self.released = 0
        self.source: dict[tuple[int, int], int] = {}  # of each (slot, generation) ever asked for

    def submit(
        self,
        fetch: Sequence[tuple[int, int, int]],
        prefetch: Sequence[tuple[int, int, int, float]],
        drop: Sequence[tuple[int, int]],
    ) -> None:
        """Rows with generations relative to the newest of their slot: -1, 0 or 1. The first asked for names the source."""
        absolute = []
        newest = list(self.model.newest)
        for rows, width in ((drop, 0), (fetch, 1), (prefetch, 1)):
            absolute.append([])
            for row in rows:
                slot = row[width]
                generation = max(newest[slot] + row[width + 1], 1)
                newest[slot] = max(newest[slot], generation)
                source = (self.source.setdefault((slot, generation), row[0]),) if width else ()
                absolute[-1].append((*source, slot, generation, *row[width + 2 :]))
        drops, fetches, prefetches = absolute
        self.world.engine.submit(
            fetch=np.array(fetches, np.int32).reshape(-1, 3),
            prefetch=np.array([row[:3] for row in prefetches], np.int32).reshape(-1, 3),
            priority=np.array([row[3] for row in prefetches], np.float32),
            drop=np.array(drops, np.int32).reshape(-1, 2),
        )
        self.model.submit(fetches, prefetches, drops)
        self.compare()

    def land(self) -> None:
        if self.model.flights:
            number = self.model.flights[0].number  # those that failed as they started have numbers too
            self.link.release(number - self.released)
            self.released = number
            self.model.land()
            self.compare()

    def pause_or_resume(self) -> None:
        if self.model.paused:
            self.world.engine.resume()
            self.model.resume()
        elif self.model.flights:
            with pytest.raises(TransferError, match="chunks moving"):
                self.world.engine.pause(0.0)
        else:
            self.world.engine.pause(WAIT)
            self.model.pause()
        self.compare()

    def compare(self) -> None:
        """The engine comes to where the model is, and not further."""
        model, engine = self.model, self.world.engine

        def there() -> bool:
            # A chunk that fails as it lands, no longer wanted, is in no counter.
            moving = f"; {len(model.flights)} chunks moving;"
            return self.link.chunks >= model.started and moving in engine.describe()

        until(there)
        now = engine.counters()
        assert {name: now[name] for name in model.counters} == model.counters
        assert self.link.chunks == model.started
        assert self.world.complete.tolist() == model.complete
        for slot, generation in enumerate(model.complete):
            if generation and generation == model.newest[slot]:
                assert self.world.holds(slot, self.source[slot, generation])

    def finish(self) -> None:
        if self.model.paused:
            self.pause_or_resume()
        while self.model.flights:
            self.land()
        self.world.engine.drain(WAIT)
        assert all(job is None for job in self.model.live)
        self.compare()


KINDS = [("host", 0), ("limited", 1), ("limited", 1400), ("limited", 2500)]
FAULTS = [("copy", 0, 0), ("copy", 2, 3), ("landing", 1, 2), ("landing", 4, 1)]
slot_numbers = st.integers(0, Stepped.SLOTS - 1)
source_numbers = st.integers(0, len(Stepped.SOURCES) - 1)
steps_on = st.sampled_from([1, 1, 1, 0, 0, -1])
fetches = st.tuples(source_numbers, slot_numbers, steps_on)
prefetches = st.tuples(source_numbers, slot_numbers, steps_on, st.sampled_from([0.0, 0.25, 0.5]))
drops = st.tuples(slot_numbers, steps_on)


class Chunks(RuleBasedStateMachine):
    """Any sequence of submissions, landings and pauses: every chunk, word and counter as the model has it."""

    @initialize(kind=st.sampled_from(KINDS), faults=st.sampled_from(FAULTS))
    def begin(self, kind: tuple[str, int], faults: tuple[str, int, int]) -> None:
        self.stepped = Stepped(*kind, *faults)

    @rule(
        fetch=st.lists(fetches, max_size=2),
        prefetch=st.lists(prefetches, max_size=3),
        drop=st.lists(drops, max_size=1),
    )
    def submit(
        self,
        fetch: list[tuple[int, int, int]],
        prefetch: list[tuple[int, int, int, float]],
        drop: list[tuple[int, int]],
    ) -> None:
        self.stepped.submit(fetch, prefetch, drop)

    @rule(chunks=st.integers(1, 4))
    def land(self, chunks: int) -> None:
        for _ in range(chunks):
            self.stepped.land()

    @rule()
    def pause_or_resume(self) -> None:
        self.stepped.pause_or_resume()

    def teardown(self) -> None:
        if hasattr(self, "stepped"):
            with self.stepped.world.engine:
                self.stepped.finish()


TestChunks = Chunks.TestCase
TestChunks.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.failure("31")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
@pytest.mark.parametrize("faults", FAULTS, ids=lambda faults: f"{faults[0]}-{faults[1]}")
def test_thousands_of_interleavings_go_as_the_model_says(kind: tuple[str, int], faults: tuple[str, int, int]) -> None:
    """Short ones, so that many begin anew: 16 times 250."""
    rng = np.random.default_rng([KINDS.index(kind), FAULTS.index(faults)])

    def rows(most: int, *limits: int) -> list[tuple[int, ...]]:
        generations = rng.choice([1, 1, 1, 0, 0, -1], most)
        return [(*rng.integers(limits), int(generations[i])) for i in range(rng.integers(most + 1))]

    sources, slots = len(Stepped.SOURCES), Stepped.SLOTS
    for _ in range(250):
        stepped = Stepped(*kind, *faults)
        with stepped.world.engine:
            for _ in range(8):
                choice = rng.random()
                if choice < 0.45:
                    ahead = [(*row, float(rng.integers(3))) for row in rows(3, sources, slots)]
                    stepped.submit(rows(2, sources, slots), ahead, rows(1, slots))
                elif choice < 0.9:
                    stepped.land()
                else:
                    stepped.pause_or_resume()
            stepped.finish()


class Generations(RuleBasedStateMachine):
    """Any sequence of submissions, drops and waits against a table of who owns which slot."""

    SOURCES, SLOTS, NBYTES = 6, 3, 5000

    @initialize(kind=st.sampled_from(["host", "slow", "throttled"]), threads=st.integers(1, 2))
    def begin(self, kind: str, threads: int) -> None:
        link: Any = HostLink()
        if kind == "slow":
            link = FaultyLink(HostLink(), delay_s=0.0002)
        elif kind == "throttled":
            link = ThrottledLink(HostLink(), 2e7, 0.0005)
        options = {"link": link, "threads": threads, "chunk_bytes": 700, "window_bytes": 1500}
        self.world = simple(self.SOURCES, self.NBYTES, self.SLOTS, **options)
        self.owner: dict[int, tuple[int, int, bool]] = {}  # slot -> source, generation, certain to complete

    @rule(slot=st.integers(0, SLOTS - 1), source=st.integers(0, SOURCES - 1), demand=st.booleans())
    def give_slot(self, slot: int, source: int, demand: bool) -> None:
        if demand:
            ((_, generation),) = self.world.fetch((source, slot))
        else:
            ((_, generation),) = self.world.prefetch((source, slot, float(source)))
        self.owner[slot] = (source, generation, True)

    # Whether a dropped copy was complete already is a matter of time, so nothing drawn may depend on it.
    @rule(slot=st.integers(0, SLOTS - 1))
    def ask_again(self, slot: int) -> None:
        source, generation, sure = self.owner.get(slot, (0, 0, False))
        if sure:
            self.world.raise_(source, (slot, generation))

    @rule(slot=st.integers(0, SLOTS - 1))
    def drop(self, slot: int) -> None:
        if slot in self.owner:
            source, generation, _ = self.owner[slot]
            self.world.drop((slot, generation))
            self.owner[slot] = (source, generation, bool(self.world.complete[slot] == generation))

    @rule(slot=st.integers(0, SLOTS - 1))
    def drop_what_is_over(self, slot: int) -> None:
        if slot in self.owner and self.owner[slot][1] > 1:
            self.world.drop((slot, self.owner[slot][1] - 1))

    @rule()
    def wait_for_all(self) -> None:
        live = [(slot, generation) for slot, (_, generation, sure) in self.owner.items() if sure]
        self.world.wait_all(live)

    @rule(slots=st.lists(st.integers(0, SLOTS - 1), min_size=1))
    def wait_for_one(self, slots: list[int]) -> None:
        some = [(slot, self.owner[slot][1]) for slot in slots if slot in self.owner and self.owner[slot][2]]
        if some:
            slot, generation = some[self.world.wait_any(some)]
            assert self.world.complete[slot] == generation

    @precondition(lambda self: hasattr(self, "owner"))
    @invariant()
    def complete_means_complete(self) -> None:
        for slot, (source, generation, _) in self.owner.items():
            if self.world.complete[slot] == generation:
                assert self.world.holds(slot, source)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        with self.world.engine:
            self.wait_for_all()
            counters = settle(self.world)
            for slot, (source, generation, sure) in self.owner.items():
                assert (self.world.complete[slot] == generation) == sure
                assert not sure or self.world.holds(slot, source)
        assert counters["failed"] == 0


TestGenerations = Generations.TestCase
TestGenerations.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
