"""Decode a Mixtral of 1.64 GB from disk in 700 MB of memory, beside other ways of doing it.

    sudo python bench/bench_memory_limit.py [--json FILE]

A random Mixtral (16 layers x 32 experts, top-2, bfloat16) is written shard by shard into a temporary folder. Each
contender then writes the same tokens in a process of its own, the limited ones in a memory cgroup made for
it, with the model's files dropped from the page cache first. What is counted, per token after the warm-up:

* MB read: ``read_bytes`` of /proc/self/io, what came from the block device for this process, page faults included;
* ms: wall time between tokens.

Linux; making a cgroup takes root. accelerate and llama-cpp-python (with gguf) take part where they are installed.
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.generation.streamers import BaseStreamer
from transformers.utils.logging import disable_progress_bar

MB = 1e6
EMBEDDING_STD = 0.16
LIMIT_BYTES = 700_000_000
CONTENDERS = ("moecache", "accelerate", "llama.cpp", "resident")
CONFIG = MixtralConfig(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=16,
    num_attention_heads=8,
    num_key_value_heads=8,
    num_local_experts=32,
    num_experts_per_tok=2,
    max_position_embeddings=2048,
    architectures=["MixtralForCausalLM"],
    dtype="bfloat16",
    bos_token_id=1,
    eos_token_id=None,
)


def write_model(folder: Path, seed: int) -> None:
    """Write the checkpoint one shard (one layer) at a time, so that this process stays small."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = CONFIG.initializer_range) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(torch.bfloat16)

    def ones() -> torch.Tensor:
        return torch.ones(CONFIG.hidden_size, dtype=torch.bfloat16)

    hidden, inner, vocab = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.vocab_size
    weight_map: dict[str, str] = {}
    for layer in range(CONFIG.num_hidden_layers):
        p = f"model.layers.{layer}"
        shard = {f"{p}.input_layernorm.weight": ones(), f"{p}.post_attention_layernorm.weight": ones()}
        shard |= {f"{p}.self_attn.{part}_proj.weight": normal(hidden, hidden) for part in "qkvo"}
        shard[f"{p}.block_sparse_moe.gate.weight"] = normal(CONFIG.num_local_experts, hidden)
        for expert in range(CONFIG.num_local_experts):
            e = f"{p}.block_sparse_moe.experts.{expert}"
            shard[f"{e}.w1.weight"] = normal(inner, hidden)
            shard[f"{e}.w2.weight"] = normal(hidden, inner)
            shard[f"{e}.w3.weight"] = normal(inner, hidden)
        if layer == 0:
            # Of the common size, embeddings would drown in the layers' outputs and all tokens take the same few experts.
            shard["model.embed_tokens.weight"] = normal(vocab, hidden, std=EMBEDDING_STD)
            shard["lm_head.weight"] = normal(vocab, hidden)
            shard["model.norm.weight"] = ones()
        file = f"model-{layer + 1:05}-of-{CONFIG.num_hidden_layers:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    CONFIG.save_pretrained(folder)


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


class Cgroup:
    """A memory cgroup of its own (version 1 or 2), removed at the end.

    Raises
    ------
    OSError
        This machine or user cannot make one.
    """

    def __init__(self, limit_bytes: int) -> None:
        v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
        self.version = 1 if v1.is_dir() else 2
        root = v1 if self.version == 1 else v2
        if self.version == 2 and "memory" not in (root / "cgroup.subtree_control").read_text().split():
            (root / "cgroup.subtree_control").write_text("+memory")
        self.path = root / f"moecache-bench-{os.getpid()}"
        self.path.mkdir()
        limit = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
        (self.path / limit).write_text(str(limit_bytes))
        if (self.path / "memory.swap.max").exists():
            (self.path / "memory.swap.max").write_text("0")

    def enter(self) -> None:
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self) -> int | None:
        file = self.path / ("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")
        return int(file.read_text()) if file.exists() else None

    def close(self) -> None:
        # The kernel may take a moment to let go of the last process.
        for _ in range(50):
            try:
                return self.path.rmdir()
            except OSError:
                time.sleep(0.1)


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


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


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

    model = moecache.load(args.model, capacity=args.capacity, bank="disk", policy=args.policy)
    cache = model.moecache
    facts = generate(model, args, Meter(args.warmup, cache.reset_stats))
    stats = cache.stats()
    facts |= {"hit_rate": stats.hit_rate, "resident_mb": stats.resident_bytes / MB, "stall_s": stats.stall_s}
    facts |= {"fetched_mb_per_token": (stats.bytes_demand + stats.bytes_prefetch) / facts["tokens"] / MB}
    cache.close()
    return facts


def run_resident(args: argparse.Namespace) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(args.model, experts_implementation="eager")
    return generate(model, args, Meter(args.warmup))


def run_accelerate(args: argparse.Namespace) -> dict[str, Any]:
    """All but the experts in memory; the experts of every layer on disk."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    experts = [name for name, _ in model.named_modules() if name.endswith(".experts")]
    others = {name.rpartition(".")[0] for name, _ in [*model.named_parameters(), *model.named_buffers()]} - set(experts)
    model = AutoModelForCausalLM.from_pretrained(
        args.model,
        experts_implementation="eager",
        device_map=dict.fromkeys(experts, "disk") | dict.fromkeys(others, "cpu"),
        offload_folder=args.scratch,
    )
    drop_from_page_cache(Path(args.scratch))
    return generate(model, args, Meter(args.warmup))


def run_llama(args: argparse.Namespace) -> dict[str, Any]:
    """llama.cpp over mmap, fed the tokens that the first contender wrote."""
    from llama_cpp import Llama

    llm = Llama(model_path=str(args.gguf), n_ctx=1024, use_mmap=True, n_threads=os.cpu_count(), verbose=False)
    tokens = json.loads(Path(args.token_file).read_text())
    meter = Meter(args.warmup)
    llm.eval(prompt_ids(args))
    meter.token(tokens[0])
    for token, following in pairwise(tokens):
        llm.eval([token])
        meter.token(following)
    return meter.facts()


RUNNERS = {"moecache": run_moecache, "resident": run_resident, "accelerate": run_accelerate, "llama.cpp": run_llama}


def absent(contender: str) -> str | None:
    """Why a contender cannot take part."""
    needs = {"accelerate": ("accelerate",), "llama.cpp": ("llama_cpp", "gguf")}.get(contender, ())
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


def measure(contender: str, args: argparse.Namespace, folder: Path, token_file: Path) -> dict[str, Any]:
    """Run one contender in a process of its own."""
    cgroup = None if contender == "resident" else Cgroup(args.limit)
    drop_from_page_cache(folder)
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    command = [sys.executable, __file__, "--contender", contender, "--model", str(folder / "model")]
    command += ["--scratch", str(scratch), "--gguf", str(folder / "model.gguf"), "--token-file", str(token_file)]
    for option in ("capacity", "policy", "tokens", "warmup", "prompt_tokens"):
        command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=cgroup.enter if cgroup else None)
        seconds, peak = time.perf_counter() - start, cgroup.peak() if cgroup else None
    finally:
        if cgroup:
            cgroup.close()
        shutil.rmtree(scratch, ignore_errors=True)
    if done.returncode:
        reason = "killed (out of memory)" if done.returncode == -9 else (done.stderr.strip().splitlines() or ["?"])[-1]
        return {"contender": contender, "failed": reason[:160]}
    facts = json.loads(done.stdout.splitlines()[-1])
    return {"contender": contender, "process_s": seconds, "peak_mb": peak and peak / MB, **facts}


def table(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    head = ("contender", "MB/token", "ms/token", "tokens/s", "time / ours", "warm-up MB", "warm-up s", "own MB")
    ours = next((row["ms_per_token"] for row in rows if row["contender"] == "moecache" and "failed" not in row), None)
    lines = [head]
    for row in rows:
        if "failed" in row:
            continue
        name = row["contender"] + (" (no limit)" if row["contender"] == "resident" else "")
        ratio = f"{row['ms_per_token'] / ours:.2f}" if ours else ""
        lines.append(
            (
                name,
                f"{row['mb_per_token']:.1f}",
                f"{row['ms_per_token']:.1f}",
                f"{1e3 / row['ms_per_token']:.2f}",
                ratio,
                f"{row['warmup_mb']:.0f}",
                f"{row['warmup_s']:.1f}",
                f"{row['anonymous_mb']:.0f}",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    text.insert(1, "-" * len(text[0]))
    text += [f"{row['contender']}: {row['failed']}" for row in rows if "failed" in row]
    text.append(f"limit {args.limit / MB:.0f} MB; {args.tokens} tokens after {args.warmup} of warm-up; MB = 10^6 bytes")
    text.append("own MB: memory of the process that is not a page of a file; the rest of the limit is page cache")
    return "\n".join(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=LIMIT_BYTES, help="bytes of memory for each limited contender")
    parser.add_argument("--capacity", type=float, default=0.17, help="fraction of the experts that moecache keeps")
    parser.add_argument("--policy", default="expected-next-use")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--warmup", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--folder", type=Path, help="keep the model here, and use it if it is there")
    parser.add_argument("--json", type=Path, metavar="FILE")
    for hidden in ("--contender", "--model", "--scratch", "--gguf", "--token-file"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_all(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    if not (folder / "model" / "config.json").exists():
        (folder / "model").mkdir(exist_ok=True, parents=True)
        print(f"writing the model to {folder}", file=sys.stderr)
        write_model(folder / "model", seed=0)
    token_file, rows = folder / "tokens.json", []
    for contender in args.only:
        if reason := absent(contender):
            rows.append({"contender": contender, "failed": reason})
            continue
        if contender == "llama.cpp" and not (folder / "model.gguf").exists():
            write_gguf(folder / "model", folder / "model.gguf")
        print(f"running {contender}", file=sys.stderr)
        row = measure(contender, args, folder, token_file)
        if "token_ids" in row and not token_file.exists():
            token_file.write_text(json.dumps(row["token_ids"]))
        rows.append(row)
    token_file.unlink(missing_ok=True)
    return rows


def main() -> int:
    args = parse()
    disable_progress_bar()
    if args.contender:
        print(json.dumps(RUNNERS[args.contender](args)))
        return 0
    try:
        Cgroup(args.limit).close()
    except OSError as error:
        print(f"skipped: cannot make a memory cgroup here ({error})")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        rows = run_all(args, args.folder or Path(temporary))
    print(table(rows, args))
    if args.json:
        args.json.write_text(json.dumps({"limit": args.limit, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
