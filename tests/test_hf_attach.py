"""Attaching: what is refused and why, what is restored, and that models do not disturb each other."""

from __future__ import annotations

import copy
import logging
import threading
import warnings
from pathlib import Path

import pytest
import torch
from hf_families import aligned, build, left_padded, load_empty, load_resident, save
from torch import nn

import moecache
import moecache.hf
from moecache.errors import AttachError, CapacityError, CheckpointError, ClosedError, UnsupportedModelError

IDS = torch.randint(2, 96, (1, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    return save("mixtral", tmp_path / "mixtral")


@pytest.mark.failure("121")
def test_attach_twice(mixtral: Path) -> None:
    model = load_empty(mixtral)
    cache = moecache.attach(model, 4)
    with pytest.raises(AttachError, match="attached already"):
        moecache.attach(model, 4)
    assert not cache.closed
    with torch.no_grad():
        model(IDS)


@pytest.mark.failure("121")
@pytest.mark.parametrize("bank", ["disk", "ram"])
@pytest.mark.failure("121", "107")
def test_attach_detach_attach(mixtral: Path, bank: str) -> None:
    eager, model = load_resident(mixtral), load_empty(mixtral)
    for capacity in (4, 6):
        assert moecache.attach(model, capacity, bank=bank).capacity == capacity
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, eager(IDS).logits)
        moecache.detach(model)
        assert not hasattr(model, "moecache")
    with pytest.raises(AttachError, match="are not in memory"), torch.no_grad():
        model(IDS)
    with pytest.raises(AttachError, match="not attached"):
        moecache.detach(model)


@pytest.mark.failure("72", "108")
def test_model_without_moe_layers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has no MoE layers"):
        moecache.attach(LlamaForCausalLM(config))


@pytest.mark.failure("67", "72")
def test_dropout_is_refused_when_the_model_runs_in_training_mode() -> None:
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2, "num_experts": 2}
    config = SwitchTransformersConfig(**sizes, num_layers=2, num_sparse_encoder_layers=1, dropout_rate=0.5)
    model = SwitchTransformersForConditionalGeneration(config).train()
    moecache.attach(model, 2)
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        with pytest.raises(AttachError, match="computes otherwise in training mode"):
            model(input_ids=ids, decoder_input_ids=ids)
        model.eval()(input_ids=ids, decoder_input_ids=ids)


def test_use_after_close(mixtral: Path) -> None:
    model = load_empty(mixtral)
    cache = moecache.attach(model, 4)
    cache.close()
    with pytest.raises(ClosedError), torch.no_grad():
        model(IDS)
    moecache.detach(model)
    moecache.attach(model, 4)
    with torch.no_grad():
        model(IDS)


def test_impossible_capacity_changes_nothing(mixtral: Path) -> None:
    model = load_resident(mixtral)
    with pytest.raises(CapacityError):
        moecache.attach(model, 1)
    assert model.config._experts_implementation == "grouped_mm"
    assert not hasattr(model, "moecache")
    with torch.no_grad():
        model(IDS)


@pytest.mark.failure("111")
def test_meta_experts_without_a_checkpoint(mixtral: Path) -> None:
    model = load_resident(mixtral)
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.detach().to("meta"), requires_grad=False)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.down_proj: is on the meta device"):
        moecache.attach(model, 4)


def test_disk_bank_needs_experts_kept_out(mixtral: Path) -> None:
    with pytest.raises(AttachError, match=r"bank='disk' needs .*experts_implementation='moecache'"):
        moecache.attach(load_resident(mixtral), 4, bank="disk")
    with pytest.raises(AttachError, match="expected 'disk', 'ram' or None"):
        moecache.attach(load_resident(mixtral), 4, bank="tape")  # type: ignore[arg-type]


@pytest.mark.failure("112")
def test_accelerate_hooks_are_refused(mixtral: Path) -> None:
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    model = load_resident(mixtral)
    hooks.add_hook_to_module(model.model.layers[0].mlp.experts, hooks.ModelHook())
    with pytest.raises(AttachError, match=r"accelerate has hooks on model\.layers\.0\.mlp\.experts"):
        moecache.attach(model, 4)


@pytest.mark.failure("81", "118")
def test_wrapped_expert_parameters_are_refused(mixtral: Path) -> None:
    model = load_resident(mixtral)

    class Adapter(nn.Module):
        def __init__(self, base_layer: nn.Module) -> None:
            super().__init__()
            self.base_layer = base_layer

        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            return self.base_layer(*args) + 1

    block = model.model.layers[0].mlp
    block.experts = Adapter(block.experts)
    with pytest.raises(UnsupportedModelError, match="parameters are wrapped"):
        moecache.attach(model, 4)

    model = load_resident(mixtral)
    nn.utils.parametrize.register_parametrization(model.model.layers[0].mlp.experts, "down_proj", nn.Identity())
    with pytest.raises(UnsupportedModelError):
        moecache.attach(model, 4)


@pytest.mark.failure("81", "80")
def test_parameter_of_a_tensor_subclass_is_refused(mixtral: Path) -> None:
    class Quantised(torch.Tensor):
        pass

    model = load_resident(mixtral)
    experts = model.model.layers[0].mlp.experts
    experts._parameters["down_proj"] = nn.Parameter(experts.down_proj.detach().as_subclass(Quantised))
    with pytest.raises(UnsupportedModelError, match="down_proj is a Quantised"):
        moecache.attach(model, 4)


@pytest.mark.failure("112")
@pytest.mark.parametrize(
    "cast",
    [
        lambda model: model.half(),
        lambda model: model.to(torch.bfloat16),
        lambda model: model.double(),
        lambda model: model.to("meta"),
        lambda model: model.model.layers[0].half(),
        lambda model: model.model.layers[1].mlp.experts.to(torch.float16),
    ],
)
@pytest.mark.failure("112")
def test_casts_are_refused(mixtral: Path, cast) -> None:
    model = load_empty(mixtral)
    moecache.attach(model, 4)
    with pytest.raises(AttachError, match=r"an attached model cannot go from torch\.float32"):
        cast(model)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert model.to("cpu") is model
    assert model.float() is model
    assert model.to(torch.float32) is model
    with torch.no_grad():
        model(IDS)
    moecache.detach(model)
    assert model.model.embed_tokens.half().weight.dtype == torch.float16


@pytest.mark.failure("120")
def test_training_and_backward_are_refused(mixtral: Path) -> None:
    model, eager = load_empty(mixtral), load_resident(mixtral)
    moecache.attach(model, 4)
    logits = model(IDS).logits  # with grad mode on, as many scripts run a model
    assert torch.equal(logits, eager(IDS).logits)
    with pytest.raises(AttachError, match="backward through experts is refused"):
        logits.sum().backward()
    model.train()
    with pytest.raises(AttachError, match=r"inference.*model\.eval\(\)"):
        model(IDS)
    with torch.no_grad():
        model(IDS)


@pytest.mark.parametrize("bank", ["disk", "ram", None])
def test_state_dict_and_save_pretrained(mixtral: Path, tmp_path: Path, bank: str | None) -> None:
    eager = load_resident(mixtral)
    model = load_resident(mixtral) if bank is None else load_empty(mixtral)
    moecache.attach(model, 4, bank=bank)
    expected, found = eager.state_dict(), model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    model.save_pretrained(tmp_path / "again")
    again = load_resident(tmp_path / "again").state_dict()
    assert all(torch.equal(again[name], expected[name]) for name in expected)
    with pytest.raises(AttachError, match="load_state_dict"):
        model.load_state_dict(expected)


@pytest.mark.failure("52", "115")
def test_two_models_are_independent(mixtral: Path, tmp_path: Path) -> None:
    other = save("qwen3_moe", tmp_path / "qwen")
    models = [load_empty(mixtral), load_empty(other), load_empty(mixtral)]
    eagers = [load_resident(mixtral), load_resident(other), load_resident(mixtral)]
    caches = [moecache.attach(model, 6) for model in models]
    with torch.no_grad():
        for _ in range(2):
            for model, eager in zip(models, eagers, strict=True):
                assert torch.equal(model(IDS).logits, eager(IDS).logits)
    caches[0].close()
    with torch.no_grad():
        assert torch.equal(models[2](IDS).logits, eagers[2](IDS).logits)
        assert torch.equal(models[1](IDS).logits, eagers[1](IDS).logits)


@pytest.mark.failure("52", "115")
def test_models_that_share_a_config(mixtral: Path) -> None:
    model = build("mixtral")
    sibling = type(model)(model.config).eval()
    with torch.no_grad():
        before = sibling(IDS).logits
        moecache.attach(model, 4)
        model(IDS)
        sibling_logits = sibling(IDS).logits
    assert torch.allclose(sibling_logits, before, atol=1e-5)


@pytest.mark.failure("C10")
def test_deep_copy_shares_the_cache(mixtral: Path) -> None:
    model, eager = load_empty(mixtral), load_resident(mixtral)
    cache = moecache.attach(model, 4)
    twin = copy.deepcopy(model)
    assert twin.moecache is cache
    assert twin.to("cpu") is twin
    with pytest.raises(AttachError, match="a copy that shares"):
        moecache.detach(twin)
    with torch.no_grad():
        assert torch.equal(twin(IDS).logits, eager(IDS).logits)
        assert torch.equal(model(IDS).logits, eager(IDS).logits)


def test_pickling_is_refused(mixtral: Path, tmp_path: Path) -> None:
    model = load_empty(mixtral)
    moecache.attach(model, 4)
    with pytest.raises(AttachError, match="cannot be pickled"):
        torch.save(model, tmp_path / "model.pt")


@pytest.mark.failure("114")
def test_threads_run_requests_side_by_side(mixtral: Path) -> None:
    model, eager = load_empty(mixtral), load_resident(mixtral)
    moecache.attach(model, 6)
    prompts = [torch.randint(2, 96, (1, n), generator=torch.Generator().manual_seed(n)) for n in (3, 5, 8)]
    with torch.no_grad():
        expected = [eager(prompt).logits for prompt in prompts]
    wrong: list[BaseException] = []

    @torch.no_grad()
    def run(number: int) -> None:
        try:
            assert all(torch.equal(model(prompts[number]).logits, expected[number]) for _ in range(15))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


@pytest.mark.failure("49", "64", "66")
def test_shared_experts_and_dense_layers_stay(tmp_path: Path) -> None:
    save("qwen2_moe", tmp_path)
    model = load_empty(tmp_path)
    cache = moecache.attach(model, 4)
    assert cache.bank.layer_names == ("model.layers.0.mlp.experts", "model.layers.2.mlp.experts")
    on_meta = {name for name, param in model.named_parameters() if param.device.type == "meta"}
    assert on_meta == {f"{name}.{param}" for name in cache.bank.layer_names for param in ("gate_up_proj", "down_proj")}


def test_load_in_one_call(mixtral: Path) -> None:
    eager = load_resident(mixtral)
    model = aligned(moecache.load(mixtral, capacity=0.5, policy="lru", prefetch=False))
    assert type(model) is type(eager)
    assert model.moecache.policy == "lru"
    assert model.moecache.capacity == 8
    ids, mask = left_padded()
    assert torch.equal(
        model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False),
        eager.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False),
    )


def test_rare_options_reach_the_cache_and_leave_the_models_padding_id(mixtral: Path) -> None:
    options = moecache.CacheOptions(history_capacity=3, reserve=0)
    with moecache.attach(load_empty(mixtral), 4, options=options) as cache:
        assert cache.history.capacity == 3
    with pytest.raises(AttachError, match=r"expected options=moecache.CacheOptions\(threads=...\)"):
        moecache.load(mixtral, capacity=4, threads=2)


@pytest.mark.failure("110")
def test_compiled_block_gives_the_same_output(mixtral: Path) -> None:
    model, eager = load_empty(mixtral), load_resident(mixtral)
    moecache.attach(model, 4)
    block = torch.compile(model.model.layers[0].mlp, backend="eager")
    with torch.no_grad():
        for rows in (5, 1, 1, 1):
            hidden = torch.randn(1, rows, 32)
            assert torch.equal(block(hidden), eager.model.layers[0].mlp(hidden))
        with torch.compiler.set_stance("fail_on_recompile"):
            block(torch.randn(1, 1, 32))


@pytest.mark.failure("137")
def test_process_is_left_as_it_was(mixtral: Path) -> None:
    handlers, filters = list(logging.getLogger().handlers), list(warnings.filters)
    moecache.attach(load_empty(mixtral), 4)
    assert logging.getLogger().handlers == handlers
    assert warnings.filters == filters
