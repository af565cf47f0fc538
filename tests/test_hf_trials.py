"""Which form computes an experts class: what a check on samples could miss is met, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_families import build
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

import moecache
import moecache.hf
from moecache.errors import AttachError, UnsupportedModelError

IDS = torch.randint(2, 96, (2, 9), generator=torch.Generator().manual_seed(0))
EXPERTS, TOP_K = 8, 2
TABLE = [1.0, 1.0, 1.0, 2.0, 0.5, 1.0, 3.0, 1.0]


def experts_class(change: Callable[..., Any], prepare: Callable[[Any], None] = lambda module: None) -> type[nn.Module]:
    """A dispatched experts class whose products are changed by ``change(module, expert, product, place)``."""

    class OddExperts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = config.num_local_experts
            inner, outer = config.intermediate_size, config.hidden_size
            self.gate_up_proj = nn.Parameter(torch.randn(self.num_experts, 2 * inner, outer) * 0.2)
            self.down_proj = nn.Parameter(torch.randn(self.num_experts, outer, inner) * 0.2)
            self.act_fn = nn.SiLU()
            prepare(self)

        def forward(self, hidden_states, top_k_index, top_k_weights):
            result = torch.zeros_like(hidden_states)
            mask = nn.functional.one_hot(top_k_index, self.num_experts + 1).permute(2, 1, 0)
            for expert in top_k_index.unique().tolist():
                place, token = torch.where(mask[expert])
                gate, up = nn.functional.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
                product = nn.functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
                product = change(self, expert, product, place) * top_k_weights[token, place, None]
                result.index_add_(0, token, product.to(result.dtype))
            return result

    return use_experts_implementation(OddExperts)


def model_with(cls: type[nn.Module]) -> Any:
    model = build("mixtral")
    torch.manual_seed(3)
    for layer in model.model.layers:
        layer.mlp.experts = cls(model.config).eval()
    model.set_experts_implementation("eager")
    return model


def assert_equal_when_attached(model: Any, capacity: int = 4) -> None:
    with torch.no_grad():
        expected = [model(ids).logits for ids in (IDS, IDS[:1, :1])]
        moecache.attach(model, capacity)
        assert all(
            torch.equal(model(ids).logits, logits) for ids, logits in zip((IDS, IDS[:1, :1]), expected, strict=True)
        )


def with_buffer(module: Any) -> None:
    module.register_buffer("scales", torch.tensor(TABLE))


def with_list(module: Any) -> None:
    module.scales = list(TABLE)


def with_dict(module: Any) -> None:
    module.scales = dict(enumerate(TABLE))


def with_norms(module: Any) -> None:
    module.scales = nn.ModuleList(nn.RMSNorm(32) for _ in TABLE)
    for number, norm in enumerate(module.scales):
        nn.init.constant_(norm.weight, 1.0 + number)


@pytest.mark.failure("C9", "77")
@pytest.mark.parametrize("prepare", [with_buffer, with_list, with_dict], ids=lambda f: f.__name__)
def test_state_by_expert_number_beside_the_parameters(prepare) -> None:
    assert_equal_when_attached(model_with(experts_class(lambda m, e, y, _: y * m.scales[e], prepare)))


@pytest.mark.failure("C9")
def test_modules_by_expert_number() -> None:
    assert_equal_when_attached(model_with(experts_class(lambda m, e, y, _: m.scales[e](y), with_norms)))


@pytest.mark.failure("C9", "77")
def test_state_by_expert_number_that_changes_after_attaching() -> None:
    """All ones when the class is tried: only its code says that the list is looked into."""
    model = model_with(experts_class(lambda m, e, y, _: y * m.scales[e], with_list))
    twin = copy.deepcopy(model)
    for layer in (*model.model.layers, *twin.model.layers):
        layer.mlp.experts.scales[:] = [1.0] * EXPERTS
    moecache.attach(model, 4)
    for layer in (*model.model.layers, *twin.model.layers):
        layer.mlp.experts.scales[5] = 4.0
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, twin(IDS).logits)


@pytest.mark.failure("C9")
@pytest.mark.parametrize("threshold", [3, EXPERTS - 1])
def test_branch_on_the_expert_number(threshold: int) -> None:
    assert_equal_when_attached(model_with(experts_class(lambda m, e, y, _: y * 2 if e >= threshold else y)))


@pytest.mark.failure("C9")
def test_flag_that_is_switched_after_attaching() -> None:
    model = model_with(
        experts_class(lambda m, e, y, _: y * 2 if m.doubled else y, lambda m: setattr(m, "doubled", False))
    )
    moecache.attach(model, 4)
    with torch.no_grad():
        before = model(IDS).logits
        for layer in model.model.layers:
            layer.mlp.experts.doubled = True
        assert not torch.equal(model(IDS).logits, before)


@pytest.mark.failure("C9")
def test_dependence_on_the_place_among_the_top_k_is_refused() -> None:
    model = model_with(experts_class(lambda m, e, y, place: y * (1 + (place == TOP_K - 1))[:, None]))
    with pytest.raises(UnsupportedModelError, match="OddExperts: no way was found to compute one expert at a time"):
        moecache.attach(model, 4)
    assert not hasattr(model, "moecache")


@pytest.mark.failure("C9")
@pytest.mark.parametrize("tokens", [1000, 50_000])
def test_dependence_on_the_number_of_tokens_is_refused(tokens: int) -> None:
    cls = experts_class(lambda m, e, y, _: y)
    stock = cls.forward.__wrapped__

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = stock(self, hidden_states, top_k_index, top_k_weights)
        return result * 2 if hidden_states.shape[0] >= tokens else result

    cls.forward.__wrapped__ = forward
    # `tokens` is a cell of the function here; written out it is a constant of its code.
    source = f"def forward(self, h, i, w):\n    y = stock(self, h, i, w)\n    return y * 2 if h.shape[0] >= {tokens} else y\n"
    names: dict[str, Any] = {"stock": stock}
    exec(source, names)  # classes whose source is not to be had are read by their code all the same
    cls.forward.__wrapped__ = names["forward"]
    with pytest.raises(UnsupportedModelError, match="no way was found"):
        moecache.attach(model_with(cls), 4)


@pytest.mark.failure("C9")
def test_values_beyond_a_clamp_and_gate_weights_of_zero() -> None:
    """A clamp is computed by the class itself; skipping weights of zero changes nothing but where products overflow."""
    assert_equal_when_attached(model_with(experts_class(lambda m, e, y, _: y.clamp(-5000.0, 5000.0))))
    cls = experts_class(lambda m, e, y, _: y)
    stock = cls.forward.__wrapped__
    cls.forward.__wrapped__ = lambda self, h, i, w: stock(self, h.clamp(max=3e7), i, w)
    assert_equal_when_attached(model_with(cls))
    cls.forward.__wrapped__ = lambda self, h, i, w: stock(self, h, i, w) + (w == 0).any()
    with pytest.raises(UnsupportedModelError, match="no way was found"):
        moecache.attach(model_with(cls), 4)


@pytest.mark.failure("C9", "120")
def test_dropout_inside_experts_is_refused_in_training_only() -> None:
    model = model_with(experts_class(lambda m, e, y, _: nn.functional.dropout(y, 0.5, m.training)))
    assert_equal_when_attached(model)
    model.train()
    with (
        pytest.raises(AttachError, match=r"OddExperts computes otherwise in training mode.*model\.eval\(\)"),
        torch.no_grad(),
    ):
        model(IDS)
    model.eval()
    with torch.no_grad():
        model(IDS)


@pytest.mark.failure("C9")
def test_layers_of_one_class_that_differ() -> None:
    """Attributes, activations, methods of one instance, buffers: each layer is tried with its own."""

    def prepare(module: Any) -> None:
        module.alpha = 1.0
        with_buffer(module)

    model = model_with(experts_class(lambda m, e, y, _: y * m.alpha + m.scales[e], prepare))
    experts = model.model.layers[1].mlp.experts
    experts.alpha, experts.act_fn = 1.5, nn.GELU()
    experts.scales[3] = 7.0
    assert_equal_when_attached(model)

    model = build("mixtral")
    model.set_experts_implementation("eager")
    model.model.layers[1].mlp.experts.act_fn = nn.ReLU()
    assert_equal_when_attached(model)


@pytest.mark.failure("C9")
def test_method_of_one_instance_is_used() -> None:
    """gpt-oss calls its gate as a method: one that an instance brings itself is what both compute with."""
    model = build("gpt_oss")
    model.set_experts_implementation("eager")
    experts = model.model.layers[1].mlp.experts
    experts._apply_gate = lambda gate_up: gate_up[..., ::2] * gate_up[..., 1::2]
    assert_equal_when_attached(model)


@pytest.mark.failure("C9", "72")
def test_forward_of_one_instance_is_refused() -> None:
    model = build("mixtral")
    experts = model.model.layers[1].mlp.experts
    experts.forward = lambda hidden, ids, scales: hidden
    with pytest.raises(
        UnsupportedModelError, match=r"model\.layers\.1\.mlp\.experts: the forward of this instance was re"
    ):
        moecache.attach(model, 4)


@pytest.mark.failure("C9", "137")
def test_trying_leaves_no_trace() -> None:
    """Buffers that a forward writes to, the random state, and the defaults of the caller."""

    def counted(module: Any, expert: int, product: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        module.used[expert] += len(place)
        return product

    model = model_with(experts_class(counted, lambda m: m.register_buffer("used", torch.zeros(EXPERTS))))
    state = torch.get_rng_state()
    moecache.attach(model, 4)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(int(layer.mlp.experts.used.sum()) == 0 for layer in model.model.layers)
    with torch.no_grad():
        model(IDS)
    assert all(int(layer.mlp.experts.used.sum()) == IDS.numel() * TOP_K for layer in model.model.layers)
    assert "moecache" in ALL_EXPERTS_FUNCTIONS.valid_keys()


@pytest.mark.failure("H30")
@pytest.mark.parametrize("value", [[2, 2], 2])
def test_experts_per_token_as_a_list(value: Any) -> None:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    config = AutoConfig.for_model(
        "hunyuan_v1_moe", vocab_size=96, num_key_value_heads=2, num_experts=6, moe_topk=value, pad_token_id=0, **sizes
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        expected = model(IDS).logits
        assert moecache.attach(model, 4).top_k == 2
        assert torch.equal(model(IDS).logits, expected)
