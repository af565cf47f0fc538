"""Everything at once, for as long as you like: does a cache stay whole, and does it give everything back?

    python tests/soak/soak.py --seconds 1800

Eight threads decode through one cache whose link fails one chunk in a hundred, while others interrupt them, leave steps
half way, resize the cache (down to its minimum), fork, and at last close it under them. Then comes another cache. Every
expert handed out is looked at, every byte of it. What must hold: no wrong byte, no error but the library's own where they
are due, no interrupt swallowed, no slot kept, and resident memory, descriptors and threads flat from cache to cache.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import gc
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from patterns import Interrupts, assert_nothing_is_held, descriptors, join, patterned_bank, resident_mb, threads, use

from moecache import CacheOptions, ExpertBank, ExpertCache, policy
from moecache._engine import FaultyLink, FileLink, HostLink, ThrottledLink
from moecache.errors import ClosedError, LeaseError, TransferError

NUM_EXPERTS = (16, 12, 16)
NUMBERS = 3_000  # int32 in a tensor of an expert
FAIL_EVERY = 100  # chunks
PATIENCE_S = 60.0  # seconds nothing here should ever take
POLICIES = [name for name in policy.NAMES if name != "belady"]


class Worker(threading.Thread):
    """Decodes request after request and counts what happened to it."""

    def __init__(self, era: Era, number: int) -> None:
        super().__init__(name=f"worker {number}", daemon=True)
        self.era, self.random = era, random.Random(era.seed * 100 + number)
        self.sent = self.got = 0  # interrupts
        self.may_end, self.over = threading.Lock(), False
        self.requests = 0

    def run(self) -> None:
        struck = False
        while True:
            try:
                if struck:
                    # The next may come as soon as this one is counted: inside the block that catches it.
                    struck, self.got = False, self.got + 1
                while not self.era.stop.is_set():
                    self.session()
                # An interrupt to a thread that has ended would strike whichever thread has its number then.
                with self.may_end:
                    self.over = True
                while self.sent != self.got:
                    time.sleep(0)
                return
            except KeyboardInterrupt:
                struck = True

    def session(self) -> None:
        era = self.era
        try:
            era.checked[self.name] += use(era.cache, self.random, self.random.randrange(1, 30), leave=0.02)
        except TransferError as error:
            if not (isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO):
                era.fail(f"{self.name}: a copy failed for another reason", error)
            era.seen["a copy failed, as made to"] += 1
        except ClosedError as error:
            if not era.closing.is_set():
                era.fail(f"{self.name}: closed, though nobody did", error)
            era.seen["closed"] += 1
            era.stop.wait(0.01)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            era.fail(self.name, error)
        self.requests += 1


class Era:
    """The life of one cache.

    Parameters
    ----------
    seed : int
    folder : Path
        For files of a bank and a history.
    workers : int
        Threads that decode; one of them is the main thread.
    seconds : float
        Until it is closed.
    without : collection of str
        Of "interrupts", "resizes", "forks" and "failures": what is left out.
    """

    def __init__(self, seed: int, folder: Path, workers: int, seconds: float, without: Collection[str] = ()) -> None:
        self.seed, self.seconds, self.without = seed, seconds, without
        self.random = random.Random(seed)
        self.calm, self.stop, self.closing = threading.Event(), threading.Event(), threading.Event()
        self.seen: Counter[str] = Counter()
        self.checked: Counter[str] = Counter()
        self.faults: list[str] = []
        self.on_disk = bool(seed % 2)
        self.bank: ExpertBank = patterned_bank(NUM_EXPERTS, NUMBERS, folder / "bank" if self.on_disk else None)
        self.smallest = len(self.bank.shape_groups) * 2
        self.policy = self.random.choice(POLICIES)
        self.cache = ExpertCache(
            self.bank,
            self._capacity(),
            policy=self.policy,
            history=folder / "soak.history",
            timeout=PATIENCE_S / 2,
            options=CacheOptions(history_capacity=8, link=self._link()),
        )
        self.workers = [Worker(self, number) for number in range(workers - 1)]
        self.main = Worker(self, workers)

    def _link(self) -> Any:
        inner: Any = FileLink() if self.on_disk else HostLink()
        if self.seed % 3 == 0:
            inner = ThrottledLink(inner, 2e9, latency_s=20e-6, jitter_s=50e-6, seed=self.seed)
        first = 0 if "failures" in self.without else FAIL_EVERY // 2
        return FaultyLink(inner, fail_at=first, fail_every=FAIL_EVERY, error=errno.EIO)

    def _capacity(self) -> int:
        return self.smallest if self.random.random() < 0.3 else self.random.randrange(self.smallest, sum(NUM_EXPERTS))

    def fail(self, where: str, error: BaseException) -> None:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        self.faults.append(f"{where}: {type(error).__name__}: {str(error)[:2000]}\n{''.join(lines)[-3000:]}")
        self.calm.set()
        self.stop.set()

    def live(self) -> None:
        """Run it to its end; `faults` says what was wrong."""
        deeds = {"interrupts": self._interrupt, "resizes": self._resize, "forks": self._fork}
        chaos = [
            threading.Thread(target=self._guarded, args=(deed,), name=name, daemon=True)
            for name, deed in deeds.items()
            if name not in self.without
        ]
        for thread in (*self.workers, *chaos):
            thread.start()
        with Interrupts(self.seed, 0.02) as interrupts:
            self._decode_interrupted(interrupts)
        self.calm.set()
        stuck = join(chaos, PATIENCE_S)
        self.stop.set()
        stuck += join(self.workers, PATIENCE_S)
        if stuck:
            frames = sys._current_frames()
            where = "\n".join("".join(traceback.format_stack(frame)[-4:]) for frame in frames.values())
            self.faults.append(f"{', '.join(stuck)} did not end in {PATIENCE_S} s\n{where}")
            return
        if self.faults:
            return
        for worker in self.workers:
            if worker.sent != worker.got:
                self.faults.append(f"{worker.name}: {worker.sent} interrupts were sent, {worker.got} arrived")
        self._guarded(interrupts.check)
        if not self.faults:
            self._guarded(self._end)

    def _guarded(self, deed: Callable[[], None]) -> None:
        try:
            deed()
        except BaseException as error:
            self.fail(getattr(deed, "__name__", "check").strip("_"), error)

    def _decode_interrupted(self, interrupts: Interrupts) -> None:
        # What the workers do, on the one thread that signal handlers run in.
        end = time.monotonic() + self.seconds
        while not self.stop.is_set() and time.monotonic() < end:
            try:
                if "interrupts" not in self.without:
                    interrupts.arm()
                while interrupts.quiet and not self.stop.is_set() and time.monotonic() < end:
                    self.main.session()
                if not self.stop.is_set():
                    interrupts.check()
            except KeyboardInterrupt:
                interrupts.caught()
            except AssertionError as error:
                self.fail("main", error)
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _interrupt(self) -> None:
        # The next one to a thread only when the last has arrived, so that each can be counted.
        dice = random.Random(self.seed + 1)
        waited: dict[str, float] = {}
        while not self.calm.is_set():
            worker = dice.choice(self.workers)
            if worker.sent == worker.got:
                waited.pop(worker.name, None)
                with worker.may_end:
                    if not worker.over:
                        worker.sent += 1
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(
                            ctypes.c_ulong(worker.ident or 0), ctypes.py_object(KeyboardInterrupt)
                        )
            elif time.monotonic() - waited.setdefault(worker.name, time.monotonic()) > PATIENCE_S:
                raise AssertionError(f"an interrupt of {worker.name} never arrived")
            self.calm.wait(dice.uniform(0, 0.01))
        end = time.monotonic() + PATIENCE_S
        while (
            any(worker.sent != worker.got and worker.is_alive() for worker in self.workers) and time.monotonic() < end
        ):
            time.sleep(0.001)

    def _resize(self) -> None:
        while not self.calm.is_set():
            try:
                self.cache.resize(self._capacity())
                self.seen["resized"] += 1
            except LeaseError:
                self.seen["a resize was refused"] += 1
            self.calm.wait(self.random.uniform(0, 0.05))

    def _fork(self) -> None:
        # A child is told at once that the cache is its parent's as soon as it needs a copy; what it finds in its copy of the
        # slots is right.
        while not self.calm.wait(self.random.uniform(0.1, 0.5)):
            child = os.fork()
            if not child:
                os._exit(in_child(self.cache))
            _, status = os.waitpid(child, 0)
            if status:
                raise AssertionError(
                    f"a forked child ended with status {status:#x}; expected right bytes or a ClosedError"
                )
            self.seen["forked"] += 1

    def _end(self) -> None:
        assert_nothing_is_held(self.cache)
        closers = [Worker(self, 50 + number) for number in range(3)]
        self.stop.clear()
        for worker in closers:
            worker.start()
        time.sleep(0.02)
        self.closing.set()
        self.cache.close()
        self.stop.set()
        stuck = join(closers, PATIENCE_S)
        assert not stuck, f"{stuck} did not end after close()"
        self.bank.close()
        self.cache.close()


def in_child(cache: ExpertCache) -> int:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(PATIENCE_S))  # a hang ends with the signal's status
    try:
        use(cache, random.Random(0), 3)
    except ClosedError:
        return 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def flat(series: list[float], slack: float) -> bool:
    """Whether the last third lies no more than the slack above the second one (the first is warm-up)."""
    third = len(series) // 3
    return not third or statistics.median(series[-third:]) <= statistics.median(series[third : 2 * third]) + slack


def soak(seconds: float, workers: int, seed: int, era_seconds: float, without: Collection[str]) -> dict[str, Any]:
    """Caches, one after the other; what happened, and under ``faults`` what should not have."""
    torch.set_num_threads(1)
    series: dict[str, list[float]] = {"resident MB": [], "descriptors": [], "threads": []}
    seen: Counter[str] = Counter()
    faults: list[str] = []
    checked = eras = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end and not faults:
        with tempfile.TemporaryDirectory(prefix="moecache-soak-") as folder:
            era = Era(seed + eras, Path(folder), workers, min(era_seconds, seconds / 4), without)
            era.live()
        seen += era.seen
        seen["interrupted"] += sum(worker.got for worker in era.workers)
        seen[f"policy {era.policy}"] += 1
        checked += sum(era.checked.values())
        faults += [f"seed {era.seed}: {fault}" for fault in era.faults]
        del era
        gc.collect()
        series["resident MB"].append(resident_mb())
        series["descriptors"].append(descriptors())
        series["threads"].append(threads())
        eras += 1
    for what, slack in (("resident MB", 16.0), ("descriptors", 0.0), ("threads", 0.0)):
        if not faults and not flat(series[what], slack):
            faults.append(f"{what} grew: {series[what]}")
    return {
        "caches": eras,
        "experts checked": checked,
        **seen,
        **{k: v[-1] for k, v in series.items()},
        "faults": faults,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the first cache; the next has the next number")
    parser.add_argument("--era", type=float, default=5.0, help="seconds that each cache lives")
    parser.add_argument("--without", nargs="*", default=(), choices=("interrupts", "resizes", "forks", "failures"))
    arguments = parser.parse_args()
    report = soak(arguments.seconds, arguments.threads, arguments.seed, arguments.era, arguments.without)
    faults = report.pop("faults")
    print(json.dumps(report, indent=1))
    print("\n".join(faults), file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.stdout.flush()
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread that hangs is reported above and must not hold up the end
