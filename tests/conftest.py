"""What several test modules watch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cache_helpers import make_bank

import moecache
from moecache import ExpertBank, Request


@pytest.fixture
def bank() -> Iterator[ExpertBank]:
    """Two layers of eight experts that differ in every number."""
    with make_bank() as bank:
        yield bank


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
