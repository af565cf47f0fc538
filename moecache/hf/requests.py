"""Where requests begin and end: read from the calls of the model, so ``generate()`` needs no change."""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .continuous import ContinuousBatching
from .generation import Generation, ends_of
from .open_requests import OpenRequests, Sequences
from .past import capturing, given, made, tokens_held
from .rows import Rows, without_nan

if TYPE_CHECKING:
    from ..cache import ExpertCache
    from ..lease import Lease

__all__ = ["Requests"]


class _Current(threading.local):
    """Of the forward pass of one model that a thread is in, or was in last."""

    open: OpenRequests | None = None
    inside: bool = False
    decode: bool | None = None
    sequences: Sequences = Sequences()
    rows: Rows | None = None
    token_mask: torch.Tensor | None = None
    last_layer: int = -1
    links_output: bool = False
    generation: Generation | None = None


class Requests:
    """The requests that each forward pass belongs to: one for each of its sequences.

    They are keyed by the key-value cache, whatever thread uses it: one that is empty, or that has not been seen,
    begins requests, which end when the key-value cache is emptied or dies. Passes without one belong together within a
    call of ``generate()``, or where each repeats the ids of the one before and adds to them. A ``generate()`` that
    raises drops the requests that it began, as the ``with`` block of a request does.
    """

    def __init__(self, cache: ExpertCache, model: nn.Module) -> None:
        self._cache = cache
        self._current = _Current()
        self._argument_names = list(inspect.signature(model.forward).parameters)
        self._config = getattr(model, "config", None)
        self._ends = ends_of(model)
        self.continuous = ContinuousBatching(getattr(model, "init_continuous_batching", None))
        self._by_key: dict[int, OpenRequests] = {}
        self._orphans: deque[OpenRequests] = deque()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of a forward pass of the top model, from its arguments."""
        if args:
            kwargs = {**dict(zip(self._argument_names, args, strict=False)), **kwargs}
        self._end_orphans()
        tokens = _tokens(kwargs)
        batch, length = (0, 0) if tokens is None else tokens.shape[:2]
        current = self._current
        generation = current.generation
        past = given(kwargs)
        fresh: int | None = None
        if past is None:
            held: int | None = 0
            opened, known = self._uncached(tokens, self._uses_cache(kwargs))
            if known:
                fresh = length - known
        else:
            opened, held = self._cached(past, length == 1)
        continues = held != 0 or fresh is not None
        opened.length = (held or 0) + length
        current.open, current.inside, current.last_layer = opened, True, -1
        current.links_output = opened.key is None and self._uses_cache(kwargs)
        new = length if fresh is None else fresh
        current.decode = None if tokens is None else continues and new == 1
        packed = _boundaries(kwargs, tokens)
        if packed is not None:
            current.decode = length == packed.shape[0] - 1
        elif (
            generation is not None
            and continues
            and (generation.drafts or (generation.speculates and generation.passes))
        ):
            current.decode = True
        if generation is not None:
            generation.passes += 1
        current.token_mask, current.rows = None, None
        beams = 1 if generation is None or batch % generation.beams else generation.beams
        current.sequences = Sequences(max(batch // beams, 1)) if packed is None else self._packed(past, packed)
        if tokens is None or packed is not None or (batch == 1 and length == 1):
            return
        if new > 1:
            opened.begin_turn()
        ends = self._ends if generation is None else generation.ends
        current.rows = Rows(tokens, kwargs.get("attention_mask"), held, fresh, beams, ends, opened.ended)

    def _packed(self, past: Any, boundaries: torch.Tensor) -> Sequences:
        # Sequences that share a row; those of continuous batching come and go.
        found = self.continuous.sequences(past, boundaries)
        if found is not None:
            return found
        lengths = [n for n in boundaries.diff().tolist() if n > 0]
        return Sequences(len(lengths), lengths) if lengths else Sequences()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after_forward(self, output: Any) -> None:
        """Take note of the key-value cache that a forward pass made."""
        current = self._current
        opened = current.open
        current.inside, current.rows = False, None
        if opened is None:
            return
        if current.links_output and output is not None:
            past = made(output)
            if past is not None:
                self._hold(past, opened)
        if opened.key is not None:
            current.open = None

    def route(self, layer: int, topk_ids: torch.Tensor, weights: torch.Tensor) -> Lease:
        """Take the router's choice for a call of one experts module, for the requests of this thread's forward pass.

        A module that is called outside a forward pass of the top model opens a request on its own; it ends when the
        next one begins, or when a layer that is not deeper than the last one is called with several tokens.

        Parameters
        ----------
        layer : int
        topk_ids : integer Tensor ``[tokens, k]``
        weights : float Tensor ``[tokens, k]``
            The gate weights; rows with NaN do not count.
        """
        current = self._current
        tokens = weights.shape[0]
        first = not current.inside or current.last_layer < 0
        if not current.inside or current.open is None or not current.open.usable:
            again = layer <= current.last_layer and tokens > 1
            if current.open is None or current.open.ids is not None or again or not current.open.usable:
                current.open = self._begin()
            current.decode = current.token_mask = current.rows = None
            current.sequences = Sequences()
        elif current.rows is not None and (weights.is_cpu or not capturing()):
            final = current.rows.ends.final
            current.token_mask, current.rows = current.rows.token_mask(), None
            if final:
                current.open.end_rows()
        current.last_layer = layer
        token_mask = current.token_mask
        if token_mask is not None and token_mask.shape[0] != tokens:
            token_mask = None
        # One token: once a pass, as what is NaN stays so, and a look costs microseconds, or a wait for the device.
        if (first or tokens > 1) and (weights.is_cpu or not capturing()):
            token_mask = without_nan(weights, token_mask)
            if tokens == 1:
                current.token_mask = token_mask
        return current.open.route(current.sequences, layer, topk_ids, current.decode, token_mask)

    @contextmanager
    def generating(self, generation: Generation) -> Iterator[None]:
        """A call of ``generate()`` in this thread."""
        current = self._current
        outer, current.generation = current.generation, generation
        try:
            yield
        except BaseException:
            for opened in generation.begun:
                opened.end(keep=False)
            raise
        finally:
            current.generation = outer
            if generation.uncached is not None:
                generation.uncached.end()
                current.open = None
            self._end_orphans()

    def end(self) -> None:
        """End every request."""
        self._end_orphans()
        while self._by_key:
            self._by_key.popitem()[1].end()
        if self._current.open is not None:
            self._current.open.end()
            self._current.open = None

    def _begin(self) -> OpenRequests:
        opened = OpenRequests(self._cache)
        if self._current.generation is not None:
            self._current.generation.begun.append(opened)
        return opened

    def _cached(self, past: Any, one_token: bool) -> tuple[OpenRequests, int | None]:
        # The requests of a key-value cache, and how many tokens that holds, None if it does not say.
        found = self._by_key.get(id(past))
        if found is not None and (found.key is None or found.key() is not past or not found.usable):
            found = None
        held = tokens_held(past, trusted=found is not None and one_token)
        if found is None and held and type(past) is tuple:
            # Tensors have no identity that lasts: they continue what the thread's last pass left.
            last = self._current.open
            if last is not None and last.usable and last.key is None and last.length == held:
                return last, held
        if found is not None:
            if held != 0 or found.length == 0:
                return found, held
            found.end()
        found = self._begin()
        self._hold(past, found)
        return found, held

    def _uncached(self, tokens: torch.Tensor | None, uses_cache: bool) -> tuple[OpenRequests, int]:
        # The requests of a pass without a key-value cache, and how many tokens of a row it repeats.
        current, generation = self._current, self._current.generation
        if tokens is None or uses_cache:
            return self._begin(), 0
        last = current.open if generation is None else generation.uncached
        if last is not None and last.usable and last.ids is not None:
            before = last.ids
            grows = (
                before.shape[0] == tokens.shape[0] and before.dim() == tokens.dim() and last.length < tokens.shape[1]
            )
            # Beams change places, so within generate() the ids may differ.
            if grows and (generation is not None or torch.equal(tokens[:, : last.length], before)):
                known, last.ids = last.length, tokens
                return last, known
        opened = self._begin()
        opened.ids = tokens
        if generation is not None:
            generation.uncached = opened
        return opened, 0

    def _uses_cache(self, kwargs: dict[str, Any]) -> bool:
        wanted = kwargs.get("use_cache")
        return bool(getattr(self._config, "use_cache", False) if wanted is None else wanted)

    def _hold(self, past: Any, opened: OpenRequests) -> None:
        this, key = weakref.ref(self), id(past)

        def ended(ref: weakref.ref[Any]) -> None:
            requests = this()
            if requests is not None:
                requests._key_ended(key, ref)

        try:
            opened.key = weakref.ref(past, ended)
        except TypeError:
            return
        self._by_key[key] = opened

    def _key_ended(self, key: int, ref: weakref.ref[Any]) -> None:
        opened = self._by_key.get(key)
        if opened is None or opened.key is not ref:
            return
        self._orphans.append(self._by_key.pop(key))
        # The garbage collector may come by in the middle of a step, whose state must not change under it.
        if not _within_package(sys._getframe(1)):
            self._end_orphans()

    def _end_orphans(self) -> None:
        while self._orphans:
            try:
                self._orphans.popleft().end()
            except IndexError:  # another thread was faster
                return


def _tokens(kwargs: dict[str, Any]) -> torch.Tensor | None:
    """What the rows of a pass are: ids ``[batch, length]`` or embeddings ``[batch, length, hidden]``."""
    names = ["input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds"]
    if kwargs.get("encoder_outputs") is not None:
        names = names[2:]
    tokens = next((kwargs[name] for name in names if kwargs.get(name) is not None), None)
    return tokens if isinstance(tokens, torch.Tensor) and tokens.dim() >= 2 else None


def _boundaries(kwargs: dict[str, Any], tokens: torch.Tensor | None) -> torch.Tensor | None:
    """Where the sequences begin that share one row, and where the last ends: integer Tensor ``[sequences + 1]`` on the host."""
    given = kwargs.get("cu_seq_lens_q")
    if given is not None:
        return given if given.is_cpu or not capturing() else None
    positions = kwargs.get("position_ids")
    if kwargs.get("attention_mask") is not None or not isinstance(positions, torch.Tensor) or not positions.is_cpu:
        return None
    if tokens is None or tokens.shape[0] != 1 or tokens.shape[1] < 2 or positions.shape != tokens.shape[:2]:
        return None
    begins = (positions[0].diff() != 1).nonzero()[:, 0] + 1
    if not len(begins):
        return None
    return torch.cat([begins.new_zeros(1), begins, begins.new_tensor([tokens.shape[1]])])


def _within_package(frame: FrameType | None) -> bool:
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("moecache.") and name != __name__:
            return True
        frame = frame.f_back
    return False
