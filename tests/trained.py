"""The trained model of examples/, with a cache and without one: greedy texts, token by token."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from hf_families import aligned
from transformers import AutoModelForCausalLM, AutoTokenizer

import moecache
import moecache.hf

MODEL = Path(__file__).parent.parent / "examples" / "tiny_moe" / "model"


def _prompts(count: int) -> list[str]:
    held: Any = json.loads((MODEL.parent / "prompts.json").read_text())
    lists = list(held.values()) if isinstance(held, dict) else [held]
    return [text for texts in itertools.zip_longest(*lists) for text in texts if text is not None][:count]


def _texts(model: Any, prompts: list[str], tokens: int) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    found = []
    with torch.no_grad():
        for prompt in prompts:
            encoded = tokenizer(prompt, return_tensors="pt")
            output = model.generate(**encoded, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
            found.append(output[0].tolist())
    return found


def texts_that_differ(prompts: int, tokens: int) -> int:
    """How many of the prompts' greedy texts differ, at a quarter of the experts; misses and evictions are asserted."""
    texts = _prompts(prompts)
    assert len(texts) == prompts
    expected = _texts(aligned(AutoModelForCausalLM.from_pretrained(MODEL)), texts, tokens)
    model = aligned(AutoModelForCausalLM.from_pretrained(MODEL, experts_implementation="moecache"))
    with moecache.attach(model, 0.25, bank="disk") as cache:
        found = _texts(model, texts, tokens)
        stats = cache.stats()
    assert stats.misses > 0
    assert stats.evictions > 0
    assert stats.resident_bytes < stats.expert_bytes_total
    return sum(a != b for a, b in zip(found, expected, strict=True))
