"""Numba kernels over whole histories, for offline work: many queries at once, and which requests to keep.

Dot products are sums of whole numbers in floating point, exact in whatever order as long as none leaves the mantissa;
who calls chooses a dtype for which that holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from .jit import compiled

__all__ = ["best_of_each", "dot_products", "most_representative"]

# Stored requests whose sums stay in the nearest cache while all columns pass by.
_TILE = 1024


def _dot_products(queries: np.ndarray, columns: np.ndarray, out: np.ndarray) -> None:
    stored = columns.shape[1]
    for q in numba.prange(len(queries)):
        query = queries[q]
        used = np.flatnonzero(query)
        for begin in range(0, stored, _TILE):
            end = min(begin + _TILE, stored)
            sums = out[q, begin:end]
            sums[:] = 0
            # Four columns a pass: a sum is read and written once for four products.
            for j in range(0, len(used) - 3, 4):
                a, b, c, d = used[j], used[j + 1], used[j + 2], used[j + 3]
                column_a, column_b = columns[a, begin:end], columns[b, begin:end]
                column_c, column_d = columns[c, begin:end], columns[d, begin:end]
                for i in range(end - begin):
                    sums[i] += (
                        query[a] * column_a[i]
                        + query[b] * column_b[i]
                        + (query[c] * column_c[i] + query[d] * column_d[i])
                    )
            for j in range(len(used) // 4 * 4, len(used)):
                column = columns[used[j], begin:end]
                for i in range(end - begin):
                    sums[i] += query[used[j]] * column[i]


@functools.cache
def _compiled(parallel: bool) -> Callable[..., Any]:
    # The file cache does not distinguish the two.
    return numba.njit(parallel=True)(_dot_products) if parallel else compiled()(_dot_products)


def dot_products(queries: np.ndarray, columns: np.ndarray, parallel: bool = False) -> np.ndarray:
    """Dot product of every query with every stored request.

    Parameters
    ----------
    queries : float array ``[n, experts]``
        Whole numbers; experts that a query does not use cost nothing.
    columns : float array ``[experts, stored]``
        Of the same dtype.
    parallel : bool
        One query a thread, on all cores.

    Returns
    -------
    float array ``[n, stored]``
    """
    out = np.empty((len(queries), columns.shape[1]), columns.dtype)
    _compiled(parallel)(queries, columns, out)
    return out


@compiled()
def best_of_each(dots: np.ndarray, square: np.ndarray, written: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """The `top` stored requests of largest cosine for each query, the newest first of equal ones.

    Parameters
    ----------
    dots : float array ``[n, stored]``
    square : float64 array ``[stored]``
        Squared norms of the stored requests.
    written : int64 array ``[stored]``
        The larger, the newer.

    Returns
    -------
    (int32 array, float64 array) ``[n, top]``
        Entries, and squared dot product over squared norm. -1 and 0 where nothing more has anything in common.
    """
    entries = np.full((len(dots), top), -1, np.int32)
    keys = np.zeros((len(dots), top))
    for q in range(len(dots)):
        for entry in range(dots.shape[1]):
            dot = np.float64(dots[q, entry])
            if dot == 0:
                continue
            key = dot * dot / square[entry]
            i = top
            while i > 0:
                other = entries[q, i - 1]
                if other >= 0 and (key < keys[q, i - 1] or (key == keys[q, i - 1] and written[entry] < written[other])):
                    break
                if i < top:
                    entries[q, i], keys[q, i] = other, keys[q, i - 1]
                i -= 1
            if i < top:
                entries[q, i], keys[q, i] = entry, key
    return entries, keys


@compiled()
def most_representative(similarity: np.ndarray, count: int) -> np.ndarray:
    """The requests that stand best for all: greedily, the one that adds most to the sum over all requests of the largest
    similarity to a kept one, the last of equal ones.

    The sum is submodular, so greed reaches 1 - 1/e of the best choice's (Nemhauser, Wolsey and Fisher 1978), and what a
    request adds only shrinks: gains of earlier rounds are bounds, and only those above the best are made anew (Minoux
    1978).

    Parameters
    ----------
    similarity : float array ``[n, n]``
        Symmetric, none negative.
    count : int
        At most n.

    Returns
    -------
    int64 array ``[count]``
        Ascending.
    """
    n = len(similarity)
    gain = np.empty(n)
    for i in range(n):
        gain[i] = similarity[i].sum()
    covered = np.zeros(n)
    kept = np.empty(count, np.int64)
    for m in range(count):
        best, best_gain = -1, -1.0
        while True:
            # The largest bound; when it is the one just made anew, nothing can pass it.
            candidate = n - 1
            for i in range(n - 1, -1, -1):
                if gain[i] > gain[candidate]:
                    candidate = i
            if candidate == best:
                break
            added = 0.0
            for i in range(n):
                added += max(similarity[candidate, i] - covered[i], 0.0)
            gain[candidate] = added
            if added > best_gain or (added == best_gain and candidate > best):
                best, best_gain = candidate, added
        kept[m] = best
        gain[best] = -np.inf
        for i in range(n):
            covered[i] = max(covered[i], similarity[best, i])
    return np.sort(kept)
