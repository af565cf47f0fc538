"""Records of routing, in columns, put together into a trace: which row is which token, what is missing, what a pass was."""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TraceFormatError
from ..tensorfile import MOST_LAYERS, MOST_TOP_K, brief
from ..trace import Trace, experts_per_layer, name_of

__all__ = ["NONE", "Columns", "Records", "assemble"]

_LOG = logging.getLogger("moecache")
NONE = -1
"""Stands in a column of numbers for a record that does not say."""

_MOST_MISSING = 0.5  # of the tokens: more are no end that was cut off
_METADATA = ("tokens", "columns")  # said of a text, not of a trace


@dataclass
class Columns:
    """What the records of a file say, a record each row, in the order of the file.

    Attributes
    ----------
    line : int64 array ``[records]``
        For messages.
    request, token, layer, step, decode, token_id : int64 array ``[records]``
        :data:`NONE` where a record does not say; `step` is the number of the forward pass.
    count : int64 array ``[records]``
        How many experts it names.
    ids : int64 array ``[count.sum()]``
    weights : float32 array ``[count.sum()]`` or None
        The gate's.
    names : list of str or int
        Of the requests, by number.
    single : bool
        A record names one of a token's experts, not all.
    metadata : dict of str to str
    """

    line: np.ndarray
    request: np.ndarray
    token: np.ndarray
    layer: np.ndarray
    step: np.ndarray
    decode: np.ndarray
    token_id: np.ndarray
    count: np.ndarray
    ids: np.ndarray
    weights: np.ndarray | None
    names: list[str | int]
    single: bool
    metadata: dict[str, str]


class Records:
    """Columns that grow record by record."""

    def __init__(self) -> None:
        self.metadata: dict[str, str] = {}
        self.numbers: dict[str | int, int] = {}  # of requests by their name, in order of first appearance
        self.single = False
        self._rows = [array("q") for _ in range(8)]
        self._ids, self._weights = array("q"), array("f")

    def __len__(self) -> int:
        return len(self._rows[0])

    def add(self, row: tuple[int, int, int, int, int, int, int], ids: list[int], weights: list[float] | None) -> None:
        """Take down ``(line, request, token, layer, step, decode, token_id)`` and the experts."""
        for column, value in zip(self._rows, (*row, len(ids)), strict=True):
            column.append(value)
        self._ids.extend(ids)
        self._weights.extend([np.nan] * len(ids) if weights is None else weights)

    def request(self, name: str | int) -> int:
        """The number of a request."""
        return self.numbers.setdefault(name, len(self.numbers))

    def columns(self) -> Columns:
        """All of them."""
        rows = [np.array(column, np.int64) for column in self._rows]
        weights = np.array(self._weights, np.float32)
        line, request, token, layer, step, decode, token_id, count = rows
        return Columns(
            line=line,
            request=request,
            token=token,
            layer=layer,
            step=step,
            decode=decode,
            token_id=token_id,
            count=count,
            ids=np.array(self._ids, np.int64),
            weights=None if np.isnan(weights).all() else weights,
            names=list(self.numbers),
            single=self.single,
            metadata=self.metadata,
        )


def assemble(
    path: Path,
    columns: Columns,
    num_experts: int | None = None,
    top_k: int | None = None,
    request_tokens: int | None = None,
) -> Trace:
    """A trace of records.

    Tokens without numbers are counted by their layers: a run of records of one layer is one forward pass's tokens there, and a pass
    begins where layers start over. Where such runs differ in length within a pass, the last tokens are those that the short ones have
    (the last layer of a prompt is often computed for its last token alone). Tokens that lack layers are left out, and counted in a line
    of the log and in the metadata (``incomplete_tokens``).

    Parameters
    ----------
    path : path
        For messages, and for the trace's name.
    columns : Columns
    num_experts, top_k : int, optional
        Experts of a layer and of a token, where the records do not tell.
    request_tokens : int, optional
        Where no request is named, begin one every so many tokens.

    Raises
    ------
    TraceFormatError
    """
    if not len(columns.line):
        raise TraceFormatError(f"{path}: no line routes anything")
    if (columns.token == NONE).any():
        columns = _count_tokens(path, columns, top_k)
    job = _Assembly(path, columns)
    return job.trace(num_experts, top_k, request_tokens)


def _count_tokens(path: Path, columns: Columns, top_k: int | None) -> Columns:
    # Numbers for tokens that have none, and for the passes that their order tells of.
    c = columns
    if (c.token != NONE).any():
        raise TraceFormatError(f"{path}: some records number their token and some do not")
    if not c.single and (c.count != c.count[0]).any():
        raise TraceFormatError(
            f"{path} names no tokens, and its records name {c.count.min()} to {c.count.max()} experts: number the tokens in a column token"
        )
    if (c.step != NONE).any():
        c.token = _occurrences(np.stack([c.request, c.step, c.layer]), c, _share(path, c, top_k) if c.single else 1)
        return c
    order = np.argsort(c.request, kind="stable")
    request, layer = c.request[order], c.layer[order]
    begins = np.ones(len(order), bool)
    begins[1:] = (np.diff(request) != 0) | (np.diff(layer) != 0)
    share = _share(path, c, top_k) if c.single else 1
    first = np.flatnonzero(begins)
    length = np.diff(np.append(first, len(order)))
    if len(np.unique(layer)) == 1:
        token = (np.arange(len(order)) - np.repeat(first, length)) // share
        c.token[order] = token
        return _said(path, c)
    # A pass begins where a run's layer is no higher than the run's before it, or with a request.
    run_layer, run_request = layer[first], request[first]
    wraps = np.ones(len(first), bool)
    wraps[1:] = (np.diff(run_layer) <= 0) | (np.diff(run_request) != 0)
    step = np.cumsum(wraps) - 1
    tokens = length // share
    most = np.maximum.reduceat(tokens, np.flatnonzero(wraps))
    lag = most[step] - tokens
    c.token[order] = (np.arange(len(order)) - np.repeat(first, length)) // share + np.repeat(lag, length)
    c.step[order] = np.repeat(step, length)
    return _said(path, c)


def _said(path: Path, columns: Columns) -> Columns:
    _LOG.warning("%s names no tokens: each time that a request's layers start over is taken for a forward pass", path)
    return columns


def _share(path: Path, c: Columns, top_k: int | None) -> int:
    # Of records of one expert each: how many belong to a token. What divides all runs of one layer.
    change = np.ones(len(c.layer), bool)
    keys = np.stack([c.request, c.step, c.layer])
    order = np.lexsort((np.arange(keys.shape[1]), c.request))
    change[1:] = (np.diff(keys[:, order], axis=1) != 0).any(0)
    runs = np.diff(np.append(np.flatnonzero(change), len(change)))
    share = top_k or int(np.gcd.reduce(runs))
    ids = c.ids[order]
    if (runs % share).any() or share > MOST_TOP_K or _twice(ids, len(ids) // share):
        raise TraceFormatError(
            f"{path} names no tokens, and its runs of {runs.min()} to {runs.max()} records of a layer are not {share} experts a "
            "token: number the tokens in a column token, or say how many experts a token has (--top-k)"
        )
    return share


def _twice(ids: np.ndarray, groups: int) -> bool:
    grouped = np.sort(ids.reshape(groups, -1), axis=1)
    return bool((np.diff(grouped, axis=1) == 0).any())


def _occurrences(keys: np.ndarray, c: Columns, share: int) -> np.ndarray:
    # How often each key has come before, by `share` records a time.
    _, key = np.unique(keys, axis=1, return_inverse=True)
    key = key.reshape(-1)
    order = np.argsort(key, kind="stable")
    begins = np.flatnonzero(np.diff(key[order], prepend=-1))
    place = np.empty(len(key), np.int64)
    place[order] = np.arange(len(key)) - np.repeat(begins, np.diff(np.append(begins, len(key))))
    return place // share


class _Assembly:
    """Records whose tokens are numbered, on their way to a trace."""

    def __init__(self, path: Path, columns: Columns) -> None:
        self.path, self.c = path, columns
        c = columns
        self.stepped = bool((c.step != NONE).any())
        if self.stepped and (c.step == NONE).any():
            raise TraceFormatError(f"{path}: some records number their forward pass and some do not")
        keys = (c.token, c.request, c.step) if self.stepped else (c.token, c.request)
        self.order = np.lexsort(keys)
        begins = np.ones(len(self.order), bool)
        begins[1:] = np.any([np.diff(key[self.order]) != 0 for key in keys], axis=0)
        self.row = np.empty(len(self.order), np.int64)
        self.row[self.order] = np.cumsum(begins) - 1
        self.first = self.order[begins]
        self.layers, layer = np.unique(c.layer, return_inverse=True)
        if len(self.layers) > MOST_LAYERS:
            raise TraceFormatError(f"{path}: {len(self.layers):,} layers; expected at most {MOST_LAYERS:,}")
        if len(self.first) * len(self.layers) > max(1 << 20, 64 * len(c.line)):
            raise TraceFormatError(
                f"{path}: most tokens lack most of its {len(self.layers):,} layers: this is no routing"
            )
        self.place = self.row * len(self.layers) + layer.reshape(-1)
        self.metadata = dict(c.metadata)

    def trace(self, num_experts: int | None, top_k: int | None, request_tokens: int | None) -> Trace:
        self._check_single()
        kept = self._complete()
        experts, weights = self._experts(top_k)
        request, decode, forward = self._passes(kept)
        c, names = self.c, {}
        if not self.stepped and len(c.names) <= 1 and request_tokens is not None:
            request = np.arange(len(request)) // request_tokens
        elif (np.diff(c.request) < 0).any() and not self.stepped:
            _LOG.warning(
                "%s: its requests take turns; they are put one after another (replay --concurrency plays turns)",
                self.path,
            )
        token_id = c.token_id[self.first][kept]
        if (token_id != NONE).all():
            names["token"] = token_id
        return Trace(
            name=name_of(self.path),
            experts=experts[kept],
            request=_renumbered(request),
            decode=decode,
            num_experts=self._per_layer(experts, num_experts),
            forward=forward,
            weights=None if weights is None else weights[kept],
            metadata=self._metadata(len(kept)),
            **names,
        )

    def _check_single(self) -> None:
        # A record for each token and layer, unless each names one expert.
        sorted_ = np.sort(self.place, kind="stable")
        if not self.c.single and (np.diff(sorted_) == 0).any():
            order = np.argsort(self.place, kind="stable")
            n = int(order[1:][np.diff(sorted_) == 0].min())
            raise TraceFormatError(
                f"{self.path}, line {self.c.line[n]}: {self._named(n)} has layer {self.c.layer[n]} already; name requests in a "
                "column request where token numbers start over"
            )

    def _complete(self) -> np.ndarray:
        # Rows of the tokens that have every layer.
        there = np.zeros((len(self.first), len(self.layers)), bool)
        there.reshape(-1)[self.place] = True
        whole: np.ndarray = np.asarray(there.all(1))
        promised = self.metadata.get("tokens", str(len(whole)))
        if whole.all() and promised == str(len(whole)):
            return np.flatnonzero(whole)
        row = int(np.argmin(whole))
        lacks = f"{self._named(int(self.first[row]))} lacks layer {self.layers[np.argmin(there[row])]}"
        if "tokens" in self.metadata:
            reason = lacks if not whole.all() else "the file is cut short"
            raise TraceFormatError(
                f"{self.path}: its first line promises {brief(promised)} tokens, {whole.sum():,} are there; {reason}"
            )
        if not whole.any() or (~whole).mean() > _MOST_MISSING:
            raise TraceFormatError(
                f"{self.path}: {lacks}, and so {(~whole).sum():,} of {len(whole):,} tokens lack some: layers must be those of one "
                "model, and tokens numbered within their requests"
            )
        _LOG.warning(
            "%s: %d of %d tokens lack some of the %d layers and are left out (%s); a file that is cut short or a pass that was "
            "under way",
            self.path,
            (~whole).sum(),
            len(whole),
            len(self.layers),
            lacks,
        )
        self.metadata["incomplete_tokens"] = str((~whole).sum())
        return np.flatnonzero(whole)

    def _named(self, n: int) -> str:
        return f"token {self.c.token[n]} of request {brief(self.c.names[self.c.request[n]])}"

    def _experts(self, top_k: int | None) -> tuple[np.ndarray, np.ndarray | None]:
        # int64 and float [tokens, layers, k], each layer's experts in the order of the file.
        c, tokens, layers = self.c, len(self.first), len(self.layers)
        owner = np.repeat(self.place, c.count)
        order = np.argsort(owner, kind="stable")
        owner, ids = owner[order], c.ids[order]
        width = np.bincount(owner, minlength=tokens * layers)
        stated = self.metadata.get("top_k", "")
        most = int(stated) if stated.isascii() and stated.isdigit() and len(stated) < 6 else 0
        k = max(int(width.max(initial=0)), most, top_k or 0)
        if k > MOST_TOP_K or tokens * layers * k > max(1 << 20, 64 * len(ids)):
            raise TraceFormatError(
                f"{self.path}: a token goes to {k} experts of a layer, and most to far fewer: this is no routing"
            )
        at = owner * k + np.arange(len(ids)) - np.repeat(np.cumsum(width) - width, width)
        experts = np.full((tokens, layers, k), -1, np.int16)
        experts.reshape(-1)[at] = ids
        if c.weights is None or np.isnan(c.weights).any():
            if c.weights is not None:
                _LOG.warning(
                    "%s: %d of %d experts have no weight; none is kept", self.path, np.isnan(c.weights).sum(), len(ids)
                )
            return experts, None
        weights = np.zeros(experts.shape, np.float32)
        weights.reshape(-1)[at] = c.weights[order]
        return experts, weights

    def _passes(self, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        # Of each token that is kept: request, decode, and its forward pass where passes are known.
        c, first = self.c, self.first
        decode = c.decode[first]
        mixed = np.flatnonzero(c.decode != decode[self.row])
        if len(mixed):
            raise TraceFormatError(f"{self.path}, line {c.line[mixed[0]]}: a token of prompt and completion both")
        request, step = c.request[first], c.step[first]
        if not self.stepped:
            return request[kept], np.where(decode == NONE, 1, decode)[kept].astype(np.uint8), None
        begins = np.ones(len(first), bool)
        begins[1:] = (np.diff(step) != 0) | (np.diff(request) != 0) | (np.diff(decode) != 0)
        forward = np.cumsum(begins) - 1
        if (decode == NONE).any():
            decode = np.where(decode == NONE, _decoding(request, forward), decode)
        return request[kept], decode[kept].astype(np.uint8), forward[kept]

    def _per_layer(self, experts: np.ndarray, num_experts: int | None) -> tuple[int, ...]:
        if "num_experts" in self.metadata:
            return experts_per_layer(self.metadata["num_experts"], len(self.layers), f"{self.path}, line 1")
        return (num_experts or max(int(experts.max(initial=0)) + 1, 1),) * len(self.layers)

    def _metadata(self, tokens: int) -> Mapping[str, Any]:
        layers = self.layers
        other_numbers = {} if layers[-1] == len(layers) - 1 else {"moe_layers": json.dumps(layers.tolist())}
        kept = {k: v for k, v in self.metadata.items() if k not in _METADATA}
        return {"model": name_of(self.path), **other_numbers, **kept}


def _decoding(request: np.ndarray, forward: np.ndarray) -> np.ndarray:
    # Whether a token is of a completion, where nothing says so: a request's passes of several tokens before its first of one are its
    # prompt.
    size = np.bincount(forward)
    alone = size[forward] == 1
    decode = np.zeros(len(request), np.int64)
    for r in np.unique(request):
        mine = np.flatnonzero(request == r)
        decode[mine[np.argmax(alone[mine]) if alone[mine].any() else len(mine) :]] = 1
    return decode


def _renumbered(request: np.ndarray) -> np.ndarray:
    # 0, 1, ... in the order of first appearance.
    _, first, number = np.unique(request, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[number.reshape(-1)].astype(np.int32)
