"""Which model a history, a trace or a forecaster is of."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .bank import ExpertBank

__all__ = ["Fingerprint"]


class Fingerprint(NamedTuple):
    """What a history must share with a model to mean anything for it."""

    num_experts: tuple[int, ...]
    top_k: int  # 0: not known
    digest: str  # of layer names and parameter shapes

    @classmethod
    def of(cls, bank: ExpertBank, top_k: int | None) -> Fingerprint:
        groups = [{name: list(spec.shape) for name, spec in sorted(group.items())} for group in bank.shape_groups]
        text = json.dumps([list(bank.layer_names), list(bank.layer_group), groups])
        return cls(tuple(bank.num_experts), top_k or 0, hashlib.sha256(text.encode()).hexdigest()[:16])

    def fits(self, other: Fingerprint) -> bool:
        same_k = self.top_k == other.top_k or 0 in (self.top_k, other.top_k)
        return same_k and self.num_experts == other.num_experts and self.digest == other.digest

    def __str__(self) -> str:
        shape = " ".join(str(n) for n in sorted(set(self.num_experts)))
        return f"{len(self.num_experts)} layers of {shape} experts, top-{self.top_k or '?'}, digest {self.digest}"
