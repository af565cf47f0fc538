"""Packed experts: formats in which checkpoints hold them, decoded as they arrive in a slot."""

from .format import Decoded, Format, Part, format_named, register_format
from .fp8 import FP8, BlockFP8
from .mxfp4 import MXFP4
from .recipe import Recipe

__all__ = ["FP8", "MXFP4", "BlockFP8", "Decoded", "Format", "Part", "Recipe", "format_named", "register_format"]

for _format in (FP8(), BlockFP8(), MXFP4()):
    register_format(_format)
