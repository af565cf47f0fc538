"""An attached model's outputs equal those of the experts implementation it was loaded with, and follow it when it is switched."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers
from hf_families import aligned, build, load_empty, load_resident, save

import moecache
import moecache.hf
from moecache.errors import AttachError, UnsupportedModelError
from moecache.hf import by_place

PROMPTS = torch.randint(2, 96, (3, 40), generator=torch.Generator().manual_seed(2))
TINY = Path(__file__).parent.parent / "examples" / "tiny_moe" / "model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"), torch.bfloat16)


@torch.no_grad()
def logits(model) -> list[torch.Tensor]:
    """Of a batch of prompts, and of a prompt of one token."""
    return [model(PROMPTS).logits, model(PROMPTS[:1, :1]).logits]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[torch.Tensor]]:
    names = ("eager", "grouped_mm", "batched_mm")
    return {name: logits(load_resident(folder, experts_implementation=name)) for name in names}


def test_implementations_differ(expected) -> None:
    """Or else nothing here would show anything."""
    assert not same(expected["eager"], expected["grouped_mm"])


@pytest.mark.failure("C12")
@pytest.mark.parametrize("capacity", [4, 1.0])
def test_switching_an_attached_model(folder: Path, expected, capacity: int | float) -> None:
    model = load_empty(folder)
    cache = moecache.attach(model, capacity)
    assert model.config._experts_implementation == "moecache"
    assert model.get_experts_implementation() == {"": "grouped_mm"}
    assert same(logits(model), expected["grouped_mm"])
    for name in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(name)
        assert model.get_experts_implementation() == {"": name}
        assert same(logits(model), expected[name])
    model.model.set_experts_implementation({"": "eager"})
    assert same(logits(model), expected["eager"])
    twin = copy.deepcopy(model)
    twin.set_experts_implementation("batched_mm")  # they share the cache, and this
    assert same(logits(model), expected["batched_mm"])
    assert same(logits(twin), expected["batched_mm"])
    assert cache.stats().misses > 0


@pytest.mark.failure("C12")
def test_a_switch_that_fails_changes_nothing(folder: Path, expected) -> None:
    model = load_empty(folder)
    moecache.attach(model, 4)
    with pytest.raises(ValueError, match="nonsense"):
        model.set_experts_implementation("nonsense")
    assert same(logits(model), expected["grouped_mm"])
    model.config._experts_implementation = "eager"
    with pytest.raises(AttachError, match=r"was changed to experts_implementation='eager'; set it to 'moecache' again"):
        logits(model)
    model.config._experts_implementation = "moecache"
    assert same(logits(model), expected["grouped_mm"])


def test_an_unknown_implementation_is_refused(folder: Path) -> None:
    model = load_empty(folder)
    with pytest.raises(AttachError, match=r"experts_implementation is 'nonsense'; expected one of eager, .*grouped_mm"):
        moecache.attach(model, 4, experts_implementation="nonsense")
    assert not hasattr(model, "moecache")


def test_load_takes_the_implementation(folder: Path, expected) -> None:
    for name in ("eager", "batched_mm"):
        model = aligned(moecache.load(folder, capacity=4, experts_implementation=name))
        assert same(logits(model), expected[name])
        moecache.detach(model)


@pytest.mark.failure("C12")
def test_experts_in_memory_after_all_are_those_of_the_default(folder: Path, tmp_path: Path) -> None:
    """Experts that could not be kept out: the same outputs before and after attaching."""
    resident = load_resident(folder)
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(
        None, config=resident.config, state_dict=resident.state_dict(), experts_implementation="moecache"
    )
    before = logits(aligned(model))
    assert same(before, logits(resident))
    moecache.attach(model, 4)
    assert same(logits(model), before)


@pytest.mark.failure("H33")
def test_rows_that_grouped_products_refuse(tmp_path: Path) -> None:
    """The stock model cannot run such sizes either; what can is named before anything changes."""
    save("mixtral", tmp_path, hidden_size=30, num_attention_heads=3, num_key_value_heads=1, head_dim=10)
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        logits(load_resident(tmp_path))
    model = load_empty(tmp_path)
    with pytest.raises(
        UnsupportedModelError,
        match=r"bits of experts_implementation='grouped_mm' .*16 bytes.*experts_implementation='eager'",
    ):
        moecache.attach(model, 4)
    assert not hasattr(model, "moecache")
    cache = moecache.attach(model, 4, experts_implementation="eager")
    assert same(logits(model), logits(load_resident(tmp_path, experts_implementation="eager")))
    assert cache.stats().evictions > 0


@pytest.mark.failure("C12", "G27c")
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_long_prompts_are_computed_expert_by_expert(folder: Path, expected, monkeypatch, implementation: str) -> None:
    """Beyond a bound a step is not computed whole, though all of its experts are resident, nor are copied weights."""
    monkeypatch.setattr(by_place, "KEPT_NBYTES", 4096)
    model = load_empty(folder)
    moecache.attach(model, 1.0, experts_implementation=implementation)
    for _ in range(2):
        assert same(logits(model), expected[implementation])


@pytest.mark.failure("C12")
def test_autocast(folder: Path) -> None:
    model = load_resident(folder, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        before = logits(model)
        moecache.attach(model, 5)
        assert same(logits(model), before)


@pytest.mark.failure("C12")
def test_an_expert_named_twice_in_a_row(folder: Path) -> None:
    model = load_resident(folder)
    experts = model.model.layers[0].mlp.experts
    rows = torch.randn(5, 32).bfloat16()
    ids = torch.tensor([[3, 3, 1], [0, 1, 2], [7, 7, 7], [4, 6, 4], [1, 5, 1]])
    scale = torch.rand(5, 3).bfloat16()
    with torch.no_grad():
        before = [experts(rows, ids, scale), experts(rows[:1], ids[:1], scale[:1])]
        for capacity in (2, 1.0):
            cache = moecache.attach(model, capacity, top_k=1)
            for _ in range(2):
                assert same([experts(rows, ids, scale), experts(rows[:1], ids[:1], scale[:1])], before)
            assert cache.stats().misses > 0
            moecache.detach(model)


@pytest.mark.failure("C12")
def test_trained_model_as_transformers_loads_it() -> None:
    """Greedy texts of the trained model, whose words change between implementations: none does by attaching."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    texts = ["Once upon a time", "def main(", "The sum of", "In the year"]
    load = transformers.AutoModelForCausalLM.from_pretrained
    resident, model = (
        aligned(load(TINY, dtype="auto")),
        aligned(load(TINY, dtype="auto", experts_implementation="moecache")),
    )
    cache = moecache.attach(model, 0.25, bank="disk")
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        options = {"max_new_tokens": 60, "do_sample": False}
        assert torch.equal(model.generate(ids, **options), resident.generate(ids, **options))
    stats = cache.stats()
    assert stats.misses > 0
    assert stats.evictions > 0
    assert stats.resident_bytes < stats.expert_bytes_total


def test_a_model_made_from_its_configuration() -> None:
    """Its experts are in memory and it was never loaded: it computes as its class does, before and after."""
    model = build("mixtral")
    model.set_experts_implementation("moecache")
    before = logits(model)
    moecache.attach(model, 4)
    assert same(logits(model), before)
