from collections.abc import Sequence

from .recipe import Recipe

FP8: int
MXFP4: int

def decode(recipe: Recipe, addresses: Sequence[int], out: int) -> None: ...
