"""Train a tiny Qwen3-MoE on the text that a Python and a Debian installation carry.

    python examples/tiny_moe/train.py            # about an hour on two cores
    python examples/tiny_moe/evaluate.py         # held-out loss and routing facts of what it wrote

Nothing is downloaded. Two runs with one seed on one machine read the same files in the same order
and draw the same windows; another machine carries other text and so gives another model. README.md
has the commands that made the committed one.
"""

import argparse
import copy
import gzip
import hashlib
import math
import os
import re
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

MODEL_DIR = Path(__file__).parent / "model"
CONTEXT = 512
BOS, EOS, PAD = 256, 257, 258

STDLIB = sysconfig.get_path("stdlib")
INCLUDE = sysconfig.get_path("include")
# Where each kind lies, and how its files are named.
SOURCES = {
    "python": ([STDLIB], r"\.py$"),
    "c": ([INCLUDE, "/usr/include"], r"\.h$"),
    "reference": ([], ""),  # pydoc's topics: a dict in a module, not files
    "licence": (["/usr/share/common-licenses", "/usr/share/doc"], r"common-licenses/[^/]+$|/copyright$"),
    "man": ([f"/usr/share/man/man{section}" for section in range(1, 9)], r"\.gz$"),
    "html": (["/usr/share/doc"], r"\.html$"),
    "json": (["/usr/share", "/usr/lib"], r"\.json$"),
    "tables": ([f"{STDLIB}/encodings"], r"\.py$"),
}
# Somebody else's packages are not Python's own library, and the character tables are a kind of their own.
NOT_PYTHON = ("/site-packages/", "/dist-packages/", "/encodings/", "/test/", "/tests/", "/pydoc_data/")

MAX_FILE = 64 << 10  # no single long file may stand for its kind
MAX_TRAIN, MAX_HELD_OUT = 4 << 20, 256 << 10


def hashed(text: str | bytes) -> int:
    return int.from_bytes(hashlib.sha256(text.encode() if isinstance(text, str) else text).digest()[:8], "big")


def documents(kind: str) -> Iterator[tuple[str, bytes]]:
    """Yield the (name, text) pairs of one kind, in an order that depends on the names alone.

    A file's name is its last two parts: wherever Python is installed, ``json/decoder.py`` falls on the
    same side, so what one machine held out another machine has not trained on either.
    """
    if kind == "reference":
        from pydoc_data.topics import topics

        for name in sorted(topics, key=hashed):
            yield name, topics[name].encode()
        return
    roots, pattern = SOURCES[kind]
    # os.walk follows no links: /usr/lib and /usr/share have ones that lead in circles.
    paths = {os.path.join(at, name) for root in roots for at, _, names in os.walk(root) for name in names}
    paths = {path for path in paths if re.search(pattern, path)}
    if kind == "python":
        paths = {path for path in paths if not any(part in path for part in NOT_PYTHON)}
    name_of = {path: "/".join(path.split("/")[-2:]) for path in paths}
    for path in sorted(paths, key=lambda path: (hashed(name_of[path]), path)):
        if not os.path.isfile(path):
            continue
        try:
            with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
                text = file.read(MAX_FILE)
        except (OSError, EOFError):
            continue
        yield name_of[path], text


def read_kinds() -> dict[str, dict[str, np.ndarray]]:
    """Read every kind of text this machine has.

    Returns
    -------
    dict
        ``{kind: {"train": ids, "held_out": ids}}``. A document is whole on one side: one in ten, by the
        hash of its name, is held out.
    """
    kinds = {}
    for kind in SOURCES:
        parts, seen = {"train": [], "held_out": []}, set()
        sizes, limits = {"train": 0, "held_out": 0}, {"train": MAX_TRAIN, "held_out": MAX_HELD_OUT}
        for name, text in documents(kind):
            side = "held_out" if hashed("held out " + name) % 10 == 0 else "train"
            # Debian repeats whole licences under many names: a copy must not sit on both sides.
            if len(text) < 200 or sizes[side] >= limits[side] or hashed(text) in seen:
                continue
            try:
                text[: text.rfind(b"\n") + 1].decode()
            except UnicodeDecodeError:
                continue
            seen.add(hashed(text))
            parts[side].append(np.concatenate([[BOS], np.frombuffer(text, np.uint8), [EOS]]).astype(np.int64))
            sizes[side] += len(text)
            if all(sizes[side] >= limits[side] for side in sizes):
                break
        if any(size < 4 * CONTEXT for size in sizes.values()):
            print(f"{kind}: too little text on this machine (looked in {SOURCES[kind][0]}), left out")
            continue
        kinds[kind] = {side: np.concatenate(texts) for side, texts in parts.items()}
        print(
            f"{kind:10} {len(parts['train']):5} documents {sizes['train']:8} bytes to train on, "
            f"{len(parts['held_out']):4} documents {sizes['held_out']:7} bytes held out"
        )
    if len(kinds) < 5:
        raise SystemExit(f"only {list(kinds)} found; five kinds are the least that make routing worth looking at")
    return kinds


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose id is the byte: BPE without merges over the 256 byte symbols."""
    # GPT-2's stand-ins: a byte that prints is its own symbol, the others move past 255 in their order.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=symbols, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def sorted_experts_forward(
    self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Dropless experts for a CPU: sort the (token, expert) pairs by expert, one matmul per expert.

    The stock implementations are built for a GPU or for few tokens.
    """
    (T, K), H = top_k_index.shape, hidden_states.shape[-1]
    expert_of_pair = top_k_index.flatten()
    order = expert_of_pair.argsort(stable=True)
    counts = expert_of_pair.bincount(minlength=self.num_experts).tolist()
    x = hidden_states[:, None].expand(T, K, H).reshape(T * K, H).index_select(0, order)
    gate_up = torch.cat([F.linear(x_e, w) for x_e, w in zip(x.split(counts), self.gate_up_proj.unbind(), strict=True)])
    gate, up = gate_up.chunk(2, dim=-1)
    h = self.act_fn(gate) * up
    y = torch.cat([F.linear(h_e, w) for h_e, w in zip(h.split(counts), self.down_proj.unbind(), strict=True)])
    # A gather and a sum over K, not an index_add over tokens: the order of the sum stays fixed.
    y = y.index_select(0, order.argsort()).view(T, K, H)
    return (y * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register("sorted", sorted_experts_forward)


def new_model() -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=260,  # 256 bytes, three specials, one row that rounds it up
        hidden_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        intermediate_size=256,
        norm_topk_prob=True,
        router_aux_loss_coef=0.003,
        max_position_embeddings=1024,
        initializer_range=0.04,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return Qwen3MoeForCausalLM(config)


def batch(kinds: dict[str, dict[str, np.ndarray]], step: int, rank: int, args: argparse.Namespace) -> torch.Tensor:
    """Draw a worker's windows of one step: kinds take turns, so that experts are balanced over a mix of them."""
    rng = np.random.default_rng([args.seed, step])
    names, windows = rng.permutation(list(kinds)), []
    for row in range(args.rows * args.workers):
        ids = kinds[names[row % len(names)]]["train"]
        start = rng.integers(len(ids) - CONTEXT)
        windows.append(ids[start : start + CONTEXT + 1])
    return torch.from_numpy(np.stack(windows[rank :: args.workers]))


def save(model: Qwen3MoeForCausalLM, directory: Path) -> None:
    """Write the bf16 checkpoint beside its place and move it there, so that a reader never sees half of it."""
    fresh = directory.with_name(directory.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    model = copy.deepcopy(model).to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, do_sample=True, temperature=0.8, top_p=0.95
    )
    model.save_pretrained(fresh, max_shard_size="6MB")
    byte_tokenizer().save_pretrained(fresh)
    shutil.rmtree(directory, ignore_errors=True)
    fresh.rename(directory)


def average_gradients(parameters: list[torch.nn.Parameter]) -> None:
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad.copy_(grad.view_as(p))


def train(rank: int, args: argparse.Namespace, kinds: dict[str, dict[str, np.ndarray]], rendezvous: str) -> None:
    # Workers of one thread each: a step is thousands of small operations, and threads that meet at the
    # end of every one of them stand still whenever the machine has something else to do.
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=args.workers)
    torch.manual_seed(args.seed)
    model = Qwen3MoeForCausalLM.from_pretrained(args.init, dtype=torch.float32) if args.init else new_model()
    model.train()
    model.set_experts_implementation("sorted")
    config = model.config
    if rank == 0:
        print(
            f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, {args.steps} steps "
            f"of {args.workers} x {args.rows * CONTEXT} bytes"
        )

    matrices = [p for p in model.parameters() if p.dim() >= 2]
    norms = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)

    def lr_at(step: int) -> float:
        if step < args.warmup:
            return (step + 1) / args.warmup
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - args.warmup) / max(1, args.steps - args.warmup)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_at)
    started, bar = time.time(), tqdm(range(args.steps), unit="step", mininterval=5, disable=rank > 0)
    for step in bar:
        ids = batch(kinds, step, rank, args)
        out = model.model(ids[:, :-1], output_router_logits=True, use_cache=False)
        loss = F.cross_entropy(model.lm_head(out.last_hidden_state).flatten(0, 1), ids[:, 1:].flatten())
        # Balanced layer by layer: over all layers at once, one layer could use few experts unpunished.
        aux = torch.stack(
            [
                load_balancing_loss_func((logits,), config.num_experts, config.num_experts_per_tok)
                for logits in out.router_logits
            ]
        ).mean()
        (loss + config.router_aux_loss_coef * aux).backward()
        average_gradients(list(model.parameters()))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}", aux=f"{aux.item():.2f}", norm=f"{norm.item():.2f}", refresh=False)
        if rank == 0 and step % 50 == 0:
            tqdm.write(
                f"step {step} loss {loss.item():.4f} aux {aux.item():.3f} norm {norm.item():.2f} "
                f"lr {schedule.get_last_lr()[0]:.2e} {time.time() - started:.0f} s"
            )
        if rank == 0 and args.interim and (step + 1 == 50 or (step + 1) % 200 == 0):
            save(model, args.interim)
        if step + 1 == args.stop:
            break
    if rank == 0:
        print(f"last loss {loss.item():.4f}, {time.time() - started:.0f} s")
        save(model, args.out)
        print(f"wrote {args.out}; evaluate.py says how good it is")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    parser.add_argument("--interim", type=Path, help="also write the checkpoint here as training goes on")
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--warmup", type=int, default=100, help="steps over which the learning rate rises")
    parser.add_argument("--stop", type=int, help="end after this many of the steps, the learning rate still high")
    parser.add_argument("--init", type=Path, help="go on from this checkpoint's weights (take another --seed)")
    parser.add_argument("--rows", type=int, default=4, help="windows of 512 bytes per step and worker")
    parser.add_argument("--workers", type=int, default=2, help="processes; their number is part of the recipe")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(train, (args, read_kinds(), f"{directory}/rendezvous"), nprocs=args.workers)
