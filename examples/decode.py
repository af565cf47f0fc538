"""Write text with a mixture-of-experts model whose experts stay on disk, and show what that cost.

    python examples/decode.py                                # the tiny model, prompts of several sorts
    python examples/decode.py MODEL --prompt "..." --check   # fails unless tokens and logits are the resident model's
    python examples/decode.py --prompt "a" --prompt "b" --compare   # a batch, beside resident, LRU and accelerate
    python examples/decode.py --fit                          # before and after a forecaster was fitted to other prompts' routing

Needs ``moecache[hf]``; ``--compare`` also shows accelerate's disk offload where accelerate is installed.
"""

import argparse
import importlib.util
import io
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer
from transformers.utils.logging import disable_progress_bar

import moecache
import moecache.hf
from moecache.lab import fit, read_trace

TINY = Path(__file__).parent / "tiny_moe" / "model"
PROMPTS = TINY.parent / "prompts.json"
JSON_KEYS = (
    *("tokens_per_s", "hit_rate", "demands", "hits", "misses", "evictions", "prefetch_issued", "prefetch_useful"),
    *("bytes_demand", "bytes_prefetch", "stall_s", "capacity_experts", "resident_bytes", "expert_bytes_total"),
    *("identical", "text"),
)


class InputError(Exception):
    """What the caller asked for cannot be done; the message is one line."""


class Progress(BaseStreamer):  # type: ignore[misc]
    """Prints each row as it is written (several rows: line by line, each with its number) and times the tokens."""

    def __init__(self, tokenizer: Any, rows: int, quiet: bool) -> None:
        self.tokenizer, self.quiet, self.rows = tokenizer, quiet, rows
        self.ids: list[list[int]] = [[] for _ in range(rows)]
        self.printed = [0] * rows
        self.prompt_seen = False
        self.first = self.last = 0.0

    def put(self, value: torch.Tensor) -> None:
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        self.last = time.perf_counter()
        self.first = self.first or self.last
        for row, token in enumerate(value.reshape(-1).tolist()):
            self.ids[row].append(token)
            self._show(row, final=False)

    def end(self) -> None:
        for row in range(self.rows):
            self._show(row, final=True)
        if not self.quiet and self.rows == 1:
            print(flush=True)

    def _show(self, row: int, final: bool) -> None:
        if self.quiet:
            return
        text = self.tokenizer.decode(self.ids[row], skip_special_tokens=True)
        if not final:
            text = text.rstrip("\ufffd")  # the first bytes of a character that is not yet whole
        if self.rows > 1 and not final:
            text = text[: text.rfind("\n") + 1]
        new, self.printed[row] = text[self.printed[row] :], max(self.printed[row], len(text))
        if self.rows == 1:
            print(new, end="", flush=True)
        elif new:
            print("\n".join(f"[{row + 1}] {line}" for line in new.rstrip("\n").split("\n")), flush=True)


@dataclass
class Written:
    """What one contender wrote: texts, token ids, logits of every step (when asked for), time of the decode steps."""

    texts: list[str] = field(default_factory=list)
    sequences: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def write(model: Any, tokenizer: Any, batches: dict[str, list[str]], args: argparse.Namespace, quiet: bool) -> Written:
    """Decode the batches one after the other, as the model's generation config says, each from the same seed."""
    written = Written()
    for title, batch in batches.items():
        inputs = tokenizer(batch, return_tensors="pt", padding=len(batch) > 1).to(model.device)
        progress = Progress(tokenizer, len(batch), quiet)
        if not quiet:
            print(f"\n--- {title} ---")
            for number, prompt in enumerate(batch, 1):
                print(
                    f"[{number}] {prompt}" if len(batch) > 1 else prompt,
                    end="" if len(batch) == 1 else "\n",
                    flush=True,
                )
        torch.manual_seed(0)
        output = model.generate(
            **inputs,
            max_new_tokens=args.max_new_tokens,
            streamer=progress,
            return_dict_in_generate=True,
            output_logits=args.check,
        )
        written.sequences.append(output.sequences)
        written.logits.extend(output.logits or ())
        written.texts.extend(tokenizer.batch_decode(progress.ids, skip_special_tokens=True))
        # The prompt's own pass yields the first token; what follows are decode steps.
        written.tokens += sum(len(row) - 1 for row in progress.ids)
        written.seconds += progress.last - progress.first
    return written


def identical(ours: Written, reference: Written) -> bool:
    """Whether every token and every logit of every step is the same number."""
    pairs = [*zip(ours.sequences, reference.sequences, strict=True)]
    if len(ours.logits) != len(reference.logits):
        return False
    pairs += zip(ours.logits, reference.logits, strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def peak_rss() -> int:
    """Peak resident bytes of this process."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def load_cached(args: argparse.Namespace, policy: str, history: Any) -> Any:
    return moecache.load(
        args.model, capacity=args.capacity, bank=args.bank, policy=policy, history=history, local_files_only=True
    )


def load_resident(args: argparse.Namespace) -> Any:
    return AutoModelForCausalLM.from_pretrained(args.model, local_files_only=True)


def align_experts(model: Any) -> Any:
    """The model with every expert in memory that begins at a multiple of 64 bytes, as a cache's slots do.

    Float32 products of one row depend, on some processors, on where the weights lie, and a file is mapped anywhere: without
    this, equal experts could differ in their last bits.
    """
    for module in (module for name, module in model.named_modules() if name.endswith(".experts")):
        for param in module.parameters():
            stacked = param.dim() > 1 and param.shape[0] == getattr(module, "num_experts", None)
            rows = param.data.unsqueeze(0) if not stacked else param.data
            width = rows[0].numel()
            storage = torch.empty((len(rows), -(-width // 64) * 64), dtype=param.dtype, device=param.device)
            aligned = storage[:, :width].unflatten(1, rows.shape[1:]).copy_(rows)
            param.data = aligned if stacked else aligned[0]
    return model


def load_accelerate(args: argparse.Namespace, folder: str) -> Any:
    """The experts of every layer on disk, all else in memory, as ``device_map`` does it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model, local_files_only=True))
    experts = [name for name, _ in model.named_modules() if name.endswith(".experts")]
    device_map = dict.fromkeys(experts, "disk")
    for name, _ in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        module = name.rpartition(".")[0]
        if not any(f"{module}.".startswith(f"{e}.") for e in experts):
            # A parameter in the module that also holds the experts (a router's bias, say) goes by its own name.
            device_map[name if any(e.startswith(f"{module}.") for e in experts) else module] = "cpu"
    return AutoModelForCausalLM.from_pretrained(
        args.model,
        device_map=device_map,
        offload_folder=folder,
        local_files_only=True,
    )


def run_cached(
    args: argparse.Namespace,
    tokenizer: Any,
    batches: dict[str, list[str]],
    policy: str,
    quiet: bool,
    history: Any = None,
    name: str | None = None,
) -> tuple[dict[str, Any], Written]:
    """Decode through the cache; the facts that the table and the JSON file show."""
    model = load_cached(args, policy, history)
    cache = model.moecache
    written = write(model, tokenizer, batches, args, quiet)
    facts = {key: value for key, value in cache.stats().as_dict().items() if key in JSON_KEYS}
    facts |= {
        "tokens_per_s": written.tokens_per_s,
        "identical": None,
        "text": written.texts[0] if len(written.texts) == 1 else written.texts,
        "peak_rss": peak_rss(),
        "name": name or f"moecache {policy}",
    }
    cache.close()
    return facts, written


def record(args: argparse.Namespace, tokenizer: Any, prompts: list[str], path: Path) -> None:
    """Let the model complete each prompt, one by one, and keep what was routed."""
    model = load_cached(args, args.policy, None)
    with model.moecache.record(path, model=args.model.name) as recorder:
        for number, prompt in enumerate(prompts, 1):
            write(model, tokenizer, {"": [prompt]}, args, quiet=True)
            print(f"\rrecorded {number} of {len(prompts)} prompts, {recorder.tokens:,} tokens", end="", flush=True)
    print()
    moecache.detach(model)


def before_and_after(
    args: argparse.Namespace, tokenizer: Any, batches: dict[str, list[str]]
) -> tuple[list[dict[str, Any]], Written]:
    """Decode; record other prompts and fit; decode again, with the history of the requests alone and with the forecaster."""
    asked = {prompt for batch in batches.values() for prompt in batch}
    others = [
        prompt
        for kind in json.loads(PROMPTS.read_text(encoding="utf-8")).values()
        for prompt in kind
        if prompt not in asked
    ]

    def known() -> moecache.History | None:
        return moecache.History.load(args.history) if args.history and args.history.exists() else None

    run = (args, tokenizer, batches, args.policy)
    before, _ = run_cached(*run, quiet=False, history=known(), name="before")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "routing.safetensors"
        print()
        record(args, tokenizer, others, path)
        began = time.perf_counter()
        result = fit(read_trace(path), history=known())
        print(f"{result.report}; {time.perf_counter() - began:.0f} s, {mib(result.forecaster.nbytes)}")
        saved = Path(folder) / "history"
        result.history.save(saved)
        counts = moecache.History.load(saved)
        counts.forecaster = None
        counted, _ = run_cached(*run, quiet=True, history=counts, name="after, counts alone")
        after, written = run_cached(*run, quiet=True, history=moecache.History.load(saved), name="after, forecaster")
    if args.history:
        result.history.save(args.history)
    return [before, counted, after], written


def run_other(args: argparse.Namespace, tokenizer: Any, batches: dict[str, list[str]], name: str) -> dict[str, Any]:
    """Decode without moecache: ``resident`` or ``accelerate``."""
    with tempfile.TemporaryDirectory() as folder:
        model = load_resident(args) if name == "resident" else load_accelerate(args, folder)
        written = write(model, tokenizer, batches, args, quiet=True)
    return {"tokens_per_s": written.tokens_per_s, "peak_rss": peak_rss()}


def compare(argv: list[str]) -> list[dict[str, Any]]:
    """The other contenders, each in a process of its own so that its memory is its own."""
    rows = []
    for contender, name in (("lru", "moecache lru"), ("resident", "fully resident"), ("accelerate", "accelerate disk")):
        if contender == "accelerate" and importlib.util.find_spec("accelerate") is None:
            rows.append({"name": name, "note": "not installed"})
            continue
        done = subprocess.run(
            [sys.executable, __file__, *argv, "--contender", contender], capture_output=True, text=True
        )
        if done.returncode:
            rows.append({"name": name, "note": "failed: " + (done.stderr.strip().splitlines() or ["?"])[-1][:80]})
        else:
            rows.append(json.loads(done.stdout.splitlines()[-1]) | {"name": name})
    return rows


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def table(rows: list[dict[str, Any]]) -> str:
    """One line a contender; a fact that a contender does not have is left blank."""
    head = ("", "tokens/s", "hits", "demand fetches", "prefetches (useful)", "stall", "cache (experts)", "host peak")
    lines = [head]
    for row in rows:
        if "note" in row:
            lines.append((row["name"], "-", *[""] * 6))
            continue
        cached = ("",) * 5
        if "hit_rate" in row:
            cached = (
                f"{row['hit_rate']:.1%}",
                f"{row['misses']:,}, {mib(row['bytes_demand'])}",
                f"{row['prefetch_issued']:,} ({row['prefetch_useful']:,}), {mib(row['bytes_prefetch'])}",
                f"{row['stall_s']:.2f} s",
                f"{mib(row['resident_bytes'])} ({row['capacity_experts']:,})",
            )
        lines.append((row["name"], f"{row['tokens_per_s']:.1f}", *cached, mib(row["peak_rss"])))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    text.insert(1, "-" * len(max(text, key=len)))
    text += [f"{row['name']}: {row['note']}" for row in rows if "note" in row]
    total = rows[0]["expert_bytes_total"]
    text.append(
        f"all experts: {mib(total)}; tokens/s without the prompt's own pass; host peak: resident memory of the process"
    )
    return "\n".join(text)


def capacity(text: str) -> int | float | str:
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", type=Path, default=TINY, help="folder of a transformers MoE checkpoint"
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt", action="append", help="several make a batch; none: prompts of several kinds, one by one"
    )
    prompts.add_argument("--prompt-file", type=Path, help="a text file that is the prompt")
    parser.add_argument(
        "--capacity", type=capacity, default=0.25, help="experts, fraction of all experts, or bytes such as 8GiB"
    )
    parser.add_argument(
        "--bank", choices=("disk", "ram"), default="disk", help="where the experts that are not cached lie"
    )
    parser.add_argument("--policy", default="expected-next-use")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--history", type=Path, help="file of earlier requests: read if it exists, written at the end")
    parser.add_argument(
        "--fit", action="store_true", help="record other prompts, fit a forecaster to them, decode again"
    )
    parser.add_argument(
        "--check", action="store_true", help="decode again with the resident model; exit 1 unless all is equal"
    )
    parser.add_argument(
        "--compare", action="store_true", help="more rows: fully resident, LRU, accelerate's disk offload"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the facts as one object")
    parser.add_argument("--contender", choices=("lru", "resident", "accelerate"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def read_prompts(args: argparse.Namespace) -> dict[str, list[str]]:
    """The batches to decode, one after the other, each under a title."""
    if args.prompt:
        return {"prompt" if len(args.prompt) == 1 else f"batch of {len(args.prompt)} prompts": args.prompt}
    if args.prompt_file:
        try:
            return {args.prompt_file.name: [args.prompt_file.read_text(encoding="utf-8")]}
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--prompt-file: {error}") from error
    return {kind: prompts[:1] for kind, prompts in json.loads(PROMPTS.read_text(encoding="utf-8")).items()}


def check_arguments(args: argparse.Namespace) -> None:
    if not (args.model / "config.json").is_file():
        raise InputError(f"{args.model}: no model here (no config.json)")
    if args.max_new_tokens < 1:
        raise InputError(f"--max-new-tokens must be at least 1, not {args.max_new_tokens}")
    for option, path in (("--json", args.json), ("--history", args.history)):
        if path and not path.resolve().parent.is_dir():
            raise InputError(f"{option}: the folder of {path} does not exist")
    if args.fit and args.policy != "expected-next-use":
        raise InputError(f"--fit: the policy {args.policy} has no use for a forecaster")
    if args.prompt and not all(args.prompt):
        raise InputError("--prompt: an empty prompt gives the model nothing to go on")


def run(argv: list[str]) -> int:
    args = parse(argv)
    check_arguments(args)
    batches = read_prompts(args)
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    if args.contender:
        args.check, args.history = False, None
        if args.contender == "lru":
            row, _ = run_cached(args, tokenizer, batches, "lru", quiet=True)
        else:
            row = run_other(args, tokenizer, batches, args.contender)
        print(json.dumps(row))
        return 0

    if args.fit:
        rows, ours = before_and_after(args, tokenizer, batches)
    else:
        facts, ours = run_cached(args, tokenizer, batches, args.policy, quiet=False, history=args.history)
        rows = [facts]
    facts = rows[-1]
    if args.check:
        facts["identical"] = identical(
            ours, write(align_experts(load_resident(args)), tokenizer, batches, args, quiet=True)
        )
    print("\n" + table([*rows, *(compare(argv) if args.compare else [])]))
    if args.json:
        args.json.write_text(json.dumps({key: facts[key] for key in JSON_KEYS}, indent=2) + "\n", encoding="utf-8")
    if args.check:
        same = facts["identical"]
        print(
            "\ncheck: tokens and logits equal the resident model's"
            if same
            else "\ncheck: DIFFERS from the resident model"
        )
        return 0 if same else 1
    return 0


def main() -> int:
    for stream in (sys.stdout, sys.stderr):
        # A terminal without a sign of the completion shows its number.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        return run(sys.argv[1:])
    except (InputError, moecache.errors.MoeCacheError, OSError) as error:
        print(f"decode.py: {(str(error).strip().splitlines() or [type(error).__name__])[0]}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
