"""What earlier requests did: their activation matrices and the layer transitions, kept in memory and in a file."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ._core import ForecastWeights, HistoryStore, OnlineWeights, RequestState
from .errors import ForecasterError, HistoryFormatError
from .files import write_atomically
from .forecaster import Forecaster

if TYPE_CHECKING:
    from .bank import ExpertBank

__all__ = ["Fingerprint", "History"]

_FORMAT, _VERSION = "moecache.history", "2"
# Counts of what followed what, in the order of HistoryStore.restore.
LEARNED = ("transitions", "origins", "successions", "followed")
_FORECASTER = "forecaster."  # before the names of its arrays


class Fingerprint(NamedTuple):
    """What a history must share with a model to mean anything for it."""

    num_experts: tuple[int, ...]
    top_k: int  # 0: not known
    digest: str  # of layer names and parameter shapes

    @classmethod
    def of(cls, bank: ExpertBank, top_k: int | None) -> Fingerprint:
        kinds = [{name: list(spec.shape) for name, spec in sorted(kind.items())} for kind in bank.kinds]
        text = json.dumps([list(bank.layer_names), list(bank.layer_kind), kinds])
        return cls(tuple(bank.num_experts), top_k or 0, hashlib.sha256(text.encode()).hexdigest()[:16])

    def fits(self, other: Fingerprint) -> bool:
        same_k = self.top_k == other.top_k or 0 in (self.top_k, other.top_k)
        return same_k and self.num_experts == other.num_experts and self.digest == other.digest

    def __str__(self) -> str:
        shape = " ".join(str(n) for n in sorted(set(self.num_experts)))
        return f"{len(self.num_experts)} layers of {shape} experts, top-{self.top_k or '?'}, digest {self.digest}"


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
            Tokens routed to each expert, layer by layer, in the prompt and in the answer.
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
        request = RequestState(self.store, -1)
        request.load(np.asarray(counts, np.int64))
        return np.asarray(request.similarities())

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
        learned = [sum((getattr(s, name).astype(np.int64) for s in theirs), getattr(store, name)) for name in LEARNED]
        total = sum((s.total for s in theirs), np.array(store.total))
        tokens = sum((s.tokens for s in theirs), store.tokens)
        prompt = np.concatenate([store.prompt_counts[: store.size], *(s.prompt_counts[s.order()] for s in theirs)])
        decode = np.concatenate([store.decode_counts[: store.size], *(s.decode_counts[s.order()] for s in theirs)])
        # Entries of this history stay where they are; the others take free places and those of entries given up.
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
        cls, path: str | os.PathLike[str], fingerprint: Fingerprint | None = None, capacity: int | None = None
    ) -> History:
        """Read a file written by :meth:`save`, whole or not at all.

        Parameters
        ----------
        fingerprint : Fingerprint, optional
            Of the model it shall serve.
        capacity : int, optional
            Requests kept from now on; by default as many as when it was saved.

        Raises
        ------
        HistoryFormatError
            Not a history, cut short, of another model, or with numbers that cannot be.
        FileNotFoundError
        """
        metadata, tensors = _read(Path(path))
        try:
            experts, top_k, digest = json.loads(metadata["fingerprint"])
            found = Fingerprint(tuple(int(n) for n in experts), int(top_k), str(digest))
            tokens, kept = int(metadata["tokens"]), int(metadata["capacity"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise HistoryFormatError(f"{path}: damaged metadata ({error}); make the history again") from error
        _check_tensors(path, found.num_experts, tokens, tensors)
        forecaster = _forecaster(path, found, tensors)
        try:
            history = cls(found, capacity or kept)
        except (ValueError, OverflowError, MemoryError) as error:
            raise HistoryFormatError(f"{path}: room for {kept} requests cannot be made ({error})") from error
        if fingerprint is not None:
            history._check(fingerprint, f"{path}", expected=fingerprint)
            history.fingerprint = fingerprint
        store = history.store
        for prompt, decode in zip(tensors["prompt"], tensors["decode"], strict=True):
            store.add(prompt, decode, 0)
        store.restore(tensors["total"], tokens, *(tensors[name] for name in LEARNED))
        for name, value in store.weights.arrays().items():
            value[:] = tensors[f"online.{name}"]
        history.forecaster = forecaster
        return history

    def _check(self, other: Fingerprint, what: str, expected: Fingerprint | None = None) -> None:
        if not self.fingerprint.fits(other):
            found = self.fingerprint if expected is not None else other
            raise HistoryFormatError(
                f"{what} is of another model: expected {expected or self.fingerprint}; found {found}. Use a file of its "
                "own for each model"
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
            {name: _copy(getattr(store, name)) for name in LEARNED},
            {name: _copy(value) for name, value in store.weights.arrays().items()},
            history.forecaster,
        )

    def format(self) -> bytes:
        """The file, a safetensors one."""
        from safetensors.numpy import save

        return save(
            {
                # Oldest first: entries that are read one after the other are as old as their place says.
                "prompt": self.prompt,
                "decode": self.decode,
                "total": self.total,
                **self.learned,
                **{f"online.{name}": value for name, value in self.online.items()},
                **{
                    _FORECASTER + name: np.ascontiguousarray(array)
                    for name, array in (self.forecaster.tensors() if self.forecaster is not None else {}).items()
                },
            },
            metadata={
                "format": _FORMAT,
                "version": _VERSION,
                "fingerprint": json.dumps(self.fingerprint),
                "tokens": str(self.tokens),
                "capacity": str(self.capacity),
            },
        )


def _copy(array: np.ndarray) -> np.ndarray:
    # tobytes() keeps the GIL, under which all is written; ndarray.copy() lets it go.
    return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)


def matched_counts(prompt: np.ndarray, decode: np.ndarray) -> np.ndarray:
    """What a store compares: tokens of prompt and answer together, at most 65535 of an expert."""
    joined: np.ndarray = np.minimum(prompt.astype(np.int32) + decode, 65535)
    return joined


def _read(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        raise FileNotFoundError(f"no history at {path}")
    try:
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise HistoryFormatError(f"{path} is not a whole history file ({error}); make the history again") from error
    if metadata.get("format") != _FORMAT or metadata.get("version") != _VERSION:
        raise HistoryFormatError(
            f"{path}: expected format {_FORMAT} version {_VERSION}, found {metadata.get('format')} version "
            f"{metadata.get('version')}"
        )
    return metadata, tensors


def _forecaster(path: str | os.PathLike[str], fingerprint: Fingerprint, tensors: dict[str, Any]) -> Forecaster | None:
    arrays = {name.removeprefix(_FORECASTER): x for name, x in tensors.items() if name.startswith(_FORECASTER)}
    if not arrays:
        return None
    try:
        return Forecaster.from_tensors(fingerprint, arrays)
    except ForecasterError as error:
        raise HistoryFormatError(f"{path}: {error}") from error


def _check_tensors(
    path: str | os.PathLike[str], num_experts: tuple[int, ...], tokens: int, tensors: dict[str, Any]
) -> None:
    # Before anything of the file's sizes is allocated.
    if tokens < 0 or not num_experts or min(num_experts) < 1:
        raise HistoryFormatError(f"{path}: {tokens} tokens, layers of {num_experts} experts; make the history again")
    requests, experts = np.shape(tensors.get("prompt", ()))[:1], sum(num_experts)
    following = (*num_experts[1:], num_experts[0])
    expected: dict[str, tuple[tuple[int, ...], Any]] = {
        "prompt": ((*requests, experts), np.uint16),
        "decode": ((*requests, experts), np.uint16),
        "total": ((experts,), np.int64),
        "transitions": ((sum(a * b for a, b in zip(num_experts, following, strict=True)),), np.uint32),
        "origins": ((experts,), np.uint32),
        "successions": ((sum(n * n for n in num_experts),), np.uint32),
        "followed": ((experts,), np.uint32),
        **{f"online.{name}": (value.shape, value.dtype) for name, value in OnlineWeights().arrays().items()},
    }
    for name, (shape, dtype) in expected.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != shape or tensor.dtype != dtype:
            got = "nothing" if tensor is None else f"{tensor.dtype} {tensor.shape}"
            raise HistoryFormatError(
                f"{path}: expected {name} of {np.dtype(dtype)} {shape}, found {got}; make the history again"
            )
    fault = OnlineWeights.faults({name: tensors[f"online.{name}"] for name in OnlineWeights().arrays()})
    if fault is not None:
        raise HistoryFormatError(f"{path}: weights learned online: {fault}; make the history again")
    counts = tensors["prompt"].astype(np.int64) + tensors["decode"]
    if not counts.any(1).all() or (tensors["total"] < counts.sum(0)).any():
        raise HistoryFormatError(
            f"{path}: empty requests, or fewer tokens over all requests than in those kept; make the history again"
        )
