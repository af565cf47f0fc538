"""An expert gives the same bits whichever slot it is in and wherever its bytes lay before, at sizes of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_families import build, left_padded, load_empty, load_resident, save
from safetensors.torch import load_file, save_file

import moecache
import moecache.hf
from moecache import ExpertBank, ExpertCache

# An expert's bytes are no multiple of 16, and neither is a row of its matrices. torch's grouped product refuses such rows,
# so that transformers runs them with "eager" only.
ODD = {"hidden_size": 30, "intermediate_size": 33, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10}
PROMPT = torch.randint(2, 96, (1, 9), generator=torch.Generator().manual_seed(4))


def answer(model) -> list[torch.Tensor]:
    """Logits of a padded batch and of every token of a short answer, whose products have one row."""
    ids, mask = left_padded()
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with torch.no_grad():
        batch = model(ids, attention_mask=mask).logits
    return [batch, *model.generate(PROMPT, **options).logits]


def assert_same_bits(model, expected: list[torch.Tensor]) -> None:
    found = answer(model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def shift(file: Path, remainder: int) -> None:
    """Write a file of tensors again, so that where it is mapped they begin at addresses of that remainder by 16."""
    tensors = load_file(file)
    for n in range(16):
        save_file(tensors, file, metadata={"format": "pt", "pad": "x" * n})
        if (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 16 == remainder:
            return
    raise AssertionError("no length of the header gives this remainder")


@pytest.mark.parity
@pytest.mark.failure("C13")
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_of_odd_size_do_not_depend_on_their_slot(tmp_path: Path, family: str) -> None:
    save(family, tmp_path, **ODD)
    expected = answer(load_resident(tmp_path, experts_implementation="eager"))
    for capacity, bank in ((2, "disk"), (5, "ram"), (16, "disk")):
        model = load_empty(tmp_path)
        cache = moecache.attach(model, capacity, bank=bank, experts_implementation="eager")
        for _ in range(2):  # the second time experts are in other slots
            assert_same_bits(model, expected)
        assert cache.capacity == 16 or cache.stats().evictions > 0
        moecache.detach(model)


@pytest.mark.parity
@pytest.mark.failure("C13")
@pytest.mark.parametrize("remainder", [0, 8])
def test_a_mapped_checkpoint_of_stacked_experts_at_any_address(tmp_path: Path, remainder: int) -> None:
    build("qwen3_moe", **ODD).save_pretrained(tmp_path, save_original_format=False)
    shift(tmp_path / "model.safetensors", remainder)
    expected = answer(load_resident(tmp_path, experts_implementation="eager"))
    for bank in ("disk", "ram"):
        model = load_empty(tmp_path)
        moecache.attach(model, 4, bank=bank, experts_implementation="eager")
        assert_same_bits(model, expected)
        moecache.detach(model)


@pytest.mark.parity
@pytest.mark.failure("C13")
@pytest.mark.parametrize("offset", [1, 2])
def test_experts_in_memory_are_adopted_at_any_address(tmp_path: Path, offset: int) -> None:
    save("mixtral", tmp_path, **ODD)
    model = load_resident(tmp_path, experts_implementation="eager")
    expected = answer(model)
    for layer in model.model.layers:
        for param in layer.mlp.experts.parameters():
            moved = torch.empty(param.numel() + offset)[offset:].view(param.shape)
            param.data = moved.copy_(param.data)
            assert param.data_ptr() % 64 == 4 * offset
    cache = moecache.attach(model, 4, experts_implementation="eager")
    assert cache.bank.copied_bytes == 0
    assert_same_bits(model, expected)


@pytest.mark.parity
@pytest.mark.failure("C13")
def test_a_resized_pool_is_aligned_too(tmp_path: Path) -> None:
    save("mixtral", tmp_path, **ODD)
    expected = answer(load_resident(tmp_path, experts_implementation="eager"))
    model = load_empty(tmp_path)
    cache = moecache.attach(model, 3, experts_implementation="eager")
    for capacity in (11, 2, 16):
        assert_same_bits(model, expected)
        cache.resize(capacity)
    assert_same_bits(model, expected)


@pytest.mark.parametrize("where", ["memory", "file"])
@pytest.mark.parametrize("nbytes", [1, 3, 63, 64, 65, 4097])
def test_experts_of_any_number_of_bytes_at_any_address(tmp_path: Path, nbytes: int, where: str) -> None:
    """Only bytes move: what they mean, and whether a processor could read them where they lie, does not matter."""
    generator = torch.Generator().manual_seed(nbytes)
    layers = [torch.randint(0, 256, (5, nbytes), dtype=torch.uint8, generator=generator) for _ in range(2)]
    if where == "memory":
        moved = [torch.empty(layer.numel() + 1, dtype=torch.uint8)[1:].view(layer.shape) for layer in layers]
        bank = ExpertBank.from_tensors([{"w": to.copy_(layer)} for to, layer in zip(moved, layers, strict=True)])
        assert bank.copied_bytes == 0
    else:
        names = {f"l.{n}.e.{e}.w": row.clone() for n, layer in enumerate(layers) for e, row in enumerate(layer)}
        save_file({"first": torch.zeros(7, dtype=torch.uint8), **names}, tmp_path / "model.safetensors")
        bank = ExpertBank.from_safetensors(tmp_path, {"w": "l.{layer}.e.{expert}.w"})
    with bank, ExpertCache(bank, 2) as cache, cache.request() as request:
        for _ in range(2):
            for number, layer in enumerate(layers):
                with request.route(number, torch.arange(5).view(5, 1)) as lease:
                    for expert, slot, _ in lease.ready():
                        assert torch.equal(lease.weights["w"][slot], layer[expert])
                        assert lease.weights["w"][slot].data_ptr() % 64 == 0
