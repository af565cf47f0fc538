"""Run mixture-of-experts models whose experts do not fit on the device."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors
from .bank import ExpertBank, Layout
from .cache import ExpertCache
from .fingerprint import Fingerprint
from .forecaster import Forecaster
from .history import History
from .lease import Lease
from .options import CacheOptions
from .request import Request
from .request_batch import RequestBatch
from .stats import RequestStats, Stats

if TYPE_CHECKING:
    from . import policy as policy
    from .hf import attach as attach
    from .hf import detach as detach
    from .hf import load as load

__all__ = [
    "CacheOptions",
    "ExpertBank",
    "ExpertCache",
    "Fingerprint",
    "Forecaster",
    "History",
    "Layout",
    "Lease",
    "Request",
    "RequestBatch",
    "RequestStats",
    "Stats",
    "attach",
    "detach",
    "errors",
    "load",
    "policy",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # transformers and Numba cost seconds to import: only who asks for them pays.
    if name in ("attach", "detach", "load"):
        return getattr(import_module("moecache.hf"), name)
    if name == "policy":
        return import_module("moecache.policy")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
