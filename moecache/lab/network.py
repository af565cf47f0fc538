"""The forecaster while it is fitted: the streaming formula over whole chunks of tokens, with gradients.

Every state of a chunk is made at once: the usage averages are linear in what was routed, so a layer's share of the state is one
matrix product, and the state after layer l is the sum of the newest shares of layers up to l and the previous ones behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from ..fingerprint import Fingerprint
from ..forecaster import HORIZONS, Forecaster
from ..jit import compiled
from .sequences import CHUNK, UNKNOWN, Batch

__all__ = ["Network", "Question"]


class Question:
    """Logits of one read-out with what is asked of them.

    Attributes
    ----------
    linear : tensor ``[L, tokens, intervals, E]``
        From the state.
    bias : tensor ``[L, intervals, E]``
    weights : tensor ``[intervals, S - 1]``
    logs : float32 tensor ``[S - 1, L, tokens, E]``
    code : uint8 tensor ``[L, tokens, E]``
        As :class:`moecache.lab.sequences.Batch` has it.
    """

    def __init__(self, linear: Tensor, bias: Tensor, weights: Tensor, logs: Tensor, code: Tensor) -> None:
        self.linear, self.bias, self.weights, self.logs, self.code = linear, bias, weights, logs, code

    def loss(self, scale: float) -> Tensor:
        """`scale` times the sum of the binary cross-entropies; its value is the sum of absolute errors, which costs less."""
        loss: Tensor = _Logistic.apply(self.linear, self.bias, self.weights, self.logs, self.code, scale)  # type: ignore[no-untyped-call]
        return loss

    def logits(self) -> Tensor:
        """float32 ``[L, tokens, intervals, E]``"""
        return self.linear.float() + self.bias[:, None] + torch.einsum("slte,is->ltie", self.logs, self.weights)

    def entropy(self) -> tuple[Tensor, Tensor]:
        """float64 ``[intervals]``: summed cross-entropies, and of how many outcomes."""
        z = self.logits()
        asked, came = _asked(self.code, z.shape[2])
        each = torch.nn.functional.binary_cross_entropy_with_logits(z, came.float(), reduction="none")
        return (each * asked).double().sum((0, 1, 3)), asked.double().sum((0, 1, 3))


class Network(torch.nn.Module):
    """Parameters of a :class:`moecache.forecaster.Forecaster`, layers filled up to the widest.

    Parameters
    ----------
    num_experts : sequence of int
    decays : int
        Usage averages.
    rank, rectified, distances : int
    seed : int
    """

    def __init__(
        self, num_experts: Sequence[int], decays: int, rank: int, rectified: int, distances: int, seed: int
    ) -> None:
        super().__init__()
        self.num_experts = tuple(num_experts)
        self.layers, self.width, self.rectified, self.distances = (
            len(num_experts),
            max(num_experts),
            rectified,
            distances,
        )
        layers, width, intervals = self.layers, self.width, len(HORIZONS)
        random = torch.Generator().manual_seed(seed)
        parameter = torch.nn.Parameter
        self.write = parameter(0.05 * torch.randn(layers, decays * width, rank, generator=random))
        self.use_read = parameter(torch.zeros(layers, rank, intervals * width))
        self.use_bias = parameter(torch.zeros(layers, intervals, width))
        self.use_weights = parameter(torch.full((intervals, decays - 1), 0.3))
        self.ahead_read = parameter(torch.zeros(layers, rank, width))
        self.ahead_gain = parameter(torch.ones(distances, rank))
        self.ahead_bias = parameter(torch.zeros(layers, distances, width))
        self.ahead_weights = parameter(torch.full((distances, decays - 1), 0.3))
        self.ahead_pairs = parameter(torch.zeros(distances, layers, width, width))

    @property
    def matrices(self) -> list[torch.nn.Parameter]:
        """The parameters that weight decay applies to."""
        return [self.write, self.use_read, self.ahead_read, self.ahead_pairs]

    def start_from(self, uses: np.ndarray, risks: np.ndarray) -> None:
        """Take every expert's own rate of use as its bias, from :meth:`moecache.lab.sequences.Sequences.exposure`."""
        common = (uses.sum((0, 2)) / np.maximum(risks.sum((0, 2)), 1))[None, :, None]
        rate = np.clip((uses + 50 * common) / (risks + 50), 1e-4, 0.999)
        bias = torch.from_numpy(np.log(rate / (1 - rate)).astype(np.float32))
        with torch.no_grad():
            self.use_bias.copy_(bias)
            self.ahead_bias.copy_(bias[:, :1].expand_as(self.ahead_bias))

    def forward(self, batch: Batch, distances: Sequence[int], keep: Tensor | None = None) -> list[Question]:
        """The hazards, and the coming layers at these distances.

        Parameters
        ----------
        batch : Batch
        distances : sequence of int
        keep : tensor ``[chunks, rank]``, optional
            What is left of each component of the state (drop-out).

        Returns
        -------
        list of Question
        """
        device, kind = self.write.device, _product_type(self.write.device)
        layers, n, width = self.layers, len(batch.tokens), self.width
        tokens = n * CHUNK
        averages = torch.from_numpy(batch.averages).to(device, kind)
        shares = torch.bmm(averages.view(layers, n * (CHUNK + 1), -1), self.write.to(kind)).float()
        shares = shares.view(layers, n, CHUNK + 1, -1)
        previous, newest = shares[:, :, :-1], shares[:, :, 1:]
        state = previous.sum(0) + (newest - previous).cumsum(0)
        if keep is not None:
            state = state * keep[None, :, None]
        state = torch.cat([state[..., : self.rectified].relu(), state[..., self.rectified :]], -1)
        state = state.view(layers, tokens, -1)
        logs, used = torch.from_numpy(batch.logs).to(device), torch.from_numpy(batch.used).to(device)
        after = logs[:, :, :, 1:].reshape(-1, layers, tokens, width)
        before = logs[:, :, :, :-1].reshape(-1, layers, tokens, width)
        linear = torch.bmm(state.to(kind), self.use_read.to(kind)).view(layers, tokens, -1, width)
        first = torch.from_numpy(batch.first).to(device).view(layers, tokens, width)
        questions = [Question(linear, self.use_bias, self.use_weights, after, first)]
        now = used[:, :, 1 : CHUNK + 1].reshape(layers, tokens, width)
        following = used[:, :, 2:].reshape(layers, tokens, width)
        routed = (now == 0).to(kind)
        for d in distances:
            # Layer l asks for layer l + d of the same token, or around the end of the next one.
            there = [(layer + d) % layers for layer in range(layers)]
            linear = torch.bmm((state * self.ahead_gain[d - 1]).to(kind), self.ahead_read[there].to(kind))
            linear = linear + torch.bmm(routed, self.ahead_pairs[d - 1].to(kind))
            questions.append(
                Question(
                    linear[:, :, None],
                    self.ahead_bias[there, d - 1][:, None],
                    self.ahead_weights[d - 1 : d],
                    torch.cat([before[:, d:], after[:, :d]], 1),
                    torch.cat([now[d:], following[:d]]),
                )
            )
        return questions

    def forecaster(self, fingerprint: Fingerprint, decay: np.ndarray, prior: np.ndarray) -> Forecaster:
        """The weights as they run, layers at their own widths."""
        layers, width = self.layers, self.width
        gids = np.flatnonzero(np.arange(width) < np.array(self.num_experts)[:, None])

        def of_experts(parameter: Tensor, kind: Any) -> np.ndarray:
            # [..., L, E, r or nothing] to [..., M, r or nothing]
            return np.ascontiguousarray(parameter.detach().cpu().numpy().astype(kind))

        half, single = np.float16, np.float32
        write = self.write.view(layers, -1, width, self.write.shape[2]).transpose(0, 1).flatten(1, 2)[:, gids]
        use_read = self.use_read.view(layers, -1, len(HORIZONS), width).permute(2, 0, 3, 1).flatten(1, 2)[:, gids]
        ahead_read = self.ahead_read.transpose(1, 2).flatten(0, 1)[gids]
        pairs = [
            self.ahead_pairs[d - 1, layer, :n, : self.num_experts[(layer + d) % layers]].flatten()
            for d in range(1, self.distances + 1)
            for layer, n in enumerate(self.num_experts)
        ]
        return Forecaster(
            fingerprint=fingerprint,
            decay=np.asarray(decay, single),
            prior=np.ascontiguousarray(prior.ravel()[gids], single),
            rectified=self.rectified,
            write=of_experts(write, half),
            use_read=of_experts(use_read, half),
            use_bias=of_experts(self.use_bias.transpose(0, 1).flatten(1)[:, gids], single),
            use_weights=of_experts(self.use_weights, single),
            ahead_read=of_experts(ahead_read, half),
            ahead_gain=of_experts(self.ahead_gain, single),
            ahead_bias=of_experts(self.ahead_bias.transpose(0, 1).flatten(1)[:, gids], single),
            ahead_weights=of_experts(self.ahead_weights, single),
            ahead_pairs=of_experts(torch.cat(pairs), half),
        )


def _product_type(device: torch.device) -> torch.dtype:
    # bfloat16 where the processor multiplies it faster than float32, not where it is emulated.
    if device.type == "cuda":
        return torch.bfloat16
    fast = (
        getattr(torch.cpu, "_is_amx_tile_supported", bool)() or getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()
    )
    return torch.bfloat16 if fast else torch.float32


def _asked(code: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
    # Bool [L, tokens, intervals, E]: whether the outcome is known and not settled before, and whether it is a use.
    i = torch.arange(intervals, device=code.device)[:, None]
    code = code.to(torch.int16)[:, :, None]
    return torch.where(code < UNKNOWN, code >= i, code > UNKNOWN + i), code == i


class _Logistic(torch.autograd.Function):
    # Binary cross-entropy of a Question: the gradient is made in the forward pass, in one sweep over the logits.

    @staticmethod
    def forward(
        ctx: Any, linear: Tensor, bias: Tensor, weights: Tensor, logs: Tensor, code: Tensor, scale: float
    ) -> Tensor:
        if linear.device.type == "cpu":
            error = linear.detach().float().contiguous()
            of_bias, of_weights = torch.zeros_like(bias), torch.zeros(weights.shape, dtype=torch.float64)
            total = _errors(
                error.numpy(),
                bias.detach().contiguous().numpy(),
                weights.detach().contiguous().numpy(),
                logs.contiguous().numpy(),
                code.contiguous().numpy(),
                scale,
                of_bias.numpy(),
                of_weights.numpy(),
            )
            value = torch.tensor(total)
        else:
            error, of_bias, of_weights, value = errors(linear, bias, weights, logs, code, scale)
        ctx.save_for_backward(error.to(linear.dtype), of_bias, of_weights.to(weights.dtype))
        return value

    @staticmethod
    def backward(ctx: Any, *output: Tensor) -> tuple[Tensor | None, ...]:
        error, of_bias, of_weights = ctx.saved_tensors
        return error, of_bias, of_weights, None, None, None


def errors(
    linear: Tensor, bias: Tensor, weights: Tensor, logs: Tensor, code: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the cross-entropy by logits, bias and weights, and the sum of absolute errors: for any device."""
    asked, came = _asked(code, linear.shape[2])
    z = linear.float() + bias[:, None] + torch.einsum("slte,is->ltie", logs, weights)
    error = (torch.sigmoid(z) - came.float()) * asked * scale
    return error, error.sum(1), torch.einsum("ltie,slte->is", error.double(), logs.double()), error.abs().sum()


@numba.njit(inline="always", fastmath=True)
def _sigmoid(z: Any) -> Any:
    # (1 + tanh(z / 2)) / 2 by the continued fraction of tanh, cut where float32 no longer sees it: no call, so it vectorises.
    x = min(max(z * np.float32(0.5), np.float32(-4.97)), np.float32(4.97))
    q = x * x
    over = x * (np.float32(135135) + q * (np.float32(17325) + q * (np.float32(378) + q)))
    under = np.float32(135135) + q * (np.float32(62370) + q * (np.float32(3150) + q * np.float32(28)))
    return np.float32(0.5) + np.float32(0.5) * over / under


@compiled(fastmath=True, nogil=True, error_model="numpy")
def _errors(
    z: np.ndarray,
    bias: np.ndarray,
    weights: np.ndarray,
    logs: np.ndarray,
    code: np.ndarray,
    scale: float,
    of_bias: np.ndarray,
    of_weights: np.ndarray,
) -> float:
    # As `errors`, with z in place of the error. Short loops over local rows, so that each one vectorises.
    layers, tokens, intervals, width = z.shape
    scales = logs.shape[0]
    row, came, asked = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    known = np.empty((scales, width), np.float32)
    unknown, scaled, total = np.uint8(UNKNOWN), np.float32(scale), 0.0
    part: Any
    for layer in range(layers):
        for t in range(tokens):
            codes = code[layer, t]
            for s in range(scales):
                for e in range(width):
                    known[s, e] = logs[s, layer, t, e]
            for i in range(intervals):
                source, own, sums = z[layer, t, i], bias[layer, i], of_bias[layer, i]
                for e in range(width):
                    row[e] = source[e] + own[e]
                for s in range(scales):
                    weight = weights[i, s]
                    for e in range(width):
                        row[e] += weight * known[s, e]
                at, beyond = np.uint8(i), np.uint8(UNKNOWN + i)
                for e in range(width):
                    came[e] = np.float32(codes[e] == at)
                for e in range(width):
                    open_ = ((codes[e] >= at) & (codes[e] < unknown)) | (codes[e] > beyond)
                    asked[e] = scaled * np.float32(open_)
                for e in range(width):
                    row[e] = (_sigmoid(row[e]) - came[e]) * asked[e]
                part = np.float32(0)
                for e in range(width):
                    part += abs(row[e])
                total += part
                for e in range(width):
                    sums[e] += row[e]
                for e in range(width):
                    source[e] = row[e]
                for s in range(scales):
                    part = np.float32(0)
                    for e in range(width):
                        part += row[e] * known[s, e]
                    of_weights[i, s] += part
    return total
