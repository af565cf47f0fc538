"""Counters as people read them: rates, tables, JSON, Prometheus."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from cache_helpers import make_bank, run

from moecache import ExpertCache, Stats
from moecache.metrics import PrometheusCollector


def stats(**changes: object) -> Stats:
    fields = {field.name: 0 for field in dataclasses.fields(Stats)} | {"layer_demands": (0, 0), "layer_hits": (0, 0)}
    return Stats(**{**fields, "stall_s": 0.0, **changes})


def test_rates_of_nothing_are_zero() -> None:
    nothing = stats()
    assert nothing.hit_rate == 0.0
    assert nothing.bytes_per_token == 0.0
    assert str(nothing)


@pytest.mark.failure("140")
def test_rates() -> None:
    some = stats(demands=8, hits=6, misses=2, bytes_demand=300, bytes_prefetch=100, tokens=4)
    assert some.hit_rate == 0.75
    assert some.bytes_per_token == 100.0


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats().hits = 3


@pytest.mark.failure("140")
def test_the_table_says_what_happened() -> None:
    text = str(
        stats(
            demands=1234567,
            hits=1111111,
            misses=123456,
            evictions=99,
            bytes_demand=3_210_000_000,
            stall_s=1.5,
            prefetch_issued=7,
        )
    )
    for part in ("1,234,567, 90.0% hits", "123,456, 3.21 GB", "99", "1.500 s", "7: 0 useful"):
        assert part in text
    columns = {line.index(line.split("  ")[-1].strip()) for line in text.splitlines()}
    assert len(columns) == 1, "one table"


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (1_500_000, "1.5 MB"), (2**63, "9223372036.85 GB")]
)
def test_bytes_in_words(n: int, text: str) -> None:
    assert re.search(f"^all experts +{re.escape(text)}$", str(stats(expert_bytes_total=n)), re.MULTILINE)


def test_a_dict_of_plain_types() -> None:
    with make_bank() as bank, ExpertCache(bank, 3) as cache, cache.request() as request:
        run(request, 0, [[1, 2]])
        found = cache.stats().as_dict()
    again = json.loads(json.dumps(found))
    assert again["hit_rate"] == 0.0
    assert again["layer_demands"] == [2, 0]
    assert {field.name for field in dataclasses.fields(Stats)} < set(found)
    for name, value in found.items():
        assert type(value) in (int, float, tuple), name


@pytest.mark.failure("141")
def test_counters_only_grow() -> None:
    with make_bank() as bank, ExpertCache(bank, 3, top_k=1) as cache, cache.request() as request:
        before = cache.stats()
        for n in range(40):
            run(request, n % 2, [[n % 8], [n * 3 % 8]])
            if n == 20:
                cache.resize(5)
            now = cache.stats()
            for field in dataclasses.fields(Stats):
                if field.name not in ("capacity_experts", "resident_experts", "resident_bytes"):
                    assert getattr(now, field.name) >= getattr(before, field.name), field.name
            before = now


def test_prometheus() -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client import CollectorRegistry, generate_latest

    with make_bank() as bank, ExpertCache(bank, 3) as cache, cache.request() as request:
        registry = CollectorRegistry()
        registry.register(PrometheusCollector(cache, {"model": "tiny"}))
        run(request, 0, [[1, 2]])
        text = generate_latest(registry).decode()
        found = cache.stats()
    assert 'moecache_demands_total{model="tiny"} 2.0' in text
    assert 'moecache_misses_total{model="tiny"} 2.0' in text
    assert f'moecache_resident_bytes{{model="tiny"}} {float(found.resident_bytes)}' in text
    assert "# TYPE moecache_capacity_experts gauge" in text
    assert "# TYPE moecache_bytes_demand_total counter" in text
    assert "layer_hits" not in text
