"""One MoE layer's experts for one token: transformers' stock eager forward beside ours with everything resident."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import moecache
import moecache.hf

TINY = Path(__file__).parent.parent / "examples" / "tiny_moe" / "model"


@pytest.mark.benchmark(group="experts forward, one token, tiny model, one thread")
@pytest.mark.parametrize("implementation", ["eager", "moecache"])
def test_experts_forward(benchmark: Any, implementation: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype="auto", experts_implementation=implementation)
    if implementation == "moecache":
        moecache.attach(model, capacity=1.0, bank="ram")
    experts = model.model.layers[3].mlp.experts
    hidden = torch.randn(1, 128).bfloat16()
    ids, weights = torch.tensor([[3, 17, 9, 30]]), torch.full((1, 4), 0.25).bfloat16()
    try:
        with torch.inference_mode():
            benchmark(experts, hidden, ids, weights)
    finally:
        torch.set_num_threads(threads)
