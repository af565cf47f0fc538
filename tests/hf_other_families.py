"""Tiny random models of families whose experts do not lie, or are not called, as those of transformers' interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from remote_code.modeling_tiny import TinyForCausalLM
from transformers import PreTrainedModel

Made = tuple[Any, dict[str, Any]]

_TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def _switch_transformers() -> Made:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 16, "num_heads": 4, "num_experts": 6, "expert_capacity": 64}
    layers = {"num_layers": 2, "num_sparse_encoder_layers": 1, "num_decoder_layers": 2, "num_sparse_decoder_layers": 1}
    return transformers.SwitchTransformersForConditionalGeneration, {
        **_TOKENS,
        **sizes,
        **layers,
        "decoder_start_token_id": 0,
        "tie_word_embeddings": False,
    }


def _nllb_moe() -> Made:
    sizes = {f"{stack}_{name}": n for stack in ("encoder", "decoder") for name, n in _NLLB.items()}
    sizes |= {"d_model": 32, "num_experts": 6, "expert_capacity": 64, "max_position_embeddings": 64}
    return transformers.NllbMoeForConditionalGeneration, {**_TOKENS, **sizes, "decoder_start_token_id": 2}


_NLLB = {"layers": 2, "ffn_dim": 16, "attention_heads": 4, "sparse_step": 1}


def _dbrx() -> Made:
    experts = {"ffn_hidden_size": 16, "moe_num_experts": 6, "moe_top_k": 2, "hidden_size": 32}
    attention = {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}
    return transformers.DbrxForCausalLM, {
        **_TOKENS,
        **sizes,
        "ffn_config": {**experts, "ffn_act_fn": {"name": "silu"}},
        "attn_config": attention,
    }


def _llama4() -> Made:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 16,
        "intermediate_size_mlp": 32,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    experts = {"num_experts_per_tok": 2, "num_local_experts": 6, "interleave_moe_layer_step": 1}
    return transformers.Llama4ForCausalLM, {**_TOKENS, **_HEADS, **sizes, **experts, "max_position_embeddings": 64}


def _longcat_flash() -> Made:
    sizes = {"hidden_size": 32, "ffn_hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "q_lora_rank": 16}
    sizes |= {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 8}
    experts = {"moe_topk": 3, "n_routed_experts": 6, "zero_expert_num": 2, "expert_ffn_hidden_size": 16}
    return transformers.LongcatFlashForCausalLM, {**_TOKENS, **sizes, **experts, "max_position_embeddings": 64}


def _jetmoe() -> Made:
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_key_value_heads": 2}
    experts = {"kv_channels": 8, "num_local_experts": 6, "num_experts_per_tok": 2}
    return transformers.JetMoeForCausalLM, {**_TOKENS, **sizes, **experts, "max_position_embeddings": 64}


def _doge() -> Made:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
    return transformers.DogeForCausalLM, {
        **_TOKENS,
        **_HEADS,
        **sizes,
        "is_moe": True,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    }


def _step3p7() -> Made:
    from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "head_dim": 8}
    sizes |= {"n_routed_experts": 6, "num_experts_per_tok": 2, "share_expert_dim": 16, "num_hidden_layers": 3}
    layers = {"mlp_layer_types": ["dense", "sparse", "sparse"], "layer_types": ["full_attention"] * 3}
    return Step3p7TextModel, {
        **_TOKENS,
        **_HEADS,
        **sizes,
        **layers,
        "sliding_window": 8,
        "max_position_embeddings": 64,
    }


def _diffusion_gemma() -> Made:
    text = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    text |= {"num_global_key_value_heads": 2, "global_head_dim": 8, "head_dim": 8, "num_experts": 6, "top_k_experts": 2}
    text |= {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
        "max_position_embeddings": 64,
    }
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "patch_size": 4, "head_dim": 8}
    vision |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    tokens = {"image_token_id": 61, "boi_token_id": 62, "eoi_token_id": 63, "canvas_length": 8}
    return transformers.DiffusionGemmaForBlockDiffusion, {
        "text_config": {**_TOKENS, **_HEADS, **text},
        "vision_config": vision,
        **tokens,
    }


def _remote(block: str) -> Callable[[], Made]:
    return lambda: (TinyForCausalLM, {"block": block, "pad_token_id": 0, "use_cache": False})


# By family: its class and the sizes of a tiny configuration. The last three are forms of remote code.
BY_CLASS: dict[str, Callable[[], Made]] = {
    "step3p7": _step3p7,
    "switch_transformers": _switch_transformers,
    "nllb-moe": _nllb_moe,
    "dbrx": _dbrx,
    "llama4_text": _llama4,
    "longcat_flash": _longcat_flash,
    "jetmoe": _jetmoe,
    "doge": _doge,
    "diffusion_gemma": _diffusion_gemma,
    "remote code, masks": _remote("masks"),
    "remote code, sorted rows": _remote("sorted"),
    "remote code, residual": _remote("residual"),
}
# Of these, those that an experts implementation reaches; all others compute by themselves.
DISPATCH = ("diffusion_gemma",)


def build_by_class(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    cls, sizes = BY_CLASS[family]()
    model = cls(cls.config_class(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.normal_(0.0, 0.2)
    return model.to(dtype)


def inputs(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a model's forward is called with for tokens ``[batch, length]``: for an encoder and a decoder, of both."""
    if model.config.model_type == "diffusion_gemma" or model.config.is_encoder_decoder:
        return {"input_ids": ids, "decoder_input_ids": ids[:, : max(1, ids.shape[1] - 2)]}
    return {"input_ids": ids}
