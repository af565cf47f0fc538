"""Every supported family gives the bits of the resident eager model, whatever is cached, and does use its cache."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hf_families import FAMILIES, aligned, build, config_of, continued, left_padded, load_empty, load_resident, save

import moecache
import moecache.hf
from moecache import ExpertCache

DTYPES = [torch.float32, torch.bfloat16]
# Weights as [out, in] without bias, and as [in, out] with one: the products that all families are made of.
PARITY = ("mixtral", "gpt_oss")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, torch.dtype], Path]:
    made: dict[tuple[str, torch.dtype], Path] = {}

    class Checkpoints(dict):
        def __missing__(self, key: tuple[str, torch.dtype]) -> Path:
            family, dtype = key
            self[key] = save(family, tmp_path_factory.mktemp(family), dtype)
            return self[key]

    return Checkpoints(made)


def assert_cache_was_used(cache: ExpertCache) -> None:
    stats = cache.stats()
    assert stats.misses > 0
    if cache.capacity < sum(cache.num_experts):
        assert stats.evictions > 0
        assert stats.resident_bytes < stats.expert_bytes_total


@torch.no_grad()
def run(model) -> list[torch.Tensor]:
    """Prompt, decode step by step, a padded batch, greedy and beam search: every logit and every token."""
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(2, 96, (1, 11), generator=generator)
    output = model(prompt, use_cache=True)
    found = [output.logits]
    for token in torch.randint(2, 96, (3, 1, 1), generator=generator):
        output = model(token, **continued(model, output.past_key_values))
        found.append(output.logits)
    ids, mask = left_padded()
    found.append(model(ids, attention_mask=mask).logits)
    for options in ({}, {"num_beams": 2}):
        options |= {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        output = model.generate(ids, attention_mask=mask, **options)
        found += [output.sequences, *output.logits]
    return found


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def assert_equal_runs(model, resident) -> None:
    assert_same(run(model), run(resident))


@pytest.mark.failure("43", "44", "64", "71", "73", "107")
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.parity] * (family in PARITY)) for family in FAMILIES]
)
def test_bit_equal_at_any_capacity(checkpoints, family: str, dtype: torch.dtype) -> None:
    """By default what transformers loads by default, which is grouped_mm, computes."""
    folder = checkpoints[family, dtype]
    resident, model = load_resident(folder), load_empty(folder)
    assert model.dtype == dtype
    assert resident.config._experts_implementation == "grouped_mm"
    expected = run(resident)
    for capacity, bank in (("top-k", "disk"), (0.25, "ram"), (1.0, "disk")):
        top_k = model.config.num_experts_per_tok
        cache = moecache.attach(model, top_k if capacity == "top-k" else capacity, bank=bank)
        assert cache.bank.location == bank
        assert_same(run(model), expected)
        assert_cache_was_used(cache)
        if capacity == "top-k":
            assert cache.capacity == top_k
            assert cache.stats().waves > 0
        moecache.detach(model)


@pytest.mark.failure("C12")
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.parity] * (family in PARITY)) for family in FAMILIES]
)
def test_other_implementations(checkpoints, family: str, implementation: str, dtype: torch.dtype) -> None:
    """A resident model keeps its own; one whose experts were kept out is told which."""
    folder = checkpoints[family, dtype]
    model = load_resident(folder, experts_implementation=implementation)
    expected = run(model)
    cache = moecache.attach(model, model.config.num_experts_per_tok + 1)
    assert_same(run(model), expected)
    assert_cache_was_used(cache)
    moecache.detach(model)
    assert model.config._experts_implementation == implementation
    model = load_empty(folder)
    cache = moecache.attach(model, 1.0, experts_implementation=implementation)
    assert_same(run(model), expected)
    assert cache.stats().misses > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.failure("121", "C12")
def test_resident_model_is_adopted_and_restored(checkpoints, family: str) -> None:
    model = load_resident(checkpoints[family, torch.float32])
    expected = run(model)
    before = {name: (param, param.data_ptr()) for name, param in model.named_parameters()}
    modules = dict(model.named_modules())
    cache = moecache.attach(model, 0.5)
    assert cache.bank.location == "ram"
    assert cache.bank.copied_bytes == 0
    assert_same(run(model), expected)
    assert_cache_was_used(cache)
    moecache.detach(model)
    assert cache.closed
    assert {name: (param, param.data_ptr()) for name, param in model.named_parameters()}.keys() == before.keys()
    for name, param in model.named_parameters():
        assert param is before[name][0]
        assert param.data_ptr() == before[name][1]
    assert all(modules[name] is module for name, module in model.named_modules())
    assert model.config._experts_implementation == "grouped_mm"
    assert_same(run(model), expected)


def test_five_percent_of_many_experts(tmp_path: Path) -> None:
    save("qwen3_moe", tmp_path, num_experts=40, num_experts_per_tok=2)
    eager, model = load_resident(tmp_path), load_empty(tmp_path)
    cache = moecache.attach(model, 0.05)
    assert cache.capacity == 4
    assert_equal_runs(model, eager)
    assert_cache_was_used(cache)
    assert cache.stats().waves > 0


@pytest.mark.failure("45")
@pytest.mark.parametrize("top_k", [1, 4])
def test_extreme_top_k(tmp_path: Path, top_k: int) -> None:
    save("mixtral", tmp_path, num_local_experts=4, num_experts_per_tok=top_k)
    eager, model = load_resident(tmp_path), load_empty(tmp_path)
    cache = moecache.attach(model, top_k)
    assert_equal_runs(model, eager)
    assert_cache_was_used(cache)


@pytest.mark.failure("45")
def test_one_expert(tmp_path: Path) -> None:
    save("mixtral", tmp_path, num_local_experts=1, num_experts_per_tok=1)
    eager, model = load_resident(tmp_path), load_empty(tmp_path)
    cache = moecache.attach(model, 1)
    assert_equal_runs(model, eager)
    assert cache.stats().evictions > 0


@pytest.mark.failure("65", "68")
def test_layers_of_different_counts_and_sizes() -> None:
    """As in a pruned model: fewer and narrower experts in one layer, each size with slots of its own."""
    eager = aligned(build("mixtral", num_hidden_layers=3))
    config = config_of("mixtral", num_local_experts=5, intermediate_size=32)
    config._experts_implementation = "eager"
    block = type(eager.model.layers[1].mlp)(config).eval()
    with torch.no_grad():
        for param in block.parameters():
            param.normal_(0.0, 0.2)
    eager.model.layers[1].mlp = aligned(block)
    eager.set_experts_implementation("eager")
    model = copy.deepcopy(eager)
    cache = moecache.attach(model, 8)
    assert cache.num_experts == (8, 5, 8)
    assert cache.bank.layer_group == (0, 1, 0)
    assert_equal_runs(model, eager)
    assert_cache_was_used(cache)
    moecache.detach(model)
    assert model.model.layers[1].mlp.experts.config._experts_implementation == "eager"


@pytest.mark.failure("100")
def test_resize_between_steps(checkpoints) -> None:
    folder = checkpoints["qwen3_moe", torch.float32]
    eager, model = load_resident(folder), load_empty(folder)
    cache = moecache.attach(model, 4)
    for capacity in (12, 3, 16):
        assert_equal_runs(model, eager)
        cache.resize(capacity)
        assert cache.capacity == capacity
    assert_equal_runs(model, eager)
