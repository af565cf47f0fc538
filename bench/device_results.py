"""Times on a device, or on the CPU in its place, and the facts of a section as they come."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WAIT = 120.0
MIB = 1 << 20


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began


def median_of(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    call()
    return statistics.median(seconds(call, device) for _ in range(rounds))


def seconds_of(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Results:
    """Facts of a section, written to its file as they come."""

    def __init__(self, section: str, path: Path | None, device: torch.device) -> None:
        self.path = path
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        self.facts: dict[str, Any] = {"section": section, "device": name, "torch": torch.__version__}

    def add(self, **facts: Any) -> None:
        self.facts.update(facts)
        for name, value in facts.items():
            print(f"{self.facts['section']}: {name} = {value}", flush=True)
        if self.path is not None:
            self.path.write_text(json.dumps(self.facts, indent=1))

    def row(self, table: str, **row: Any) -> None:
        self.facts.setdefault(table, []).append(row)
        print(f"{self.facts['section']}: {table}: {row}", flush=True)
        if self.path is not None:
            self.path.write_text(json.dumps(self.facts, indent=1))
