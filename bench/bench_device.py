"""What a CUDA device adds: the rate of the link against one plain copy, and decode timing. A script of its own.

python bench/bench_device.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

import moecache

TINY = Path(__file__).parent.parent / "examples" / "tiny_moe" / "model"


def plain_copy_rate(nbytes: int, rounds: int = 10) -> float:
    """Bytes per second of one cudaMemcpyAsync of page-locked memory."""
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return nbytes / best


def engine_rate(expert_nbytes: int, experts: int, rounds: int = 10) -> float:
    """Bytes per second of the same amount as demand fetches, one expert after another."""
    bank = moecache.ExpertBank.from_tensors([{"w": torch.empty((2 * experts, expert_nbytes), dtype=torch.uint8)}])
    best = float("inf")
    with (
        moecache.ExpertCache(bank, experts, device="cuda", prefetch=False, policy="lru") as cache,
        cache.request() as request,
    ):
        for n in range(rounds):
            ids = (torch.arange(experts) + n % 2 * experts).view(1, -1)
            start = time.perf_counter()
            with request.route(0, ids) as lease:
                for _ in lease.ready():
                    pass
            best = min(best, time.perf_counter() - start)
    return expert_nbytes * experts / best


def decode_rate(capacity: float | None) -> float:
    """Tokens per second of the tiny model; None: fully resident."""
    from transformers import AutoModelForCausalLM

    import moecache.hf

    implementation = "eager" if capacity is None else "moecache"
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype="auto", experts_implementation=implementation).cuda()
    if capacity is not None:
        moecache.attach(model, capacity=capacity, bank="ram")
    ids = torch.randint(0, 256, (1, 40), device="cuda")
    model.generate(ids, max_new_tokens=8, do_sample=False)
    torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(ids, max_new_tokens=64, min_new_tokens=64, do_sample=False)
    torch.cuda.synchronize()
    return 64 / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    facts: dict[str, float | str] = {"device": torch.cuda.get_device_name()}
    plain = plain_copy_rate(192 << 20)
    facts["plain copy, GB/s"] = plain / 1e9
    for mib, experts in ((3, 64), (12, 16)):
        rate = engine_rate(mib << 20, experts)
        facts[f"engine, {mib} MiB experts, GB/s"] = rate / 1e9
        facts[f"engine, {mib} MiB experts, share of plain"] = rate / plain
    facts["tiny model resident, tokens/s"] = decode_rate(None)
    for capacity in (0.25, 1.0):
        facts[f"tiny model, capacity {capacity}, tokens/s"] = decode_rate(capacity)
    for name, value in facts.items():
        print(f"{name:<40} {value if isinstance(value, str) else format(value, '.3f')}")
    if args.json:
        args.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
