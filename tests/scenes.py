"""Scenes: code that runs in processes of its own (``zygote.py``), and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from moecache import History

PATIENCE_S = 200


class Scenes:
    """Starts scenes and says how they ended."""

    def __init__(self, folder: Path) -> None:
        here = Path(__file__).parent
        path = os.pathsep.join([str(here.parent), str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, str(here / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        self._outputs = folder
        self._output: dict[int, Path] = {}

    def start(self, code: str, folder: Path) -> int:
        output = self._outputs / f"{len(self._output)}.txt"
        pid = int(self._ask(code=code, output=str(output), cwd=str(folder)))
        self._output[pid] = output
        return pid

    def wait(self, pid: int) -> tuple[int, str]:
        """Exit code, and what was printed."""
        killer = threading.Timer(PATIENCE_S, os.kill, (pid, signal.SIGKILL))
        killer.start()
        try:
            code = int(self._ask(wait=pid))
        finally:
            killer.cancel()
        return code, self._output[pid].read_text()

    def run(self, code: str, folder: Path) -> tuple[int, str]:
        return self.wait(self.start(code, folder))

    def printed(self, pid: int, word: str) -> None:
        """Wait until a scene has printed something."""
        deadline = time.monotonic() + PATIENCE_S
        while word not in (self._output[pid].read_text() if self._output[pid].exists() else ""):
            assert time.monotonic() < deadline, self._output[pid].read_text()
            time.sleep(0.005)

    def _ask(self, **job: Any) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return self._process.stdout.readline()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)


def requests_of(path: Path) -> int:
    return len(History.load(path))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


OPENED = """
import os, signal, sys, threading, time
cache = make_cache(history="a.history", learn=True)
cache.record("a.safetensors")
serve(cache, 3)
left = cache.request()
one_token(left, 1)
"""
