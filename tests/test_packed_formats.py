"""Decoders, bit by bit against what transformers makes of the same bytes; formats that are registered; what they refuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moecache import ExpertBank, ExpertCache
from moecache.errors import CheckpointError, UnsupportedModelError
from moecache.layout import PackedSource
from moecache.packed import Decoded, Format, Recipe, format_named, register_format

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


@pytest.mark.parametrize("dtype", OUTPUTS)
def test_fp8_of_more_blocks_than_are_decoded_abreast(tmp_path: Path, dtype: torch.dtype) -> None:
    packed, scales = every_byte(80, 70 * 40).view(torch.float8_e4m3fn), torch.rand(2, 70) + 0.5
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
@pytest.mark.parametrize(
    ("shape", "scales"), [((256, 1), 256), ((33, 5), 256), ((1, 9), 256), ((96, 6), 12), ((70, 3), 12)], ids=str
)
def test_mxfp4_has_the_bits_of_transformers(
    tmp_path: Path, shape: tuple[int, int], scales: int, dtype: torch.dtype
) -> None:
    """All scales, subnormal results and overflows among them, or common ones; with all pairs of values, and shapes that fill no tile."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rows, groups = shape
    blocks = every_byte(rows, 16 * groups).reshape(1, rows, groups, 16)
    powers = (torch.arange(rows * groups) % scales + (scales < 256) * 118).to(torch.uint8).reshape(1, rows, groups)
    tensors = {"layers.0.w_blocks": blocks, "layers.0.w_scales": powers}
    found = decoded(tmp_path, "mxfp4", tensors, STACKED, dtype)
    assert_same_bits(found, convert_moe_packed_tensors(blocks, powers, dtype=dtype)[0])


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


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Two layers of four experts: FP8 with gate and up joined, then plain bfloat16."""
    torch.manual_seed(0)
    tensors = {}
    for layer, expert, name in [(layer, e, n) for layer in range(2) for e in range(4) for n in ("gate", "up")]:
        key = f"layers.{layer}.experts.{expert}.{name}.weight"
        tensors[key] = torch.randn(200, 72).to(torch.float8_e4m3fn if layer == 0 else torch.bfloat16)
        if layer == 0:
            tensors[f"{key}_scale_inv"] = torch.rand(2, 1) + 0.5
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


JOINED = {"w": [f"layers.{{layer}}.experts.{{expert}}.{name}.weight" for name in ("gate", "up")]}


@pytest.mark.parametrize("location", ["disk", "ram"])
def test_a_cache_over_packed_and_plain_layers(mixed: Path, location: str) -> None:
    with ExpertBank.from_safetensors(mixed, JOINED, packed="fp8-128", location=location) as bank:
        assert bank.location == location
        assert len(bank.shape_groups) == 1
        assert bank.nbytes == 2 * 4 * 400 * 72 * 2
        assert bank.stored_nbytes == 4 * 2 * (200 * 72 + 8) + bank.nbytes // 2
        expected = [bank.layer(layer)["w"] for layer in range(2)]
        with ExpertCache(bank, 3, top_k=2) as cache, cache.request() as request:
            for step in range(12):
                layer, ids = step % 2, torch.tensor([[step % 4, (step + 1 + step // 4) % 4]])
                with request.route(layer, ids) as lease:
                    for expert, slot, _ in lease.ready():
                        assert torch.equal(lease.weights["w"][slot], expected[layer][expert])
            stats = cache.stats()
        assert stats.misses > 0
        assert stats.evictions > 0
        assert stats.expert_bytes_stored == bank.stored_nbytes


def test_a_device_that_does_not_decode(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with (
        ExpertBank.from_safetensors(mixed, JOINED, packed="fp8-128") as bank,
        pytest.raises(
            UnsupportedModelError, match="packed experts are decoded into host memory only, and the cache is on cuda:0"
        ),
    ):
        ExpertCache(bank, 3, device="cuda:0")


def test_named_sources_say_themselves_how_they_are_packed(mixed: Path) -> None:
    names = [f"layers.0.experts.{expert}.up.weight" for expert in range(4)]
    streams = {"": names, "_scale_inv": [f"{name}_scale_inv" for name in names]}
    source = PackedSource(format_named("fp8-128"), streams, torch.float32)
    with (
        ExpertBank.from_safetensors(mixed, [{"w": [source]}]) as bank,
        ExpertBank.from_safetensors(mixed, JOINED, packed="fp8-128", dtype=torch.float32, layers=[0]) as other,
    ):
        assert torch.equal(bank.layer(0)["w"], other.layer(0)["w"][:, 200:])
    with pytest.raises(CheckpointError, match="packed= goes with templates"):
        ExpertBank.from_safetensors(mixed, [{"w": [source]}], packed="fp8")
