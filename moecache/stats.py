"""The counters of a cache and of a request: what each means, rates of them, the table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["RequestStats", "Stats"]


@dataclass(frozen=True)
class RequestStats:
    """What one request has asked of the cache; the words are those of :class:`Stats`."""

    demands: int
    hits: int
    prompt_tokens: int
    decode_tokens: int
    stall_s: float
    slot_wait_s: float

    @property
    def misses(self) -> int:
        return self.demands - self.hits


@dataclass(frozen=True)
class Stats:
    """What a cache did since it was made, or since ``reset_stats()``.

    A demand is one distinct expert of one step (one call of one MoE layer); it is a hit when the expert's bytes were
    all in its
    slot as the layer asked. A prefetch is useful when it makes a hit, late when its layer asked before it had landed,
    wasted when
    its layer did not ask, and dropped when it was wasted before it had landed.
    """

    demands: int
    hits: int
    misses: int
    evictions: int
    prefetch_issued: int
    prefetch_useful: int
    prefetch_late: int
    prefetch_wasted: int
    prefetch_dropped: int  # of the wasted ones
    prefetch_pending: int  # on their way, or not asked for yet: issued = useful + late + wasted + pending
    bytes_demand: int  # over the link: of packed experts what they are decoded from
    bytes_prefetch: int
    # Seconds of all requests together, as their threads spend them: requests_s is from where each began to where its last
    # lease ended, and deciding_s + stall_s + slot_wait_s + computing_s + elsewhere_s add up to it.
    requests_s: float
    deciding_s: float  # in route(): counting, matching, choosing
    stall_s: float  # waiting for bytes (on a device: for the last to be under way), the caller's own copies included
    slot_wait_s: float  # waiting for slots that other leases pin
    computing_s: float  # from a lease's first expert to its end, less waits: arithmetic, as far as the host sees it
    reading_s: float  # I/O threads and helping callers: chunks that came from files
    copying_s: float  # and those that came from memory
    waves: int  # steps that needed more experts than the cache had slots to give
    requests: int  # finished requests
    steps: int
    tokens: int
    capacity_experts: int
    resident_experts: int
    resident_bytes: int
    expert_bytes_total: int  # decoded
    expert_bytes_stored: int  # as they lie in files or memory: fewer where experts are packed
    direct_reads: int  # file reads past the page cache
    buffered_reads: int  # file reads through it, where the file system refuses direct reads
    failed: int  # copies that failed
    layer_demands: tuple[int, ...]
    layer_hits: tuple[int, ...]
    fits: int = 0  # of the forecaster in the background, taken up (``learn``)
    fits_failed: int = 0
    host_locked_bytes: int = 0  # of the experts' host memory, page-locked for a CUDA device
    host_pageable_bytes: int = 0  # of it, what the system refused to lock: copies from there are slower

    @property
    def hit_rate(self) -> float:
        """Hits per demand, 0.0 before the first demand."""
        return self.hits / self.demands if self.demands else 0.0

    @property
    def elsewhere_s(self) -> float:
        """Seconds that the requests' threads spent outside the cache: the rest of the model, pauses."""
        return self.requests_s - self.deciding_s - self.stall_s - self.slot_wait_s - self.computing_s

    @property
    def bytes_per_token(self) -> float:
        """Bytes moved per token routed, demanded and prefetched together."""
        return (self.bytes_demand + self.bytes_prefetch) / self.tokens if self.tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All fields, ``hit_rate`` and ``elsewhere_s``, of plain Python types."""
        return {**asdict(self), "hit_rate": self.hit_rate, "elsewhere_s": self.elsewhere_s}

    def __str__(self) -> str:
        rows = [
            (
                "experts resident",
                f"{self.resident_experts} of {self.capacity_experts} slots, {_bytes(self.resident_bytes)}",
            ),
            ("all experts", _all_experts(self.expert_bytes_total, self.expert_bytes_stored)),
            ("demands", f"{self.demands:,}, {self.hit_rate:.1%} hits"),
            ("misses", f"{self.misses:,}, {_bytes(self.bytes_demand)}"),
            ("evictions", f"{self.evictions:,}"),
            (
                "prefetches",
                f"{self.prefetch_issued:,}: {self.prefetch_useful:,} useful, {self.prefetch_late:,} late, "
                f"{self.prefetch_wasted:,} wasted ({self.prefetch_dropped:,} before they landed), {_bytes(self.bytes_prefetch)}",
            ),
            (
                "time",
                f"{self.requests_s:.3f} s: {self.deciding_s:.3f} deciding, {self.stall_s:.3f} stall, "
                f"{self.slot_wait_s:.3f} waiting for slots, {self.computing_s:.3f} computing experts, "
                f"{self.elsewhere_s:.3f} elsewhere",
            ),
            ("link", f"{self.reading_s:.3f} s reading files, {self.copying_s:.3f} s copying"),
            ("bytes per token", _bytes(self.bytes_per_token)),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _all_experts(total: int, stored: int) -> str:
    return _bytes(total) + (f", {_bytes(stored)} where they lie" if 0 < stored < total else "")


def _bytes(n: float) -> str:
    for unit in ("B", "KB", "MB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.2f} GB"
