"""Checkpoints of packed experts as they are published, tiny and random."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hf_families import save
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def one_file(folder: Path, edit: Callable[[Tensors], None]) -> Path:
    """Join a folder's shards into one file, changed by `edit`."""
    tensors: Tensors = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(shard))
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder / "model.safetensors"


def describe(folder: Path, **quantization: Any) -> None:
    """Say in the configuration how a checkpoint is quantised."""
    config = json.loads((folder / "config.json").read_text())
    # Where there is a GPU transformers has kernels of its own; what is compared is the dequantised model.
    config["quantization_config"] = quantization | ({"dequantize": True} if torch.cuda.is_available() else {})
    (folder / "config.json").write_text(json.dumps(config))


def fp8_matrix(weight: torch.Tensor, dtype: torch.dtype, block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = weight.shape
    scales = torch.rand(-(-rows // block), -(-cols // block)) + 0.5
    return (weight.float() * 3).to(dtype), scales


def save_fp8(
    family: str,
    folder: Path,
    *,
    scales: torch.dtype = torch.float32,
    values: torch.dtype = torch.float8_e4m3fn,
    plain: str = "-",
    block: int = 128,
    **changes: Any,
) -> Path:
    """A family's model, its linear layers and experts in FP8 but those whose names hold `plain`."""
    save(family, folder, torch.bfloat16, **changes)
    torch.manual_seed(3)

    def pack(tensors: Tensors) -> None:
        for name in [n for n in tensors if (n.endswith("_proj.weight") or ".experts." in n) and plain not in n]:
            tensors[name], grid = fp8_matrix(tensors[name], values, block)
            tensors[name + "_scale_inv"] = grid.to(scales)

    one_file(folder, pack)
    describe(folder, quant_method="fp8", activation_scheme="dynamic", weight_block_size=[block, block])
    return folder


def save_mxfp4(folder: Path, **changes: Any) -> Path:
    """gpt-oss as it is on the hub: blocks and scales, biases beside them."""
    save("gpt_oss", folder, torch.bfloat16, **{"intermediate_size": 32, **changes})
    generator = torch.Generator().manual_seed(0)

    def pack(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            experts, inner, outer = tensors.pop(name).shape
            shape = (experts, outer, inner // 32)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(120, 126, shape, generator=generator, dtype=torch.uint8)

    one_file(folder, pack)
    describe(folder, quant_method="mxfp4", modules_to_not_convert=["lm_head", "self_attn"])
    return folder


def flip(file: Path, name: str, at: int) -> None:
    """Change one byte of a tensor in its file, in a bit that keeps FP8 and FP4 values finite."""
    with file.open("r+b") as stream:
        size = int.from_bytes(stream.read(8), "little")
        begin = json.loads(stream.read(size))[name]["data_offsets"][0]
        stream.seek(8 + size + begin + at)
        byte = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([byte ^ 0x80]))
