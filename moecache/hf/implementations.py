"""Which experts implementation an attached model's results equal, and what happens when it is switched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..errors import AttachError
from .discovery import NAME, ExpertsLayer
from .trials import AnyForm

__all__ = ["Implementations", "implementations_of"]

_SWITCHES = ("get_experts_implementation", "set_experts_implementation")


def implementations_of(
    model: nn.Module, layers: Sequence[ExpertsLayer], asked: str | None = None, *, own: bool = False
) -> list[str]:
    """By layer, the implementation that the model was loaded with or, where its experts were kept out, would have had.

    Parameters
    ----------
    model : nn.Module
    layers : sequence of ExpertsLayer
    asked : str, optional
        The same for all of them, whatever the model was loaded with.
    own : bool
        What the model would have had even where its experts are in memory.

    Raises
    ------
    AttachError
        transformers does not know the implementation.
    """
    known = ["eager", *(name for name in ALL_EXPERTS_FUNCTIONS.valid_keys() if name != NAME)]
    if asked is not None and asked not in known:
        raise AttachError(f"experts_implementation is {asked!r}; expected one of {', '.join(known)}")
    owners = {id(m.config): m for m in model.modules() if isinstance(m, PreTrainedModel)}
    names = []
    for layer in layers:
        config: Any = layer.config
        if layer.own and asked not in (None, "eager"):
            raise AttachError(
                f"{layer.name}: {type(layer.module).__name__} computes by itself, whatever the implementation: expected "
                f"experts_implementation='eager' or None, not {asked!r}"
            )
        name = asked or config._experts_implementation
        if name == NAME and (own or any(param.is_meta for param in layer.params.values())):
            name = owners.get(id(config), model).get_correct_experts_implementation(None)  # type: ignore[operator]
        elif name in (None, NAME):
            name = "eager"  # as such a module computes where it is not attached
        if name not in known:
            raise AttachError(f"{layer.name}: experts_implementation is {name!r}; expected one of {', '.join(known)}")
        names.append(name)
    return names


class Implementations:
    """What the ``"moecache"`` in the configurations of an attached model stands for.

    ``set_experts_implementation()`` of the model, which ``generate()`` calls between prompt and decoding where there is a
    device, changes what the results equal. Copies of the model share it.

    Attributes
    ----------
    forms : list of AnyForm
        By layer, for the present implementation.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[ExpertsLayer],
        names: Sequence[str],
        choose: Callable[[list[str]], list[AnyForm]],
    ) -> None:
        self._choose = choose
        self._layers = [id(layer.config) for layer in layers]
        self._own = [layer.own for layer in layers]
        self._names = dict(zip(self._layers, names, strict=True))
        self._chosen: dict[tuple[str, ...], list[AnyForm]] = {}
        self.forms = self._forms_for(self._names)
        device: Any = getattr(model, "device", None)
        if device is not None and device.type != "cpu":
            # What generate() switches to there must not be refused in the middle of a text.
            self._forms_for({key: name.replace("grouped_mm", "batched_mm") for key, name in self._names.items()})
        self._models: list[Any] = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
        configs: list[Any] = [*(m.config for m in self._models), *(layer.config for layer in layers)]
        self._configs = {id(config): config for config in configs}
        self._before = {key: config._experts_implementation for key, config in self._configs.items()}

    def install(self) -> None:
        self._hide()
        for model in self._models:
            for name in _SWITCHES:
                model.__dict__[name] = _Switch(self, model, name)

    def remove(self) -> None:
        for key, config in self._configs.items():
            config._experts_implementation_internal = self._before[key]
        for model in self._models:
            for name in _SWITCHES:
                model.__dict__.pop(name, None)

    def check(self) -> None:
        """Raise AttachError where a configuration was switched by hand: other code would then look for the experts."""
        for key in self._names:
            found = self._configs[key]._experts_implementation_internal
            if found != NAME:
                raise AttachError(
                    f"the configuration of an attached model was changed to experts_implementation={found!r}; set it to "
                    f"{NAME!r} again, and call set_experts_implementation({found!r}) of the model"
                )

    def call(self, model: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """A method of the model's class that reads or writes the implementation in its configurations."""
        with self._shown():
            result = getattr(type(model), method)(model, *args, **kwargs)
            found = {key: self._configs[key]._experts_implementation_internal for key in self._names}
        names = {key: self._names[key] if name == NAME else name for key, name in found.items()}
        if names != self._names:
            self.forms, self._names = self._forms_for(names), names
        return result

    def _forms_for(self, names: dict[int, str]) -> list[AnyForm]:
        wanted = ["eager" if own else names[key] for key, own in zip(self._layers, self._own, strict=True)]
        if tuple(wanted) not in self._chosen:
            self._chosen[tuple(wanted)] = self._choose(wanted)
        return self._chosen[tuple(wanted)]

    @contextmanager
    def _shown(self) -> Iterator[None]:
        for key, name in self._names.items():
            self._configs[key]._experts_implementation_internal = name
        try:
            yield
        finally:
            self._hide()

    def _hide(self) -> None:
        for key in self._names:
            self._configs[key]._experts_implementation_internal = NAME


class _Switch:
    """Stands in for one of a model's methods; copies of the model share the cache, and this with it."""

    def __init__(self, implementations: Implementations, model: nn.Module, method: str) -> None:
        self._implementations, self._model, self._method = implementations, model, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._implementations.call(self._model, self._method, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Switch:
        return self
