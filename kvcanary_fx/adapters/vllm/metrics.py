"""The canary's counts in vLLM's own metrics endpoint (``/metrics``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from vllm.v1.metrics import prometheus

from ...config import CHECKS
from . import counts
from .patching import wrap

_HELP = {
    "forwards": "Forwards whose KV cache was checked, one for each KV cache group.",
    "slots_checked": "Slots whose token, position and owner were checked before a forward.",
    "fingerprints_checked": "Fingerprints that were compared with the bytes of a slot, one for each half of a layer.",
    "fingerprints_recorded": "Fingerprints that were taken after a write.",
}


class CanaryCollector(Collector):
    """Reads the counts of all engines at each request to the endpoint."""

    def describe(self) -> list[Any]:
        """Nothing: the names are known without reading the counts."""
        return []

    def collect(self) -> Iterator[Any]:
        found, violations = counts.read_all()
        for name, text in _HELP.items():
            yield CounterMetricFamily(f"kvcanary_{name}", text, value=found[name])
        yield GaugeMetricFamily(
            "kvcanary_compared_within_seconds",
            "Time in which the bytes of each stored slot are compared under the budget, 0 where nobody knows.",
            value=counts.compared_within(),
        )
        guarded = GaugeMetricFamily(
            "kvcanary_guarded", "Whether a KV cache group is guarded, and why not.", labels=["group", "reason"]
        )
        for group, why in counts.guarded().items():
            guarded.add_metric([group, why], 0 if why else 1)
        yield guarded
        family = CounterMetricFamily("kvcanary_violations", "Failed checks of the KV cache.", labels=["check"])
        for check in dict.fromkeys((*CHECKS, *violations)):
            family.add_metric([check], violations[check])
        yield family


def hook() -> None:
    """Add the counts to vLLM's registries."""
    counts.directory()  # made here, so that later processes inherit its name
    collector = CanaryCollector()
    if not any(isinstance(known, CanaryCollector) for known in list(REGISTRY._collector_to_names)):
        REGISTRY.register(collector)

    def get_prometheus_registry(original: Callable[..., CollectorRegistry]) -> CollectorRegistry:
        registry = original()
        if registry is not REGISTRY:  # with several servers vLLM makes a new one for each request
            registry.register(collector)
        return registry

    wrap(prometheus, "get_prometheus_registry", get_prometheus_registry)
