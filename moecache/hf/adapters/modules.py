"""Experts that are modules of their own, in a ModuleList or ModuleDict: Switch Transformers, NLLB-MoE, and much remote code.

Which experts such a layer calls, and with what, its own code decides. So that code runs twice: the first time its experts
only take note of what they are called with; then they compute, each as it lands, by their own forward; the second time they
give what they have computed. All else that has parameters (router, shared experts) runs once: the second time it gives what
it gave, where it is called with the same. The products, their order and what is made of them are the layer's own, and what
an expert is called with is compared: code of which this is not true is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ...bank import ParamSpec
from ...errors import AttachError, UnsupportedModelError
from ..forms import deep_stand_in, stand_in, stock_forward, without_hooks
from .base import CHANGED, Adapter, ExpertParam, Route, on_meta, token_ids

__all__ = ["ModuleExperts", "experts_within"]


def experts_within(name: str, module: nn.Module) -> dict[str, nn.Module] | None:
    """The experts of a ModuleList or ModuleDict that its name says is one of experts, by their names in it."""
    own = name.rpartition(".")[2]
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) or "expert" not in own or "shared" in own:
        return None
    found = {key: child for key, child in module.named_children() if next(child.parameters(), None) is not None}
    described = {
        (type(child), tuple((key, param.shape, param.dtype) for key, param in child.named_parameters()))
        for child in found.values()
    }
    return found if found and len(described) == 1 else None


class ModuleExperts(Adapter):
    """Experts in a container, which has a forward of its own or lies in the module that has it.

    Parameters
    ----------
    container : str
        Where it lies below the module; empty where it is the module itself.
    experts : mapping of str to nn.Module
        By name in the container.
    scope : nn.Module
        The module, or the nearest around it whose forward takes hidden states alone: what it is tried in.
    path : str
        The module's name below the scope.
    width : int, optional
        Of hidden states, where the configuration says.
    """

    def __init__(
        self, container: str, experts: Mapping[str, nn.Module], scope: nn.Module, path: str, width: int | None
    ) -> None:
        self._container, self._scope, self._path, self._width = container, scope, path, width
        self._number = {key: number for number, key in enumerate(experts)}
        self.num_experts = len(experts)
        prefix = container + "." if container else ""
        first = next(iter(experts.values()))
        self.experts = {
            name: ExpertParam(tuple(f"{prefix}{key}.{name}" for key in experts), False, tuple(param.shape))
            for name, param in first.named_parameters()
        }
        self._keys = list(experts)

    def forward(self, module: nn.Module, route: Route, *args: Any, **kwargs: Any) -> Any:
        hidden = _first_tensor(args, kwargs)
        version, calls, memo = hidden._version, _Calls(self.num_experts), _Memo()
        self._run(module, calls.note, memo, args, kwargs)
        if hidden._version != version:
            raise UnsupportedModelError(
                f"{type(module).__name__} changes its hidden states in place, so that it cannot run twice; expected a "
                "forward that leaves them alone"
            )
        rows = _flat(hidden)
        with route(calls.token_ids(rows), rows[:, :1]) as lease:
            for expert, slot, _ in lease.ready():
                calls.compute(expert, self._expert(module, lease.weights, expert, slot))
        memo.replays = True
        return self._run(module, calls.answer, memo, args, kwargs)

    def trials(
        self, module: nn.Module, specs: Mapping[str, ParamSpec], generator: torch.Generator
    ) -> Iterator[tuple[Any, ...]]:
        dtype = next(iter(specs.values())).dtype
        for shape in ((1, 1), (1, 5), (2, 17)):
            yield (torch.randn((*shape, self.hidden_size(specs)), generator=generator, device="cpu").to(dtype),)

    def hidden_size(self, specs: Mapping[str, ParamSpec]) -> int:
        """Of the rows that experts are given: the configuration's, or what the first matrix takes."""
        return self._width or next(spec.shape[-1] for spec in specs.values() if len(spec.shape) > 1)

    def own_forward(self, module: nn.Module) -> Callable[..., Any]:
        if not self._path:
            return super().own_forward(module)
        return self._in_scope(_Call(module, lambda *args, **kwargs: stock_forward(module)(module, *args, **kwargs)))

    def tried_forward(self, module: nn.Module, route: Route) -> Callable[..., Any]:
        if not self._path:
            return super().tried_forward(module, route)
        return self._in_scope(_Call(module, lambda *args, **kwargs: self.forward(module, route, *args, **kwargs)))

    def _in_scope(self, module: _Call) -> Callable[..., Any]:
        scope = deep_stand_in(without_hooks(self._scope).train(module.training), {}, {self._path: module})
        return lambda *args: type(scope).forward(scope, *args)

    def _run(
        self,
        module: nn.Module,
        called: Callable[[int, tuple[Any, ...], dict[str, Any]], torch.Tensor],
        memo: _Memo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        container = module._modules[self._container] if self._container else module
        sites = _Sites(container._modules, self._number, called)  # type: ignore[union-attr]
        twin = stand_in(module, {}, eager=False)
        if self._container:
            others = {
                key: memo.of(key, child) if child is not None and next(child.parameters(), None) is not None else child
                for key, child in module._modules.items()
                if key != self._container
            }
            listed = stand_in(container, {}, eager=False)  # type: ignore[arg-type]
            listed.__dict__["_modules"] = sites
            twin.__dict__["_modules"] = {**others, self._container: listed}
        else:
            twin.__dict__["_modules"] = sites
        before = dict(twin.__dict__)
        result = stock_forward(module)(twin, *args, **kwargs)
        if memo.replays:  # what the layer keeps of a call, such as its router's logits
            module.__dict__.update(
                {key: value for key, value in twin.__dict__.items() if value is not before.get(key, _ABSENT)}
            )
        return result

    def _expert(self, module: nn.Module, weights: Mapping[str, torch.Tensor], expert: int, slot: int) -> nn.Module:
        container = module._modules[self._container] if self._container else module
        key = self._keys[expert]
        own = container._modules[key]  # type: ignore[union-attr]
        if "_moecache" in module.__dict__:
            changed = next((name for name in self.experts if not on_meta(own, name)), None)  # type: ignore[arg-type]
            if changed is not None:
                raise AttachError(f"expert {key} of this {type(module).__name__}: {changed} {CHANGED}")
        return deep_stand_in(own, {name: weights[name].select(0, slot) for name in self.experts})  # type: ignore[arg-type]


_ABSENT = object()


class _Calls:
    """What each expert is called with, and what it gives, in one forward of a layer."""

    def __init__(self, num_experts: int) -> None:
        self._asked: dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}
        self._given: dict[int, list[Any]] = {}

    def note(self, expert: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        rows = _first_tensor(args, kwargs)
        if rows.numel():
            self._asked.setdefault(expert, []).append((args, kwargs))
        return torch.zeros_like(rows)

    def compute(self, expert: int, module: nn.Module) -> None:
        self._given[expert] = [module(*args, **kwargs) for args, kwargs in self._asked[expert]]

    def answer(self, expert: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not (rows := _first_tensor(args, kwargs)).numel():
            return torch.zeros_like(rows)
        asked, given = self._asked.get(expert), self._given.get(expert)
        if not asked or not given or not _same((args, kwargs), asked.pop(0)):
            raise UnsupportedModelError(
                f"expert {expert} was called with other rows the second time: what this layer gives its experts hangs on "
                "what they return or on chance, so that they cannot be called as they land; run it without a cache"
            )
        return given.pop(0)

    def token_ids(self, hidden: torch.Tensor) -> torch.Tensor:
        """Which experts each row of the hidden states ``[T, H]`` is given to: int64 ``[T, k]``, -1 for none."""
        tokens = len(hidden)
        if tokens == 1 or not self._asked:
            return torch.tensor([sorted(self._asked)] if self._asked else [[-1]] * tokens, device="cpu")
        rows = [
            (expert, _flat(_first_tensor(args, kwargs)))
            for expert, calls in self._asked.items()
            for args, kwargs in calls
        ]
        experts = torch.cat([torch.full((len(row),), expert, device="cpu") for expert, row in rows])
        found = None
        if all(row.shape[1] == hidden.shape[1] and row.dtype == hidden.dtype for _, row in rows):
            found = _same_rows(_keys(hidden), _keys(torch.cat([row for _, row in rows])), experts)
        if found is None:  # the layer changes rows before it gives them to experts: which are whose is not known
            found = torch.cat([torch.arange(len(row), device="cpu") % tokens for _, row in rows])
        return token_ids(found, experts, tokens)


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))


def _flat(rows: torch.Tensor) -> torch.Tensor:
    return rows.detach().reshape(-1, rows.shape[-1])


def _keys(rows: torch.Tensor) -> torch.Tensor:
    """A number for each row ``[n, H]`` that equal bits share, and others but for a chance of 2^-64 do not."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    factors = torch.randint(1 << 62, (rows.shape[1],), generator=torch.Generator().manual_seed(0), device="cpu")
    return (rows.contiguous().view(whole).to(torch.int64) * (factors * 2 + 1).to(rows.device)).sum(dim=1).cpu()


def _same_rows(of: torch.Tensor, keys: torch.Tensor, experts: torch.Tensor) -> torch.Tensor | None:
    """For each key, at which place in `of` it is; what an expert has twice is at two places. None if one is at none."""
    ordered, order = of.sort(stable=True)
    first, last = torch.searchsorted(ordered, keys), torch.searchsorted(ordered, keys, right=True)
    if bool((first == last).any()):
        return None
    by = keys.argsort(stable=True)
    by = by[experts[by].argsort(stable=True)]
    runs = torch.stack([experts[by], keys[by]], dim=1)
    counts = torch.unique_consecutive(runs, dim=0, return_counts=True)[1]
    rank = torch.empty_like(keys)
    rank[by] = torch.arange(len(by)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return order[first + rank % (last - first)]


class _Sites(dict[str, Any]):
    """The experts of a container as its code finds them, each made when it is looked at."""

    def __init__(self, modules: dict[str, Any], number: Mapping[str, int], called: Callable[..., Any]) -> None:
        super().__init__(modules)
        self._number, self._called = number, called

    def __getitem__(self, key: str) -> Any:
        child = super().__getitem__(key)
        return _Site(child, self._number[key], self._called) if key in self._number else child

    def values(self) -> Any:
        return [self[key] for key in self]

    def items(self) -> Any:
        return [(key, self[key]) for key in self]


class _Site:
    """One expert as its layer's code finds it: a call of it is noted, or answered; all else is the expert's own."""

    def __init__(self, expert: nn.Module, number: int, called: Callable[..., Any]) -> None:
        self._expert, self._number, self._called = expert, number, called

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._called(self._number, args, kwargs)

    forward = __call__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._expert, name)


class _Memo:
    """What the modules beside the experts gave in the first run, for the second."""

    def __init__(self) -> None:
        self.replays = False
        self._calls: dict[str, list[tuple[Any, Any]]] = {}

    def of(self, key: str, module: nn.Module) -> _Call:
        return _Call(module, lambda *args, **kwargs: self._call(key, module, args, kwargs))

    def _call(self, key: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls = self._calls.setdefault(key, [])
        if self.replays and calls and _same((args, kwargs), calls[0][0]):
            return calls.pop(0)[1]
        result = module(*args, **kwargs)
        if not self.replays:
            # The layer may go on to write to what it was given.
            calls.append(((args, kwargs), tree_map_only(torch.Tensor, torch.Tensor.clone, result)))
        return result


class _Call:
    """A module as the code around it finds it, with a call of its own."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self._module, self._call = module, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    forward = __call__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _same(found: Any, expected: Any) -> bool:
    pairs = zip(tree_leaves(found), tree_leaves(expected), strict=False)
    return all(
        a is b
        or (
            isinstance(a, torch.Tensor)
            and isinstance(b, torch.Tensor)
            and a.shape == b.shape
            and a.dtype == b.dtype
            and bool(((a == b) | ((a != a) & (b != b))).all())
        )
        or (not isinstance(a, torch.Tensor) and bool(a == b))
        for a, b in pairs
    )
