"""The dashboard for Grafana, and ``kvcanary top``, read metrics that vLLM's adapter exports."""

from __future__ import annotations

import json
import re
import runpy
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvcanary_fx.adapters.vllm import counts
from kvcanary_fx.cli import top
from kvcanary_fx.reports import metrics_text

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-kvcanary.json"

pytestmark = pytest.mark.skipif(not DASHBOARD.exists(), reason="not a checkout")


class Family:
    """A metric family of prometheus_client, as far as the adapter uses it."""

    suffix = ""

    def __init__(self, name: str, text: str, value: float | None = None, labels: list[str] | None = None):
        self.name, self.labels = name + self.suffix, labels or []
        self.samples = [] if value is None else [([], value)]

    def add_metric(self, values: list[str], value: float) -> None:
        self.samples.append((values, value))

    def lines(self) -> list[str]:
        """As the endpoint writes them."""
        told = []
        for values, value in self.samples:
            pairs = ",".join(f"{k}={json.dumps(v)}" for k, v in zip(self.labels, values, strict=True))
            told.append(f"{self.name}{{{pairs}}} {float(value)}" if pairs else f"{self.name} {float(value)}")
        return told


class CounterFamily(Family):
    suffix = "_total"


@pytest.fixture
def exported(monkeypatch) -> list[Family]:
    """What the adapter's collector yields, without vLLM and prometheus_client."""
    modules: dict[str, dict[str, Any]] = {
        "prometheus_client": {"REGISTRY": None, "CollectorRegistry": object},
        "prometheus_client.core": {"CounterMetricFamily": CounterFamily, "GaugeMetricFamily": Family},
        "prometheus_client.registry": {"Collector": object},
        "vllm": {},
        "vllm.v1": {},
        "vllm.v1.metrics": {"prometheus": None},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "kvcanary_fx.adapters.vllm.metrics", raising=False)  # with the real ones
    monkeypatch.setattr(counts, "read_all", lambda: (Counter(dict.fromkeys(counts.FIELDS, 7)), Counter(content=2)))
    monkeypatch.setattr(counts, "guarded", lambda: {"0": "", "draft": 'of "no" layout'})
    monkeypatch.setattr(counts, "compared_within", lambda: 1.5)
    collector = runpy.run_module("kvcanary_fx.adapters.vllm.metrics")["CanaryCollector"]()
    return list(collector.collect())


def expressions(node: Any) -> list[str]:
    """All queries of a dashboard, those of its variables included."""
    if isinstance(node, list):
        return [found for each in node for found in expressions(each)]
    if not isinstance(node, dict):
        return []
    own = [node[key] for key in ("expr", "query", "definition") if isinstance(node.get(key), str)]
    return own + [found for each in node.values() for found in expressions(each)]


def test_the_dashboard_asks_for_every_exported_metric_and_no_other(exported):
    asked = set(re.findall(r"kvcanary_\w+", " ".join(expressions(json.loads(DASHBOARD.read_text())))))
    assert asked == {family.name for family in exported}


def test_the_dashboard_groups_by_labels_that_are_exported(exported):
    board = json.loads(DASHBOARD.read_text())
    labels = {label for family in exported for label in family.labels}
    scraped = {"job", "instance"}  # added by Prometheus
    used = set(re.findall(r"by \((\w+)\)", DASHBOARD.read_text()))
    used |= set(re.findall(r"\{\{(\w+)\}\}", DASHBOARD.read_text()))
    table = next(panel for panel in board["panels"] if panel["type"] == "table")
    used |= set(table["transformations"][0]["options"]["indexByName"])
    assert used <= labels | scraped
    assert labels <= used


def test_the_dashboard_can_be_imported():
    board = json.loads(DASHBOARD.read_text())
    assert board["schemaVersion"] >= 36
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in board["panels"]:
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert {source["uid"] for source in sources} == {"${datasource}"}
    named = set(re.findall(r"\$\{?([a-z]\w*)", DASHBOARD.read_text()))
    assert named == set(variables)


def test_top_shows_what_is_exported(exported):
    reading = metrics_text.read("\n".join(line for family in exported for line in family.lines()))
    assert reading is not None
    shown = top.render("http://h/metrics", reading)
    assert shown.splitlines()[1:] == [
        "guarded     1 of 2 KV cache groups",
        '  unguarded draft: of "no" layout',
        "checked     7 slots, 7 forwards",
        "compared    7 fingerprints; every stored byte within 1.5 s",
        "recorded    7 fingerprints",
        "violations  2 (content 2)",
    ]
