"""A small model as remote code has them: experts in a ModuleList, three ways of calling them. Loaded by trust_remote_code."""

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class TinyConfig(PreTrainedConfig):
    model_type = "tiny_remote"

    def __init__(
        self, block="masks", hidden_size=32, num_experts=6, num_experts_per_tok=2, num_hidden_layers=2, **kwargs
    ):
        self.block, self.hidden_size, self.num_hidden_layers = block, hidden_size, num_hidden_layers
        self.num_experts, self.num_experts_per_tok = num_experts, num_experts_per_tok
        self.vocab_size = 64
        super().__init__(**kwargs)


class Gated(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, 16, bias=False)
        self.w2 = nn.Linear(16, config.hidden_size, bias=True)
        self.w3 = nn.Linear(config.hidden_size, 16, bias=False)

    def forward(self, rows):
        return self.w2(functional.silu(self.w1(rows)) * self.w3(rows))


class MasksBlock(nn.Module):
    """A mask an expert, sums in ascending order; the router's logits are returned too. As Mixtral and Qwen were."""

    def __init__(self, config):
        super().__init__()
        self.top_k, self.num_experts = config.num_experts_per_tok, config.num_experts
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(Gated(config) for _ in range(config.num_experts))

    def forward(self, hidden_states):
        batch, length, hidden = hidden_states.shape
        rows = hidden_states.view(-1, hidden)
        logits = self.gate(rows)
        weights, chosen = torch.topk(functional.softmax(logits, dim=1, dtype=torch.float), self.top_k, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(rows.dtype)
        result = torch.zeros_like(rows)
        mask = functional.one_hot(chosen, self.num_experts).permute(2, 1, 0)
        for number in range(self.num_experts):  # also those that no token has
            place, token = torch.where(mask[number])
            found = self.experts[number](rows[None, token].reshape(-1, hidden)) * weights[token, place, None]
            result.index_add_(0, token, found.to(rows.dtype))
        return result.reshape(batch, length, hidden), logits


class SortedBlock(nn.Module):
    """Rows sorted by expert, products kept and summed over the top-k places; a shared expert. As DeepSeek's."""

    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(Gated(config) for _ in range(config.num_experts))
        self.shared_experts = Gated(config)

    def forward(self, hidden_states):
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        weights, ids = torch.topk(self.gate(rows).sigmoid(), self.top_k, dim=-1, sorted=False)
        counts = ids.new_zeros((ids.shape[0], len(self.experts))).scatter_(1, ids, 1).sum(dim=0)
        order = ids.view(-1).argsort()
        given = rows[order // self.top_k]
        outputs, begin = [], 0
        for expert, count in zip(self.experts, counts.tolist(), strict=True):
            if count:
                outputs.append(expert(given[begin : begin + count]))
                begin += count
        outputs = torch.cat(outputs)
        places = torch.empty_like(outputs)
        places[order] = outputs
        summed = (places.view(*ids.shape, -1).to(weights.dtype) * weights.unsqueeze(-1)).sum(dim=1).to(rows.dtype)
        return summed.view(*hidden_states.shape) + self.shared_experts(hidden_states), None


class ResidualBlock(nn.Module):
    """Experts in a dictionary beside a residual MLP; the last logits are kept on the module. As Arctic's."""

    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleDict({f"expert_{n}": Gated(config) for n in range(config.num_experts)})
        self.residual_mlp = Gated(config)
        self.last_logits = None

    def forward(self, hidden_states):
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        self.last_logits = self.gate(rows)
        weights, ids = torch.topk(self.last_logits.softmax(dim=-1), 2, dim=-1)
        result = self.residual_mlp(rows)
        for number, expert in enumerate(self.experts.values()):
            token, place = torch.where(ids == number)
            if len(token):
                result[token] += expert(hidden_states.reshape(-1, rows.shape[-1])[token]) * weights[token, place, None]
        return result.view_as(hidden_states), self.last_logits


BLOCKS = {"masks": MasksBlock, "sorted": SortedBlock, "residual": ResidualBlock}


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.mlp = BLOCKS[config.block](config)

    def forward(self, hidden_states):
        batch, length, hidden = hidden_states.shape
        heads = self.qkv(self.norm(hidden_states)).view(batch, length, 3, 4, hidden // 4).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden_states = hidden_states + attended.transpose(1, 2).reshape(batch, length, hidden)
        return hidden_states + self.mlp(self.mlp_norm(hidden_states))[0]


class TinyForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TinyConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, **kwargs):
        hidden_states = self.embed(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return CausalLMOutput(logits=self.lm_head(hidden_states))
