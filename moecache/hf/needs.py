"""What a transformers model will still need of the memory that its experts are to share."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ..memory import untouched_nbytes

__all__ = ["CONTEXT_TOKENS", "activation_nbytes", "kv_cache_nbytes", "nbytes_to_come"]

# Prompt and answer, where nobody says how long they are.
CONTEXT_TOKENS = 4096
# Hidden states alive at once in a decoder layer: residual, normed, query, key, value, attention's, the experts' sum.
_HIDDEN_STATES = 8


def nbytes_to_come(model: PreTrainedModel, device: torch.device, context: int | None = None) -> int:
    """Bytes that running a model will take beyond what it takes now: dense weights that are mapped from files and have not
    been read yet, the KV cache, activations.

    Parameters
    ----------
    model : PreTrainedModel
    device : torch.device
        Where it runs.
    context : int, optional
        Tokens in all, prompt and answer, over all sequences that run at once. By default 4,096, or fewer where the model
        knows no more positions.
    """
    config = model.config.get_text_config()
    tokens = context or min(CONTEXT_TOKENS, getattr(config, "max_position_embeddings", None) or CONTEXT_TOKENS)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    nbytes = kv_cache_nbytes(config, tokens, dtype) + activation_nbytes(config, tokens, dtype)
    if device.type == "cpu":
        dense = {t.data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()] if t.device == device}
        nbytes += untouched_nbytes(dense.items())
    return nbytes


def kv_cache_nbytes(config: Any, tokens: int, dtype: torch.dtype) -> int:
    """Keys and values of so many tokens in all layers, as transformers' dynamic cache keeps them.

    Layers that look back over a window only are counted whole, latent attention as the keys and values it is expanded to.
    """
    heads = getattr(config, "num_attention_heads", 0)
    head = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    value = getattr(config, "v_head_dim", None)
    if value is not None:
        width = heads * ((getattr(config, "qk_head_dim", None) or head) + value)
    else:
        width = 2 * (getattr(config, "num_key_value_heads", None) or heads) * head
    return int(config.num_hidden_layers * width * tokens * dtype.itemsize)


def activation_nbytes(config: Any, tokens: int, dtype: torch.dtype) -> int:
    """A prompt of so many tokens as it passes one layer: hidden states, and a product for each of a token's experts."""
    top_k = getattr(config, "num_experts_per_tok", None)
    states = _HIDDEN_STATES + (top_k if isinstance(top_k, int) else _HIDDEN_STATES)
    return int(tokens * states * config.hidden_size * dtype.itemsize)
