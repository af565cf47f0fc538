"""The process in which a running cache's forecaster is fitted anew (:mod:`moecache.learning` starts it)."""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import torch

from ..errors import MoeCacheError
from ..trace import Trace
from .fit import Settings, fit


def main(arguments: list[str]) -> None:
    """Fit to traces; leaves a whole file at `target` and a line about it, or neither and a line that says why.

    Parameters
    ----------
    arguments : list of str
        The owner's process id, tokens to measure on, settings as JSON, the target, traces.
    """
    owner, measured, settings, target, *traces = arguments
    threading.Thread(target=_end_with, args=(int(owner),), daemon=True).start()
    torch.set_num_threads(1)
    try:
        result = fit(
            [Trace.load(path) for path in traces],
            settings=Settings(**json.loads(settings)),
            add=False,
            max_tokens=int(measured),
            device="cpu",
        )
        result.history.save(target)
    except (MoeCacheError, OSError) as error:
        sys.exit(str(error))
    print(result.report)


def _end_with(owner: int) -> None:
    # An owner that is killed cannot end its fit.
    while os.getppid() == owner:
        time.sleep(0.5)
    os._exit(1)
