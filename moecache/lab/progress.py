"""A progress bar on a terminal; elsewhere a line every half minute, so that a log shows that something happens."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

__all__ = ["progress"]

INTERVAL_S = 30.0


class _Lines:
    """What a tqdm bar looks like to those who move it; prints a line now and then instead."""

    def __init__(self, name: str, total: int | None, unit: str) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.n = 0
        self._begun = time.monotonic()

    def update(self, n: int = 1) -> None:
        self.n += n

    def refresh(self) -> None:
        pass

    def line(self) -> str:
        """How far it is."""
        spent = time.monotonic() - self._begun
        total = self.total or 0
        text = f"{self.name}: {self.n:,}" + (
            f" of {total:,} {self.unit}, {self.n / total:.0%}" if total else f" {self.unit}"
        )
        left = f", about {spent * (total - self.n) / self.n / 60:.0f} min left" if 0 < self.n < total else ""
        return f"{text}, {spent / 60:.1f} min{left}"


@contextlib.contextmanager
def progress(name: str, total: int | None, unit: str) -> Iterator[Any]:
    """Something with ``update(n)``, ``total`` and ``refresh()``, shown on stderr until the block ends."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=total, desc=name, unit=unit, leave=False, delay=1.0) as bar:
            yield bar
        return
    lines, ended = _Lines(name, total, unit), threading.Event()

    def show() -> None:
        while not ended.wait(INTERVAL_S):
            print(lines.line(), file=sys.stderr, flush=True)

    # A thread: some of the work reports nothing while it runs (the history of a split, the future that Belady knows).
    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield lines
    finally:
        ended.set()
        thread.join()
