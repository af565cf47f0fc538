"""Tiny random models of the families under test, saved as their checkpoints are on the hub."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

# The models are tiny: a second thread would only wait at barriers.
torch.set_num_threads(1)

_COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
}
_GROUPED = {"n_shared_experts": 1, "n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5}

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_hidden_layers": 3,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {
        "num_hidden_layers": 2,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "norm_topk_prob": True,
    },
    "olmoe": {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v2": {
        "num_hidden_layers": 3,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        **_LATENT_ATTENTION,
        **_GROUPED,
    },
    "deepseek_v3": {
        "num_hidden_layers": 3,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        **_LATENT_ATTENTION,
        **_GROUPED,
    },
    "glm4_moe": {
        "num_hidden_layers": 3,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "head_dim": 8,
        **_GROUPED,
    },
    "gpt_oss": {
        "num_hidden_layers": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
    },
}


def config_of(family: str, **changes: Any) -> Any:
    return transformers.AutoConfig.for_model(family, **{**_COMMON, **FAMILIES[family], **changes})


def build(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A model with weights large enough that routing is spread and logits differ between tokens."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family, **changes))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() > 1 or "bias" in name:
                param.normal_(0.0, 0.2)
    return model.to(dtype).eval()


def save(family: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Save such a model in a few shards."""
    build(family, dtype, **changes).save_pretrained(folder, max_shard_size="40KB")
    return folder


def aligned(model: PreTrainedModel) -> PreTrainedModel:
    """The model with every weight, and of stacked experts every expert, in memory that begins at a multiple of 64 bytes.

    Float32 products of one row depend, on some processors, on where the weights lie: a file that is mapped may put them
    anywhere, and so do experts whose bytes are no multiple of 64. What is compared bit by bit is aligned first.
    """
    for module in model.modules():
        stacked = hasattr(module, "num_experts")
        for param in module.parameters(recurse=False):
            if param.device.type == "meta":
                continue
            if stacked and param.dim() > 1 and param.shape[0] == module.num_experts:
                row = param[0].numel()
                storage = torch.empty((len(param), -(-row // 64) * 64), dtype=param.dtype)
                param.data = storage[:, :row].unflatten(1, param.shape[1:]).copy_(param.data)
            else:
                param.data = torch.empty(param.shape, dtype=param.dtype).copy_(param.data)
            assert param.data_ptr() % 64 == 0
    return model


def load_resident(folder: Path, **kwargs: Any) -> PreTrainedModel:
    """The resident model as transformers loads it, by default with ``grouped_mm`` for its experts."""
    return aligned(transformers.AutoModelForCausalLM.from_pretrained(folder, **kwargs))


def load_empty(folder: Path, **kwargs: Any) -> PreTrainedModel:
    """The model with its experts kept out."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation="moecache", **kwargs)
    return aligned(model)


def left_padded(rows: int = 4, longest: int = 9, vocab: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of different lengths, padded on the left: ids and attention mask."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(2, vocab, (rows, longest), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, :row] = 0
    return ids * mask, mask


def continued(model: PreTrainedModel, past: Any) -> dict[str, Any]:
    """The keyword under which this version of transformers takes a key-value cache."""
    return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": past}


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 6),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "moe_layer_start_index": 0,
    "moe_layer_end_index": -1,
    "num_nextn_predict_layers": 0,
}
# Those whose configuration takes the sizes above as they are; the classes of all others are checked above.
WHOLE_MODELS = [
    "afmoe",
    "aria_text",
    "axk1",
    "cohere2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "hy_v3",
    "hy_v4",
    "kolibri1",
    "laguna",
    "lara_mini",
    "mellum",
    "mimo_v2_flash",
    "minimax",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
    "solar_open",
]


def build_small(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of a family of WHOLE_MODELS."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[family]
    known = {*inspect.signature(config.__init__).parameters, *getattr(config, "attribute_map", {})}
    sizes = {name: size for name, size in SMALL.items() if name in known}
    model = transformers.AutoModelForCausalLM.from_config(config(**sizes)).eval()
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.normal_(0.0, 0.2)
    return model.to(dtype)
