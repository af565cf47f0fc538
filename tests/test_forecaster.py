"""A forecaster's weights: kept with the history, refused when they cannot be; what its hazards are worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_forecaster
from hypothesis import given
from hypothesis import strategies as st
from reference_core import SETTINGS
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from moecache import Fingerprint, Forecaster, History
from moecache.errors import ForecasterError, HistoryFormatError
from moecache.forecaster import HORIZONS, wait_beyond

MODEL = Fingerprint((4, 3, 5), 2, "abc")


def made(model: Fingerprint = MODEL, rank: int = 8, distances: int = 2, seed: int = 0) -> Forecaster:
    """A forecaster of noise."""
    random = np.random.default_rng(seed)
    experts, layers, scales = model.num_experts, len(model.num_experts), 3
    total = sum(experts)
    pairs = sum(experts[i] * experts[(i + d) % layers] for d in range(1, distances + 1) for i in range(layers))

    def noise(dtype: Any, *shape: int) -> np.ndarray:
        return (0.5 * random.normal(size=shape)).astype(dtype)

    half, single = np.float16, np.float32
    return Forecaster(
        fingerprint=model,
        decay=np.array([1, 0.5, 0.1], single),
        prior=random.random(total).astype(single),
        rectified=rank // 2,
        write=noise(half, scales, total, rank),
        use_read=noise(half, 6, total, rank),
        use_bias=noise(single, 6, total),
        use_weights=noise(single, 6, scales - 1),
        ahead_read=noise(half, total, rank),
        ahead_gain=noise(single, distances, rank),
        ahead_bias=noise(single, distances, total),
        ahead_weights=noise(single, distances, scales - 1),
        ahead_pairs=noise(half, pairs),
    )


def with_forecaster() -> History:
    history = History(MODEL, 10)
    history.add(np.zeros(12, np.int64), np.arange(12), 20)
    history.forecaster = made()
    return history


def test_it_lies_in_the_history_s_file(tmp_path: Path) -> None:
    path = tmp_path / "a.history"
    saved = with_forecaster()
    saved.save(path)
    loaded = History.load(path, MODEL)
    assert saved.forecaster is not None
    assert loaded.forecaster is not None
    assert loaded.forecaster.fingerprint == MODEL
    assert loaded.forecaster.rectified == 4
    for name, array in saved.forecaster.tensors().items():
        found = loaded.forecaster.tensors()[name]
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
    loaded.forecaster = None
    loaded.save(path)
    assert History.load(path).forecaster is None


def test_its_size_is_what_a_file_grows_by(tmp_path: Path) -> None:
    history = with_forecaster()
    history.save(tmp_path / "with")
    nbytes = made().nbytes
    history.forecaster = None
    history.save(tmp_path / "without")
    grown = (tmp_path / "with").stat().st_size - (tmp_path / "without").stat().st_size
    assert 0 < grown - nbytes < 2000  # names and shapes


@pytest.mark.parametrize("distance", [1, 2])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_pairs_are_found_where_they_lie(distance: int, layer: int) -> None:
    forecaster = made()
    reference = reference_forecaster.ForecastReference(forecaster)
    reference.now = layer
    np.testing.assert_array_equal(forecaster.pairs(distance, layer), reference._pairs(distance))


@pytest.mark.parametrize("other", [Fingerprint((4, 3, 5), 2, "abd"), Fingerprint((4, 4, 5), 2, "abc")])
def test_another_model_s_is_refused(other: Fingerprint) -> None:
    history = History(MODEL, 10)
    with pytest.raises(HistoryFormatError, match="another model"):
        history.forecaster = made(other)
    assert history.forecaster is None


def test_a_merge_keeps_one() -> None:
    own, other = History(MODEL, 10), with_forecaster()
    own.merge(other)
    assert own.forecaster is other.forecaster
    mine = made(seed=1)
    own.forecaster = mine
    own.merge(other)
    assert own.forecaster is mine


def _spoil(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict[str, np.ndarray]], None]:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"forecaster.{name}"] = change(tensors[f"forecaster.{name}"])

    return spoil


def _left_out(name: str) -> Callable[[dict[str, np.ndarray]], None]:
    def leave_out(tensors: dict[str, np.ndarray]) -> None:
        del tensors[f"forecaster.{name}"]

    return leave_out


def _first(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array.flat[0] = value
        return array

    return change


BAD = {
    "cut": _spoil("ahead_pairs", lambda x: x[:-1].copy()),
    "another rank": _spoil("use_read", lambda x: x[..., :-1].copy()),
    "no rank": _spoil("write", lambda x: x[..., :0].copy()),
    "flat": _spoil("write", lambda x: x.ravel().copy()),
    "another type": _spoil("write", lambda x: x.astype(np.float32)),
    "NaN": _spoil("use_read", _first(np.nan)),
    "inf": _spoil("ahead_read", _first(np.inf)),
    "huge": _spoil("use_bias", _first(1e20)),
    "a prior that is no share": _spoil("prior", _first(-0.1)),
    "decay of nothing": _spoil("decay", lambda x: np.array([1, 0, 0.1], np.float32)),
    "no last use": _spoil("decay", _first(0.9)),
    "more rectified than there are": _spoil("rectified", _first(9)),
    "rectified by half": _spoil("rectified", lambda x: x.astype(np.float32)),
    "too far": _spoil("ahead_gain", lambda x: np.ones((3, 8), np.float32)),
    "one missing": _left_out("use_weights"),
    "one too many": lambda tensors: tensors.update({"forecaster.more": np.zeros(1, np.float32)}),
}


@pytest.mark.failure("I35b")
@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD.keys())
def test_bad_weights_are_refused_with_the_file(spoil: Callable[[dict[str, np.ndarray]], None], tmp_path: Path) -> None:
    path = tmp_path / "a.history"
    with_forecaster().save(path)
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    spoil(tensors)
    save_file(tensors, path, metadata)
    with pytest.raises(HistoryFormatError, match="forecaster"):
        History.load(path)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.999])
def test_a_file_cut_short_is_refused(share: float, tmp_path: Path) -> None:
    path = tmp_path / "a.history"
    with_forecaster().save(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(HistoryFormatError, match="not a whole history"):
        History.load(path)


def test_wrong_weights_cannot_be_made() -> None:
    with pytest.raises(ForecasterError, match="prior"):
        replace(made(), prior=np.full(12, np.nan, np.float32))
    with pytest.raises(ForecasterError, match="ahead"):
        made(distances=3)
    assert made(Fingerprint((4,), 2, ""), distances=1).distances == 1


@given(st.lists(st.floats(0.0, 1.0), min_size=6, max_size=6))
@SETTINGS
def test_the_reuse_time_is_the_best_horizon_s(hazards: list[float]) -> None:
    found = float(wait_beyond(np.array(hazards)))
    assert found == pytest.approx(reference_forecaster.wait_beyond(hazards), rel=1e-9)
    assert found >= 0


@given(st.floats(0.01, 0.99))
@SETTINGS
def test_of_a_constant_chance_the_first_visit_says_all(chance: float) -> None:
    hazards = [1 - (1 - chance) ** n for n in np.diff((0, *HORIZONS))]
    # A use in a long interval is taken to fall on its middle, too late: the first interval, where that is exact, is best.
    assert float(wait_beyond(np.array(hazards))) == pytest.approx(1 / chance - 1, rel=1e-6)


@pytest.mark.failure("I35b")
def test_a_claim_of_many_distances_takes_no_time(tmp_path: Path) -> None:
    path = tmp_path / "a.history"
    with_forecaster().save(path)
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    tensors = {**load_file(path), "forecaster.ahead_gain": np.zeros((2**40, 0), np.float32)}
    save_file(tensors, path, metadata)
    with pytest.raises(HistoryFormatError, match="layers ahead"):
        History.load(path)
