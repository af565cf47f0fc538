"""Synthetic routing of which it is known what the best policy hits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..trace import Trace

__all__ = ["FAMILIES", "Family"]

_EXPERTS, _REQUESTS, _TOKENS = 64, 40, 150  # of the one layer; tokens of each request


@dataclass(frozen=True)
class Family:
    """A sort of routing.

    Attributes
    ----------
    trace : callable (seed) -> Trace
        One layer, one expert a token.
    optimum : callable (slots) -> float
        The hit rate that no policy exceeds in the long run, but for chance.
    known_by : str
        Who could reach it.
    """

    trace: Callable[[int], Trace]
    optimum: Callable[[int], float]
    known_by: str


def _trace(name: str, keys: np.ndarray) -> Trace:
    tokens = len(keys)
    return Trace(
        name=name,
        experts=keys.reshape(-1, 1, 1).astype(np.int16),
        request=np.arange(tokens) // _TOKENS,
        decode=np.ones(tokens, np.uint8),
        num_experts=(_EXPERTS,),
    )


def _skewed_chances() -> np.ndarray:
    chance = 1 / np.arange(1, _EXPERTS + 1)
    return np.asarray(chance / chance.sum())


def _loop(seed: int) -> Trace:
    return _trace("loop", (np.arange(_REQUESTS * _TOKENS) + seed) % _EXPERTS)


def _uniform(seed: int) -> Trace:
    return _trace("uniform", np.random.default_rng(seed).integers(0, _EXPERTS, _REQUESTS * _TOKENS))


def _skewed(seed: int) -> Trace:
    return _trace("skewed", np.random.default_rng(seed).choice(_EXPERTS, _REQUESTS * _TOKENS, p=_skewed_chances()))


def _skewed_optimum(slots: int) -> float:
    # A. Aho, P. Denning, J. Ullman, JACM 18, 1971: the slots - 1 likeliest stay, the last slot takes whatever else comes.
    if slots >= _EXPERTS:
        return 1.0
    chance = _skewed_chances()
    rest = chance[slots - 1 :]
    return float(chance[: slots - 1].sum() + (rest**2).sum() / rest.sum())


FAMILIES: dict[str, Family] = {
    "loop": Family(
        _loop, lambda slots: min(1.0, (slots - 1) / (_EXPERTS - 1)), "who knows the future (L. Belady, 1966)"
    ),
    "uniform": Family(_uniform, lambda slots: min(1.0, slots / _EXPERTS), "who does not know the future"),
    "skewed": Family(_skewed, _skewed_optimum, "who knows the chances, not the future"),
}
"""By name: the same experts round and round, independent draws from all alike, and from a few far more than from others."""
