"""Every experts class that transformers dispatches, and whole tiny models of all families that can be made so."""

from __future__ import annotations

import copy
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_families import SMALL, WHOLE_MODELS, aligned, build_small
from hf_other_families import build_by_class
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import moecache
import moecache.hf
from moecache.bank import ParamSpec
from moecache.errors import AttachError, UnsupportedModelError
from moecache.hf.discovery import discover
from moecache.hf.trials import choose_form

torch.set_num_threads(1)  # the models are tiny: a second thread would only wait at barriers

MODELS = Path(transformers.__file__).parent / "models"
CLASSES = [
    (f"transformers.models.{file.parent.name}.{file.stem}", name)
    for file in sorted(MODELS.glob("*/modeling_*.py"))
    for name in re.findall(r"^@use_experts_implementation[^\n]*\nclass (\w+)", file.read_text(), re.MULTILINE)
]


class AnySize:
    """A configuration that has a small answer to whatever an experts class asks for."""

    _experts_implementation = "eager"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if "expert" in name and ("num" in name or name.startswith("n_")):
            return 4
        if "act" in name:
            return "silu"
        if "intermediate" in name:
            return 32
        if "size" in name or "dim" in name:
            return 16
        return 1e-6 if "eps" in name else 1.5


@pytest.mark.failure("68", "73")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("module_name", "class_name"), CLASSES, ids=[name for _, name in CLASSES])
@pytest.mark.failure("68", "73")
def test_every_class_has_a_bit_equal_form(module_name: str, class_name: str, dtype: torch.dtype) -> None:
    module = getattr(importlib.import_module(module_name), class_name)(AnySize()).to(dtype)
    with torch.no_grad():
        for param in module.parameters():
            param.normal_(0.0, 0.3)
    (layer,) = discover(module)
    specs = {name: ParamSpec(tuple(p.shape[1:]), p.dtype) for name, p in layer.params.items()}
    for implementation in ("grouped_mm", "batched_mm"):
        choose_form(module, specs, torch.device("cpu"), implementation=implementation)
    form = choose_form(module, specs, torch.device("cpu"))
    # The slow way through the class's own forward is for classes to come, and for one that computes in float32.
    assert form.product.__name__ in ("plain", "by_flags") or class_name == "OpenAIPrivacyFilterExperts"


@pytest.mark.failure("72")
def test_class_of_an_unknown_form_runs_through_its_own_forward() -> None:
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    class Doubled(MixtralExperts):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise NotImplementedError

    stock = MixtralExperts.forward.__wrapped__

    def twice(self, hidden_states, top_k_index, top_k_weights):
        return stock(self, hidden_states, top_k_index, top_k_weights * 2)

    def wrapper(self, *args):
        return experts_interface.get_interface("eager", None)(self, *args)

    experts_interface = ALL_EXPERTS_FUNCTIONS
    Doubled.forward = wrapper
    Doubled.forward.__wrapped__ = twice
    module = Doubled(AnySize())
    (layer,) = discover(module)
    specs = {name: ParamSpec(tuple(p.shape[1:]), p.dtype) for name, p in layer.params.items()}
    assert choose_form(module, specs, torch.device("cpu")).product.__name__ == "by_stock"
    Doubled.forward.__wrapped__ = lambda self, hidden_states, *_: hidden_states.sum().expand_as(hidden_states)
    with pytest.raises(UnsupportedModelError, match="no way was found to compute one expert at a time"):
        choose_form(module, specs, torch.device("cpu"))


@pytest.mark.failure("70")
@pytest.mark.parametrize("family", WHOLE_MODELS)
@torch.no_grad()
@pytest.mark.failure("44", "64", "70", "71", "107")
def test_whole_model(family: str) -> None:
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    model = build_small(family)
    aligned(model)
    ids = torch.randint(3, 60, (2, 6))
    expected = {}
    for name in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(name)
        expected[name] = model(ids).logits
    with moecache.attach(model, 3) as cache:
        for name in ("grouped_mm", "eager", "batched_mm"):
            model.set_experts_implementation(name)
            assert torch.equal(model(ids).logits, expected[name]), name
        stats = cache.stats()
        assert stats.misses > 0
        assert stats.evictions > 0
        assert stats.resident_bytes < stats.expert_bytes_total
        moecache.detach(model)
    assert torch.equal(model(ids).logits, expected["grouped_mm"])


@pytest.mark.failure("75")
def test_language_experts_of_a_multimodal_model() -> None:
    """Experts are found as modules, however deep the configuration nests."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    text = {name: SMALL[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size")}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    text |= {"num_experts": 6, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "pad_token_id": 0}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"deepstack_visual_indexes": [0]}
    torch.manual_seed(0)
    model = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision)).eval()
    aligned(model)
    ids = torch.randint(3, 60, (1, 6))
    with torch.no_grad():
        expected = model(ids).logits
        cache = moecache.attach(model, 3)
        assert cache.bank.layer_names == tuple(f"model.language_model.layers.{n}.mlp.experts" for n in range(2))
        assert torch.equal(model(ids).logits, expected)
    assert cache.stats().evictions > 0


@pytest.mark.failure("70", "72")
def test_a_class_that_computes_by_itself(tmp_path: Path) -> None:
    """It does not dispatch, but is called as those are that do: it asks for the cache from then on, and only if attached."""
    model = aligned(build_by_class("step3p7"))
    ids = torch.randint(3, 60, (2, 6))
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        model.save_pretrained(tmp_path)
        kept_out = aligned(type(model).from_pretrained(tmp_path, experts_implementation="moecache"))
        with pytest.raises(AttachError, match=r"the experts of this Step3p7Experts are not in memory; .*attach"):
            kept_out(ids)
        for attached, bank in ((model, "ram"), (kept_out, "disk")):
            with pytest.raises(AttachError, match=r"Step3p7Experts computes by itself.*expected .*'eager' or None"):
                moecache.attach(attached, 3, experts_implementation="grouped_mm")
            cache = moecache.attach(attached, 3)
            assert cache.bank.location == bank
            twin = copy.deepcopy(attached)
            for _ in range(2):
                assert torch.equal(attached(ids).last_hidden_state, expected)
                assert torch.equal(twin(ids).last_hidden_state, expected)
            assert cache.stats().evictions > 0
            moecache.detach(attached)
        assert torch.equal(model(ids).last_hidden_state, expected)
