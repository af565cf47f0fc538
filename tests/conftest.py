"""What several test modules watch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import pytest
from cache_helpers import make_bank
from fake_cuda import FakeCuda, installed
from scenes import Scenes

import moecache
from moecache import ExpertBank, Request
from moecache.lab import Trace


@pytest.fixture
def bank() -> Iterator[ExpertBank]:
    """Two layers of eight experts that differ in every number."""
    with make_bank() as bank:
        yield bank


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """The mock CUDA runtime in place of cuda-python."""
    with installed(monkeypatch) as fake:
        yield fake


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenes]:
    """What starts processes of their own, from one that has imported everything already."""
    found = Scenes(tmp_path_factory.mktemp("output"))
    yield found
    found.close()


@pytest.fixture
def quick_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits of seconds, and not at a priority that a busy machine never gets to."""
    from learn_helpers import SMALL

    monkeypatch.setattr("moecache.learning._SETTINGS", asdict(SMALL))
    monkeypatch.setattr("moecache.learning._lower_priority", lambda pid: None)


@pytest.fixture(scope="session")
def trace() -> Trace:
    """Requests with something to learn, four times as many as a first fit needs."""
    from learn_helpers import ENOUGH, follows

    return follows(4 * ENOUGH)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Request]]:
    """Every request of every cache, in the order in which they begin."""
    made: list[Request] = []
    begin = moecache.ExpertCache.request

    def request(self: moecache.ExpertCache) -> Request:
        made.append(begin(self))
        return made[-1]

    monkeypatch.setattr(moecache.ExpertCache, "request", request)
    yield made
    # Counted in one layer and not in another: no model does that. A row that is NaN may become so between two layers.
    assert all(len({int(layer.sum()) for layer in request.counts} - {0}) <= 1 for request in made)
