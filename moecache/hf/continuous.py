"""Which sequences share a pass of continuous batching: what transformers' managers say."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from .open_requests import Sequences

__all__ = ["ContinuousBatching"]


class ContinuousBatching:
    """The managers of continuous batching that a model has made.

    Stands in for the model's ``init_continuous_batching``, the method through which all of them are made.

    Parameters
    ----------
    init : callable, optional
        The model's own, where it has one.
    """

    def __init__(self, init: Callable[..., Any] | None) -> None:
        self.__wrapped__: Any = init
        self.__doc__ = init.__doc__
        self._managers: list[weakref.ref[Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        manager = self.__wrapped__(*args, **kwargs)
        self._managers = [ref for ref in self._managers if ref() is not None]
        self._managers.append(weakref.ref(manager))
        return manager

    def __deepcopy__(self, memo: dict[int, Any]) -> ContinuousBatching:
        return self  # a copy of the model shares the cache, and its managers are found here too

    def sequences(self, paged_cache: Any, boundaries: torch.Tensor) -> Sequences | None:
        """Those of the pass that is about to run over a paged cache; None where no manager knows of it.

        Parameters
        ----------
        paged_cache : PagedAttentionCache
        boundaries : integer Tensor ``[sequences + 1]``
            Where each begins among the rows.
        """
        for ref in self._managers:
            processor: Any = getattr(ref(), "batch_processor", None)
            found = _inputs(processor)
            states = getattr(found, "requests_in_batch", None)
            if not states or getattr(found, "cache", None) is not paged_cache:
                continue
            lengths = [future.query_length for future in states]
            if boundaries.shape[0] <= len(lengths) or int(boundaries[len(lengths)]) != sum(lengths):
                continue
            scheduler = processor.scheduler
            return Sequences(
                len(lengths),
                lengths,
                [future.state.request_id for future in states],
                [
                    future.state.position_offset - n >= len(future.state.initial_tokens)
                    for future, n in zip(states, lengths, strict=True)
                ],
                {*scheduler.active_requests, *scheduler.waiting_requests},
            )
        return None


def _inputs(processor: Any) -> Any:
    # What describes the pass; there are two in turns where the next is prepared while one runs.
    inputs = getattr(processor, "inputs_and_outputs", None)
    pairs = getattr(inputs, "io_pairs", None)
    return inputs if pairs is None else pairs[inputs.current_pair].host_io  # type: ignore[union-attr]
