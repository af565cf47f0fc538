"""Every error the library raises on purpose: what was wrong, what was expected, what to do.

Each class also derives from the built-in a caller would guess, so ``except ValueError`` keeps working.
"""

from __future__ import annotations

from typing import NoReturn

__all__ = [
    "AttachError",
    "CapacityError",
    "CaptureError",
    "CheckpointError",
    "ClosedError",
    "CopyError",
    "FitError",
    "ForecasterError",
    "HistoryFormatError",
    "LearnError",
    "LeaseError",
    "MoeCacheError",
    "OptionError",
    "PolicyError",
    "RoutingError",
    "TraceFormatError",
    "TransferError",
    "UnsupportedModelError",
]


class MoeCacheError(Exception):
    """Base of all errors raised by moecache."""


class CapacityError(MoeCacheError, ValueError):
    """A cache size that cannot work, or a step that no slot can serve."""


class OptionError(MoeCacheError, ValueError):
    """An option of a cache that cannot be: a negative share or time, no requests to keep, too many threads."""


class RoutingError(MoeCacheError, ValueError, IndexError):
    """Router output that cannot be served: ids out of range, a wrong shape, dtype or device, NaN weights."""


class LeaseError(MoeCacheError, RuntimeError):
    """A lease used after its end, or never granted because others hold every slot."""


class ClosedError(MoeCacheError, RuntimeError):
    """A cache, request or engine used after ``close()``, or in a forked child."""


class CopyError(MoeCacheError, TypeError):
    """An object that holds addresses, threads or open files, pickled, copied or sent to another process."""


class CaptureError(MoeCacheError, RuntimeError):
    """A call that cannot be recorded: the stream captures a CUDA graph, or the model is traced, exported or transformed."""


class CheckpointError(MoeCacheError, ValueError):
    """Expert weights that cannot be found whole: missing, truncated, of differing shape or dtype, changed meanwhile."""


class TransferError(MoeCacheError, OSError):
    """A copy that failed; ``__cause__`` is the original error.

    Attributes
    ----------
    position : int
        Which of the copies that were waited for, -1: it is about none of them.
    source : int
        Global number of the expert, -1: not known.
    """

    position = -1
    source = -1


class AttachError(MoeCacheError, RuntimeError):
    """A model that cannot be attached, detached or changed in its present state."""


class UnsupportedModelError(MoeCacheError, TypeError):
    """A model without MoE layers, or with experts of a form the library does not know."""


class PolicyError(MoeCacheError, ValueError):
    """An unknown policy name, or a score function that cannot be compiled."""


class ForecasterError(MoeCacheError, ValueError):
    """Weights of a forecaster that cannot be: missing, of another model's shapes, not finite."""


class FitError(MoeCacheError, ValueError):
    """Requests that a forecaster cannot be fitted to: too few, or without anything to learn."""


class LearnError(MoeCacheError, ValueError):
    """Learning that cannot begin: no folder for its log, one that another cache uses, a policy without a forecaster."""


class HistoryFormatError(MoeCacheError, ValueError):
    """A history file that is cut short, damaged, or of another model."""


class TraceFormatError(MoeCacheError, ValueError):
    """A routing trace that is cut short, damaged, or of another model."""


def refuse_copy(of: object) -> NoReturn:
    """For ``__reduce__``: the error that pickle, `copy` and processes get for an object that belongs to this process alone.

    Raises
    ------
    CopyError
    """
    raise CopyError(
        f"a {type(of).__name__} holds memory addresses, threads or locks of this process and cannot be pickled, copied or "
        "sent to another one; make a new one there"
    )
