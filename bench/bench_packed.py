"""How fast packed experts are decoded: GB of decoded bytes a second of one core, beside torch's way of making the same.

    python bench/bench_packed.py [--rows 1536] [--cols 2048] [--rounds 25]

Processor seconds of this thread, the least of all rounds, ours and torch's in turn. Torch's way is that of transformers, which
must give the same bits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from moecache.packed import Part, format_named
from moecache.packed._loops import decode


def fp8(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    return Fp8Dequantize(None)._dequantize_one(values, scales, dtype)


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)[0]


Case = tuple[str, list[tuple[torch.Tensor, str]], Callable[..., torch.Tensor]]


def cases(rows: int, cols: int) -> dict[str, Case]:
    torch.manual_seed(0)
    values = torch.randn(rows, cols)
    grids = {"128 x 128": (-(-rows // 128), -(-cols // 128)), "per channel": (rows, 1), "1 x 32": (rows, cols // 32)}
    made: dict[str, Case] = {}
    for name, grid in grids.items():
        parts = [(values.to(torch.float8_e4m3fn), "F8_E4M3"), (torch.rand(grid), "F32")]
        made[f"FP8 e4m3, {name}"] = ("fp8", parts, fp8)
    parts = [(values.to(torch.float8_e5m2), "F8_E5M2"), (torch.rand(grids["128 x 128"]), "F32")]
    made["FP8 e5m2, 128 x 128"] = ("fp8", parts, fp8)
    blocks = torch.randint(0, 256, (rows, cols // 32, 16), dtype=torch.uint8)
    scales = torch.randint(115, 130, (rows, cols // 32), dtype=torch.uint8)
    made["MXFP4"] = ("mxfp4", [(blocks, "U8"), (scales, "U8")], mxfp4)
    return made


def seconds(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1536)
    parser.add_argument("--cols", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=25)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'format':<24}{'to':<16}{'GB/s':>6}{'torch':>8}{'times':>8}")
    for name, (packed, tensors, stock) in cases(args.rows, args.cols).items():
        form = format_named(packed)
        parts = {s: Part(tuple(t.shape), d) for s, (t, d) in zip(form.suffixes, tensors, strict=True)}
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            made = form.decoded(parts, dtype)
            out = torch.empty(made.shape, dtype=dtype)
            addresses = [tensor.data_ptr() for tensor, _ in tensors]
            ours, theirs = [], []
            for turn in range(args.rounds):
                ours.append(seconds(lambda: decode(made.recipe, addresses, out.data_ptr())))  # noqa: B023
                if turn < 3:
                    theirs.append(seconds(lambda: stock(*(tensor for tensor, _ in tensors), dtype)))  # noqa: B023
            assert torch.equal(out, stock(*(tensor for tensor, _ in tensors), dtype)), "other bits"
            rates = [out.nbytes / min(times) / 1e9 for times in (ours, theirs)]
            print(f"{name:<24}{str(dtype)[6:]:<16}{rates[0]:>6.2f}{rates[1]:>8.2f}{rates[0] / rates[1]:>8.1f}")


if __name__ == "__main__":
    main()
