"""Fitting the routing forecaster to recorded traces."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import FitError, TraceFormatError
from ..files import write_atomically
from ..forecaster import HORIZONS, Forecaster
from ..history import History
from ..trace import Trace, merge
from .fit_report import FitReport, measure
from .network import Network
from .replay import trained_history
from .schedule import split_requests
from .sequences import CHUNK, Sequences

__all__ = ["FitResult", "Settings", "fit"]

FEWEST_REQUESTS, FEWEST_TOKENS = 4, 1000
"""Below these a fit would learn the requests by heart."""

_JUDGED = 4096  # held-out tokens after every epoch: enough to see a difference of a thousandth
_PATIENCE = 2  # epochs without a better held-out loss
_COMING = 2.0  # weight of the coming layers against the six hazards


@dataclass(frozen=True)
class Settings:
    """How a forecaster is fitted; the defaults were chosen on two models' traces (``docs/forecaster.md``).

    Attributes
    ----------
    rank : int
        Components of the state.
    rectified : int or None
        Of these, how many are read only where positive; None: half.
    distances : int
        Coming layers that are forecast.
    decay : tuple of float
        What a token moves each usage average by; the first is 1.
    epochs : int or None
        At most so many passes over the training tokens; None: by their number.
    learning_rate, weight_decay : float
        Of AdamW; the rate falls by half a cosine.
    drop_out : float
        Share of the state's components left out of a chunk.
    chunks : int
        Chunks of :data:`moecache.lab.sequences.CHUNK` tokens in a step.
    seed : int
        The same seed on the same machine gives the same weights.
    """

    rank: int = 128
    rectified: int | None = None
    distances: int = 8
    decay: tuple[float, ...] = (1.0, 0.45, 0.2, 0.02)
    epochs: int | None = None
    learning_rate: float = 4e-3
    weight_decay: float = 1e-2
    drop_out: float = 0.1
    chunks: int = 8
    seed: int = 0


@dataclass(frozen=True)
class FitResult:
    """A fitted forecaster, the history that has it, and what was measured on requests that neither has seen."""

    forecaster: Forecaster
    history: History
    report: FitReport


def fit(
    traces: Trace | Sequence[Trace],
    *,
    split: str | Sequence[int] | np.ndarray | None = None,
    history: History | None = None,
    settings: Settings | None = None,
    add: bool = True,
    max_tokens: int | None = 10_000,
    device: str | torch.device | None = None,
    checkpoint: Path | None = None,
    progress: Any = None,
) -> FitResult:
    """Fit a forecaster, put the training requests into a history, and measure both.

    Parameters
    ----------
    traces : Trace or sequence of Trace
        Of one model.
    split : str or sequence of int, optional
        ``"7/10"``: the first 7 of every 10 requests train, the others are measured on; or the numbers of those that train. Without it all
        train, and the tenth that is held out to see when to stop is measured on: a little too kind.
    history : History, optional
        What is known before. Not changed; the result's history has it and the training requests.
    settings : Settings, optional
    add : bool
        Whether the result's history gets the training requests; without, it is `history` with a forecaster.
    max_tokens : int, optional
        Measure up to the first request that passes this many tokens.
    device : optional
        By default a GPU if there is one.
    checkpoint : path, optional
        Where to keep the state after each epoch, so that an interrupted fit goes on from there. It stays: remove it when the
        result is safe.
    progress : tqdm, optional
        ``total`` is set, and ``update(n)`` called with chunks done.

    Returns
    -------
    FitResult

    Raises
    ------
    FitError
        Too little to learn from, or nothing was learned.
    TraceFormatError
        Traces of different models, or a split that leaves nothing.
    """
    settings = settings or Settings()
    several = [traces] if isinstance(traces, Trace) else list(traces)
    known, played = _split(several, split)
    trace = several[0] if len(several) == 1 else merge(several)
    training, held_out = _hold_out(known)
    _check_enough(trace, training)
    job = _Fit(trace, training, held_out, settings, device)
    if progress is not None:
        progress.total = job.epochs * job.learned.chunks
        progress.refresh()
    losses = job.run(checkpoint, progress)
    forecaster = job.network.forecaster(trace.fingerprint, job.learned.decay, job.learned.prior)
    base = trained_history(trace, known if add else known[:0], history)
    base.forecaster = forecaster
    report = measure(job.network, job.learned, trace, held_out if split is None else played, base, max_tokens, losses)
    return FitResult(forecaster, base, report)


def _split(traces: Sequence[Trace], split: str | Sequence[int] | np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    # As the requests are numbered in the merged trace; each trace is split by its own numbers.
    first = np.cumsum([0] + [trace.requests for trace in traces])
    if split is None:
        return np.arange(first[-1]), np.arange(0)
    if not isinstance(split, str):
        known = np.unique(np.asarray(split, np.int64))
        played = np.setdiff1d(np.arange(first[-1]), known)
        if not len(known) or not 0 <= known[0] <= known[-1] < first[-1] or not len(played):
            raise TraceFormatError(f"requests to train on must be some, not all, of 0..{first[-1] - 1}")
        return known, played
    parts = [[part + n for part in split_requests(trace, split)] for trace, n in zip(traces, first, strict=False)]
    known, played = (np.concatenate(side) for side in zip(*parts, strict=True))
    return known, played


def _hold_out(known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # Every tenth training request, but at least one.
    held = np.arange(len(known)) % 10 == min(9, len(known) - 1)
    return known[~held], known[held]


def _check_enough(trace: Trace, training: np.ndarray) -> None:
    tokens = int(np.isin(trace.request, training).sum())
    if len(training) < FEWEST_REQUESTS or tokens < FEWEST_TOKENS:
        raise FitError(
            f"{len(training)} requests of {tokens:,} tokens are too few to fit to: record at least {FEWEST_REQUESTS} beside the tenth held "
            f"out, of {FEWEST_TOKENS:,} tokens; some ten thousand tokens do well. Without a forecaster the counts decide, as before"
        )


class _Fit:
    """One fit under way: what a checkpoint must hold."""

    def __init__(
        self,
        trace: Trace,
        training: np.ndarray,
        held_out: np.ndarray,
        settings: Settings,
        device: str | torch.device | None,
    ) -> None:
        self.settings = s = settings
        decay = np.asarray(s.decay, np.float32)
        if len(decay) < 2 or decay[0] != 1 or not ((decay > 0) & (decay <= 1)).all():
            raise FitError(f"decays {s.decay} cannot be: expected 1 and at least one other in (0, 1]")
        self.learned = Sequences(trace, training, decay)
        self.judged = Sequences(trace, held_out, decay, self.learned.prior)
        # About as many tokens are seen whatever the trace, between few passes over much and more over little.
        self.epochs = s.epochs or int(np.clip(round(100_000 / self.learned.tokens), 3, 10))
        distances = min(s.distances, max(trace.layers - 1, 1))
        rectified = s.rank // 2 if s.rectified is None else s.rectified
        self.network = Network(trace.num_experts, len(decay), s.rank, rectified, distances, s.seed)
        self.network.start_from(*self.learned.exposure())
        self.network.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        matrices = {id(p) for p in self.network.matrices}
        groups = [
            {"params": [p], "weight_decay": s.weight_decay if id(p) in matrices else 0.0}
            for p in self.network.parameters()
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=s.learning_rate, betas=(0.9, 0.99), fused=True)
        self.epoch, self.losses, self.best = 0, [self.judge()], self._weights()
        self.identity = self._identify(trace, training)

    def run(self, checkpoint: Path | None, progress: Any) -> list[float]:
        """Fit to the end; the network keeps the weights that did best on the held-out requests. Their losses, the first before any step."""
        if checkpoint is not None and checkpoint.is_file():
            self._resume(checkpoint)
            if progress is not None:
                progress.update(self.epoch * self.learned.chunks)
        while self.epoch < self.epochs and len(self.losses) - 1 - int(np.argmin(self.losses)) < _PATIENCE:
            self._one_epoch(progress)
            self.losses.append(self.judge())
            if self.losses[-1] == min(self.losses):
                self.best = self._weights()
            self.epoch += 1
            if checkpoint is not None:
                self._keep(checkpoint)
        if int(np.argmin(self.losses)) == 0 or not np.isfinite(self.losses).all():
            raise FitError(
                f"nothing was learned that holds for other requests: held-out loss {self.losses[0]:.4f} before, {self.losses[-1]:.4f} "
                "after. The routing may be random, the requests too few or too different from each other. Nothing is saved"
            )
        self.network.load_state_dict(self.best)
        with torch.no_grad():
            for p in self.network.matrices:  # measured as it will run
                p.copy_(p.half().float())
        return self.losses

    def _one_epoch(self, progress: Any) -> None:
        s, chunks = self.settings, self.learned.chunks
        random = np.random.default_rng([s.seed, self.epoch])
        order, rank = random.permutation(chunks), self.network.write.shape[2]
        steps = -(-chunks // s.chunks)
        # Mean cross-entropy of an expert's hazards and coming layers, summed over intervals.
        distances = self.network.distances
        scale = 1 / (s.chunks * CHUNK * sum(self.network.num_experts))
        for step, batch in enumerate(self.learned.batches(s.chunks, order)):
            done = self.epoch * steps + step
            rate = min(1, (done + 1) / 20) * (0.02 + 0.49 * (1 + np.cos(np.pi * done / (steps * self.epochs))))
            for group in self.optimizer.param_groups:
                group["lr"] = float(s.learning_rate * rate)
            keep = (random.random((len(batch.tokens), rank)) >= s.drop_out) / (1 - s.drop_out)
            # The next layer always, as it is asked for most and hardest to be sure of, and two of those beyond it.
            asked = [1, *(2 + random.permutation(distances - 1)[:2]).tolist()]
            keeping = torch.from_numpy(keep.astype(np.float32)).to(self.network.write.device)
            hazards, *coming = self.network(batch, asked, keeping)
            loss = hazards.loss(scale)
            for question in coming:
                loss = loss + question.loss(scale * _COMING / len(coming))
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            if progress is not None:
                progress.update(len(batch.tokens))

    @torch.no_grad()
    def judge(self) -> float:
        """Mean cross-entropy on held-out tokens: of the hazards, and of a few coming layers."""
        distances = sorted({1, min(4, self.network.distances), self.network.distances})
        sums = np.zeros((1 + len(distances), len(HORIZONS), 2))
        chunks = np.linspace(0, self.judged.chunks - 1, min(self.judged.chunks, _JUDGED // CHUNK)).astype(np.int64)
        for batch in self.judged.batches(8, chunks):
            for i, question in enumerate(self.network(batch, distances)):
                entropy, asked = question.entropy()
                sums[i, : len(asked), 0] += entropy.cpu().numpy()
                sums[i, : len(asked), 1] += asked.cpu().numpy()
        means = sums[..., 0] / np.maximum(sums[..., 1], 1)
        return float(means[0].mean() + means[1:, 0].mean())

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.network.state_dict().items()}

    def _identify(self, trace: Trace, training: np.ndarray) -> str:
        # A checkpoint goes on only with the very same data, settings and formula.
        text = json.dumps([asdict(self.settings), self.epochs, trace.fingerprint, HORIZONS, training.tolist()])
        return hashlib.sha256(text.encode() + self.learned.experts.tobytes()).hexdigest()

    def _keep(self, path: Path) -> None:
        state = {
            "identity": self.identity,
            "epoch": self.epoch,
            "losses": self.losses,
            "best": self.best,
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        file = io.BytesIO()
        torch.save(state, file)
        write_atomically(path, file.getvalue())

    def _resume(self, path: Path) -> None:
        try:
            state = torch.load(path, map_location=self.network.write.device, weights_only=True)
            same = state["identity"] == self.identity
        except (RuntimeError, ValueError, KeyError, TypeError, EOFError, OSError, pickle.UnpicklingError):
            return  # of no use: begun anew
        if same:
            self.epoch, self.losses, self.best = state["epoch"], list(state["losses"]), state["best"]
            self.network.load_state_dict(state["network"])
            self.optimizer.load_state_dict(state["optimizer"])
