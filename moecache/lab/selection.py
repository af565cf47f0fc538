"""Parts of a trace, and two traces held against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import TraceFormatError
from ..trace import Trace, check_same_model

__all__ = ["compare", "select"]


def select(trace: Trace, requests: Sequence[int] | np.ndarray) -> Trace:
    """A trace of some of its requests, which are numbered anew in their order.

    Raises
    ------
    TraceFormatError
        None, or numbers that the trace has not.
    """
    chosen = np.unique(np.asarray(requests, np.int64))
    if not len(chosen) or chosen[0] < 0 or chosen[-1] >= trace.requests:
        raise TraceFormatError(f"{trace.name}: requests to select must be some of 0..{trace.requests - 1}")
    kept = np.isin(trace.request, chosen)
    by_token = {
        name: array[kept]
        for name in ("experts", "decode", "forward", "counted", "weights", "token")
        if (array := getattr(trace, name)) is not None
    }
    return replace(
        trace,
        request=np.searchsorted(chosen, trace.request[kept]),
        request_group=None if trace.request_group is None else trace.request_group[chosen],
        **by_token,
    )


def compare(one: Trace, other: Trace) -> dict[str, Any]:
    """What two traces of one model have in common.

    Returns
    -------
    dict
        ``tokens`` of both; ``equal_tokens``, the first so many of both that are routed alike (requests, experts in any order);
        ``experts_alike``, the share of equal experts place by place over as many tokens as both have; ``usage_similarity``, the
        cosine of how often each expert was used.

    Raises
    ------
    TraceFormatError
        They are of different models.
    """
    check_same_model(one, other.fingerprint, other.model, other.name)
    both = min(one.tokens, other.tokens)
    mine, theirs = (np.sort(trace.experts[:both], axis=2) for trace in (one, other))
    same = (mine == theirs).all((1, 2)) & (one.request[:both] == other.request[:both])
    common = int(np.argmin(same)) if not same.all() else both
    used = [_usage(trace) for trace in (one, other)]
    return {
        "tokens": (one.tokens, other.tokens),
        "equal_tokens": common,
        "experts_alike": float((mine == theirs).mean()),
        "usage_similarity": float(used[0] @ used[1] / (np.linalg.norm(used[0]) * np.linalg.norm(used[1]))),
    }


def _usage(trace: Trace) -> np.ndarray:
    keys = trace.experts.astype(np.int64) + max(trace.num_experts) * np.arange(trace.layers)[None, :, None]
    return np.bincount(keys[trace.experts >= 0], minlength=max(trace.num_experts) * trace.layers).astype(float)
