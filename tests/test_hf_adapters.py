"""Experts that do not lie, or are not called, as transformers' experts interface has them: the same bits, from a cache."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_families import aligned
from hf_other_families import BY_CLASS, DISPATCH, build_by_class, inputs
from remote_code import modeling_tiny
from safetensors.torch import load_file
from torch import nn

import moecache
import moecache.hf
from moecache.errors import AttachError, RoutingError, UnsupportedModelError
from moecache.hf.discovery import discover, experts_per_token

IDS = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))
REMOTE = [family for family in BY_CLASS if family.startswith("remote")]


@torch.no_grad()
def run(model: Any) -> list[torch.Tensor]:
    """A batch, one token, and an answer of twelve: every logit and every token."""
    found = []
    for ids in (IDS, IDS[:1, :1]):
        output = model(**inputs(model, ids))
        found.append(output.logits if hasattr(output, "logits") else output.last_hidden_state)
    if hasattr(model, "generate") and model.config.model_type != "diffusion_gemma":
        options = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        output = model.generate(IDS, **options)
        found += [output.sequences, *output.logits]
    return found


def assert_runs_from(cache: moecache.ExpertCache, model: Any, expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(run(model), expected, strict=True))
    stats = cache.stats()
    assert stats.misses > 0
    if cache.capacity < sum(cache.num_experts):
        assert stats.evictions > 0
        assert stats.resident_bytes < stats.expert_bytes_total


def few(model: Any) -> int:
    """Slots for the experts of one token and one more, of every shape that experts have."""
    layers = discover(model)
    shapes = {tuple((key, param.shape) for key, param in layer.experts.items()) for layer in layers}
    return len(shapes) * (1 + max(experts_per_token(layer.config) or 1 for layer in layers))


@pytest.mark.failure("70", "72", "107")
@pytest.mark.parametrize("family", BY_CLASS)
def test_bit_equal_from_memory_and_from_disk(family: str, tmp_path: Path) -> None:
    """`make matrix` does so with both dtypes, all ways of loading and all resident."""
    dtype = torch.bfloat16
    build_by_class(family, dtype).save_pretrained(tmp_path)
    cls = BY_CLASS[family]()[0]
    model = aligned(cls.from_pretrained(tmp_path, dtype=dtype))
    expected = run(model)
    kept_out = aligned(cls.from_pretrained(tmp_path, dtype=dtype, experts_implementation="moecache"))
    before = sum(param.nbytes for param in kept_out.parameters() if not param.is_meta)
    assert before < sum(param.nbytes for param in model.parameters())
    for subject, bank in ((model, "ram"), (kept_out, "disk")):
        cache = moecache.attach(subject, few(subject), bank=bank)
        assert cache.bank.location == bank
        assert_runs_from(cache, subject, expected)
        moecache.detach(subject)
    assert all(torch.equal(a, b) for a, b in zip(run(model), expected, strict=True))


@pytest.mark.failure("70", "121")
@pytest.mark.parametrize("family", BY_CLASS)
def test_state_dict_is_what_it_was(family: str, tmp_path: Path) -> None:
    model = build_by_class(family)
    model.save_pretrained(tmp_path / "before")
    moecache.attach(model, few(model))
    model.save_pretrained(tmp_path / "attached")
    moecache.detach(model)
    before, attached = (load_file(tmp_path / name / "model.safetensors") for name in ("before", "attached"))
    assert before.keys() == attached.keys()
    unread = {name for name in before if ".experts.6." in name or ".experts.7." in name}  # of identity experts
    assert all(torch.equal(tensor, attached[name]) for name, tensor in before.items() if name not in unread)


@pytest.mark.failure("70", "72")
@pytest.mark.parametrize("block", ["masks", "sorted", "residual"])
def test_remote_code(block: str, tmp_path: Path) -> None:
    """As ``trust_remote_code=True`` loads it: a class that nothing here has seen before."""
    build_by_class(f"remote code, {'sorted rows' if block == 'sorted' else block}").save_pretrained(tmp_path)
    shutil.copy(modeling_tiny.__file__, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    names = {"AutoConfig": "TinyConfig", "AutoModelForCausalLM": "TinyForCausalLM"}
    config["auto_map"] = {auto: f"modeling_tiny.{name}" for auto, name in names.items()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    auto = transformers.AutoModelForCausalLM
    expected = run(aligned(auto.from_pretrained(tmp_path, trust_remote_code=True)))
    model = aligned(auto.from_pretrained(tmp_path, trust_remote_code=True, experts_implementation="moecache"))
    assert type(model) is not modeling_tiny.TinyForCausalLM
    with pytest.raises(AttachError, match=r"the experts of this \w+Block are not in memory; .*attach"):
        model(IDS)
    cache = moecache.attach(model, 3, bank="disk")
    assert_runs_from(cache, model, expected)
    twin = copy.deepcopy(model)
    assert all(torch.equal(a, b) for a, b in zip(run(twin), expected, strict=True))
    moecache.detach(model)


@pytest.mark.failure("70")
@torch.no_grad()
def test_router_and_shared_experts_run_once_and_rows_are_counted_by_token() -> None:
    model = build_by_class("remote code, sorted rows")
    calls: list[str] = []
    block = model.layers[0].mlp
    for name in ("gate", "shared_experts"):
        block.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.append(name))
    model(IDS)
    assert calls == ["gate", "shared_experts"]
    cache = moecache.attach(model, 3)
    seen = []
    route = moecache.RequestBatch.route

    def noted(self: Any, layer: int, ids: torch.Tensor, **options: Any) -> Any:
        seen.append(ids)
        return route(self, layer, ids, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moecache.RequestBatch, "route", noted)
        model(IDS)
    assert calls == ["gate", "shared_experts"] * 2
    hidden: list[torch.Tensor] = []
    moecache.detach(model)
    block.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    model(IDS)
    scores = block.gate(hidden[0].view(-1, 32))
    assert torch.equal(seen[0], scores.topk(2, dim=-1).indices.sort(dim=-1).values)
    assert cache.stats().misses > 0


@pytest.mark.failure("70")
@torch.no_grad()
def test_what_a_layer_keeps_of_a_call_is_kept() -> None:
    model = build_by_class("remote code, residual")
    model(IDS)
    expected = model.layers[1].mlp.last_logits
    model.layers[1].mlp.last_logits = None
    moecache.attach(model, 3)
    model(IDS)
    assert torch.equal(model.layers[1].mlp.last_logits, expected)


class Chained(modeling_tiny.ResidualBlock):
    """Gives the second expert what the first returns."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        for expert in self.experts.values():
            hidden_states = expert(hidden_states)
        return hidden_states, None


class Overwriting(modeling_tiny.ResidualBlock):
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(hidden_states.mul_(0.5))


class Grouped(nn.Module):
    """A class of tomorrow: dispatched, called as all are, with parameters that nobody knows."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.packed = nn.Parameter(torch.randn(3, 32, 32))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return hidden_states @ self.packed[0]


@pytest.mark.failure("72", "108")
@pytest.mark.parametrize(
    ("cls", "reason"),
    [(Chained, "was called with other rows the second time"), (Overwriting, "changes its hidden states in place")],
)
def test_layers_that_cannot_be_paged_are_refused_by_name(cls: type, reason: str) -> None:
    model = build_by_class("remote code, residual")
    for layer in model.layers:
        layer.mlp = cls(model.config)
    before = {name: param.data_ptr() for name, param in model.named_parameters()}
    with pytest.raises(UnsupportedModelError, match=rf"{cls.__name__}: no way was found .*{reason}"):
        moecache.attach(model, 3)
    assert {name: param.data_ptr() for name, param in model.named_parameters()} == before
    assert not hasattr(model, "moecache")
    with torch.no_grad():
        model(IDS)


@pytest.mark.failure("72", "108")
def test_parameters_that_nobody_knows_are_said() -> None:
    model = build_by_class("remote code, masks")
    dispatched = transformers.integrations.use_experts_implementation(Grouped)
    model.layers[1].mlp.experts = dispatched(model.config)
    with pytest.raises(
        UnsupportedModelError,
        match=r"experts \(Grouped\): expected parameters with one row for each of 6 experts, found",
    ):
        moecache.attach(model, 3)


@pytest.mark.failure("68", "72")
def test_two_classes_of_experts_in_one_model() -> None:
    """A ModuleList in one layer, stacked parameters that dispatch in the other."""
    model = build_by_class("remote code, masks")
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=16, num_local_experts=6, num_experts_per_tok=2, hidden_act="silu"
    )
    config._experts_implementation = "grouped_mm"
    block = transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock(config).eval()
    with torch.no_grad():
        for param in block.parameters():
            param.normal_(0.0, 0.2)
    forward = type(block).forward

    class Pair(type(block)):
        def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
            return forward(self, hidden_states), None

    block.__class__ = Pair
    model.layers[1].mlp = block
    aligned(model)
    expected = run(model)
    cache = moecache.attach(model, 5)
    assert cache.bank.layer_group == (0, 1)
    assert_runs_from(cache, model, expected)
    model.set_experts_implementation("eager")
    moecache.detach(model)


@pytest.mark.failure("65", "82")
@torch.no_grad()
def test_changed_experts_and_foreign_ids_are_refused() -> None:
    model = build_by_class("switch_transformers")
    cache = moecache.attach(model, 4)
    experts = cache.bank.layer_names
    assert [name.split(".")[0] for name in experts] == ["encoder", "decoder"]
    container = model.get_submodule(experts[1])
    kept = {key: expert.wi.weight for key, expert in container.items()}
    for expert in container.values():
        expert.wi.weight = nn.Parameter(torch.ones(16, 32))
    with pytest.raises(AttachError, match=r"expert_\d of this SwitchTransformersExperts: wi\.weight was replaced"):
        model(**inputs(model, IDS))
    for key, expert in container.items():
        expert.wi.weight = kept[key]
    model(**inputs(model, IDS))
    other = build_by_class("dbrx")
    moecache.attach(other, 4)
    module = other.transformer.blocks[0].ffn.experts
    for wrong, reason in ((-7, "out of range"), (6, "the router named expert 6; expected 0 to 5")):
        with pytest.raises(RoutingError, match=reason):
            module(torch.randn(1, 3, 32), torch.tensor([[0, wrong]] * 3), torch.ones(3, 2))
    with pytest.raises(AttachError, match="cannot go from"):
        container.half()
    for family in set(BY_CLASS) - {*DISPATCH, *REMOTE}:
        single = build_by_class(family)
        with pytest.raises(AttachError, match=r"computes by itself.*expected .*'eager' or None"):
            moecache.attach(single, 5, experts_implementation="grouped_mm")
