"""What a call of ``generate()`` says about the forward passes it makes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .rows import Ends

if TYPE_CHECKING:
    from .open_requests import OpenRequests

__all__ = ["GenerateWatch", "Generation", "ends_of"]


class Generation:
    """One call of ``generate()``.

    Attributes
    ----------
    ends : Ends
        What says that a row has ended; nothing for beams, whose rows change places.
    speculates : bool
        Its passes check several drafted tokens at once.
    drafts : bool
        It is the draft model's part of such a generation.
    beams : int
        Rows that are beams of one prompt.
    begun : list of OpenRequests
        Requests that began within the call.
    uncached : OpenRequests, optional
        The one of the passes that have no key-value cache.
    passes : int
        Forward passes so far.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
        sources = [given, getattr(model, "generation_config", None)]

        def setting(name: str) -> Any:
            values = [kwargs.get(name), *(getattr(source, name, None) for source in sources)]
            return next((value for value in values if value is not None), None)

        stops = bool(kwargs.get("stopping_criteria")) or setting("stop_strings") or setting("max_time")
        eos = _ids(setting("eos_token_id"))
        self.beams = setting("num_beams") or 1
        # An answer may hold the padding token; only what ends rows by another sign than EOS makes it one.
        pad = setting("pad_token_id") if stops else None
        self.ends = (
            Ends() if self.beams > 1 or not eos else Ends(eos, pad if isinstance(pad, int) else None, final=True)
        )
        names = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
        self.speculates = any(setting(name) is not None for name in names)
        self.drafts = bool(setting("is_assistant"))
        self.begun: list[OpenRequests] = []
        self.uncached: OpenRequests | None = None
        self.passes = 0


def ends_of(model: nn.Module) -> Ends:
    """What says that a row of a batch has ended in loops of people's own."""
    sources = (getattr(model, "generation_config", None), getattr(model, "config", None))
    eos: frozenset[int] = frozenset().union(*(_ids(getattr(source, "eos_token_id", None)) for source in sources))
    pads = [getattr(source, "pad_token_id", None) for source in sources]
    return Ends(eos, next((pad for pad in pads if isinstance(pad, int)), None))


def _ids(value: Any) -> frozenset[int]:
    if isinstance(value, torch.Tensor):
        value = value.flatten().tolist()
    if isinstance(value, (list, tuple, set)):
        return frozenset(value)
    return frozenset() if value is None else frozenset([value])


_Watch = Callable[[Generation], AbstractContextManager[None]]


class GenerateWatch:
    """Stands in for an attached model's ``generate``: the same call, whose beginning and end are seen."""

    def __init__(self, model: nn.Module, generate: Callable[..., Any], watch: _Watch) -> None:
        self._model, self._watch = model, watch
        self.__wrapped__, self.__doc__ = generate, generate.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._watch(Generation(self._model, args, kwargs)):
            return self.__wrapped__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> GenerateWatch:
        model = memo.get(id(self._model), self._model)
        return GenerateWatch(model, copy.deepcopy(self.__wrapped__, memo), self._watch)
