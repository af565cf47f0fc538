"""Replay with a clock: what hits, misses and prefetches cost in time.

The decisions are the runtime's own; only the bytes are imagined. A link moves one chunk after another, demands before prefetches; a layer
computes its resident experts while the missing ones travel, then each as it lands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from .._core import Core
from ..errors import PolicyError, TraceFormatError
from ..history import History
from ..policy import Resolved, Score
from ..trace import Trace
from ._clock import LinkClock
from ._replay import Replay as _Replay
from .replay import COUNTED_ONLY, _blocks, _Quiet, make_core, resolve_any, slots_of, trained_history
from .schedule import Schedule, schedule, split_requests

__all__ = ["MODELS", "PROFILES", "Model", "Profile", "TimedResult", "model_for", "replay_timed", "stand_in"]


@dataclass(frozen=True)
class Model:
    """How large the experts of a model are.

    Attributes
    ----------
    expert_nbytes : int
        Of one expert, in the form in which it travels.
    source : str
        Shapes and type behind the number.
    """

    name: str
    expert_nbytes: int
    moe_layers: int
    num_experts: int
    top_k: int
    source: str


MODELS = {
    model.name: model
    for model in (
        Model(
            "mixtral-8x7b",
            3 * 4096 * 14336 * 2,
            32,
            8,
            2,
            "config.json: hidden 4096, ffn 14336, three matrices, bfloat16",
        ),
        Model(
            "deepseek-v2-lite",
            3 * 2048 * 1408 * 2,
            26,
            64,
            6,
            "config.json: hidden 2048, expert ffn 1408, three matrices, bfloat16",
        ),
        Model(
            "qwen3-30b-a3b",
            3 * 2048 * 768 * 2,
            48,
            128,
            8,
            "config.json: hidden 2048, expert ffn 768, three matrices, bfloat16",
        ),
        Model(
            "gpt-oss-20b",
            3 * 2880 * 2880 * 17 // 32 + 3 * 2880 * 2,
            24,
            32,
            4,
            "config.json: hidden and ffn 2880, MXFP4 (4 bits and a byte for 32 of them), bfloat16 biases",
        ),
        Model(
            "switch-large-128",
            2 * 1024 * 4096 * 2,
            24,
            128,
            1,
            "config.json: d_model 1024, d_ff 4096, two matrices, bfloat16",
        ),
        Model(
            "nllb-moe-54b",
            (2 * 2048 * 8192 + 2048 + 8192) * 2,
            12,
            128,
            2,
            "config.json: d_model 2048, ffn 8192, biases, bfloat16",
        ),
    )
}


@dataclass(frozen=True)
class Profile:
    """A link and the device behind it.

    Attributes
    ----------
    rate : float
        Bytes per second.
    latency_s : float
        Before the first byte of an expert.
    chunk_nbytes : int
        A demand waits for at most one chunk of a prefetch.
    memory_rate : float
        Bytes per second at which the device reads weights: one token's arithmetic is bound by it.
    layer_s, pass_s : float
        Attention and the rest of a layer before it routes; what a forward pass takes outside its MoE layers.
    source : str
    """

    name: str
    rate: float
    latency_s: float
    chunk_nbytes: int = 2 << 20
    memory_rate: float = 768e9
    layer_s: float = 120e-6
    pass_s: float = 300e-6
    source: str = ""


_NOMINAL = "16 lanes at {} GT/s with 128b/130b coding carry {} GB/s one way"
_DEVICE = "; layer and pass times are round assumptions for one token on such a card, to be replaced by measured ones"
PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            "pcie4-32",
            32e9,
            10e-6,
            source=f"PCIe 4.0 x16 as usually quoted: {_NOMINAL.format(16, 31.5)}. RTX A5000, memory 768 GB/s{_DEVICE}",
        ),
        Profile(
            "pcie4-24",
            24e9,
            10e-6,
            source="PCIe 4.0 x16 as usually reached: 20 to 40 % below nominal "
            f"(https://fridayswithfaraday.com/posts/gpu-hw-pcie-gen5-bandwidth-bottleneck). RTX A5000, memory 768 GB/s{_DEVICE}",
        ),
        Profile(
            "pcie5",
            50e9,
            10e-6,
            memory_rate=3350e9,
            layer_s=60e-6,
            pass_s=150e-6,
            source=f"PCIe 5.0 x16, 20 % below nominal: {_NOMINAL.format(32, 63)}; H100, memory 3350 GB/s (same page){_DEVICE}",
        ),
        Profile(
            "nvme",
            7.45e9,
            100e-6,
            source="Samsung 990 PRO, sequential reads of 7450 MB/s "
            "(https://www.slashcam.com/news/single/Samsung-990-PRO--New-NVMe-SSD-top-model-reaches-th-17407.html); "
            f"latency of a flash read assumed 100 us; RTX A5000, memory 768 GB/s{_DEVICE}",
        ),
    )
}


@dataclass(frozen=True)
class TimedResult:
    """What one policy did at one capacity on one link. Times in seconds, sizes in bytes.

    ``stall_s`` is time the arithmetic waited for bytes; ``link_idle`` the share of all time in which nothing moved.
    ``seconds_without`` is the same play without prefetching (None where it was without). ``floor_s`` is what no policy can
    beat on demand alone: the bytes that Belady's policy misses at this capacity, over the link's rate. ``bytes_wasted``
    were prefetched and not asked for.
    """

    trace: str
    model: str
    policy: str
    fraction: float
    capacity_experts: int
    link: str
    prefetch: bool
    tokens: int
    demands: int
    hits: int
    seconds: float
    seconds_without: float | None
    floor_s: float
    stall_s: float
    tokens_per_s: float
    link_idle: float
    bytes_demand: int
    bytes_prefetch: int
    bytes_wasted: int
    prefetch_issued: int
    prefetch_useful: int
    prefetch_late: int
    prefetch_wasted: int
    resident_tokens_per_s: float

    @property
    def hit_rate(self) -> float:
        return self.hits / self.demands if self.demands else 0.0

    @property
    def waste_share(self) -> float:
        """Wasted bytes, as a share of those that steps needed moved."""
        needed = self.bytes_demand + self.bytes_prefetch - self.bytes_wasted
        return self.bytes_wasted / needed if needed else 0.0

    def row(self) -> dict[str, Any]:
        """The result as plain Python values."""
        moved = (self.bytes_demand + self.bytes_prefetch) / max(self.tokens, 1)
        return {**asdict(self), "hit_rate": self.hit_rate, "bytes_per_token": moved}


def model_for(trace: Trace) -> Model | None:
    """The model of :data:`MODELS` that a trace seems to be of, by name and shape."""
    name = f"{trace.model} {trace.name}".lower()
    fits = [m for m in MODELS.values() if m.name in name and (m.moe_layers, m.top_k) == (trace.layers, trace.top_k)]
    return fits[0] if fits else None


def stand_in(trace: Trace, model: Model) -> Trace:
    """Another model's routing in the shape of one of which there is no trace: proportions to look at, not results.

    Layers repeat until there are enough. Where the model has c times the experts, expert e becomes c of them, and which a
    token takes depends on the place it gave e; where it has fewer, numbers fold. A place that would name an expert twice
    takes the next one that is free.

    Parameters
    ----------
    trace : Trace
        Of layers with the same number of experts.
    model : Model

    Raises
    ------
    TraceFormatError
    """
    if len(set(trace.num_experts)) > 1:
        raise TraceFormatError(f"{trace.name} has layers of differing size: no stand-in can be made of it")
    copies = max(model.num_experts // trace.num_experts[0], 1)
    place = np.arange(model.top_k)
    routed = trace.experts.astype(np.int64)[:, np.arange(model.moe_layers) % trace.layers][:, :, place % trace.top_k]
    none = routed < 0
    experts = (routed * copies + (place + np.arange(model.moe_layers)[:, None]) % copies) % model.num_experts
    for j in range(1, model.top_k):
        for _ in range(model.top_k):
            taken = (experts[:, :, :j] == experts[:, :, j : j + 1]).any(2)
            experts[:, :, j] = np.where(taken, (experts[:, :, j] + 1) % model.num_experts, experts[:, :, j])
    experts[none] = -1
    return replace(
        trace,
        name=f"{trace.name} as {model.name}",
        experts=experts.astype(np.int16),
        num_experts=(model.num_experts,) * model.moe_layers,
        weights=None,
        metadata={"model": f"{model.name} (stand-in)", "expert_nbytes": str(model.expert_nbytes)},
    )


def expert_nbytes_of(trace: Trace) -> int | None:
    """Bytes of an expert, from the recording or from what is known of the model."""
    recorded = trace.metadata.get("expert_nbytes", "")
    model = model_for(trace)
    return int(recorded) if recorded.isdigit() else model.expert_nbytes if model else None


def replay_timed(
    trace: Trace,
    policies: Sequence[str | Score] = ("lru", "expected-next-use"),
    capacities: Sequence[int | float] = (0.2, 0.5),
    profile: Profile = PROFILES["pcie4-24"],
    *,
    expert_nbytes: int | None = None,
    prefetch: bool = True,
    prefetch_waste: float = 0.25,
    hints: np.ndarray | None = None,
    split: str | None = None,
    history: History | None = None,
    history_capacity: int = 1000,
    concurrency: int | None = None,
    max_tokens: int | None = None,
    progress: Any = None,
) -> list[TimedResult]:
    """Play a trace against the clock.

    Parameters
    ----------
    profile : Profile
        Of :data:`PROFILES`, or one's own.
    expert_nbytes : int, optional
        By default that of the model the trace names.
    prefetch : bool
        Whether the policies that can fetch ahead may. They are played without it too, for the difference.
    prefetch_waste : float
        As of :class:`moecache.ExpertCache`.
    hints : float32 array ``[tokens, layers, experts]``, optional
        Chances handed in before each token of the schedule, as with :meth:`moecache.Request.hint`: how good prefetching
        would be if these were known.

    Other parameters are those of :func:`moecache.lab.replay`.

    Raises
    ------
    PolicyError, CapacityError, TraceFormatError
    """
    nbytes = expert_nbytes or expert_nbytes_of(trace)
    if nbytes is None:
        raise PolicyError(
            f"the bytes of an expert of {trace.model} are not known: give expert_nbytes (--expert-bytes 17301504 for example)"
        )
    resolved = [resolve_any(policy) for policy in policies]
    for policy in resolved:
        if policy.code in COUNTED_ONLY:
            raise PolicyError(f"{policy.name} has no clock: only its hits are counted")
    known, played = split_requests(trace, split)
    plan = schedule(trace, played, concurrency, max_tokens)
    base = trained_history(trace, known, history, history_capacity)
    play = _Play(trace, plan, profile, nbytes, base, prefetch_waste, hints, progress or _Quiet())
    slots = [slots_of(trace, capacity) for capacity in capacities]
    floors = [misses * nbytes / profile.rate for misses in _belady_misses(trace, plan, slots)]
    return [
        play.judge(policy, n, prefetch and policy.code != "belady", floor)
        for policy in resolved
        for n, floor in zip(slots, floors, strict=True)
    ]


def _belady_misses(trace: Trace, plan: Schedule, slots: Sequence[int]) -> list[int]:
    history = History(trace.fingerprint, 1)
    cores = [make_core(trace, n, resolve_any("belady"), history) for n in slots]
    _Replay(cores, *plan.arrays(), plan.next_use).run(0, plan.passes)
    return [core.misses for core in cores]


@dataclass(frozen=True)
class _Play:
    """What stays the same from policy to policy."""

    trace: Trace
    plan: Schedule
    profile: Profile
    nbytes: int
    base: History
    prefetch_waste: float
    hints: np.ndarray | None
    bar: Any

    def judge(self, policy: Resolved, slots: int, prefetch: bool, floor_s: float) -> TimedResult:
        core, clock = self._run(policy, slots, prefetch)
        without = self._run(policy, slots, False)[1].now if prefetch else None
        return _result(self, policy, core, clock, prefetch, without, floor_s)

    def _run(self, policy: Resolved, slots: int, prefetch: bool) -> tuple[Core, LinkClock]:
        profile, plan = self.profile, self.plan
        core = make_core(self.trace, slots, policy, self.base.copy(), prefetch, self.prefetch_waste)
        clock = LinkClock(
            self.nbytes,
            profile.chunk_nbytes,
            profile.rate,
            profile.latency_s,
            profile.pass_s,
            profile.layer_s,
            self.nbytes / profile.memory_rate,
        )
        future = plan.next_use if policy.code == "belady" else None
        native = _Replay([core], *plan.arrays(), future, clock=clock, hints=self.hints if prefetch else None)
        for first, end in _blocks(plan.passes):
            native.run(first, end)
            self.bar.update(end - first)
        return core, clock


def _result(
    play: _Play, policy: Resolved, core: Core, clock: LinkClock, prefetch: bool, without: float | None, floor_s: float
) -> TimedResult:
    trace, plan, profile, slots = play.trace, play.plan, play.profile, core.slots.num_slots
    expert_s = play.nbytes / profile.memory_rate
    counters = core.counters()
    resident_s = plan.passes * (profile.pass_s + trace.layers * profile.layer_s) + core.demands * expert_s
    return TimedResult(
        trace=trace.name,
        model=trace.model,
        policy=policy.name,
        fraction=slots / sum(trace.num_experts),
        capacity_experts=slots,
        link=profile.name,
        prefetch=prefetch,
        tokens=plan.tokens,
        demands=core.demands,
        hits=core.hits,
        seconds=clock.now,
        seconds_without=without,
        floor_s=floor_s,
        stall_s=clock.stall_s,
        tokens_per_s=plan.tokens / clock.now,
        link_idle=1 - min(clock.busy_s / clock.now, 1.0),
        bytes_demand=clock.bytes_demand,
        bytes_prefetch=clock.bytes_prefetch,
        bytes_wasted=clock.bytes_prefetch - clock.bytes_joined - counters["prefetch_useful"] * play.nbytes,
        prefetch_issued=counters["prefetch_issued"],
        prefetch_useful=counters["prefetch_useful"],
        prefetch_late=counters["prefetch_late"],
        prefetch_wasted=counters["prefetch_wasted"],
        resident_tokens_per_s=plan.tokens / resident_s,
    )


def profile_from(text: str) -> Profile:
    """A profile by name, or ``rate,latency`` such as ``24e9,10e-6`` in bytes per second and seconds.

    Raises
    ------
    PolicyError
    """
    if text in PROFILES:
        return PROFILES[text]
    try:
        rate, _, latency = text.partition(",")
        profile = replace(
            PROFILES["pcie4-24"], name=text, rate=float(rate), latency_s=float(latency or 10e-6), source="given"
        )
        if profile.rate <= 0 or profile.latency_s < 0:
            raise ValueError(text)
    except ValueError:
        raise PolicyError(
            f"no link is called {text!r}: expected one of {', '.join(PROFILES)}, or bytes per second and seconds such as 24e9,10e-6"
        ) from None
    return profile
