"""Which rows of a forward pass are counted: not padding, not those of an answer that has ended, not NaN."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

__all__ = ["Ends", "Rows", "without_nan"]

# An additive mask adds 0 where a token is seen; what hides it is -10,000, the least number of a dtype, or -inf.
_HIDDEN = -1e3
_FEW = 32


class Ends(NamedTuple):
    """Tokens whose coming back as input says that a row of a batch has ended."""

    eos: frozenset[int] = frozenset()
    pad: int | None = None
    final: bool = False  # a row that has ended stays so until the next prompt, whatever it is fed


class Rows(NamedTuple):
    """What is known of a forward pass before it runs; asked once, when its first experts are called.

    Attributes
    ----------
    tokens : Tensor ``[batch, length]`` or ``[batch, length, hidden]``
    mask : object
        As the model was given it: bool, int or additive float Tensor ``[batch, kv]`` or ``[batch, heads, length, kv]``, a
        mapping of the kind of layer to those, or anything else, which says nothing.
    past : int, optional
        Tokens that the key-value cache held before, None where that is not known.
    fresh : int, optional
        New tokens at the end of each row, where earlier ones are computed again for want of a key-value cache.
    beams : int
        Rows that share a prompt, which is counted once.
    ends : Ends
    ended : list of bool
        By row, of the request; written.
    """

    tokens: torch.Tensor
    mask: Any
    past: int | None
    fresh: int | None
    beams: int
    ends: Ends
    ended: list[bool]

    def token_mask(self) -> torch.Tensor | None:
        """bool Tensor ``[batch * length]`` on the host, as the experts see the rows; None when all count."""
        batch, length = self.tokens.shape[:2]
        if length == 1:
            return self._running()
        seen = _seen(self.mask, length, self.past)
        if seen is None or seen.shape[0] not in (1, batch):
            seen = torch.ones((1, 1), dtype=torch.bool)
        seen = seen.expand(batch, length)
        if self.fresh is not None:
            seen = seen & (torch.arange(length) >= length - self.fresh)
        if self.beams > 1 and (length > 1 if self.fresh is None else self.fresh > 1):
            seen = seen & (torch.arange(batch) % self.beams == 0)[:, None]
        if self.fresh == 1 and (running := self._running()) is not None:
            seen = seen & running[:, None]
        return None if bool(seen.all()) else seen.reshape(-1)

    def _running(self) -> torch.Tensor | None:
        # bool [batch]: whose newest token belongs to an answer that goes on.
        eos, pad, final = self.ends
        if self.tokens.dim() != 2 or self.tokens.shape[0] == 1 or (not eos and pad is None):
            return None
        ended = [token in eos or token == pad for token in self.tokens[:, -1].tolist()]
        if final:
            if len(self.ended) == len(ended):
                ended = [now or before for now, before in zip(ended, self.ended, strict=True)]
            self.ended[:] = ended
        return torch.tensor([not row for row in ended]) if any(ended) else None


def _seen(mask: Any, length: int, past: int | None) -> torch.Tensor | None:
    """bool ``[batch or 1, length]`` on the host: which of the new tokens a mask does not hide."""
    if isinstance(mask, dict):
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if type(mask) is not torch.Tensor or mask.is_meta or mask.dim() not in (2, 3, 4) or mask.shape[-1] < 1:
        return None
    keys = mask.shape[-1]
    # A static cache has keys for what is still to come: the new tokens' own follow those of the past.
    first = past if past is not None and past + length <= keys else keys - length
    if mask.dim() == 2:
        return None if first < 0 else mask[:, first : first + length].bool().cpu()
    if mask.shape[-2] != length:
        return None
    square = mask if mask.dim() == 3 else mask[:, 0]
    # A token that may not attend to itself is padding; where its own key is not among them, one that attends to nothing.
    shown = square.diagonal(first, -2, -1) if first >= 0 else square
    shown = shown > _HIDDEN if shown.is_floating_point() else shown.bool()
    return (shown if first >= 0 else shown.any(-1)).cpu()


def without_nan(weights: torch.Tensor, token_mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask of counted rows less those whose gate weights ``[tokens, k]`` hold NaN, which were routed by nothing."""
    # A sum is NaN when a term is: one reduction where there is none. Of a few numbers Python's is the faster.
    few = weights.is_cpu and weights.numel() <= _FEW
    total = sum(map(sum, weights.tolist())) if few else weights.sum().item()
    if not math.isnan(total):
        return token_mask
    sound = ~weights.isnan().any(1).cpu()
    return sound if token_mask is None else token_mask & sound
