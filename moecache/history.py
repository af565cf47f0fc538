"""What earlier requests did: their activation matrices and the layer transitions, kept in memory and in a file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ._core import HistoryStore, RequestState
from .errors import HistoryFormatError

if TYPE_CHECKING:
    from .bank import ExpertBank

__all__ = ["Fingerprint", "History"]

_FORMAT, _VERSION = "moecache.history", "1"


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

    def merge(self, other: History) -> None:
        """Add another history's requests and transitions to this one.

        Raises
        ------
        HistoryFormatError
            The other one is of another model.
        """
        self._check(other.fingerprint, "the history to merge")
        theirs = other.store
        before = self.store.tokens
        total = np.array(self.store.total)
        for entry in range(theirs.size):
            self.store.add(theirs.prompt_counts[entry], theirs.decode_counts[entry], 0)
        self.store.restore(
            total + theirs.total,
            before + theirs.tokens,
            self.store.transitions + theirs.transitions,
            self.store.origins + theirs.origins,
            self.store.successions + theirs.successions,
            self.store.followed + theirs.followed,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, under a temporary name first: a reader never sees half of one."""
        from safetensors.numpy import save

        store, n = self.store, self.store.size
        data = save(
            {
                "prompt": np.ascontiguousarray(store.prompt_counts[:n]),
                "decode": np.ascontiguousarray(store.decode_counts[:n]),
                "total": store.total,
                "transitions": store.transitions,
                "origins": store.origins,
                "successions": store.successions,
                "followed": store.followed,
            },
            metadata={
                "format": _FORMAT,
                "version": _VERSION,
                "fingerprint": json.dumps(self.fingerprint),
                "tokens": str(store.tokens),
                "capacity": str(store.capacity),
            },
        )
        write_atomically(Path(path), data)

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
        learned = ("transitions", "origins", "successions", "followed")
        store.restore(tensors["total"], tokens, *(tensors[name] for name in learned))
        return history

    def _check(self, other: Fingerprint, what: str, expected: Fingerprint | None = None) -> None:
        if not self.fingerprint.fits(other):
            found = self.fingerprint if expected is not None else other
            raise HistoryFormatError(
                f"{what} is of another model: expected {expected or self.fingerprint}; found {found}. Use a file of its "
                "own for each model"
            )


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
    }
    for name, (shape, dtype) in expected.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != shape or tensor.dtype != dtype:
            got = "nothing" if tensor is None else f"{tensor.dtype} {tensor.shape}"
            raise HistoryFormatError(
                f"{path}: expected {name} of {np.dtype(dtype)} {shape}, found {got}; make the history again"
            )
    counts = tensors["prompt"].astype(np.int64) + tensors["decode"]
    if not counts.any(1).all() or (tensors["total"] < counts.sum(0)).any():
        raise HistoryFormatError(
            f"{path}: empty requests, or fewer tokens over all requests than in those kept; make the history again"
        )


def write_atomically(path: Path, data: bytes) -> None:
    """Write a whole file or leave what was there."""
    with whole_file(path) as file:
        file.write(data)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes its name only when all of it is written; what was there stays until then."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    # Not mkstemp: its files are for their owner alone.
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def open_history(
    history: History | str | os.PathLike[str] | None, fingerprint: Fingerprint, capacity: int
) -> tuple[History, Path | None]:
    """The history a cache shall use and the file to keep it in: an object, a file that may not exist yet, or a new one."""
    if isinstance(history, History):
        history._check(fingerprint, "this history", expected=fingerprint)
        return history, None
    if history is None:
        return History(fingerprint, capacity), None
    path = Path(history)
    if path.exists():
        return History.load(path, fingerprint), path
    if not path.parent.is_dir():
        raise HistoryFormatError(f"no folder {path.parent} to keep the history {path.name} in")
    return History(fingerprint, capacity), path
