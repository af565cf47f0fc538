"""FP8 values with a scale for each block, as DeepSeek-V3 and others are published: ``weight`` and ``weight_scale_inv``.

A matrix ``[rows, cols]`` of e4m3 or e5m2 has scales ``[ceil(rows / block), ceil(cols / block)]``, ``[rows, 1]`` (per channel) or a
single one (per tensor); a result is the product in float32, rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch

from ..errors import CheckpointError
from . import _loops
from .format import Decoded, Format, Part, output_of
from .recipe import Recipe

__all__ = ["FP8", "BlockFP8"]

# What the loop calls a scale's dtype, and its bytes.
_SCALES = {"F32": (0, 4), "BF16": (1, 2), "F8_E8M0": (2, 1), "U8": (2, 1)}
_VALUES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


class FP8(Format):
    """Blocks as many as the scales are: each of equal size, as transformers reads them."""

    name = "fp8"
    suffixes = ("", "_scale_inv")
    dtypes = frozenset({"F8_E4M3", "F8_E5M2"})

    def decoded(self, parts: Mapping[str, Part], dtype: torch.dtype) -> Decoded:
        values, scales = parts[""], parts["_scale_inv"]
        if len(values.shape) != 2 or values.dtype not in self.dtypes:
            raise CheckpointError(
                f"FP8 values of shape {values.shape}, {values.dtype}; expected a matrix of {' or '.join(sorted(self.dtypes))}"
            )
        if scales.dtype not in _SCALES:
            raise CheckpointError(f"FP8 scales of {scales.dtype}; expected one of {', '.join(_SCALES)}")
        block = self.block(values.shape, scales.shape[-2:] if len(scales.shape) > 1 else (1, 1), scales.shape)
        recipe = _recipe(values.shape, block, values.dtype, scales.dtype, output_of(dtype, "FP8"))
        return Decoded(values.shape, recipe)

    def block(self, shape: tuple[int, ...], grid: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns that have a scale in common."""
        sound = all(n > 0 and size % n == 0 for size, n in zip(shape, grid, strict=True))
        if not sound or (len(scales) < 2 and scales not in ((), (1,))) or scales[:-2] not in ((), (1,)):
            raise CheckpointError(
                f"FP8 scales of shape {scales} for values of shape {shape}; expected a scale for each of equal blocks"
            )
        return shape[0] // grid[0], shape[1] // grid[1]


class BlockFP8(FP8):
    """Blocks of 128 x 128, of which those at the edges may be smaller."""

    name = "fp8-128"
    SIZE = 128

    def block(self, shape: tuple[int, ...], grid: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int]:
        expected = tuple(-(-size // self.SIZE) for size in shape)
        if scales != expected:
            raise CheckpointError(
                f"FP8 scales of shape {scales} for values of shape {shape}; expected {expected}, one for each "
                f"{self.SIZE} x {self.SIZE}"
            )
        return self.SIZE, self.SIZE


@lru_cache
def _recipe(shape: tuple[int, int], block: tuple[int, int], values: str, scales: str, output: int) -> Recipe:
    (rows, cols), (high, wide) = shape, block
    kind, nbytes = _SCALES[scales]
    across = -(-cols // wide)
    # Of rows with scales of their own a few at a time are enough; blocks are not cut.
    quantum = high if high < rows else 1
    return Recipe(
        _loops.FP8,
        rows,
        quantum,
        ((1, cols), (high, across * nbytes)),
        np.array([cols, high, wide, kind, output], np.int64),
        table=np.concatenate([_of_every_byte(values), _of_every_byte(scales)])
        if nbytes == 1
        else _of_every_byte(values),
    )


def _of_every_byte(dtype: str) -> np.ndarray:
    """What each byte stands for as float32: a value by torch's own conversion, a scale as a power of two."""
    every = torch.arange(256, dtype=torch.uint8, device="cpu")
    if dtype in _VALUES:
        return every.view(_VALUES[dtype]).to(torch.float32).numpy().view(np.uint8)
    made = (every.to(torch.float32) - 127.0).exp2()
    if dtype == "F8_E8M0":
        made[255] = torch.nan
    return made.numpy().view(np.uint8)
