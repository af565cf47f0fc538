"""What earlier requests did: their activation matrices and the layer transitions, kept in memory and in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ._core import ForecastWeights, HistoryStore, RunningMatch
from .errors import ForecasterError, HistoryFormatError
from .files import write_atomically
from .fingerprint import Fingerprint
from .forecaster import Forecaster
from .history_file import FORECASTER, FORMAT, LEARNED, VERSION, check_capacity, read_history
from .tensorfile import shape_fault

__all__ = ["History"]


class History:
    """Finished requests of one model, and how experts follow experts.

    A full history replaces the request that the new one resembles most, so that it keeps both the newest and the
    different.

    Parameters
    ----------
    fingerprint : Fingerprint
    capacity : int
        Requests kept. Memory is about ``5 * capacity * num_experts.sum()`` bytes once full.
    """

    def __init__(self, fingerprint: Fingerprint, capacity: int = 1000) -> None:
        if capacity < 1:
            raise HistoryFormatError(f"a history of {capacity} requests cannot match anything: expected at least 1")
        fault = shape_fault([int(n) for n in fingerprint.num_experts], fingerprint.top_k)
        if fault is not None:
            raise HistoryFormatError(f"no history can be kept of a model with {fault}")
        self.fingerprint = fingerprint
        self.store = HistoryStore(np.array(fingerprint.num_experts, np.int32), capacity)

    @property
    def forecaster(self) -> Forecaster | None:
        """Weights fitted to the model's traces (``moecache fit``), kept in the same file; None without.

        Raises
        ------
        HistoryFormatError
            When set to one of another model.
        """
        weights = self.store.forecaster
        return None if weights is None else weights.source

    @forecaster.setter
    def forecaster(self, forecaster: Forecaster | None) -> None:
        if forecaster is not None:
            self._check(forecaster.fingerprint, "the forecaster")
        self.store.forecaster = None if forecaster is None else ForecastWeights(forecaster)

    def __len__(self) -> int:
        return int(self.store.size)

    @property
    def capacity(self) -> int:
        return int(self.store.capacity)

    def add(self, prompt: np.ndarray, decode: np.ndarray, tokens: int) -> int:
        """Keep one finished request.

        Parameters
        ----------
        prompt, decode : integer array [experts of all layers]
            Tokens routed to each expert, layer by layer, in the prompt and in the completion.
        tokens : int
            Tokens of both.

        Returns
        -------
        int
            The entry written, or -1 for an empty request.
        """
        return int(self.store.add(prompt, decode, tokens))

    def match(self, counts: np.ndarray) -> np.ndarray:
        """Cosine similarity of an activation matrix to every stored request.

        Parameters
        ----------
        counts : integer array [experts of all layers]

        Returns
        -------
        float64 array [len(self)]
            Zero where either side is empty.
        """
        match = RunningMatch(self.store)
        match.load(np.asarray(counts, np.int64))
        return np.asarray(match.similarities())

    def match_many(self, counts: np.ndarray, parallel: bool = False) -> np.ndarray:
        """:meth:`match` for many activation matrices at once, for offline work (compiled with Numba).

        Parameters
        ----------
        counts : integer array ``[n, experts of all layers]``
        parallel : bool
            On all cores.

        Returns
        -------
        float64 array ``[n, len(self)]``
        """
        store = self.store
        dots, square = self._dots(counts, parallel)
        norms = np.sqrt(np.maximum(square, 1)[:, None] * np.maximum(store.square[: store.size], 1))
        return np.asarray(dots / norms)

    def best_matches(self, counts: np.ndarray, top: int, parallel: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """The requests most similar to each of many activation matrices.

        Parameters
        ----------
        counts : integer array ``[n, experts of all layers]``
        top : int
            How many for each.
        parallel : bool
            On all cores.

        Returns
        -------
        (int32 array, float64 array) ``[n, top]``
            Entries and cosine similarities, the largest first and of equal ones the newest; -1 and 0 where fewer have
            anything in common.
        """
        from .batch import best_of_each

        store = self.store
        dots, square = self._dots(counts, parallel)
        entries, keys = best_of_each(dots, store.square[: store.size], store.written[: store.size], top)
        return entries, np.sqrt(keys / np.maximum(square, 1)[:, None])

    def _dots(self, counts: np.ndarray, parallel: bool) -> tuple[np.ndarray, np.ndarray]:
        # Dot products with every entry, and the squared norms of the queries.
        from .batch import dot_products

        counts = np.asarray(counts)
        experts = sum(self.fingerprint.num_experts)
        if counts.ndim != 2 or counts.shape[1] != experts or counts.dtype.kind not in "iu" or (counts < 0).any():
            raise HistoryFormatError(
                f"counts are {counts.dtype} {counts.shape}; expected non-negative integers [n, {experts}]"
            )
        store = self.store
        rows = matched_counts(store.prompt_counts[: store.size], store.decode_counts[: store.size])
        queries = counts.astype(np.float64)
        square = (queries**2).sum(1)
        # No dot product, nor any part of one, is larger than the product of the norms.
        bound = np.sqrt(square.max(initial=0) * store.square[: store.size].max(initial=0))
        exact = np.float32 if bound < 2**24 else np.float64
        return dot_products(queries.astype(exact), np.ascontiguousarray(rows.T, exact), parallel), square

    def merge(self, *others: History) -> None:
        """Add other histories' requests and what they learned to this one.

        Where they are more requests than the capacity, those stay that the others resemble most, so that whatever was
        asked often or seldom still has something near it (:func:`moecache.batch.most_representative`; about
        ``8 * requests ** 2`` bytes while it chooses). A forecaster is kept, or else the first of the others is taken.

        Raises
        ------
        HistoryFormatError
            One of them is of another model; nothing has changed.
        """
        for other in others:
            self._check(other.fingerprint, "the history to merge")
        store, theirs = self.store, [other.store for other in others]
        learned = [sum((s.learned()[name].astype(np.int64) for s in theirs), store.learned()[name]) for name in LEARNED]
        total = sum((s.total for s in theirs), np.array(store.total))
        tokens = sum((s.tokens for s in theirs), store.tokens)
        prompt = np.concatenate([store.prompt_counts[: store.size], *(s.prompt_counts[s.order()] for s in theirs)])
        decode = np.concatenate([store.decode_counts[: store.size], *(s.decode_counts[s.order()] for s in theirs)])
        # Entries of this history stay where they are; the others take free places and those of entries replaced.
        kept = self._representative(prompt, decode)
        places = [n for n in range(store.capacity) if n >= store.size or not kept[n]]
        arrivals = np.flatnonzero(kept[store.size :]) + store.size
        for place, n in zip(places, arrivals.tolist(), strict=False):
            store.add(prompt[n], decode[n], 0, entry=place)
        store.restore(total, tokens, *learned)
        store.weights.join([s.weights for s in theirs])
        self.forecaster = next((h.forecaster for h in (self, *others) if h.forecaster is not None), None)

    def _representative(self, prompt: np.ndarray, decode: np.ndarray) -> np.ndarray:
        # bool [n]: which of the requests of several histories, this one's first, to keep.
        if len(prompt) <= self.capacity:
            return np.ones(len(prompt), np.bool_)
        from .batch import dot_products, most_representative

        rows = matched_counts(prompt, decode).astype(np.float64)
        similarity = dot_products(rows, np.ascontiguousarray(rows.T))
        inverse = 1 / np.sqrt((rows**2).sum(1))
        similarity *= inverse[:, None]
        similarity *= inverse
        # Oldest first, as of equal ones the last is kept.
        age = np.concatenate([self.store.order(), np.arange(len(self), len(prompt))])
        kept = np.zeros(len(prompt), np.bool_)
        kept[age[most_representative(similarity[np.ix_(age, age)], self.capacity)]] = True
        return kept

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, under a temporary name first: a reader never sees half of one.

        What is there is replaced. A cache that was given a path takes in what others have written (:mod:`moecache.persistence`).
        """
        write_atomically(Path(path), Snapshot.of(self).format())

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        fingerprint: Fingerprint | None = None,
        capacity: int | None = None,
        *,
        expected_capacity: int = 0,
    ) -> History:
        """Read a file written by :meth:`save`, whole or not at all.

        Parameters
        ----------
        fingerprint : Fingerprint, optional
            Of the model it shall serve.
        capacity : int, optional
            Requests kept from now on; by default as many as when it was saved.
        expected_capacity : int
            So many are accepted of any file; more only where they take less than 1 GiB, or than 64 times the file.

        Raises
        ------
        HistoryFormatError
            Not a history, cut short, of another model, or with numbers that cannot be.
        FileNotFoundError
        """
        path = Path(path)
        file = read_history(path)
        found = Fingerprint(file.num_experts, file.top_k, file.digest)
        if fingerprint is not None and not found.fits(fingerprint):
            raise _another_model(f"{path}", fingerprint, found)
        if capacity is None and file.capacity > expected_capacity:
            check_capacity(path, file.capacity, sum(found.num_experts))
        try:
            forecaster = Forecaster.from_tensors(found, file.forecaster) if file.forecaster else None
            history = cls(fingerprint or found, file.capacity if capacity is None else capacity)
        except (ForecasterError, MemoryError) as error:
            raise HistoryFormatError(f"{path}: {str(error) or 'not enough memory for it'}") from error
        history._fill(file.tensors, file.tokens)
        history.forecaster = forecaster
        return history

    def copy(self) -> History:
        """A history of its own with the same contents."""
        return Snapshot.of(self).history()

    def __reduce__(self) -> tuple[Callable[[Snapshot], History], tuple[Snapshot]]:
        return Snapshot.history, (Snapshot.of(self),)

    def _fill(self, arrays: Mapping[str, np.ndarray], tokens: int) -> None:
        # Into a new history, what `Snapshot.arrays` gave.
        for prompt, decode in zip(arrays["prompt"], arrays["decode"], strict=True):
            self.store.add(prompt, decode, 0)
        self.store.restore(arrays["total"], tokens, *(arrays[name] for name in LEARNED))
        for name, value in self.store.weights.arrays().items():
            value[:] = arrays[f"online.{name}"]

    def _check(self, other: Fingerprint, what: str, expected: Fingerprint | None = None) -> None:
        if not self.fingerprint.fits(other):
            raise _another_model(
                what, expected or self.fingerprint, self.fingerprint if expected is not None else other
            )


def _another_model(what: str, expected: Fingerprint, found: Fingerprint) -> HistoryFormatError:
    return HistoryFormatError(
        f"{what} is of another model: expected {expected}; found {found}. Use a file of its own for each model"
    )


class Snapshot(NamedTuple):
    """What a history holds at one moment, oldest request first; the arrays are copies."""

    fingerprint: Fingerprint
    capacity: int
    finished: int  # requests ever written into entries
    written: np.ndarray  # for each entry, `finished` before it was written
    prompt: np.ndarray
    decode: np.ndarray
    total: np.ndarray
    tokens: int
    learned: dict[str, np.ndarray]
    online: dict[str, np.ndarray]
    forecaster: Forecaster | None

    @classmethod
    def of(cls, history: History) -> Snapshot:
        store = history.store
        finished = -1
        while finished != store.finished:  # a request ended in another thread meanwhile
            finished = store.finished
            written = _copy(store.written[: store.size])
            prompt, decode = _copy(store.prompt_counts[: len(written)]), _copy(store.decode_counts[: len(written)])
        order = np.argsort(written)
        prompt, decode = prompt[order], decode[order]
        # A request that ends right now is counted in the sums after it is kept.
        kept = prompt.sum(0, dtype=np.int64) + decode.sum(0, dtype=np.int64)
        return cls(
            history.fingerprint,
            history.capacity,
            finished,
            written[order],
            prompt,
            decode,
            np.maximum(_copy(store.total), kept),
            store.tokens,
            {name: _copy(value) for name, value in store.learned().items()},
            {name: _copy(value) for name, value in store.weights.arrays().items()},
            history.forecaster,
        )

    def history(self) -> History:
        """A history with these contents."""
        history = History(self.fingerprint, self.capacity)
        history._fill(self.arrays(), self.tokens)
        history.forecaster = self.forecaster
        return history

    def arrays(self) -> dict[str, np.ndarray]:
        """What a file holds, but for the forecaster."""
        return {
            # Oldest first: entries that are read one after the other are as old as their place says.
            "prompt": self.prompt,
            "decode": self.decode,
            "total": self.total,
            **self.learned,
            **{f"online.{name}": value for name, value in self.online.items()},
        }

    def format(self) -> bytes:
        """The file, a safetensors one."""
        from safetensors.numpy import save

        weights = {} if self.forecaster is None else self.forecaster.tensors()
        return save(
            {
                **self.arrays(),
                **{FORECASTER + name: np.ascontiguousarray(array) for name, array in weights.items()},
            },
            metadata={
                "format": FORMAT,
                "version": VERSION,
                "fingerprint": json.dumps(self.fingerprint),
                "tokens": str(self.tokens),
                "capacity": str(self.capacity),
            },
        )


def _copy(array: np.ndarray) -> np.ndarray:
    # tobytes() keeps the GIL, under which all is written; ndarray.copy() lets it go.
    return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)


def matched_counts(prompt: np.ndarray, decode: np.ndarray) -> np.ndarray:
    """What a store compares: tokens of prompt and completion together, at most 65535 of an expert."""
    joined: np.ndarray = np.minimum(prompt.astype(np.int32) + decode, 65535)
    return joined
