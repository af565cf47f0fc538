"""Eviction policies by name, and scores written by users.

A policy is one decision: of the experts in the slots, which is evicted? Each scores an expert; the largest score goes
first, ties go to the one unused for longest, then to the lowest slot.

``expected-next-use``
    Layer steps until the expert is worth its slot: ``L (1/index - 1) + ((layer - now - 1) mod L) + 1``, the index being the
    most uses per token that keeping it promises, by its chances of use in the next 1, 2, 4, ... 32 tokens.
``counts``
    The same from counts alone, whether there is a trained forecaster or not.
``moe-infinity``
    ``-(ratio + eps) (1 - layer / L)``, ratio being the expert's share of its layer in the best matching past request.
``lru``
    The longest unused.
``lfu``
    The least often used since the cache was made.
``belady``
    The one whose next use lies furthest ahead; known in replay only.

docs/policies.md has the formulas in full and what they measured.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from ._core import FEATURES
from .errors import PolicyError

__all__ = ["FEATURES", "NAMES", "Score", "resolve", "score"]

NAMES = ("expected-next-use", "counts", "moe-infinity", "lru", "lfu")
"""Policies of the runtime."""


class Resolved(NamedTuple):
    code: str  # what _core calls it
    address: int  # of the score function, 0 for a built-in
    name: str  # what people call it


class Score:
    """A compiled score: see :func:`score`."""

    def __init__(self, function: Callable[..., float]) -> None:
        self.function = function
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self._compiled = _compile(function)
        self.address: int = self._compiled.address

    def __call__(self, *args: float, **kwargs: float) -> float:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<policy score {self.__name__}{inspect.signature(self.function)}>"


def score(function: Callable[..., float]) -> Score:
    """Compile a Python function of named numbers into an eviction policy that runs without the GIL.

    The expert with the largest score is evicted. The arguments are any of:

    layer, now, num_layers
        The expert's layer, the layer of the present step, the number of MoE layers.
    distance
        Layer steps until the expert's layer comes next, 1..num_layers.
    age
        Steps since the expert was last used.
    frequency, request_frequency
        Tokens routed to it since the cache was made, and in this request.
    fast, slow, prior
        Its share of tokens, decayed by 0.3 and by 0.02 a token in this request, and over all finished requests.
    probability
        Its chance of use at its layer's next visit, over all running requests.
    matched
        Its share of its layer in the best matching past request.

    Raises
    ------
    PolicyError
        An unknown argument, or a body that Numba cannot compile.

    Examples
    --------
    >>> @score
    ... def stale_and_rare(age, frequency):
    ...     return age / (1.0 + frequency)
    >>> cache = ExpertCache(bank, 64, policy=stale_and_rare)  # doctest: +SKIP
    """
    return Score(function)


def _compile(function: Callable[..., float]) -> Any:
    import numba

    names = list(inspect.signature(function).parameters)
    for name in names:
        if name not in FEATURES:
            near = difflib.get_close_matches(name, FEATURES)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise PolicyError(
                f"score {function.__name__}: no number is called {name!r}{hint} There are: {', '.join(FEATURES)}"
            )
    arguments = ", ".join(f"x[{FEATURES.index(name)}]" for name in names)
    # Division by zero gives infinity or NaN, as in NumPy: there is nobody to raise an error to.
    namespace: dict[str, Any] = {"inner": numba.njit(function, error_model="numpy")}
    exec(f"def outer(x):\n    return float(inner({arguments}))", namespace)
    try:
        return numba.cfunc("float64(CPointer(float64))")(namespace["outer"])
    except numba.core.errors.NumbaError as error:
        raise PolicyError(f"score {function.__name__} cannot be compiled by Numba: {str(error).strip()}") from error


def resolve(policy: str | Score, extra: tuple[str, ...] = ()) -> Resolved:
    """What a user's choice means to the core.

    Raises
    ------
    PolicyError
        An unknown name; the nearest ones are in the message.
    """
    if isinstance(policy, Score):
        return Resolved("user", policy.address, policy.__name__)
    names = (*NAMES, *extra)
    if policy not in names:
        near = difflib.get_close_matches(str(policy), names, n=2)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise PolicyError(
            f"no policy is called {policy!r}{hint} There are: {', '.join(names)}, and scores made with "
            "moecache.policy.score"
        )
    return Resolved(policy, 0, policy)
