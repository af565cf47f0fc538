"""One MoE layer's experts: transformers' implementations beside ours with every expert resident, one thread.

The shapes are those of the tiny trained model and of a layer of 64 experts, 6 a token. One token is what decoding asks; 512
are a prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import moecache
import moecache.hf

TINY = Path(__file__).parent.parent / "examples" / "tiny_moe" / "model"
SIZES = {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 64, "num_experts_per_tok": 6, "head_dim": 64}
LAYERS = 8


@pytest.fixture(scope="module", params=["tiny", "64 experts"])
def resident(request: pytest.FixtureRequest) -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if request.param == "tiny":
        yield AutoModelForCausalLM.from_pretrained(TINY, dtype="auto")
    else:
        config = transformers.Qwen3MoeConfig(vocab_size=64, num_hidden_layers=LAYERS, **SIZES)
        yield AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    torch.set_num_threads(threads)


@pytest.mark.benchmark(min_rounds=30, warmup=True, warmup_iterations=3)
@pytest.mark.parametrize("attached", [False, True], ids=["stock", "moecache"])
@pytest.mark.parametrize("tokens", [1, 512])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_experts_forward(benchmark: Any, resident: Any, implementation: str, tokens: int, attached: bool) -> None:
    if implementation == "batched_mm" and tokens > 1:
        pytest.skip("batched_mm copies the weights of every token's experts")
    model = copy.deepcopy(resident)
    model.set_experts_implementation(implementation)
    if attached:
        moecache.attach(model, capacity=1.0)
    experts = model.model.layers[3].mlp.experts
    hidden = torch.randn(tokens, model.config.hidden_size).bfloat16()
    top_k = model.config.num_experts_per_tok
    ids = torch.rand(tokens, model.config.num_experts).argsort(1)[:, :top_k].contiguous()
    weights = torch.full((tokens, top_k), 1 / top_k).bfloat16()
    benchmark.group = (
        f"{implementation}, {tokens} tokens, {model.config.num_experts} experts x {model.config.num_hidden_layers}"
    )
    with torch.inference_mode():
        every = torch.arange(model.config.num_experts)[:, None]
        experts(hidden[:1].expand(len(every), -1).contiguous(), every, torch.ones_like(every).bfloat16())
        benchmark(experts, hidden, ids, weights)
