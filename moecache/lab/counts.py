"""Activation counts without token order: enough to seed a history."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import TraceFormatError
from ..fingerprint import Fingerprint
from ..history import History
from ..tensorfile import MOST_TOKENS, MOST_TOP_K, brief, read_tensors, shape_fault, whole_number
from .packed import ending_of, open_text

__all__ = ["Counts", "holds_counts"]


@dataclass(frozen=True)
class Counts:
    """Activation counts without token order: enough to seed a history.

    Attributes
    ----------
    counts : integer array ``[entries, layers, experts]``
    tokens : int64 array ``[entries]``
    top_k : int
    model : str
    """

    counts: np.ndarray
    tokens: np.ndarray
    top_k: int
    model: str

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Counts:
        """Read a safetensors file with ``counts`` and ``tokens``, or a heat map as CSV or TSV: ``layer,expert,count``.

        Raises
        ------
        TraceFormatError, FileNotFoundError
        """
        path = Path(path)
        if ending_of(path) in (".csv", ".tsv"):
            return _heat_map(path)
        metadata, tensors = read_tensors(path, "file of activation counts", TraceFormatError)
        counts, tokens = tensors.get("counts"), tensors.get("tokens")
        if counts is None or tokens is None or counts.ndim != 3 or tokens.shape != counts.shape[:1]:
            raise TraceFormatError(
                f"{path} is no file of activation counts: expected counts [entries, layers, experts] and tokens [entries]"
            )
        if counts.dtype.kind not in "iu" or tokens.dtype.kind not in "iu":
            raise TraceFormatError(f"{path}: counts are {counts.dtype}, tokens {tokens.dtype}; expected integers")
        if counts.size == 0 or counts.min() < 0 or tokens.min() < 0 or max(counts.max(), tokens.max()) > MOST_TOKENS:
            raise TraceFormatError(f"{path}: nothing counted, negative counts, or more than {MOST_TOKENS:,}")
        try:
            top_k = whole_number(metadata.get("top_k", "0"), 0, MOST_TOP_K)
        except ValueError as error:
            raise TraceFormatError(f"{path}: metadata top_k is {error}") from error
        return cls(counts, tokens.astype(np.int64), top_k, metadata.get("model", path.stem))

    def history(self, capacity: int = 1000) -> History:
        """A history with one entry for each of these, as completions; large counts are scaled down to what an entry holds."""
        layers, experts = self.counts.shape[1:]
        history = History(Fingerprint((experts,) * layers, self.top_k, ""), capacity)
        for counts, tokens in zip(
            self.counts.reshape(len(self.counts), -1).astype(np.int64), self.tokens.tolist(), strict=True
        ):
            scale = max(1.0, counts.max() / 65535)
            scaled = np.floor(counts / scale).astype(np.int64)
            history.add(np.zeros_like(scaled), scaled, int(tokens / scale))
        return history


def holds_counts(path: Path) -> bool:
    """Whether a file is one of activation counts rather than a history, by its ending or its arrays' names."""
    from safetensors import SafetensorError, safe_open

    if ending_of(path) in (".csv", ".tsv"):
        return True
    try:
        with safe_open(path, "np") as file:
            return "counts" in file.keys()  # noqa: SIM118
    except (SafetensorError, OSError):
        return False  # who reads it says what is wrong


def _heat_map(path: Path) -> Counts:
    # One entry. Layers are those that the file names, in ascending order.
    cells: dict[tuple[int, int], int] = {}
    with open_text(path) as file:
        rows = csv.reader(
            (line for line in file if not line.startswith("#")),
            delimiter="\t" if ending_of(path) == ".tsv" else ",",
        )
        try:
            head = [name.strip().lower() for name in next(rows, [])]
            if head != ["layer", "expert", "count"]:
                raise TraceFormatError(f"{path}: expected the columns layer,expert,count, found {brief(head)}")
            for row in rows:
                layer, expert, count = (whole_number(cell.strip(), 0, MOST_TOKENS) for cell in row)
                if (layer, expert) in cells:
                    raise ValueError(f"layer {layer}, expert {expert} is there twice")
                cells[layer, expert] = count
        except (ValueError, csv.Error) as error:
            if isinstance(error, TraceFormatError):
                raise
            raise TraceFormatError(f"{path}, line {rows.line_num}: {brief(error, 200)}") from error
    layers = {layer: place for place, layer in enumerate(sorted({layer for layer, _ in cells}))}
    experts = 1 + max((expert for _, expert in cells), default=0)
    fault = shape_fault([experts] * len(layers))
    if fault is not None or len(layers) * experts > 1000 * len(cells) or not any(cells.values()):
        raise TraceFormatError(f"{path}: {fault or 'nothing is counted, or nearly all experts are missing'}")
    counts = np.zeros((1, len(layers), experts), np.int64)
    for (layer, expert), count in cells.items():
        counts[0, layers[layer], expert] = count
    # Each token is routed in each layer: how many there were, if k were 1, is the most that can be said.
    return Counts(counts, counts.sum(2).max(1), 0, path.stem)
