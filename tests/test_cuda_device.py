"""The same promises on a CUDA device. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import moecache

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("cuda.bindings", reason="cuda-python is not installed")

TINY = Path(__file__).parent.parent / "examples" / "tiny_moe" / "model"
LAYERS, EXPERTS, TOP_K = 6, 16, 4


def ids_of(tokens: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand((tokens, EXPERTS), generator=generator).argsort(1)[:, :TOP_K]


@pytest.mark.parametrize("capacity", [TOP_K, 20, 48])
def test_slots_hold_the_right_bytes_while_kernels_still_read_the_old_ones(capacity: int) -> None:
    generator = torch.Generator().manual_seed(capacity)
    weights = [torch.randn((EXPERTS, 257, 129), generator=generator) for _ in range(LAYERS)]
    bank = moecache.ExpertBank.from_tensors([{"w": w} for w in weights])
    with moecache.ExpertCache(bank, capacity, device="cuda", top_k=TOP_K) as cache, cache.request() as request:
        for step in range(60):
            for layer in range(LAYERS):
                ids = ids_of(40 if step % 20 == 0 else 1, generator).cuda()
                sums = {}
                with request.route(layer, ids) as lease:
                    for expert, slot, _ in lease.ready():
                        torch.cuda._sleep(200_000)  # the reader is slow: the slot's next copy has to wait for it
                        sums[expert] = lease.weights["w"][slot].double().sum()
                for expert, found in sums.items():
                    assert found.cpu() == weights[layer][expert].cuda().double().sum().cpu()
        stats = cache.stats()
    assert stats.misses > 0
    assert stats.evictions > 0
    assert stats.resident_bytes < stats.expert_bytes_total


@pytest.mark.parametrize("bank", ["ram", "disk"])
def test_a_model_decodes_to_the_same_tokens_and_logits(bank: str) -> None:
    transformers = pytest.importorskip("transformers")
    import moecache.hf

    def decode(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        out = model.generate(ids, max_new_tokens=24, do_sample=False, output_logits=True, return_dict_in_generate=True)
        return out.sequences, torch.stack(out.logits)

    ids = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(0)).cuda()
    load = transformers.AutoModelForCausalLM.from_pretrained
    expected = decode(load(TINY, dtype="auto", experts_implementation="eager").cuda())
    model = load(TINY, dtype="auto", experts_implementation="moecache").cuda()
    with moecache.attach(model, capacity=0.25, bank=bank) as cache:
        found = decode(model)
        stats = cache.stats()
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert stats.misses > 0
    assert stats.evictions > 0
