"""The routing forecaster's weights: what they are, what they must be, and how they lie in a file. No fitting, no running.

The formulas stand in ``docs/forecaster.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import ForecasterError
from .tensorfile import brief

if TYPE_CHECKING:
    from .fingerprint import Fingerprint

__all__ = ["HORIZONS", "Forecaster", "wait_beyond"]

HORIZONS = (1, 2, 4, 8, 16, 32)
"""Ends of the hazards' intervals, in visits of the layer after the one just made: (0, 1], (1, 2], (2, 4], ..., (16, 32]."""

FLOOR = 1e-3
"""Added to a usage average before its logarithm is taken, so that an expert never seen stays finite."""

_LARGEST = 1e4  # of any weight: what fits float16 and still adds up in float32


@dataclass(frozen=True, eq=False)
class Forecaster:
    """Weights of the linear state-space model that forecasts coming experts from routed ones.

    M experts of all layers lie one after another, layer by layer; S usage averages; rank r; H = 6 intervals; D layers ahead.

    Attributes
    ----------
    fingerprint : Fingerprint
        Of the model it was fitted for.
    decay : float32 array ``[S]``
        What a token moves each usage average by; the first is 1: used at the last visit.
    prior : float32 array ``[M]``
        Where the averages of a request begin.
    rectified : int
        So many leading components of the state are read only where they are positive.
    write : float16 array ``[S, M, r]``
        What an expert's average adds to the state.
    use_read : float16 array ``[H, M, r]``
    use_bias : float32 array ``[H, M]``
    use_weights : float32 array ``[H, S - 1]``
        Read-out of the hazards: from the state, of the expert, from the logarithms of its decayed averages.
    ahead_read : float16 array ``[M, r]``
    ahead_gain : float32 array ``[D, r]``
    ahead_bias : float32 array ``[D, M]``
    ahead_weights : float32 array ``[D, S - 1]``
        Read-out of coming layers, shared by all distances but for gain, bias and weights.
    ahead_pairs : float16 array
        Log odds that an expert of layer l adds to one of layer l + d (around the end), for d = 1..D, l = 0..L-1, row by row.
    """

    fingerprint: Fingerprint
    decay: np.ndarray
    prior: np.ndarray
    rectified: int
    write: np.ndarray
    use_read: np.ndarray
    use_bias: np.ndarray
    use_weights: np.ndarray
    ahead_read: np.ndarray
    ahead_gain: np.ndarray
    ahead_bias: np.ndarray
    ahead_weights: np.ndarray
    ahead_pairs: np.ndarray

    def __post_init__(self) -> None:
        _check(self)

    @property
    def rank(self) -> int:
        return int(self.write.shape[2])

    @property
    def distances(self) -> int:
        """Layers ahead that are forecast: D."""
        return int(self.ahead_gain.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, in memory and in a file."""
        return sum(array.nbytes for array in self.tensors().values())

    def pairs(self, distance: int, layer: int) -> np.ndarray:
        """The part of `ahead_pairs` from `layer` to the layer `distance` ahead: float16 ``[experts there, experts here]``'s transpose.

        Returns
        -------
        float16 array ``[experts of layer, experts of layer + distance]``, a view
        """
        experts = self.fingerprint.num_experts
        layers = len(experts)
        begin = sum(experts[i] * experts[(i + d) % layers] for d, i in _before(distance, layer, layers))
        shape = (experts[layer], experts[(layer + distance) % layers])
        return self.ahead_pairs[begin : begin + shape[0] * shape[1]].reshape(shape)

    def tensors(self) -> dict[str, np.ndarray]:
        """The arrays of a file."""
        arrays = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("fingerprint", "rectified")}
        return {**arrays, "rectified": np.array([self.rectified], np.int32)}

    @classmethod
    def from_tensors(cls, fingerprint: Fingerprint, tensors: Mapping[str, np.ndarray]) -> Forecaster:
        """What :meth:`tensors` gave.

        Raises
        ------
        ForecasterError
            Arrays that are missing, of another model's or impossible shapes, or not finite.
        """
        wanted = [f.name for f in fields(cls) if f.name != "fingerprint"]
        missing, unknown = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
        if missing or unknown:
            raise ForecasterError(
                f"a forecaster lacks {missing}, and has {brief(unknown)} that it should not; fit it again"
            )
        found: dict[str, Any] = dict(tensors)
        if found["rectified"].shape != (1,) or found["rectified"].dtype != np.int32:
            raise ForecasterError("a forecaster's `rectified` is not one whole number; fit it again")
        found["rectified"] = int(found["rectified"][0])
        return cls(fingerprint, **found)


def _before(distance: int, layer: int, layers: int) -> list[tuple[int, int]]:
    # The (distance, layer) whose pairs lie in front of these.
    return [(d, i) for d in range(1, distance + 1) for i in range(layers) if (d, i) < (distance, layer)]


def _check(forecaster: Forecaster) -> None:
    f, experts = forecaster, forecaster.fingerprint.num_experts
    layers, total = len(experts), sum(experts)
    if f.write.ndim != 3 or f.ahead_gain.ndim != 2 or min(f.write.shape) < 1:
        raise ForecasterError(
            f"a forecaster's write is {f.write.shape}, its ahead_gain {f.ahead_gain.shape}; expected [averages, experts, rank] "
            "and [distances, rank]"
        )
    scales, _, rank = f.write.shape
    distances, intervals = f.ahead_gain.shape[0], len(HORIZONS)
    if not 0 < distances < layers + (layers == 1):  # before anything is summed over them
        raise ForecasterError(f"a forecaster looks {distances} layers ahead in a model of {layers}")
    pairs = sum(experts[i] * experts[(i + d) % layers] for d in range(1, distances + 1) for i in range(layers))
    half, single = np.float16, np.float32
    expected: dict[str, tuple[tuple[int, ...], type]] = {
        "decay": ((scales,), single),
        "prior": ((total,), single),
        "write": ((scales, total, rank), half),
        "use_read": ((intervals, total, rank), half),
        "use_bias": ((intervals, total), single),
        "use_weights": ((intervals, scales - 1), single),
        "ahead_read": ((total, rank), half),
        "ahead_gain": ((distances, rank), single),
        "ahead_bias": ((distances, total), single),
        "ahead_weights": ((distances, scales - 1), single),
        "ahead_pairs": ((pairs,), half),
    }
    for name, (shape, dtype) in expected.items():
        array = getattr(f, name)
        if array.shape != shape or array.dtype != dtype:
            raise ForecasterError(
                f"a forecaster's {name} is {array.dtype} {array.shape}; for {f.fingerprint} expected {np.dtype(dtype)} {shape}"
            )
        if array.size and not float(np.abs(array).max()) <= _LARGEST:
            raise ForecasterError(f"a forecaster's {name} holds numbers that are not finite or beyond {_LARGEST:g}")
    if f.decay[0] != 1 or f.decay.min() <= 0 or f.decay.max() > 1:
        raise ForecasterError(f"a forecaster's decays are {f.decay}; expected 1 and others in (0, 1]")
    if f.prior.min() < 0 or f.prior.max() > 1:
        raise ForecasterError(
            f"a forecaster's prior lies in [{f.prior.min()}, {f.prior.max()}]; expected shares of tokens"
        )
    if not 0 <= f.rectified <= rank:
        raise ForecasterError(f"{f.rectified} of {rank} components of a forecaster's state cannot be rectified")


def wait_beyond(hazards: np.ndarray) -> np.ndarray:
    """How long an expert must be kept beyond its layer's next visit to be worth its slot, from its hazards.

    Keeping an expert for up to T visits is used with chance ``P(T)`` and takes ``E[min(use, T)]`` visits on average. The largest
    ratio of the two over all T is what the slot earns per visit: the index of Gittins, optimal where experts are independent
    and slots have a price. From one constant chance p it is p.

    Parameters
    ----------
    hazards : float array ``[..., 6]``
        Chance of a use within each interval of :data:`HORIZONS`, given none before.

    Returns
    -------
    float array ``[...]``
        ``1 / index - 1``, in visits.
    """
    alive = np.ones_like(hazards[..., 0])
    visits, best = np.zeros_like(alive), np.full_like(alive, 1e-5)
    for i, length in enumerate(np.diff((0, *HORIZONS))):
        chance = hazards[..., i]
        # A use falls on the interval's middle on average.
        visits = visits + alive * (length * (1 - chance) + chance * (length + 1) / 2)
        alive = alive * (1 - chance)
        best = np.maximum(best, (1 - alive) / visits)
    return np.asarray(1 / best - 1)
