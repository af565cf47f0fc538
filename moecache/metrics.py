"""A cache's counters for Prometheus (extra ``metrics``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from .cache import ExpertCache

__all__ = ["PrometheusCollector"]


class PrometheusCollector:
    """A prometheus_client collector over one cache (extra ``metrics``).

    >>> prometheus_client.REGISTRY.register(PrometheusCollector(cache))  # doctest: +SKIP
    """

    _GAUGES = (
        "capacity_experts",
        "resident_experts",
        "resident_bytes",
        "expert_bytes_total",
        "expert_bytes_stored",
        "host_locked_bytes",
        "host_pageable_bytes",
        "prefetch_pending",
    )

    def __init__(self, cache: ExpertCache, labels: dict[str, str] | None = None) -> None:
        self._cache = cache
        self._labels = dict(labels or {})

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stats = self._cache.stats()
        for field in fields(stats):
            value = getattr(stats, field.name)
            if isinstance(value, tuple):
                continue
            family = GaugeMetricFamily if field.name in self._GAUGES else CounterMetricFamily
            metric = family(f"moecache_{field.name}", field.name.replace("_", " "), labels=list(self._labels))
            metric.add_metric(list(self._labels.values()), value)
            yield metric
