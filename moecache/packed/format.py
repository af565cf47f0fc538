"""What a format of packed experts is, and the table of those that are known by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch

from ..errors import CheckpointError
from .recipe import Recipe

__all__ = ["OUTPUTS", "Decoded", "Format", "Part", "format_named", "register_format"]

OUTPUTS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""Dtypes that the built-in loops decode to, and what their headers call them by."""


class Part(NamedTuple):
    """One stream of one expert's matrix as the checkpoint has it."""

    shape: tuple[int, ...]
    dtype: str  # the format's own name of it, as in a safetensors header: "F8_E4M3", "U8"


class Decoded(NamedTuple):
    """What a matrix becomes."""

    shape: tuple[int, ...]
    recipe: Recipe
    by_columns: bool = False  # its rows are columns of the result, to which no other matrix can be joined


class Format(ABC):
    """How matrices are packed: which tensors hold one, and the loop that decodes them.

    A format has no state, and is registered as one object with :func:`register_format`.

    Attributes
    ----------
    name : str
        What people call it by.
    suffixes : tuple of str
        What follows the name of a parameter's tensor in the names of its streams, in the order of the recipe's streams. The
        first is that of the values.
    optional : frozenset of str
        Suffixes of streams that a checkpoint may lack.
    dtypes : frozenset of str
        Of the values, as safetensors names them. Tensors under the first suffix of other dtypes are not packed.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    optional: ClassVar[frozenset[str]] = frozenset()
    dtypes: ClassVar[frozenset[str]]

    @abstractmethod
    def decoded(self, parts: Mapping[str, Part], dtype: torch.dtype) -> Decoded:
        """Shape and recipe of one matrix.

        Parameters
        ----------
        parts : mapping of str to Part
            By suffix, those that the checkpoint has.
        dtype : torch.dtype
            Of the result.

        Raises
        ------
        CheckpointError
            Shapes or dtypes that the format does not have; the message begins where the caller's has named the tensor.
        """


_FORMATS: dict[str, Format] = {}


def register_format(made: Format) -> Format:
    """Make a format known by its name, for ``ExpertBank.from_safetensors(..., packed=name)``.

    Raises
    ------
    CheckpointError
        The name is another format's, or the format names no streams.
    """
    if not made.suffixes or len(set(made.suffixes)) < len(made.suffixes) or not made.dtypes:
        raise CheckpointError(f"format {made.name!r} needs suffixes, each once, and dtypes of its values")
    if type(_FORMATS.get(made.name, made)) is not type(made):
        raise CheckpointError(f"format {made.name!r} is known already, as {type(_FORMATS[made.name]).__name__}")
    _FORMATS[made.name] = made
    return made


def format_named(name: str) -> Format:
    """A registered format.

    Raises
    ------
    CheckpointError
        There is none of that name.
    """
    if name not in _FORMATS:
        raise CheckpointError(
            f"unknown format {name!r} of packed experts; known: {', '.join(sorted(_FORMATS))}, or register_format() one"
        )
    return _FORMATS[name]


def output_of(dtype: torch.dtype, name: str) -> int:
    """The number that the built-in loops know a result's dtype by.

    Raises
    ------
    CheckpointError
        They do not decode to it.
    """
    if dtype not in OUTPUTS:
        raise CheckpointError(f"{name} decodes to {', '.join(map(str, OUTPUTS))}, not to {dtype}")
    return OUTPUTS[dtype]
