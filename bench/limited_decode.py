"""One contender of ``bench_memory_limit.py``, in a process of its own; prints one line of JSON.

Apart from it so that the process that starts contenders maps none of torch's libraries: pages that another process has
mapped stay in the page cache, and whoever comes next has them for nothing.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bench_memory_limit import FORMATS, MB, drop_from_page_cache
from limited_models import CONFIGS, write_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer
from transformers.utils.logging import disable_progress_bar

CONFIG = CONFIGS["bf16"]


def model_folder(args: argparse.Namespace) -> Path:
    return Path(args.folder, f"model-{args.format}")


def gguf_tensors(folder: Path) -> Iterator[tuple[str, Callable[[], torch.Tensor], tuple[int, ...], bool]]:
    """The checkpoint's tensors under their GGUF names: (name, how to get it, shape, whether as float32)."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    hidden, inner, experts = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.num_local_experts

    def get(name: str) -> torch.Tensor:
        with safe_open(folder / index[name], "pt") as shard:
            return shard.get_tensor(name)

    def rotary(name: str) -> torch.Tensor:
        # llama.cpp rotates neighbours, transformers the two halves of a head.
        heads = CONFIG.num_attention_heads
        return get(name).view(heads, 2, hidden // heads // 2, hidden).transpose(1, 2).reshape(hidden, hidden)

    def stacked(layer: str, part: str) -> torch.Tensor:
        return torch.stack([get(f"{layer}.block_sparse_moe.experts.{e}.{part}.weight") for e in range(experts)])

    yield "token_embd.weight", lambda: get("model.embed_tokens.weight"), (CONFIG.vocab_size, hidden), False
    yield "output.weight", lambda: get("lm_head.weight"), (CONFIG.vocab_size, hidden), False
    yield "output_norm.weight", lambda: get("model.norm.weight"), (hidden,), True
    for number in range(CONFIG.num_hidden_layers):
        p, b = f"model.layers.{number}", f"blk.{number}"
        yield f"{b}.attn_norm.weight", lambda p=p: get(f"{p}.input_layernorm.weight"), (hidden,), True
        yield f"{b}.ffn_norm.weight", lambda p=p: get(f"{p}.post_attention_layernorm.weight"), (hidden,), True
        for part in "qk":
            yield (
                f"{b}.attn_{part}.weight",
                lambda p=p, c=part: rotary(f"{p}.self_attn.{c}_proj.weight"),
                (hidden, hidden),
                False,
            )
        for part, short in (("v", "v"), ("o", "output")):
            yield (
                f"{b}.attn_{short}.weight",
                lambda p=p, c=part: get(f"{p}.self_attn.{c}_proj.weight"),
                (hidden, hidden),
                False,
            )
        yield f"{b}.ffn_gate_inp.weight", lambda p=p: get(f"{p}.block_sparse_moe.gate.weight"), (experts, hidden), True
        for short, part, shape in (
            ("gate", "w1", (inner, hidden)),
            ("down", "w2", (hidden, inner)),
            ("up", "w3", (inner, hidden)),
        ):
            yield f"{b}.ffn_{short}_exps.weight", lambda p=p, c=part: stacked(p, c), (experts, *shape), False


def write_gguf(folder: Path, path: Path) -> None:
    """The same weights as float16 GGUF, one tensor at a time."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_attention_heads)
    writer.add_head_count_kv(CONFIG.num_key_value_heads)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_rope_freq_base(CONFIG.rope_parameters["rope_theta"])
    writer.add_expert_count(CONFIG.num_local_experts)
    writer.add_expert_used_count(CONFIG.num_experts_per_tok)
    writer.add_vocab_size(CONFIG.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{token}>" for token in range(CONFIG.vocab_size)])
    writer.add_token_scores([0.0] * CONFIG.vocab_size)
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * CONFIG.vocab_size)
    for name, _, shape, wide in gguf_tensors(folder):
        dtype = np.dtype(np.float32 if wide else np.float16)
        writer.add_tensor_info(name, shape, dtype, int(np.prod(shape)) * dtype.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, get, _, wide in gguf_tensors(folder):
        writer.write_tensor_data(get().to(torch.float32 if wide else torch.float16).numpy())
    writer.close()


def read_bytes() -> int:
    """Bytes that came from the block device for this process so far."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise OSError("/proc/self/io has no read_bytes")


def own_memory(field: str) -> int:
    """A figure of /proc/self/status in bytes: ``RssAnon``, ``RssFile``, ..."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


class Meter(BaseStreamer):
    """Notes time and bytes at every token; the first ``warmup`` ones are kept apart."""

    def __init__(self, warmup: int, at_warm: Callable[[], None] = lambda: None) -> None:
        self.warmup, self.at_warm = warmup, at_warm
        self.start = time.perf_counter(), read_bytes()
        self.marks: list[tuple[float, int]] = []
        self.tokens: list[int] = []
        self.prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        self.token(int(value.reshape(-1)[0]))

    def token(self, token: int) -> None:
        self.tokens.append(token)
        self.marks.append((time.perf_counter(), read_bytes()))
        if len(self.marks) == self.warmup:
            self.at_warm()

    def end(self) -> None:
        pass

    def facts(self) -> dict[str, Any]:
        warm, last = self.marks[self.warmup - 1], self.marks[-1]
        count = len(self.marks) - self.warmup
        return {
            "anonymous_mb": own_memory("RssAnon") / MB,
            "mb_per_token": (last[1] - warm[1]) / count / MB,
            "ms_per_token": (last[0] - warm[0]) / count * 1e3,
            "tokens": count,
            "warmup_tokens": self.warmup,
            "warmup_mb": (warm[1] - self.start[1]) / MB,
            "warmup_s": warm[0] - self.start[0],
            "token_ids": self.tokens,
        }


def prompt_ids(args: argparse.Namespace) -> list[int]:
    return torch.randint(
        0, CONFIG.vocab_size, (args.prompt_tokens,), generator=torch.Generator().manual_seed(1)
    ).tolist()


def generate(model: Any, args: argparse.Namespace, meter: Meter) -> dict[str, Any]:
    """Sampled from one seed: equal logits give equal tokens, and a random model does not fall into a loop."""
    ids = torch.tensor([prompt_ids(args)])
    torch.manual_seed(0)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=args.warmup + args.tokens,
        do_sample=True,
        top_k=0,
        streamer=meter,
    )
    return meter.facts()


def run_moecache(args: argparse.Namespace) -> dict[str, Any]:
    import moecache
    import moecache.hf

    size = args.capacity if args.capacity == "auto" else float(args.capacity)
    context = args.prompt_tokens + args.warmup + args.tokens
    model = moecache.load(model_folder(args), capacity=size, bank="disk", policy=args.policy, context=context)
    cache = model.moecache
    attached = {f"attached_{field}_mb": own_memory(field) / MB for field in ("RssAnon", "RssFile")}
    facts = attached | generate(model, args, Meter(args.warmup, cache.reset_stats))
    stats = cache.stats()
    facts |= {"capacity_experts": cache.capacity, "capacity_share": cache.capacity / sum(cache.num_experts)}
    facts |= {"hit_rate": stats.hit_rate, "resident_mb": stats.resident_bytes / MB, "stall_s": stats.stall_s}
    facts |= {"file_mb": own_memory("RssFile") / MB}
    facts |= {"fetched_mb_per_token": (stats.bytes_demand + stats.bytes_prefetch) / facts["tokens"] / MB}
    cache.close()
    return facts


def run_resident(args: argparse.Namespace) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(model_folder(args))
    return generate(model, args, Meter(args.warmup))


def run_accelerate(args: argparse.Namespace) -> dict[str, Any]:
    """All but the experts in memory; the experts of every layer on disk."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[args.format])
    experts = [name for name, _ in model.named_modules() if name.endswith(".experts")]
    others = {name.rpartition(".")[0] for name, _ in [*model.named_parameters(), *model.named_buffers()]} - set(experts)
    model = AutoModelForCausalLM.from_pretrained(
        model_folder(args),
        device_map=dict.fromkeys(experts, "disk") | dict.fromkeys(others, "cpu"),
        offload_folder=args.folder / "scratch",
    )
    drop_from_page_cache((args.folder / "scratch").rglob("*"))
    return generate(model, args, Meter(args.warmup))


def run_llama(args: argparse.Namespace) -> dict[str, Any]:
    """llama.cpp over mmap, fed the tokens that the first contender wrote."""
    from llama_cpp import Llama

    llm = Llama(
        model_path=str(args.folder / "model.gguf"), n_ctx=1024, use_mmap=True, n_threads=os.cpu_count(), verbose=False
    )
    tokens = json.loads(args.token_file.read_text())
    meter = Meter(args.warmup)
    llm.eval(prompt_ids(args))
    meter.token(tokens[0])
    for token, following in pairwise(tokens):
        llm.eval([token])
        meter.token(following)
    return meter.facts()


def write_model_once(args: argparse.Namespace) -> dict[str, Any]:
    folder = model_folder(args)
    if not (folder / "config.json").exists():
        folder.mkdir(exist_ok=True, parents=True)
        print(f"writing the model to {folder}", file=sys.stderr)
        write_model(folder, args.format, seed=0)
    return {}


def write_gguf_once(args: argparse.Namespace) -> dict[str, Any]:
    if not (args.folder / "model.gguf").exists():
        write_gguf(model_folder(args), args.folder / "model.gguf")
    return {}


TASKS = {
    "moecache": run_moecache,
    "resident": run_resident,
    "accelerate": run_accelerate,
    "llama.cpp": run_llama,
    "write-model": write_model_once,
    "write-gguf": write_gguf_once,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--capacity", default="auto")
    parser.add_argument("--policy", default="expected-next-use")
    parser.add_argument("--format", choices=FORMATS, default="bf16")
    parser.add_argument("--token-file", type=Path)
    for option in ("tokens", "warmup", "prompt-tokens"):
        parser.add_argument(f"--{option}", type=int, default=16)
    args = parser.parse_args()
    disable_progress_bar()
    print(json.dumps(TASKS[args.task](args)))


if __name__ == "__main__":
    main()
