"""MXFP4 as gpt-oss is published: ``*_blocks`` of 32 values of four bits and ``*_scales`` of one exponent for each block.

Values are e2m1, the low half of a byte first; the result has them transposed, as the classes that compute with them hold
their weights: ``[rows, cols / 32, 16]`` becomes ``[cols, rows]``.
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

__all__ = ["MXFP4"]

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# For results of 16 bits: where the exponent begins, and the least and the largest scale with which all values stay normal.
_EXPONENTS = {torch.bfloat16: (7, 2, 252), torch.float16: (10, 114, 140)}
# Of rows of the packed matrix, which are columns of the result: as many as fill a cache line there.
_QUANTUM = 32


class MXFP4(Format):
    """Blocks along the rows, decoded into columns."""

    name = "mxfp4"
    suffixes = ("_blocks", "_scales")
    dtypes = frozenset({"U8"})

    def decoded(self, parts: Mapping[str, Part], dtype: torch.dtype) -> Decoded:
        blocks, scales = parts["_blocks"], parts["_scales"]
        if len(blocks.shape) != 3 or blocks.shape[2] != 16 or blocks.dtype != "U8":
            raise CheckpointError(
                f"MXFP4 blocks of shape {blocks.shape}, {blocks.dtype}; expected [rows, blocks, 16], U8"
            )
        if scales.shape != blocks.shape[:2] or scales.dtype not in ("U8", "F8_E8M0"):
            raise CheckpointError(
                f"MXFP4 scales of shape {scales.shape}, {scales.dtype} for blocks of shape {blocks.shape}; expected "
                f"{blocks.shape[:2]}, U8"
            )
        output_of(dtype, "MXFP4")
        rows, cols = blocks.shape[0], 32 * blocks.shape[1]
        return Decoded((cols, rows), _recipe(rows, cols, dtype), by_columns=True)


@lru_cache
def _recipe(rows: int, cols: int, dtype: torch.dtype) -> Recipe:
    return Recipe(
        _loops.MXFP4,
        rows,
        _QUANTUM,
        ((1, cols // 2), (1, cols // 32)),
        np.array([cols, rows, dtype.itemsize, *_EXPONENTS.get(dtype, (0, 1, 0))], np.int64),
        table=_table(dtype),
    )


def _table(dtype: torch.dtype) -> np.ndarray:
    """The sixteen values of each scale, rounded by the operation that transformers decodes with."""
    values = torch.tensor(_VALUES + tuple(-value for value in _VALUES), dtype=dtype, device="cpu").repeat(256, 1)
    exponents = torch.arange(256, dtype=torch.int32, device="cpu")[:, None] - 127
    return torch.ldexp(values, exponents, out=values).view(torch.uint8).numpy().reshape(-1)
