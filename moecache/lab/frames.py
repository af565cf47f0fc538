"""Results as pandas DataFrames."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from ..errors import OptionError

__all__ = ["to_frame"]


class _Result(Protocol):
    def row(self) -> Mapping[str, Any]: ...


def to_frame(results: Iterable[_Result]) -> Any:
    """A DataFrame with a row for each result of a replay, a clocked replay, a recall or a suite.

    Parameters
    ----------
    results : iterable
        Of anything with ``row()``.

    Returns
    -------
    pandas.DataFrame

    Raises
    ------
    OptionError
        pandas is not installed.
    """
    if importlib.util.find_spec("pandas") is None:
        raise OptionError("a DataFrame is made with pandas: pip install 'moecache[tables]'")
    import pandas

    return pandas.DataFrame([dict(result.row()) for result in results])
