"""Fitting: the formula over whole chunks is the streaming one, and what comes out is measured, repeatable and worth having."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from learn_helpers import RAGGED, SMALL, follows
from reference_forecaster import HORIZONS, ForecastReference

from moecache import History
from moecache.errors import FitError
from moecache.lab import Settings, Trace, fit
from moecache.lab.fit import _Fit
from moecache.lab.network import Network, Question, errors
from moecache.lab.sequences import CHUNK, UNKNOWN, Sequences, at_risk


def scattered(trace: Trace, settings: Settings, seed: int = 0) -> _Fit:
    """A fit whose weights are all noise, so that every part of the formula counts."""
    job = _Fit(trace, np.arange(trace.requests - 1), np.array([trace.requests - 1]), settings, "cpu")
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in job.network.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=random))
        for p in job.network.matrices:
            p.copy_(p.half().float())
    return job


@pytest.mark.parametrize("distances", [1, 2])
def test_chunks_are_the_streaming_formula(distances: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moecache.lab.network._product_type", lambda device: torch.float32)
    trace = follows(3, 50)
    job = scattered(trace, replace(SMALL, distances=distances, decay=(1.0, 0.5, 0.1)))
    forecaster = job.network.forecaster(trace.fingerprint, job.learned.decay, job.learned.prior)
    sequences = job.learned
    looks = []
    for batch in sequences.batches(2):
        questions = job.network(batch, list(range(1, distances + 1)))
        shape = (len(RAGGED), len(batch.tokens), CHUNK, -1, max(RAGGED))
        looked = [torch.sigmoid(q.logits()).detach().numpy().reshape(shape) for q in questions]
        looks += [[x[:, c, : batch.tokens[c]] for x in looked] for c in range(len(batch.tokens))]
    for r in (0, 1):
        own = trace.experts[trace.request == r]
        reference = ForecastReference(forecaster)
        chunks = looks[: -(-len(own) // CHUNK)]
        looks = looks[len(chunks) :]
        hazards, *coming = (np.concatenate(parts, 1) for parts in zip(*chunks, strict=True))
        assert hazards.shape[1] == len(own)
        for t in range(len(own)):
            for layer, n in enumerate(RAGGED):
                reference.visit(layer, own[t, layer])
                np.testing.assert_allclose(hazards[layer, t, :, :n], reference.hazards(layer), atol=2e-4)
                for d in range(1, distances + 1):
                    there = RAGGED[(layer + d) % len(RAGGED)]
                    np.testing.assert_allclose(coming[d - 1][layer, t, 0, :there], reference.coming(d), atol=2e-4)


def test_codes_say_when_an_expert_is_used_first() -> None:
    trace = follows(4, 60)
    sequences = Sequences(trace, [2, 0], np.array([1.0, 0.2]))
    seen = [np.concatenate([batch.first, batch.used[:, :, 1 : CHUNK + 1]], 3) for batch in sequences.batches(3)]
    codes = np.concatenate(seen, 1)
    chunk = 0
    for r in (2, 0):
        own = trace.experts[trace.request == r]
        for t in range(len(own)):
            row = codes[:, chunk + t // CHUNK, t % CHUNK]
            for layer, n in enumerate(RAGGED):
                for e in range(n):
                    uses = [u - t for u in range(t + 1, len(own)) if e in own[u, layer]]
                    first = uses[0] if uses else None
                    for i, end in enumerate(HORIZONS):
                        begin = HORIZONS[i - 1] if i else 0
                        open_ = (
                            first > begin if first is not None and first <= HORIZONS[-1] else end <= len(own) - 1 - t
                        )
                        open_ = open_ and not (first is not None and first <= begin)
                        assert bool(at_risk(row[layer, e : e + 1], i)[0]) == open_, (t, layer, e, i)
                        assert (row[layer, e] == i) == (first is not None and begin < first <= end)
                    assert (row[layer, max(RAGGED) + e] == 0) == (e in own[t, layer])
        chunk += -(-len(own) // CHUNK)
    for layer, n in enumerate(RAGGED):
        assert (codes[layer, :, :, n : max(RAGGED)] == UNKNOWN).all()


def test_one_sweep_gives_the_gradients_of_the_cross_entropy() -> None:
    random = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    linear, bias, weights = (noise(2, 7, 6, 5), noise(2, 6, 5), noise(6, 3))
    logs, code = noise(3, 2, 7, 5), torch.randint(0, 15, (2, 7, 5), generator=random).to(torch.uint8)
    code[code == 6] = UNKNOWN
    code[code == 7] = UNKNOWN
    parameters = [x.clone().requires_grad_() for x in (linear, bias, weights)]
    Question(*parameters, logs, code).loss(0.25).backward()
    plain = [x.clone().requires_grad_() for x in (linear, bias, weights)]
    (0.25 * Question(*plain, logs, code).entropy()[0].sum()).backward()
    anywhere = errors(linear, bias, weights, logs, code, 0.25)
    for a, b, c in zip(parameters, plain, anywhere, strict=False):
        torch.testing.assert_close(a.grad, b.grad, atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(b.grad, c.to(b.grad.dtype), atol=2e-4, rtol=1e-3)


def test_what_can_be_learned_is_learned() -> None:
    trace = follows(30, 150)
    found = fit(trace, split="7/10", settings=replace(SMALL, epochs=6))
    report = found.report
    assert report.losses[-1] < report.losses[0]
    rate = {(r.policy, r.capacity_experts): r.hit_rate for r in report.hits}
    sizes = {n for _, n in rate}
    assert sum(rate["forecaster", n] for n in sizes) > sum(rate["lru", n] for n in sizes)
    assert all(rate["forecaster", n] <= rate["belady", n] for n in sizes)
    played = trace.experts[trace.request % 10 >= 7]
    used = played[:, 2][played[:, 2] >= 0]
    # Layer 2 turns with the expert that layer 1 has chosen first: what is frequent says little of it.
    assert report.recall[0, 2] > np.isin(used, np.argsort(found.forecaster.prior[8:])[-2:]).mean() + 0.05
    assert report.calibration_error[:3].max() < 0.05
    assert found.history.forecaster is found.forecaster
    assert len(found.history) == 21
    assert report.requests == 9


def test_the_same_seed_gives_the_same_weights() -> None:
    trace = follows()
    first, second, other = (fit(trace, settings=replace(SMALL, seed=s)).forecaster.tensors() for s in (3, 3, 4))
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])
    assert any((first[name] != other[name]).any() for name in ("write", "use_read"))


class _Interrupted(Exception):
    pass


class _Stopper:
    """A progress bar that stops the fit after some chunks."""

    total = 0

    def __init__(self, after: int) -> None:
        self.left, self.calls = after, 0

    def refresh(self) -> None:
        pass

    def update(self, n: int) -> None:
        self.left -= n
        self.calls += 1
        if self.left < 0:
            raise _Interrupted


def test_an_interrupted_fit_goes_on(tmp_path: Path) -> None:
    trace, checkpoint = follows(), tmp_path / "a.fit"
    counting = _Stopper(10**9)
    whole = fit(trace, settings=SMALL, progress=counting).forecaster.tensors()
    chunks = counting.total // 3
    with pytest.raises(_Interrupted):
        fit(trace, settings=SMALL, checkpoint=checkpoint, progress=_Stopper(2 * chunks))
    assert checkpoint.exists()
    rest = _Stopper(10**9)
    resumed = fit(trace, settings=SMALL, checkpoint=checkpoint, progress=rest).forecaster.tensors()
    for name, array in whole.items():
        np.testing.assert_array_equal(array, resumed[name])
    assert rest.calls == 1 + -(-chunks // SMALL.chunks)  # what was done, in one go, and the last pass


def test_a_checkpoint_of_something_else_is_not_used(tmp_path: Path) -> None:
    trace, checkpoint = follows(), tmp_path / "a.fit"
    checkpoint.write_bytes(b"not a checkpoint")
    fit(trace, settings=SMALL, checkpoint=checkpoint)
    with pytest.raises(_Interrupted):
        fit(follows(seed=1), settings=SMALL, checkpoint=checkpoint, progress=_Stopper(140))
    expected = fit(trace, settings=SMALL).forecaster.tensors()
    for name, array in fit(trace, settings=SMALL, checkpoint=checkpoint).forecaster.tensors().items():
        np.testing.assert_array_equal(array, expected[name])


@pytest.mark.parametrize(("requests", "tokens"), [(3, 1000), (12, 20)])
def test_too_little_is_refused(requests: int, tokens: int, tmp_path: Path) -> None:
    with pytest.raises(FitError, match="too few"):
        fit(follows(requests, tokens), settings=SMALL, checkpoint=tmp_path / "a.fit")
    assert not list(tmp_path.iterdir())


def test_noise_is_not_learned() -> None:
    random = np.random.default_rng(0)
    experts = np.array([[random.permutation(6)[:2] for _ in range(3)] for _ in range(1500)], np.int16)
    trace = Trace("noise", experts, (np.arange(1500) // 150).astype(np.int32), np.ones(1500, np.uint8), (6, 6, 6))
    try:
        report = fit(trace, settings=SMALL).report
    except FitError as error:
        assert "nothing was learned" in str(error)  # noqa: PT017
    else:
        # The sharpness of a mean over few tokens can be learned even here, but nothing else.
        assert report.losses[0] - min(report.losses) < 0.3
        assert report.recall_ahead(1) == pytest.approx(1 / 3, abs=0.05)


def test_several_traces_and_an_earlier_history(tmp_path: Path) -> None:
    trace = follows(8)
    history = History(trace.fingerprint, 100)
    history.add(np.zeros(14, np.int64), np.ones(14, np.int64), 5)
    found = fit([trace, follows(8, seed=5)], split="3/4", history=history, settings=SMALL)
    assert (len(history), len(found.history)) == (1, 13)
    assert history.forecaster is None
    assert found.report.requests == 4
    path = tmp_path / "a.history"
    found.history.save(path)
    loaded = History.load(path, trace.fingerprint)
    assert loaded.forecaster is not None
    for name, array in found.forecaster.tensors().items():
        np.testing.assert_array_equal(array, loaded.forecaster.tensors()[name])


def test_layers_of_one_width_and_one_layer() -> None:
    found = fit(follows(num_experts=(8,), tokens=200), settings=replace(SMALL, distances=8))
    assert found.forecaster.distances == 1
    network = Network((8,), 2, 4, 2, 1, 0)
    assert network.width == 8
