"""Which of transformers' conversions only unpack: those that a format of packed experts stands for, bit by bit.

transformers describes how a quantised checkpoint is dequantised by an operation before those that merge and join. Where that
operation is a known one, its tensors stay as they lie, and each expert is decoded as it arrives.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..checkpoint import CheckpointIndex
from ..errors import CheckpointError
from ..layout import PackedSource
from ..packed import Format, format_named

__all__ = ["decodes", "packed_format", "packed_pieces", "refuse_other_format", "warn_of_other_blocks"]

_log = logging.getLogger("moecache")

# transformers' operations by name, as older versions lack some, and the format that has their bits.
_FORMATS = {"Fp8Dequantize": "fp8", "Mxfp4Dequantize": "mxfp4"}
# Tensors beside the packed ones that dequantising leaves unread.
_UNREAD = ("activation_scale", "input_scale")


def decodes(quantizer: Any) -> bool:
    """Whether a quantiser makes plain parameters of what it loads, by an operation that a format stands for."""
    return (
        _method(quantizer) in ("fp8", "mxfp4") and getattr(quantizer.quantization_config, "dequantize", False) is True
    )


def _method(quantizer: Any) -> str:
    method = quantizer.quantization_config.quant_method
    return str(getattr(method, "value", method))


def packed_format(steps: Sequence[Any]) -> tuple[Format | None, Sequence[Any]]:
    """The format that a conversion's first operation stands for, and the operations after it."""
    name = _FORMATS.get(type(steps[0]).__name__) if steps else None
    return (None, steps) if name is None else (format_named(name), steps[1:])


def packed_pieces(
    index: CheckpointIndex,
    patterns: Sequence[str],
    sources: Mapping[str, Sequence[str]],
    packed: Format,
    dtype: torch.dtype,
    *,
    merged: bool,
) -> list[str | Sequence[str] | PackedSource]:
    """What makes up a parameter: its packed matrices, and those that this checkpoint has plain.

    Parameters
    ----------
    index : CheckpointIndex
    patterns : sequence of str
        Of the conversion's sources, in transformers' order.
    sources : mapping of str to sequence of str
        The tensors' names by pattern.
    packed, dtype : Format, torch.dtype
    merged : bool
        Each tensor is one expert's; otherwise there is one of all experts.
    """
    further = (*packed.suffixes[1:], *_UNREAD)
    pieces: list[str | Sequence[str] | PackedSource] = []
    for pattern in patterns:
        if pattern not in sources or pattern.endswith(further):
            continue
        stem = pattern[: len(pattern) - len(packed.suffixes[0])]
        names = {suffix: sources.get(stem + suffix, []) for suffix in packed.suffixes}
        found: dict[str, str | Sequence[str]] = {s: n if merged else n[0] for s, n in names.items() if n}
        values = names[packed.suffixes[0]]
        plain = not any(index.tensors[name].dtype_name in packed.dtypes for name in values)
        pieces.append(found[packed.suffixes[0]] if plain else PackedSource(packed, found, dtype))
    return pieces


def refuse_other_format(index: CheckpointIndex, names: Iterable[str], ignored: Collection[str], quantizer: Any) -> None:
    """Raise CheckpointError where experts of these names have scales in the files that nothing would multiply them with."""
    formats = [format_named(name) for name in sorted(set(_FORMATS.values()))]
    for name in names:
        for packed in formats:
            values = index.tensors[name].dtype_name
            scales = [name + suffix for suffix in packed.suffixes[1:] if name + suffix in ignored]
            if scales and values in packed.dtypes:
                said = "none" if quantizer is None else _method(quantizer)
                raise CheckpointError(
                    f"experts are stored as {values} with scales ({scales[0]!r}), and quantization_config, which says {said}, "
                    f"has nothing read them; expected quant_method {packed.name!r} in config.json"
                )


def warn_of_other_blocks(index: CheckpointIndex, pieces: Sequence[Any], config: Any) -> bool:
    """Log that transformers takes the scales of a matrix for other blocks than its configuration says; True if it does."""
    size = getattr(config, "weight_block_size", None)
    for piece in pieces:
        if not isinstance(piece, PackedSource) or piece.format.name != "fp8" or not size:
            continue
        values, scales = (piece.streams.get(suffix, ()) for suffix in piece.format.suffixes)
        first = [index.tensors[name if isinstance(name, str) else name[0]].shape[-2:] for name in (values, scales)]
        grid = tuple(-(-n // block) for n, block in zip(first[0], size, strict=True))
        ragged = any(g > 1 and n % block for g, n, block in zip(grid, first[0], size, strict=True))
        if ragged and len(first[1]) == 2:
            _log.warning(
                "%s is no multiple of the blocks of %s that quantization_config names: transformers divides it evenly into the "
                "%s scales that there are, and so do we, so that outputs are the same",
                tuple(first[0]),
                tuple(size),
                tuple(first[1]),
            )
            return True
    return False
