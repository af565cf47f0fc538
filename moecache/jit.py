"""Numba's compiler, with its cache on disk where there is a place for one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numba

__all__ = ["compiled"]

logger = logging.getLogger("moecache")

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(**options: Any) -> Callable[[_Function], _Function]:
    """``numba.njit(cache=True)``, which compiles anew in each process where the cache cannot be written.

    Numba itself raises then: as the function is defined, which keeps its module from being imported, where neither the
    package's folder nor a home can be written; at the first call where the disk is full.
    """

    def decorate(function: _Function) -> _Function:
        try:
            made: Any = numba.njit(cache=True, **options)(function)
        except RuntimeError as error:  # "no locator available"
            _say_once(str(error))
            return numba.njit(**options)(function)  # type: ignore[no-any-return]
        cache = getattr(made, "_cache", None)
        if cache is not None:
            cache.save_overload = _forgiving(cache.save_overload)
        return made  # type: ignore[no-any-return]

    return decorate


def _forgiving(save: Callable[..., None]) -> Callable[..., None]:
    def save_overload(*arguments: Any) -> None:
        try:
            save(*arguments)
        except OSError as error:
            _say_once(str(error))

    return save_overload


_said = False


def _say_once(why: str) -> None:
    global _said
    if not _said:
        _said = True
        logger.warning(
            "Numba cannot keep what it compiles (%s): seconds more in each process; NUMBA_CACHE_DIR=FOLDER gives it a place",
            why,
        )
