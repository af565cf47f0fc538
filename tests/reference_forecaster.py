"""The forecaster as plain NumPy in float64: everything anew at each look, nothing kept that could go stale."""

from __future__ import annotations

from typing import Any

import numpy as np

HORIZONS = (1, 2, 4, 8, 16, 32)


def sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-z))


class ForecastReference:
    """One running request.

    ``visit`` is called for every (token, layer) in the order they are routed; a prompt comes layer by layer.
    """

    def __init__(self, forecaster: Any) -> None:
        self.f = forecaster
        self.num_experts = forecaster.fingerprint.num_experts
        self.offset = np.concatenate([[0], np.cumsum(self.num_experts)])
        self.averages = np.tile(forecaster.prior.astype(np.float64), (len(forecaster.decay), 1))
        self.now = len(self.num_experts) - 1
        self.routed: list[int] = []

    def _of(self, layer: int) -> slice:
        return slice(int(self.offset[layer]), int(self.offset[layer + 1]))

    def visit(self, layer: int, experts: Any) -> None:
        """One token at one layer; ids below 0 are none."""
        used = np.zeros(self.num_experts[layer])
        self.routed = [int(e) for e in experts if e >= 0]
        used[self.routed] = 1
        self.now = layer
        for s, a in enumerate(self.f.decay.astype(np.float64)):
            own = self.averages[s, self._of(layer)]
            own += a * (used - own)

    def state(self) -> np.ndarray:
        """float64 [r]: what every usage average adds, by how far it lies from the prior; then the rectification."""
        deviation = self.averages - self.f.prior.astype(np.float64)
        state = np.einsum("sm,smr->r", deviation, self.f.write.astype(np.float64))
        state[: self.f.rectified] = np.maximum(state[: self.f.rectified], 0)
        return state

    def _logs(self, layer: int) -> np.ndarray:
        # float64 [S - 1, experts]: the layer's decayed averages, as of its last visit, over the prior.
        own = self._of(layer)
        return np.log(self.averages[1:, own] + 1e-3) - np.log(self.f.prior[own].astype(np.float64) + 1e-3)

    def hazards(self, layer: int) -> np.ndarray:
        """float64 [6, experts of layer]: chance of use in each interval after the layer's last visit, given none before."""
        own = self._of(layer)
        z = self.f.use_read[:, own].astype(np.float64) @ self.state() + self.f.use_bias[:, own]
        return sigmoid(z + self.f.use_weights.astype(np.float64) @ self._logs(layer))

    def coming(self, distance: int) -> np.ndarray:
        """float64 [experts there]: chance of use at the layer `distance` ahead of the one visited last, around the end."""
        d, layer = distance - 1, (self.now + distance) % len(self.num_experts)
        own = self._of(layer)
        state = self.f.ahead_gain[d].astype(np.float64) * self.state()
        z = self.f.ahead_read[own].astype(np.float64) @ state + self.f.ahead_bias[d, own]
        z += self.f.ahead_weights[d].astype(np.float64) @ self._logs(layer)
        return sigmoid(z + self._pairs(distance)[self.routed].sum(0))

    def _pairs(self, distance: int) -> np.ndarray:
        # float64 [experts here, experts there]
        layers, begin = len(self.num_experts), 0
        for d in range(1, distance + 1):
            for here in range(layers):
                shape = self.num_experts[here], self.num_experts[(here + d) % layers]
                if (d, here) == (distance, self.now):
                    return self.f.ahead_pairs[begin : begin + shape[0] * shape[1]].reshape(shape).astype(np.float64)
                begin += shape[0] * shape[1]
        raise AssertionError


def wait_beyond(hazards: Any) -> float:
    """Visits beyond the next that one expert must be kept, from its six hazards: every horizon's use per visit, the best."""
    rates = []
    for horizon in range(1, len(HORIZONS) + 1):
        alive, visits = 1.0, 0.0
        for i in range(horizon):
            length = HORIZONS[i] - (HORIZONS[i - 1] if i else 0)
            visits += alive * ((1 - hazards[i]) * length + hazards[i] * (length + 1) / 2)
            alive *= 1 - hazards[i]
        rates.append((1 - alive) / visits)
    return 1 / max(*rates, 1e-5) - 1
