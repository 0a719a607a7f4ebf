"""Grafana's dashboards are what generate.py makes, ask for figures that exist, and show all of those that there are."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "deploy/grafana"
SYNTHETIC = {"ALERTS", "up"}  # Prometheus' own
PARTS = ("_bucket", "_sum", "_count", "")


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_dashboards", GRAFANA / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def metrics() -> dict[str, set[str]]:
    """Those of the handbook, which test_service_metrics compares with what a server tells; with their labels."""
    text = (ROOT / "docs/watching.md").read_text(encoding="utf-8")
    found: dict[str, set[str]] = {}
    of_all, of_jobs = text.split("All that follows has the labels `job_id` and `project`")
    for part, common in ((of_all, set[str]()), (of_jobs, {"job_id", "project"})):
        for names, labels in re.findall(r"^\| (`shoal_[^|]*)\|([^|]*)\|", part, flags=re.MULTILINE):
            for name in re.findall(r"`(shoal_\w+)`", names):
                found[name] = set(re.findall(r"`(\w+)`", labels)) | common
    return found


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Names of figures, and of the labels that are asked of them. Raises ValueError for what is no PromQL."""
    parser = pytest.importorskip("promql_parser")
    plain = expression.replace("$project", "p").replace("$job", "j")

    def walk(node: Any) -> Iterator[tuple[str, set[str]]]:
        if isinstance(node, parser.VectorSelector):
            yield node.name, {matcher.name for matcher in node.matchers.matchers}
        for field in ("expr", "lhs", "rhs", "vector_selector", "args"):
            child = getattr(node, field, None)
            for each in child if isinstance(child, list | tuple) else (child,):
                if each is not None:
                    yield from walk(each)

    return walk(parser.parse(plain))


def asked() -> list[str]:
    found = []
    for path in GRAFANA.glob("dashboards/*.json"):
        document = json.loads(path.read_text(encoding="utf-8"))
        found += [target["expr"] for panel in document["panels"] for target in panel["targets"]]
    return found


def alerts() -> list[str]:
    document = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text(encoding="utf-8"))
    return [rule["expr"] for group in document["groups"] for rule in group["rules"]]


def test_the_files_are_what_the_generator_makes(generator: ModuleType) -> None:
    texts = generator.texts()
    assert set(texts) == set(GRAFANA.glob("dashboards/*.json"))
    for path, text in texts.items():
        assert path.read_text(encoding="utf-8") == text, f"run python deploy/grafana/generate.py: {path.name} is older"


@pytest.mark.parametrize("expressions", [asked(), alerts()], ids=["dashboards", "alerts"])
def test_every_query_is_one_and_asks_for_figures_that_exist(expressions: list[str]) -> None:
    known = metrics()
    for expression in expressions:
        for name, labels in selectors(expression):
            if name in SYNTHETIC or name.startswith("process_"):
                continue
            found = next((name.removesuffix(part) for part in PARTS if name.removesuffix(part) in known), None)
            assert found is not None, f"{name} in {expression}"
            assert labels <= known[found], f"{name} has no {labels - known[found]}: {expression}"


@pytest.mark.parametrize("expressions", [asked(), alerts()], ids=["dashboards", "alerts"])
def test_what_is_told_apart_are_labels_of_the_figures(expressions: list[str]) -> None:
    """By another label, as `job`, all jobs would count as one without anybody noticing."""
    known = metrics()
    for expression in expressions:
        names = [name.removesuffix(part) for name, _ in selectors(expression) for part in PARTS]
        labels = {"le", "instance"}.union(*(known.get(name, set()) for name in names))
        apart = {label for each in re.findall(r"\bby \(([^)]*)\)", expression) for label in each.split(", ")}
        assert apart <= labels, f"{apart - labels} in {expression}"


def test_no_label_is_one_that_prometheus_sets() -> None:
    """It would call ours `exported_...`; the second half is what its operator adds."""
    taken = {"job", "instance", "namespace", "service", "pod", "container", "endpoint"}
    assert not [name for name, labels in metrics().items() if labels & taken]


def test_every_figure_is_on_a_dashboard() -> None:
    shown = {name for expression in asked() for name, _ in selectors(expression)}
    missing = {name for name in metrics() if not any(f"{name}{part}" in shown for part in PARTS)}
    assert missing == set()


def test_the_provisioning_leads_to_them() -> None:
    compose = yaml.safe_load((ROOT / "deploy/compose/compose.yaml").read_text(encoding="utf-8"))["services"]
    mounted = dict(volume.split(":")[:2] for volume in compose["grafana"]["volumes"])
    provider = yaml.safe_load((GRAFANA / "provisioning/dashboards/shoal.yaml").read_text())["providers"][0]
    assert mounted["../grafana/dashboards"] == provider["options"]["path"]
    source = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in compose
