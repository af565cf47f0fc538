"""Say how good the tiny model is on held-out text, and how it routes.

    python examples/tiny_moe/evaluate.py
    python examples/tiny_moe/evaluate.py --samples    # also let it go on from each kind's first prompt

The text is read anew from this machine, so on another one the numbers differ a little.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from train import BOS, CONTEXT, MODEL_DIR, read_kinds
from transformers import AutoModelForCausalLM, AutoTokenizer


def windows(ids: np.ndarray, number: int) -> torch.Tensor:
    """Evenly spaced windows that do not overlap: each is one request."""
    number = min(number, (len(ids) - 1) // CONTEXT)
    starts = np.linspace(0, len(ids) - 1 - CONTEXT, number).astype(int)
    return torch.from_numpy(np.stack([ids[start : start + CONTEXT + 1] for start in starts]))


@torch.inference_mode()
def losses_and_uses(model, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of every byte, and which experts it used: bool ``[requests, layers, tokens, experts]``."""
    losses, uses = [], []
    for rows in ids.split(8):
        out = model(rows[:, :-1], output_router_logits=True, use_cache=False)
        loss = F.cross_entropy(out.logits.float().transpose(1, 2), rows[:, 1:], reduction="none")
        losses.append(loss[rows[:, 1:] < BOS])  # a document's end is not a byte
        logits = torch.stack(out.router_logits).unflatten(1, (len(rows), -1)).transpose(0, 1)
        top = logits.topk(model.config.num_experts_per_tok).indices
        uses.append(torch.zeros(logits.shape, dtype=torch.bool).scatter_(-1, top, True))
    return torch.cat(losses), torch.cat(uses)


def overlap(frequencies: torch.Tensor, top_k: int) -> float:
    """Expected reuse if every token drew its experts independently, each as often as ``frequencies`` say."""
    return (frequencies.square().sum(-1) / top_k).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--windows", type=int, default=24, help="requests per kind, 512 bytes each")
    parser.add_argument("--samples", action="store_true")
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
    stock = model.config._experts_implementation
    model.set_experts_implementation("sorted")
    K, E = model.config.num_experts_per_tok, model.config.num_experts
    kinds = read_kinds()
    losses, uses = {}, {}
    for kind, parts in kinds.items():
        losses[kind], uses[kind] = losses_and_uses(model, windows(parts["held_out"], args.windows))
    pooled = torch.cat(list(uses.values()))

    def routing(used: torch.Tensor) -> list[float]:
        reuse = (used[:, :, 1:] & used[:, :, :-1]).sum(-1).float().mean().item() / K
        hot = used.sum(2).float().sort(-1, descending=True).values[..., : E // 4]
        share = (hot.sum(-1) / (used.shape[2] * K)).mean().item()
        marginal = used.float().mean((0, 2)).sort(-1, descending=True).values
        return [
            reuse,
            overlap(used.float().mean(2), K),
            overlap(marginal, K),
            share,
            (marginal[:, : E // 4].sum(-1) / K).mean().item(),
        ]

    print(f"""
Held-out loss ({model.dtype}) and routing over {len(pooled)} requests of {CONTEXT} bytes.

reuse: share of a token's {K} experts at a layer that the token before used there too. By chance: {K / E:.3f} if all
experts were alike; the columns: if tokens drew independently with their request's or kind's expert frequencies.
hot quarter: share of activations that go to the {E // 4} busiest of a layer's {E} experts, by request and by kind;
{1 / 4:.3f} if all were alike.
""")
    print("           requests  nats/byte  bits/byte | reuse  by chance: request   kind | hot quarter: request   kind")
    for kind in [*kinds, "all"]:
        loss = (torch.cat(list(losses.values())) if kind == "all" else losses[kind]).mean().item()
        used = pooled if kind == "all" else uses[kind]
        reuse, by_request, by_kind, share, pooled_share = routing(used)
        print(
            f"{kind:10} {len(used):8} {loss:10.3f} {loss / math.log(2):10.3f} | {reuse:5.3f}"
            f" {by_request:19.3f} {by_kind:6.3f} | {share:20.3f} {pooled_share:6.3f}"
        )

    counts = {kind: F.normalize(used.sum(2).flatten(1).float(), dim=1) for kind, used in uses.items()}
    print("\nMean cosine of two requests' activation counts (layers x experts), by their kinds:\n")
    print(" " * 10 + "".join(f"{kind:>10}" for kind in counts))
    within, between = [], []
    for a in counts:
        row = []
        for b in counts:
            cosines = counts[a] @ counts[b].T
            if a == b:
                cosines = cosines[~torch.eye(len(cosines), dtype=torch.bool)]  # a request is like itself
            (within if a == b else between).append(cosines.mean().item())
            row.append(cosines.mean().item())
        print(f"{a:10}" + "".join(f"{value:10.3f}" for value in row))
    print(f"\nwithin a kind {np.mean(within):.3f}, between kinds {np.mean(between):.3f}")
    share_of_layer = pooled.float().mean((0, 2)) / K
    print(
        f"busiest expert of any layer takes {share_of_layer.max():.3f} of its layer's activations, "
        f"the idlest {share_of_layer.min():.4f}; {1 / E:.4f} if all were alike"
    )

    if args.samples:
        model.set_experts_implementation(stock)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        for kind, prompts in json.loads((Path(__file__).parent / "prompts.json").read_text(encoding="utf-8")).items():
            torch.manual_seed(0)
            ids = tokenizer(prompts[0], return_tensors="pt").input_ids
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=240)
            print(f"\n===== {kind}, prompt =====\n{prompts[0]}\n===== it goes on =====")
            print(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main()
