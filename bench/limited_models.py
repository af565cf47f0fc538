"""The random models of ``bench_memory_limit.py``, written as checkpoints of their format are on the hub, a layer a shard."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import GptOssConfig, MixtralConfig, PretrainedConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Tensors = dict[str, torch.Tensor]

EMBEDDING_STD = 0.16
_SIZES = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": None,
}
_MIXTRAL = MixtralConfig(**_SIZES, architectures=["MixtralForCausalLM"])
_GPT_OSS = GptOssConfig(
    **_SIZES,
    head_dim=64,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    architectures=["GptOssForCausalLM"],
)
CONFIGS: Mapping[str, PretrainedConfig] = {
    "bf16": _MIXTRAL,
    "fp8": _MIXTRAL,
    "gpt-oss-bf16": _GPT_OSS,
    "mxfp4": _GPT_OSS,
}
_PLAIN = ["self_attn", "lm_head", "router", "gate"]
_QUANTIZATION = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": _PLAIN},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": _PLAIN},
}


class _Random:
    """Tensors of one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float = _MIXTRAL.initializer_range) -> torch.Tensor:
        return (torch.randn(*shape, generator=self.generator) * std).to(torch.bfloat16)

    def bytes(self, *shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.uint8)


def _mixtral_layer(p: str, c: PretrainedConfig, random: _Random, packed: bool) -> Tensors:
    hidden, inner = c.hidden_size, c.intermediate_size
    shard = {f"{p}.self_attn.{part}_proj.weight": random.normal(hidden, hidden) for part in "qkvo"}
    shard[f"{p}.block_sparse_moe.gate.weight"] = random.normal(c.num_local_experts, hidden)
    for expert in range(c.num_local_experts):
        for name, shape in (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden))):
            key, weight = f"{p}.block_sparse_moe.experts.{expert}.{name}.weight", random.normal(*shape)
            shard[key] = weight
            if packed:
                blocks = weight.float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
                scales = blocks.abs().amax((1, 3)) / 448
                shard[key] = (blocks / scales[:, None, :, None]).reshape(shape).to(torch.float8_e4m3fn)
                shard[f"{key}_scale_inv"] = scales
    return shard


def _gpt_oss_layer(p: str, c: PretrainedConfig, random: _Random, packed: bool) -> Tensors:
    hidden, inner, experts = c.hidden_size, c.intermediate_size, c.num_local_experts
    shard = {f"{p}.self_attn.{part}_proj.weight": random.normal(hidden, hidden) for part in "qkvo"}
    shard |= {f"{p}.self_attn.{part}_proj.bias": random.normal(hidden) for part in "qkvo"}
    shard[f"{p}.self_attn.sinks"] = random.normal(c.num_attention_heads)
    shard[f"{p}.mlp.router.weight"], shard[f"{p}.mlp.router.bias"] = (
        random.normal(experts, hidden),
        random.normal(experts),
    )
    for name, rows, cols in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        key = f"{p}.mlp.experts.{name}"
        shard[f"{key}_bias"] = random.normal(experts, rows)
        blocks = random.bytes(experts, rows, cols // 32, 16)
        scales = random.bytes(experts, rows, cols // 32, low=119, high=122)
        if packed:
            shard |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        else:  # the same model
            shard[key] = convert_moe_packed_tensors(blocks, scales)
    return shard


_LAYERS: Mapping[str, Callable[[str, PretrainedConfig, _Random, bool], Tensors]] = {
    "mixtral": _mixtral_layer,
    "gpt_oss": _gpt_oss_layer,
}


def write_model(folder: Path, form: str, seed: int) -> None:
    """Write the checkpoint one shard (one layer) at a time, so that this process stays small."""
    config, random = CONFIGS[form], _Random(seed)
    hidden, vocab = config.hidden_size, config.vocab_size
    weight_map: dict[str, str] = {}
    for layer in range(config.num_hidden_layers):
        p = f"model.layers.{layer}"
        shard = _LAYERS[config.model_type](p, config, random, form in _QUANTIZATION)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shard[f"{p}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        if layer == 0:
            # Of the common size, embeddings would drown in the layers' outputs and all tokens take the same few experts.
            shard["model.embed_tokens.weight"] = random.normal(vocab, hidden, std=EMBEDDING_STD)
            shard["lm_head.weight"] = random.normal(vocab, hidden)
            shard["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        file = f"model-{layer + 1:05}-of-{config.num_hidden_layers:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config.save_pretrained(folder)
    if form in _QUANTIZATION:
        described = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(described | {"quantization_config": _QUANTIZATION[form]}))
