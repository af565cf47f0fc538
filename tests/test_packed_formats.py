"""Decoders, bit by bit against what transformers makes of the same bytes; formats that are registered; what they refuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moecache import ExpertBank
from moecache.errors import CheckpointError
from moecache.packed import Decoded, Format, Recipe, register_format

OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)
TEMPLATE = {"w": "layers.{layer}.experts.{expert}.w.weight"}
STACKED = {"w": "layers.{layer}.w"}


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits; of a NaN only that it is one, as torch's own differ between vectors and what is left over."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    bits = torch.int32 if found.dtype == torch.float32 else torch.int16
    assert torch.equal(found.view(bits)[~nan], expected.view(bits)[~nan])


def decoded(tmp_path: Path, packed: str, tensors: dict[str, torch.Tensor], layout, dtype: torch.dtype) -> torch.Tensor:
    """One expert's matrix, by way of a file."""
    save_file(tensors, tmp_path / "model.safetensors")
    with ExpertBank.from_safetensors(tmp_path, layout, packed=packed, dtype=dtype) as bank:
        assert bank.is_packed
        assert bank.stored_nbytes == sum(tensor.nbytes for tensor in tensors.values())
        return bank.expert(0, 0)["w"]


def fp8(
    tmp_path: Path, values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, packed: str = "fp8"
) -> torch.Tensor:
    name = "layers.0.experts.0.w.weight"
    return decoded(tmp_path, packed, {name: values, f"{name}_scale_inv": scales}, TEMPLATE, dtype)


def stock_fp8(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    return Fp8Dequantize(None)._dequantize_one(values, scales, dtype)


def every_byte(*shape: int) -> torch.Tensor:
    """Bytes of which each value comes in each of 256 columns that follow each other."""
    rows, cols = shape
    return ((torch.arange(rows)[:, None] * 7 + torch.arange(cols)) % 256).to(torch.uint8)


@pytest.mark.parametrize("dtype", OUTPUTS)
@pytest.mark.parametrize("values", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("grid", [(1, 1), (2, 2), (6, 1), (3, 4), (6, 516)], ids=str)
def test_fp8_has_the_bits_of_transformers(tmp_path: Path, values, grid: tuple[int, int], dtype) -> None:
    """Every value of a byte, NaN and infinities too, with scales from subnormal to such that products overflow."""
    packed = every_byte(6, 516).view(values)
    exponents = torch.linspace(-140, 120, grid[0] * grid[1]).round() if grid != (1, 1) else torch.tensor([3.0])
    scales = (torch.rand(grid) + 1) * torch.exp2(exponents.reshape(grid))
    assert_same_bits(fp8(tmp_path, packed, scales, dtype), stock_fp8(packed, scales, dtype))


@pytest.mark.parametrize("scales", [torch.float8_e8m0fnu, torch.uint8, torch.bfloat16])
def test_fp8_scales_of_other_dtypes(tmp_path: Path, scales: torch.dtype) -> None:
    """Every exponent of a scale of one byte: zero to NaN for float8_e8m0fnu."""
    packed = every_byte(512, 6).view(torch.float8_e4m3fn)
    exponents = torch.arange(256, dtype=torch.uint8).reshape(256, 1)
    grid = exponents.float().to(scales) if scales == torch.bfloat16 else exponents.view(scales)
    for dtype in OUTPUTS:
        assert_same_bits(fp8(tmp_path, packed, grid, dtype), stock_fp8(packed, grid, dtype))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_fp8_with_one_scale(tmp_path: Path, shape: tuple[int, ...]) -> None:
    packed, scale = every_byte(5, 3).view(torch.float8_e4m3fn), torch.full(shape, 0.37)
    assert_same_bits(fp8(tmp_path, packed, scale, torch.bfloat16), stock_fp8(packed, scale, torch.bfloat16))


def test_fp8_blocks_that_end_ragged(tmp_path: Path) -> None:
    """Blocks of 128 x 128 of which the last are smaller, which transformers refuses to divide."""
    packed = every_byte(300, 200).view(torch.float8_e4m3fn)
    scales = torch.rand(3, 2) + 0.5
    spread = scales.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    expected = (packed.float() * spread).to(torch.bfloat16)
    assert_same_bits(fp8(tmp_path, packed, scales, torch.bfloat16, "fp8-128"), expected)
    with pytest.raises(
        CheckpointError, match=r"scales of shape \(3, 2\) for values of shape \(100, 100\); expected \(1, 1\)"
    ):
        fp8(tmp_path, every_byte(100, 100).view(torch.float8_e4m3fn), scales, torch.bfloat16, "fp8-128")


@pytest.mark.parametrize("dtype", OUTPUTS)
@pytest.mark.parametrize("shape", [(256, 1), (33, 5), (1, 9)], ids=str)
def test_mxfp4_has_the_bits_of_transformers(tmp_path: Path, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """All scales, subnormal results and overflows among them, with all pairs of values; shapes that fill no tile."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rows, groups = shape
    blocks = every_byte(rows, 16 * groups).reshape(1, rows, groups, 16)
    scales = (torch.arange(rows * groups) % 256).to(torch.uint8).reshape(1, rows, groups)
    tensors = {"layers.0.w_blocks": blocks, "layers.0.w_scales": scales}
    found = decoded(tmp_path, "mxfp4", tensors, STACKED, dtype)
    assert_same_bits(found, convert_moe_packed_tensors(blocks, scales, dtype=dtype)[0])


VALUES, GRID = torch.zeros(4, 8, dtype=torch.float8_e4m3fn), torch.ones(2, 2)


@pytest.mark.parametrize(
    ("values", "scales", "dtype", "why"),
    [
        (VALUES, torch.ones(3, 2), torch.bfloat16, r"scales of shape \(3, 2\) for values of shape \(4, 8\)"),
        (VALUES, torch.ones(2), torch.bfloat16, r"scales of shape \(2,\)"),
        (VALUES, torch.ones(1, 2, 2, 2), torch.bfloat16, r"scales of shape \(1, 2, 2, 2\)"),
        (VALUES, GRID.to(torch.int32), torch.bfloat16, r"FP8 scales of I32; expected one of F32, BF16"),
        (VALUES, GRID, torch.float64, r"decodes to torch.bfloat16, torch.float16, torch.float32, not to torch.float64"),
        (VALUES[0].clone(), GRID, torch.bfloat16, r"values of shape \(8,\), F8_E4M3; expected a matrix"),
    ],
)
def test_fp8_refuses(tmp_path: Path, values, scales, dtype, why: str) -> None:
    with pytest.raises(CheckpointError, match=r"'layers\.0\.experts\.0\.w\.weight'.*" + why):
        fp8(tmp_path, values, scales, dtype)


@pytest.mark.parametrize(
    ("blocks", "scales", "why"),
    [
        (
            torch.zeros(1, 4, 2, 8, dtype=torch.uint8),
            torch.zeros(1, 4, 2, dtype=torch.uint8),
            r"blocks of shape \(4, 2, 8\)",
        ),
        (
            torch.zeros(1, 4, 2, 16, dtype=torch.uint8),
            torch.zeros(1, 4, 3, dtype=torch.uint8),
            r"scales of shape \(4, 3\), U8",
        ),
        (torch.zeros(1, 4, 2, 16, dtype=torch.uint8), torch.zeros(1, 4, 2), r"scales of shape \(4, 2\), F32"),
        (
            torch.zeros(2, 4, 2, 16, dtype=torch.uint8),
            torch.zeros(1, 4, 2, dtype=torch.uint8),
            r"are of \[2, 1\] experts",
        ),
    ],
)
def test_mxfp4_refuses(tmp_path: Path, blocks: torch.Tensor, scales: torch.Tensor, why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        decoded(tmp_path, "mxfp4", {"layers.0.w_blocks": blocks, "layers.0.w_scales": scales}, STACKED, torch.bfloat16)


def test_columns_cannot_be_joined(tmp_path: Path) -> None:
    tensors = {}
    for name in "ab":
        tensors[f"layers.0.{name}_blocks"] = torch.zeros(1, 4, 1, 16, dtype=torch.uint8)
        tensors[f"layers.0.{name}_scales"] = torch.zeros(1, 4, 1, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"packed as mxfp4: decoded by columns, it cannot be joined"):
        decoded(tmp_path, "mxfp4", tensors, {"w": ["layers.{layer}.a", "layers.{layer}.b"]}, torch.bfloat16)


@pytest.mark.parametrize("packed", ["fp8", "mxfp4"])
def test_values_without_their_scales(tmp_path: Path, packed: str) -> None:
    values = {"fp8": ("", VALUES[None].clone()), "mxfp4": ("_blocks", torch.zeros(1, 4, 2, 16, dtype=torch.uint8))}[
        packed
    ]
    with pytest.raises(
        CheckpointError, match=rf"tensor 'layers\.0\.w_scale.* is not in the checkpoint; {packed} values need it"
    ):
        decoded(tmp_path, packed, {f"layers.0.w{values[0]}": values[1]}, STACKED, torch.bfloat16)


def test_unknown_format(tmp_path: Path) -> None:
    save_file({"layers.0.w": torch.zeros(1, 2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unknown format 'int3' of packed experts; known: fp8, fp8-128, mxfp4"):
        ExpertBank.from_safetensors(tmp_path, STACKED, packed="int3")


class NegatedBytes(Format):
    """A stranger's format: int8 whose sign is the other way round, in one file with a loop compiled by Numba."""

    name = "negated"
    suffixes = ("_neg",)
    dtypes = frozenset({"I8"})

    def decoded(self, parts, dtype: torch.dtype) -> Decoded:
        from numba import carray, cfunc, types

        to, n = types.CPointer, types.int64

        @cfunc(types.void(to(to(types.int8)), to(n), to(types.uint8), n, n, to(types.float32)))
        def decode(streams, numbers, table, first, rows, out):
            cols = numbers[0]
            packed = carray(streams[0], (rows, cols))
            matrix = carray(out, (first + rows, cols))
            for i in range(rows):
                for j in range(cols):
                    matrix[first + i, j] = -packed[i, j]

        rows, cols = parts["_neg"].shape
        recipe = Recipe(decode.address, rows, 1, ((1, cols),), np.array([cols], np.int64), owner=decode)
        return Decoded((rows, cols), recipe)


def test_a_format_of_ones_own(tmp_path: Path) -> None:
    register_format(NegatedBytes())
    register_format(NegatedBytes())  # a module that is imported again
    packed = every_byte(7, 5).view(torch.int8)
    found = decoded(tmp_path, "negated", {"layers.0.w_neg": packed[None].clone()}, STACKED, torch.float32)
    assert torch.equal(found, -packed.float())

    class Other(NegatedBytes):
        pass

    with pytest.raises(CheckpointError, match="'negated' is known already, as NegatedBytes"):
        register_format(Other())
