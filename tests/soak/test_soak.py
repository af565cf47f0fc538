"""Short forms of the long runs (`make soak`), each in a process of its own: they interrupt, fork and count descriptors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SECONDS = float(os.environ.get("MOECACHE_SOAK_SECONDS", "15"))


def run(script: str, *arguments: object, timeout: float = 280) -> str:
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.mark.timeout(SECONDS * 4 + 300)
@pytest.mark.failure("A2", "A4b", "E16", "E16b", "19", "105", "114")
def test_everything_at_once_and_nothing_grows() -> None:
    run("soak.py", "--seconds", SECONDS, "--era", max(SECONDS / 4, 1), timeout=SECONDS * 4 + 240)


@pytest.mark.failure("A2", "114")
def test_resizes_beside_threads_that_route_and_generate() -> None:
    run("resizes.py", "--count", os.environ.get("MOECACHE_RESIZES", "60"))


@pytest.mark.failure("E16", "E16b", "E17", "19")
@pytest.mark.parametrize("over", ["loop", "generate"])
def test_interrupts_at_any_moment_hold_no_slot_and_arrive(over: str) -> None:
    run("interrupts.py", "--only", over, "--count", os.environ.get("MOECACHE_INTERRUPTS", "300"))
