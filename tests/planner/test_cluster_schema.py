"""The JSON Schemas of clusters, markets and plans: they take what Shoal takes, refuse what a field alone shows, and
explain what users write."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from shoal.cli import run
from shoal_planner.cluster import parse_cluster
from shoal_planner.cluster_schema import cluster_schema, market_schema
from shoal_planner.errors import InvalidField
from shoal_planner.market import parse_market
from shoal_planner.plan import parse_plan
from shoal_planner.plan_schema import plan_schema

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
CLUSTERS = ["cluster-mixed.yaml", "local-cluster.yaml"]
MIXED, MARKET = (
    yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8")) for name in ("cluster-mixed.yaml", "market.yaml")
)
PLAN: dict[str, Any] = {
    "pipelines": [
        {
            "micro_batch": 2,
            "micro_batches": 4,
            "stages": [{"layers": [[0, 4]], "replicas": [{"node": "a-0", "devices": [0], "samples": 2}]}],
        }
    ]
}
SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {
    "cluster": cluster_schema,
    "market": market_schema,
    "plan": plan_schema,
}


def problems(what: str, document: object) -> list[str]:
    return [error.message for error in Draft202012Validator(SCHEMAS[what]()).iter_errors(document)]


def changed(document: Mapping[str, Any], path: list[str | int], value: object) -> dict[str, Any]:
    found: Any = copy.deepcopy(dict(document))
    place = found
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return dict(found)


@pytest.mark.parametrize("what", SCHEMAS)
def test_each_is_a_schema_and_printed(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = SCHEMAS[what]()
    Draft202012Validator.check_schema(made)
    assert run(["schema", what]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(made, allow_nan=False))


@pytest.mark.parametrize("name", CLUSTERS)
def test_examples_are_clusters(name: str) -> None:
    assert problems("cluster", yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))) == []


def test_other_documents_are_taken() -> None:
    assert problems("market", MARKET) == []
    assert problems("plan", PLAN) == [] and parse_plan(PLAN)
    assert problems("cluster", {**MIXED, "devices": None, "links": None}) == []


@pytest.mark.parametrize(
    "path, value",
    [
        (["nodes"], []),
        (["node"], 1),
        (["devices"], False),
        (["links"], ""),
        (["nodes", 0, "count"], 0),
        (["nodes", 0, "device"], None),
        (["nodes", 0, "price_per_hour"], "7.3"),
        (["nodes", 0, "zones"], "a"),
        (["nodes", 0, "name"], "-"),
        (["devices", "T4", "efficiency"], 2),
        (["links", 0, "gbit_per_s"], "25"),
        (["links", 0, "fan_in"], 1),
        (["links", 0, "speed"], 1),
    ],
)
def test_what_no_cluster_may_say_is_refused_as_shoal_refuses_it(path: list[str | int], value: object) -> None:
    document = changed(MIXED, path, value)
    assert problems("cluster", document) != []
    with pytest.raises(InvalidField):
        parse_cluster(document)


@pytest.mark.parametrize(
    "path, value", [(["offers"], []), (["offers", 0, "count"], 1), (["offers", 0, "price_per_hour"], 0)]
)
def test_what_no_market_may_say_is_refused(path: list[str | int], value: object) -> None:
    document = changed(MARKET, path, value)
    assert problems("market", document) != []
    with pytest.raises(InvalidField):
        parse_market(document)


def test_what_no_plan_may_say_is_refused() -> None:
    document = changed(PLAN, ["pipelines", 0, "stages", 0, "replicas", 0, "tp"], "1")
    assert problems("plan", document) != []
    with pytest.raises(InvalidField):
        parse_plan(document)


def _undescribed(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, each in schema.get("properties", {}).items():
        at = f"{path}.{name}" if path else name
        if not each.get("description"):
            yield at
        for part in (each, each.get("items", {}), each.get("additionalProperties", {})):
            if isinstance(part, Mapping):
                yield from _undescribed(part, at)


@pytest.mark.parametrize("what", ["cluster", "market"])
def test_every_field_is_described(what: str) -> None:
    assert [*_undescribed(SCHEMAS[what]())] == []
