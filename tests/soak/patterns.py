"""Experts whose bytes say which they are, and checks that whoever uses a cache can make at any moment."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors.torch import save_file

from moecache import ExpertBank, ExpertCache, Layout, Lease

PARAMS = {"up": 1, "down": 2}


class WrongBytesError(AssertionError):
    """A slot holds what is not its expert's."""


def code(layer: int, expert: int, name: str) -> int:
    return 1_000_000 * (layer + 1) + 10 * expert + PARAMS[name]


def patterned_bank(num_experts: Sequence[int], numbers: int, folder: Path | None = None) -> ExpertBank:
    """A bank in RAM, or in two files of `folder`; every number of an expert's tensors is its `code`."""
    layers: list[dict[str, torch.Tensor]] = []
    for layer, experts in enumerate(num_experts):
        layers.append({})
        for name, tag in PARAMS.items():
            size = numbers + 13 * tag + 7 * (layer % 2)
            codes = [code(layer, expert, name) for expert in range(experts)]
            layers[-1][name] = torch.tensor(codes, dtype=torch.int32)[:, None].repeat(1, size)
    if folder is None:
        return ExpertBank.from_tensors(layers)
    folder.mkdir(parents=True, exist_ok=True)
    flat = {
        f"layers.{layer}.experts.{expert}.{name}": tensor[expert].clone()
        for layer, tensors in enumerate(layers)
        for name, tensor in tensors.items()
        for expert in range(len(tensor))
    }
    for half in range(2):
        save_file(dict(list(flat.items())[half::2]), folder / f"shard-{half}.safetensors")
    return ExpertBank.from_safetensors(
        folder, Layout({name: [f"layers.{{layer}}.experts.{{expert}}.{name}"] for name in PARAMS})
    )


def check(lease: Lease, layer: int, expert: int, slot: int) -> None:
    """Raise `WrongBytesError` unless the slot holds this expert, every byte of it."""
    for name, tensor in lease.weights.items():
        row = tensor[slot]
        if not bool((row == code(layer, expert, name)).all()):
            found = sorted(set(row.tolist()))[:4]
            raise WrongBytesError(
                f"layer {layer} expert {expert} {name} in slot {slot}: expected {code(layer, expert, name)}, found {found}"
            )


def use(cache: ExpertCache, rng: random.Random, steps: int, leave: float = 0.0, top_k: int = 2) -> int:
    """One request of so many steps, every expert checked; `leave`: the chance of leaving a step's loop early.

    Returns how many experts were checked.
    """
    checked = 0
    with cache.request() as request:
        for _ in range(steps):
            layer = rng.randrange(cache.layers)
            tokens = rng.choice((1, 1, 1, 1, 3, 40))
            ids = [rng.sample(range(cache.num_experts[layer]), top_k) for _ in range(tokens)]
            with request.route(layer, torch.tensor(ids)) as lease:
                for expert, slot, _ in lease.ready():
                    check(lease, layer, expert, slot)
                    checked += 1
                    if rng.random() < leave:
                        break
    return checked


def assert_nothing_is_held(cache: ExpertCache) -> None:
    """Every slot can be had at once: steps that together are as large as the pool leave none of their experts waiting."""
    left: dict[int, int] = {}
    with cache.request() as request, ExitStack() as leases:
        for layer, experts in enumerate(cache.num_experts):
            kind = cache.bank.layer_group[layer]
            if kind not in left:
                with request.route(layer, torch.empty(0, 1, dtype=torch.int64)) as lease:
                    left[kind] = len(next(iter(lease.weights.values())))
            count = min(left[kind], experts)
            left[kind] -= count
            lease = leases.enter_context(request.route(layer, torch.arange(count)[None]))
            assert -1 not in lease.slots, (
                f"layer {layer}: {lease.slots.count(-1)} of {count} slots were never given back"
            )
    stats = cache.stats()
    assert stats.hits + stats.misses == stats.demands


class Interrupts:
    """KeyboardInterrupts in the main thread at random moments, and whether each arrived.

    One at a time: `arm` after the one before it was counted with `caught`.

    Attributes
    ----------
    raised, arrived : int
    elsewhere : int
        Raised while foreign code ran that cannot raise (a ``__del__``, a callback): the interpreter says so and drops them.
    ignored : list of str
        Exceptions of any kind that the interpreter dropped while code of the library ran.
    """

    def __init__(self, seed: int, longest_s: float) -> None:
        self.raised = self.arrived = self.elsewhere = 0
        self.ignored: list[str] = []
        self._random, self._longest_s = random.Random(seed), longest_s

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGALRM, self._strike), sys.unraisablehook
        sys.unraisablehook = self._unraisable
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before[0])
        sys.unraisablehook = self._before[1]

    def _strike(self, number: int, frame: FrameType | None) -> None:
        self.raised += 1
        raise KeyboardInterrupt

    def _unraisable(self, what: Any) -> None:
        text, traceback = f"{what.object!r}: {what.exc_value!r}", what.exc_traceback
        files = []
        while traceback is not None:
            files.append(traceback.tb_frame.f_code.co_filename)
            traceback = traceback.tb_next
        if "moecache" in text or any(f"{os.sep}moecache{os.sep}" in file for file in files):
            self.ignored.append(text)
        elif isinstance(what.exc_value, KeyboardInterrupt):
            self.elsewhere += 1
        else:
            self._before[1](what)

    @property
    def quiet(self) -> bool:
        """Whether none is under way: raised, and not arrived."""
        return self.raised == self.arrived + self.elsewhere and not self.ignored

    def arm(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._random.uniform(1e-6, self._longest_s))

    def caught(self) -> None:
        self.arrived += 1

    def check(self) -> None:
        """Raise AssertionError if one vanished; to be called where none is under way."""
        assert not self.ignored, f"exceptions were dropped in {self.ignored[:3]}"
        assert self.quiet, (
            f"{self.raised} interrupts were raised, {self.arrived} arrived, {self.elsewhere} struck foreign callbacks"
        )


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) - 1


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def join(workers: Sequence[threading.Thread], seconds: float) -> list[str]:
    """Names of those that do not end."""
    for worker in workers:
        worker.join(seconds)
    return [worker.name for worker in workers if worker.is_alive()]
