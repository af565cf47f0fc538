"""The tiny model in plain torch, its experts on disk: what a person with an inference stack of their own writes.

    python examples/handwritten.py "def main" --capacity 0.25

No transformers. What moecache adds to an ordinary decoder: ``ExpertBank``, ``ExpertCache`` and the method ``experts``.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open

import moecache

TINY = Path(__file__).parent / "tiny_moe" / "model"


class TinyMoE:
    """A Qwen3-MoE decoder for one sequence; a token is a byte.

    Parameters
    ----------
    folder : Path
        ``config.json`` and safetensors files in the per-expert layout of the hub.
    **cache_options
        For `moecache.ExpertCache`: capacity, policy, history, ...
    """

    def __init__(self, folder: Path, **cache_options) -> None:
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.weights = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as shard:
                self.weights |= {name: shard.get_tensor(name) for name in shard.keys() if ".experts." not in name}  # noqa: SIM118
        bank = moecache.ExpertBank.from_safetensors(folder, "qwen3_moe")
        self.cache = moecache.ExpertCache(bank, **cache_options)

        rope = self.config.get("rope_parameters") or self.config
        self.head_dim = self.config["head_dim"]
        self.inv_freq = 1.0 / rope["rope_theta"] ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim)

    def generate(self, prompt: list[int], max_new_tokens: int) -> Iterator[int]:
        """Greedy decoding, one token at a time until the end of text."""
        stops = self.config["eos_token_id"]
        kv = [(None, None)] * self.config["num_hidden_layers"]
        ids, position = torch.tensor(prompt), 0
        with self.cache.request() as request:
            for _ in range(max_new_tokens):
                logits = self.forward(ids, position, kv, request)
                token = int(logits[-1].argmax())
                yield token
                if token in (stops if isinstance(stops, list) else [stops]):
                    return
                position += len(ids)
                ids = torch.tensor([token])

    def forward(self, ids: torch.Tensor, position: int, kv: list, request: moecache.Request) -> torch.Tensor:
        """Logits [T, vocabulary] of the tokens ``ids`` [T] that stand at ``position``."""
        angles = torch.arange(position, position + len(ids)).float()[:, None] * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        x = self.weights["model.embed_tokens.weight"][ids]
        rotation = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            x = x + self.attention(name, self.norm(x, f"{name}.input_layernorm"), rotation, kv, layer)
            x = x + self.experts(name, self.norm(x, f"{name}.post_attention_layernorm"), request, layer)
        head = "model.embed_tokens" if self.config["tie_word_embeddings"] else "lm_head"
        return F.linear(self.norm(x[-1:], "model.norm"), self.weights[f"{head}.weight"])

    def experts(self, name: str, x: torch.Tensor, request: moecache.Request, layer: int) -> torch.Tensor:
        """The routed experts of one layer, each from its slot as soon as it is there."""
        probabilities = F.softmax(F.linear(x, self.weights[f"{name}.mlp.gate.weight"]), dim=-1, dtype=torch.float)
        weights, ids = probabilities.topk(self.config["num_experts_per_tok"], dim=-1)
        if self.config["norm_topk_prob"]:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights.to(x.dtype)

        products = {}
        with request.route(layer, ids, weights) as lease:
            for expert, slot, tokens in lease.ready():
                gate, up = F.linear(x[tokens], lease.weights["gate_up_proj"][slot]).chunk(2, dim=-1)
                y = F.linear(F.silu(gate) * up, lease.weights["down_proj"][slot])
                products[expert] = tokens, y * weights[tokens, lease.positions, None]
        # Summed in the order of the expert's number: the result does not depend on which were cached.
        out = torch.zeros_like(x)
        for _, (tokens, y) in sorted(products.items()):
            out.index_add_(0, tokens, y)
        return out

    def attention(self, name: str, x: torch.Tensor, rotation: tuple, kv: list, layer: int) -> torch.Tensor:
        """Causal attention with grouped heads; appends to the layer's keys and values."""

        def heads(part: str, normed: bool = True) -> torch.Tensor:
            y = F.linear(x, self.weights[f"{name}.self_attn.{part}_proj.weight"]).view(len(x), -1, self.head_dim)
            return (self.norm(y, f"{name}.self_attn.{part}_norm") if normed else y).transpose(0, 1)[None]

        q, k, v = rotate(heads("q"), *rotation), rotate(heads("k"), *rotation), heads("v", normed=False)
        past_k, past_v = kv[layer]
        if past_k is not None:
            k, v = torch.cat((past_k, k), dim=2), torch.cat((past_v, v), dim=2)
        kv[layer] = k, v
        y = F.scaled_dot_product_attention(q, k, v, is_causal=len(x) > 1, enable_gqa=True)
        return F.linear(y[0].transpose(0, 1).reshape(len(x), -1), self.weights[f"{name}.self_attn.o_proj.weight"])

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Root mean square normalisation, in float32."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return self.weights[f"{name}.weight"] * y.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of x [1, heads, T, head_dim] by cos and sin [T, head_dim]."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="#include <stdio.h>\n")
    parser.add_argument("--capacity", type=float, default=0.25, help="fraction of all experts that is kept in memory")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    args = parser.parse_args()
    with torch.inference_mode():
        model = TinyMoE(TINY, capacity=args.capacity)
        print(args.prompt, end="", flush=True)
        for token in model.generate(list(args.prompt.encode()), args.max_new_tokens):
            if token < 256:
                sys.stdout.buffer.write(bytes([token]))
                sys.stdout.buffer.flush()
        print("\n", model.cache.stats(), sep="\n")
        model.cache.close()


if __name__ == "__main__":
    main()
