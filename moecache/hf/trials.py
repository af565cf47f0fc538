"""Which form is right for an experts module: read from its forward, then tried against it bit by bit.

A trial can only miss what it does not meet. So every expert is tried by its number, with the model's own top-k; rows
and gate weights span what clamps and branches distinguish; the constants in the forward's code are tried from both
sides; and a forward that reads anything a form does not know of is only computed by itself.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..bank import ExpertBank, ParamSpec
from ..errors import UnsupportedModelError
from .adapters.tried import AdapterForm, try_adapter
from .by_place import PlaceForm, place_forms
from .discovery import ExpertsLayer
from .forms import Form, by_flags, by_stock, by_stock_in_float32, flag, plain, stand_in, stock_forward
from .shuffled import TRIAL_ERRORS, ShuffledLease, random_slots, same_bits, undisturbed

__all__ = ["AnyForm", "choose_form", "choose_forms"]

_KNOWN = {"num_experts", "act_fn", "_apply_gate", "post_expert_norm"}  # besides the bank's parameters
_MOST_TOKENS = 1 << 17
_MAGNITUDES = (1.0, 1e-3, 30.0, 1e4, 1e8, 0.0)


AnyForm = Form | PlaceForm | AdapterForm


class _Batch(NamedTuple):
    rows: torch.Tensor
    ids: torch.Tensor
    scale: torch.Tensor


def choose_forms(
    layers: Sequence[ExpertsLayer],
    bank: ExpertBank,
    top_k: int | None,
    device: torch.device,
    implementations: Sequence[str],
) -> list[AnyForm]:
    """A form for each layer; modules that are alike in all but their experts' parameters share a trial.

    Parameters
    ----------
    layers : sequence of ExpertsLayer
    bank : ExpertBank
    top_k, device
        See :func:`choose_form`.
    implementations : sequence of str
        Of each module, as transformers names them.
    """
    forms: list[AnyForm] = []
    tried: dict[Any, frozenset[str]] = {}  # adapters: what they refuse, by what may differ
    for number, layer in enumerate(layers):
        group, module = bank.layer_group[number], layer.module
        if layer.adapter is not None:
            key = type(layer.adapter), type(module), group
            if key not in tried:
                tried[key] = try_adapter(layer.adapter, module, bank.shape_groups[group], device).refuses
            forms.append(AdapterForm(layer.adapter, tried[key]))
            continue
        twin = next(
            (
                i
                for i in range(number)
                if bank.layer_group[i] == group
                and implementations[i] == implementations[number]
                and _alike(module, layers[i].module, set(bank.shape_groups[group]))
            ),
            None,
        )
        forms.append(
            choose_form(module, bank.shape_groups[group], device, top_k, implementations[number])
            if twin is None
            else forms[twin]
        )
    return forms


def choose_form(
    module: nn.Module,
    specs: Mapping[str, ParamSpec],
    device: torch.device,
    top_k: int | None = None,
    implementation: str = "eager",
) -> Form | PlaceForm:
    """The cheapest way to compute this module that equals an experts implementation bit by bit.

    Parameters
    ----------
    module : nn.Module
        Its expert parameters may be on the meta device.
    specs : mapping of str to ParamSpec
        Of one expert's parameters.
    device : torch.device
        Where it will run.
    top_k : int, optional
        Experts per token, where the model says.
    implementation : str
        ``"eager"``, which is the class's own forward, or what transformers calls ``grouped_mm``, ``batched_mm`` and so on.

    Raises
    ------
    UnsupportedModelError
        There is none.
    """
    _check_floats(module, specs)
    extra = sorted(_names_read(module) - _KNOWN - set(specs))
    reasons = []
    with undisturbed(device):
        factor = _common_factor(specs)
        # Another order of the same products is equal in all sizes; other products need not be.
        real = (
            None
            if implementation == "eager" or factor == 1
            else _Trial(module, specs, 1, device, top_k, implementation)
        )
        for shrink in dict.fromkeys((factor, 1)):
            trial = _Trial(module, specs, shrink, device, top_k, implementation)
            candidates: Iterable[Form | PlaceForm] = (
                _forms(module, specs, only_stock=bool(extra))
                if implementation == "eager"
                else place_forms(module, specs, implementation, device)
            )
            for form in candidates:
                try:
                    if trial.passes(form) and (
                        not isinstance(form, PlaceForm) or real is None or real.passes_briefly(form)
                    ):
                        return form._replace(refuses=trial.refused(form))
                except TRIAL_ERRORS as error:
                    reasons.append(f"{_name(form)}: {str(error)[:200]}")
    detail = f" ({reasons[-1]})" if reasons else ""
    if implementation != "eager":
        raise UnsupportedModelError(
            f"{type(module).__name__}: no way was found to compute one expert at a time with the bits of "
            f"experts_implementation={implementation!r}{detail}; "
            "attach(model, experts_implementation='eager') gives those of its own forward"
        )
    extra_names = f"; its forward reads {', '.join(extra[:8])}" if extra else ""
    raise UnsupportedModelError(
        f"{type(module).__name__}: no way was found to compute one expert at a time with the bits of its own "
        f"forward{extra_names}{detail}"
    )


def _name(form: Form | PlaceForm) -> str:
    return form.name if isinstance(form, PlaceForm) else form.product.__name__


def _check_floats(module: nn.Module, specs: Mapping[str, ParamSpec]) -> None:
    quantised = {
        name: spec.dtype for name, spec in specs.items() if spec.dtype.itemsize < 2 or not spec.dtype.is_floating_point
    }
    if quantised:
        raise UnsupportedModelError(
            f"{type(module).__name__}: experts of {quantised} cannot be computed; expected floats"
        )


def _forms(module: Any, specs: Mapping[str, ParamSpec], *, only_stock: bool) -> Iterator[Form]:
    if not only_stock:
        plain_flags = flag(module, "has_gate", True) and not (
            flag(module, "has_bias") or flag(module, "is_transposed") or flag(module, "has_post_expert_norm")
        )
        if plain_flags and set(specs) == {"gate_up_proj", "down_proj"}:
            yield Form(plain, "input")
            yield Form(plain, "float32")
        yield Form(by_flags, "input")
        yield Form(by_flags, "scale")
        yield Form(by_flags, "float32")
    yield Form(by_stock, "input")
    yield Form(by_stock_in_float32, "float32")


def _common_factor(specs: Mapping[str, ParamSpec]) -> int:
    """By how much all sizes can shrink and keep their ratios; multiples of 16 remain."""
    return max(1, math.gcd(*(size for spec in specs.values() for size in spec.shape)) // 16)


class _Trial:
    """One experts module with random weights for all its experts, and the batches that forms are tried on."""

    def __init__(
        self,
        module: nn.Module,
        specs: Mapping[str, ParamSpec],
        shrink: int,
        device: torch.device,
        top_k: int | None,
        implementation: str,
    ) -> None:
        self._generator = torch.Generator("cpu").manual_seed(0)
        self._device = device
        self._experts = int(module.num_experts)  # type: ignore[arg-type]
        # Expert e lies in slot e + 1, so that what takes one for the other is seen.
        self._slots = {
            name: random_slots(
                [size // shrink for size in spec.shape], self._experts, spec.dtype, device, self._generator
            )
            for name, spec in specs.items()
        }
        self._weights = {name: tensor[1:] for name, tensor in self._slots.items()}
        self._stock = _isolated(module, self._weights)
        self._run: Callable[..., torch.Tensor] = (
            stock_forward(module) if implementation == "eager" else ALL_EXPERTS_FUNCTIONS[implementation]
        )
        self._subject = _isolated(module, {})
        self._dtype = next(iter(self._weights.values())).dtype
        first = self._weights.get("down_proj", next(iter(self._weights.values())))
        self._hidden = first.shape[-1 if flag(module, "is_transposed") else 1]
        numbers = _constants(module)
        self._magnitudes = (*_MAGNITUDES, *sorted({abs(n) for n in numbers if 1 < abs(n) < 1e30}))
        self._boundaries = sorted({int(n) for n in numbers if n == int(n) and 3 < n <= _MOST_TOKENS})
        self._top_k = min(top_k or 8, self._experts)

    def passes(self, form: Form | PlaceForm) -> bool:
        return all(self._equal(form, batch) for batch in self._batches())

    def passes_briefly(self, form: PlaceForm) -> bool:
        # batched_mm copies the weights of every token's experts, which are large here.
        lengths = (1, 3) if form.name == "grouped_mm" else (1,)
        return all(self._equal(form, self._batch(self._ids(tokens, self._top_k), self._dtype)) for tokens in lengths)

    def refused(self, form: Form | PlaceForm) -> frozenset[str]:
        """Ways of running in which this form's bits are not the module's, though they are otherwise."""
        batches = [self._batch(self._ids(tokens, self._top_k), self._dtype) for tokens in (1, 17)]
        found = set()
        for twin in (self._stock, self._subject):
            twin.__dict__["training"] = True
        if not self._all_equal(form, batches):
            found.add("training")
        for twin in (self._stock, self._subject):
            twin.__dict__["training"] = False
        with torch.autocast(self._device.type, torch.bfloat16):
            if not self._all_equal(form, batches):
                found.add("autocast")
        return frozenset(found)

    def _all_equal(self, form: Form | PlaceForm, batches: Sequence[_Batch]) -> bool:
        for batch in batches:
            try:
                expected = self._forward(batch)
            except TRIAL_ERRORS:
                continue  # the model's own forward fails there as well, and says so
            try:
                if not all(same_bits(found, expected) for found in self._found(form, batch)):
                    return False
            except TRIAL_ERRORS:
                return False
        return True

    def _equal(self, form: Form | PlaceForm, batch: _Batch) -> bool:
        try:
            expected = self._forward(batch)
        except TRIAL_ERRORS:
            if len(batch.ids):
                raise
            return True  # the implementation cannot run without tokens either
        return all(same_bits(found, expected) for found in self._found(form, batch))

    def _forward(self, batch: _Batch) -> torch.Tensor:
        return self._run(self._stock, *batch)

    def _found(self, form: Form | PlaceForm, batch: _Batch) -> Iterator[torch.Tensor]:
        # As a step computes whose experts land one after another, and as one whose experts are all resident.
        yield form.run(self._subject, ShuffledLease(self._slots, batch.ids, missing=1), *batch)
        if isinstance(form, PlaceForm):
            yield form.run(self._subject, ShuffledLease(self._slots, batch.ids, missing=0), *batch)

    def _batches(self) -> Iterator[_Batch]:
        for scale_dtype in dict.fromkeys((self._dtype, torch.float32)):
            for tokens, top_k in ((1, 1), (1, self._top_k), (3, min(2, self._experts)), (17, self._top_k)):
                yield self._batch(self._ids(tokens, top_k), scale_dtype)
        yield self._batch(self._every_expert(), self._dtype)
        repeated = self._ids(5, min(2, self._top_k))
        yield self._batch(repeated[:, :1].expand_as(repeated).contiguous(), self._dtype)
        # Long prompts, and as many tokens as the code may distinguish, most of them of one expert.
        lengths = {0, 1030, *(n + step for n in self._boundaries[:12] for step in (-1, 0, 1))}
        for number in sorted(lengths):
            ids = self._ids(number, self._top_k if number < 4096 else 1)
            ids[: number - number // 8, 0] = self._experts - 1
            yield self._batch(ids, self._dtype)

    def _random(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        values = torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")
        return values.to(dtype=dtype, device=self._device)

    def _ids(self, tokens: int, top_k: int) -> torch.Tensor:
        if tokens > 2048:
            first = torch.randint(self._experts, (tokens, 1), generator=self._generator, device="cpu")
            return (first + torch.arange(top_k, device="cpu")) % self._experts
        order = torch.rand((tokens, self._experts), generator=self._generator, dtype=torch.float32, device="cpu")
        return order.argsort(dim=1)[:, :top_k].contiguous()

    def _every_expert(self) -> torch.Tensor:
        rows = -(-self._experts // self._top_k)
        ids = torch.randperm(self._experts, generator=self._generator, device="cpu")
        return torch.cat([ids, ids[: rows * self._top_k - self._experts]]).reshape(self._top_k, rows).t().contiguous()

    def _batch(self, ids: torch.Tensor, scale_dtype: torch.dtype) -> _Batch:
        tokens, top_k = ids.shape
        rows = self._random(tokens, self._hidden, dtype=torch.float32)
        sizes = torch.tensor(self._magnitudes, dtype=torch.float32, device=self._device)
        if tokens > 1:  # one token is the commonest case and is tried as it commonly is
            rows *= sizes[torch.arange(tokens, device=self._device) % len(sizes), None]
        scale = self._random(tokens, top_k, dtype=scale_dtype)
        if scale.numel() > 4:
            scale.view(-1)[1::5], scale.view(-1)[3::7] = 0.0, 1.0
        return _Batch(rows.to(self._dtype), ids.to(self._device), scale)


def _isolated(module: nn.Module, params: Mapping[str, torch.Tensor]) -> nn.Module:
    """A stand-in that evaluates, whose buffers a trial may write to."""
    twin = stand_in(module, params)
    twin.__dict__["training"] = False
    twin.__dict__["_buffers"] = {
        name: None if buffer is None else buffer.detach().clone() for name, buffer in module._buffers.items()
    }
    return twin


def _codes(module: nn.Module) -> list[types.CodeType]:
    """The code of a module's eager forward and of what it calls that is written in Python beside it."""
    forward = stock_forward(module)
    queue: list[Any] = [forward]
    seen: dict[int, types.CodeType] = {}
    while queue:
        function = queue.pop()
        function = getattr(function, "__func__", function)
        nested = [function.__code__]
        while nested:
            code = nested.pop()
            if id(code) in seen or len(seen) > 64:
                continue
            seen[id(code)] = code
            nested += [const for const in code.co_consts if isinstance(const, types.CodeType)]
            for name in code.co_names:
                called = _member(module, name) if _has(module, name) else function.__globals__.get(name)
                if isinstance(getattr(called, "__func__", called), types.FunctionType):
                    queue.append(called)
        queue += [cell for cell in _cells(function) if isinstance(cell, types.FunctionType)]
    return list(seen.values())


def _cells(function: Any) -> list[Any]:
    cells = []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not bound yet
            continue
    return cells


def _has(module: nn.Module, name: str) -> bool:
    """Whether a name is the module's own: not what every nn.Module has."""
    stored = (module.__dict__, module._parameters, module._buffers, module._modules)
    return any(name in names for names in stored) or any(
        name in vars(cls) for cls in type(module).__mro__ if cls not in nn.Module.__mro__
    )


def _member(module: nn.Module, name: str) -> Any:
    found = module.__dict__.get(name)
    for cls in type(module).__mro__:
        if found is None and cls not in nn.Module.__mro__:
            found = vars(cls).get(name)
    return found


def _names_read(module: nn.Module) -> set[str]:
    """What a module's eager forward may read: of the module, of its file, of what encloses it."""
    forward: Any = stock_forward(module)
    names = set(forward.__code__.co_freevars)
    nested = [forward.__code__]
    while nested:
        code = nested.pop()
        nested += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        texts = {const for const in code.co_consts if isinstance(const, str) and const.isidentifier()}
        names |= {name for name in {*code.co_names, *texts} if _has(module, name)}
        names |= {
            name
            for name in code.co_names
            if name in forward.__globals__ and not isinstance(forward.__globals__[name], types.ModuleType)
        }
    return names


def _constants(module: nn.Module) -> set[float]:
    """Numbers that a module's eager forward may compare with: in its code, and in attributes that the code names."""
    numbers: set[float] = set()
    for code in _codes(module):
        values = [*code.co_consts, *(const for const in code.co_consts if isinstance(const, tuple) for const in const)]
        values += [module.__dict__.get(name) for name in code.co_names if name != "num_experts"]
        numbers.update(
            v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v)
        )
    return numbers


def _alike(one: Any, other: Any, but: Collection[str] = ()) -> bool:
    """Whether two modules, or what they hold, are equal in all but the parameters named."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        meta = one.is_meta or other.is_meta
        return not meta and one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, nn.Module):
        mine = {**vars(one), "_parameters": {k: v for k, v in one._parameters.items() if k not in but}}
        its = {**vars(other), "_parameters": {k: v for k, v in other._parameters.items() if k not in but}}
        for private in ("_moecache_pending", "_moecache_whole"):
            mine.pop(private, None)
            its.pop(private, None)
        return _alike(mine, its)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, (int, float, complex, str, bytes, set, frozenset, torch.dtype, torch.device)):
        return bool(one == other)
    return False
