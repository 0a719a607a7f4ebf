"""Values of the chart: each is documented and checked, each that is documented exists, and wrong ones are refused with
a sentence that names them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml
from helm_ground import A100, CHART, COMBINATIONS, L4, MAJORS, ROOT, run_helm

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
README = (CHART / "README.md").read_text(encoding="utf-8")


def leaves(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every value that the schema knows, by its path; those of a pool are in another table."""
    for name, each in schema["properties"].items():
        if "description" in each:
            yield f"{path}{name}", each
        else:
            yield from leaves(each, f"{path}{name}.")


def default_of(path: str) -> Any:
    found: Any = VALUES
    for name in path.split("."):
        found = found[name]
    return found


def paths_of(value: Any, known: set[str], path: str = "") -> Iterator[str]:
    if path in known or not isinstance(value, dict) or not value:
        yield path
        return
    for name, each in value.items():
        yield from paths_of(each, known, f"{path}.{name}" if path else name)


def rows(heading: str) -> dict[str, tuple[str, ...]]:
    """Of the table that begins so."""
    table = README.partition(heading)[2].partition("\n\n")[0]
    found = re.findall(r"^\| `([^`]+)` \|(.*)\|$", table, flags=re.MULTILINE)
    return {name: tuple(cell.strip() for cell in rest.split(" | ")) for name, rest in found}


KNOWN = dict(leaves(SCHEMA))


def test_the_schema_is_one_and_takes_the_defaults() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA, jsonschema.Draft7Validator)
    for values in COMBINATIONS.values():
        jsonschema.validate(values, SCHEMA, jsonschema.Draft7Validator)


def test_each_value_has_a_default_and_is_checked() -> None:
    assert set(paths_of(VALUES, set(KNOWN))) == set(KNOWN)


def test_each_value_is_in_the_readme_with_its_default_and_the_other_way_round() -> None:
    table = rows("| value | default | meaning |")
    assert list(table) == list(KNOWN)
    for path, (default, meaning) in table.items():
        assert meaning == KNOWN[path]["description"], path
        value = default_of(path)
        if value == "":
            assert default == "empty", path
        else:
            assert yaml.safe_load(default.strip("`")) == value, path


def test_each_field_of_a_pool_is_in_the_readme_or_among_those_of_all_pools() -> None:
    pool = SCHEMA["properties"]["pools"]["items"]["properties"]
    common = set(SCHEMA["properties"]["workers"]["properties"])
    node = {f"node.{name}": each for name, each in pool["node"]["properties"].items()}
    own = {name: each for name, each in pool.items() if name not in common} | node
    table = rows("| field of a pool | meaning |")
    assert {name: cells[0] for name, cells in table.items()} == {
        name: each["description"] for name, each in own.items()
    }
    assert common - set(pool) == {"settings", "serviceAccount"}, "what is of all pools, and cannot be of one"


@pytest.mark.parametrize("document", ["helm/shoal/README.md", "docs/kubernetes.md"])
def test_values_that_are_shown_can_be_rendered(document: str) -> None:
    shown = re.findall(r"```yaml\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert shown
    for text in shown:
        done = run_helm(4, "template", yaml.safe_load(text))
        assert done.returncode == 0, done.stderr


def test_templates_use_each_value() -> None:
    """A value that nothing reads would be accepted and ignored."""
    texts = "".join(path.read_text(encoding="utf-8") for path in (CHART / "templates").rglob("*.*"))
    unread = [path for path in KNOWN if path.rpartition(".")[2] not in texts and path != "global"]
    assert not unread


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"controlPlane": {"replica": 2}}, ["controlPlane", "replica", "not allowed"]),
        ({"controlPlane": {"replicas": "two"}}, ["replicas", "integer"]),
        ({"controlPlane": {"replicas": 0}}, ["replicas", "1"]),
        ({"contolPlane": {}}, ["contolPlane", "not allowed"]),
        ({"platform": "openstack"}, ["platform", "eks"]),
        ({"images": {"pullPolicy": "Sometimes"}}, ["pullPolicy", "IfNotPresent"]),
        ({"database": {"external": {"url": "mysql://db/shoal"}}}, ["url", "postgres"]),
        ({"controlPlane": {"settings": {"NO_PROGRESS_S": 1}}}, ["NO_PROGRESS_S"]),
        ({"controlPlane": {"settings": {"no_progres_s": 1}}}, ["no_progres_s", "no_progress_s"]),
        ({"controlPlane": {"settings": {"database_url": "sqlite://"}}}, ["database_url", "must be one of"]),
        ({"workers": {"settings": {"silence": 5}}}, ["silence", "silence_s"]),
        ({"fullnameOverride": "Shoal_1"}, ["fullnameOverride"]),
        ({"controlPlane": {"publicUrl": "shoal.example.org"}}, ["publicUrl", "https?"]),
        ({"rayCluster": {"upgradeStrategy": "Rolling"}}, ["upgradeStrategy", "Recreate"]),
        ({"workers": {"sharedMemory": "lots"}}, ["sharedMemory"]),
        ({"objectStore": {"buckets": ["team-runs"]}}, ["buckets", "s3://"]),
        ({"workers": {"terminationGracePeriodSeconds": 5}}, ["terminationGracePeriodSeconds", "30"]),
        ({"pools": [{"name": "a", "min": 0, "node": {"device": "L4"}}]}, ["pools", "0", "max"]),
        ({"pools": [{**L4, "name": "L4_spot"}]}, ["pools", "0", "name"]),
        ({"pools": [{**L4, "node": {"device": "L4", "price": 1}}]}, ["node", "price"]),
        ({"pools": [{**L4, "node": {}}]}, ["node", "device"]),
    ],
)
def test_a_wrong_value_is_named(major: int, values: dict[str, Any], said: list[str]) -> None:
    done = run_helm(major, "template", values)
    assert done.returncode != 0
    assert all(word in done.stderr for word in said), done.stderr


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"database": {"embedded": {"enabled": False}}}, "database: the control plane has none"),
        ({"controlPlane": {"enabled": False}, "rayCluster": {"enabled": False}}, "nothing would be installed"),
        ({"controlPlane": {"enabled": False}}, "connector.server is empty"),
        (
            {"controlPlane": {"enabled": False}, "connector": {"server": "https://shoal.example.org"}},
            "auth.existingSecret is empty",
        ),
        ({"controlPlane": {"ingress": {"enabled": True}}}, "controlPlane.ingress.host is empty"),
        ({"controlPlane": {"oidc": {"issuer": "https://id.example.org"}}}, "controlPlane.oidc.clientId is empty"),
        ({"images": {"registry": "user:password@registry"}}, "must be a host and a path"),
        ({"images": {"registry": "https://registry.example.org"}}, "must be a host and a path"),
        (
            {"pools": [{**L4, "resources": {"requests": {"memory": "64Gi"}}}]},
            "pools[0] (l4): resources.requests.memory = 64Gi is more than resources.limits.memory = 32Gi",
        ),
        (
            {"pools": [{**L4, "resources": {"requests": {"cpu": "2500m"}, "limits": {"cpu": 2}}}]},
            "pools[0] (l4): resources.requests.cpu = 2500m is more than resources.limits.cpu = 2",
        ),
        (
            {"pools": [{**L4, "sharedMemory": "64Gi"}]},
            "pools[0] (l4): sharedMemory = 64Gi counts against resources.limits.memory = 32Gi",
        ),
        ({"rayCluster": {"head": {"sharedMemory": "8Gi"}}}, "rayCluster.head: sharedMemory = 8Gi counts against"),
        (
            {"objectStore": {"buckets": ["s3://a"]}, "controlPlane": {"settings": {"ambient_storage": "s3://b"}}},
            "controlPlane.settings.ambient_storage and objectStore.buckets say the same",
        ),
        ({"pools": [L4, L4]}, "pools[1] (l4): another pool has this name"),
        ({"pools": [{**L4, "min": 5}]}, "pools[0] (l4): min = 5 is more than max = 4"),
        ({"pools": [{**L4, "replicas": 9}]}, "pools[0] (l4): replicas = 9 is not between min = 1 and max = 4"),
        ({"pools": [{**A100, "spot": False}]}, "pools[0] (a100-spot): node.preemptions_per_hour is only for pools"),
        ({"pools": [{**L4, "node": {**L4["node"], "device_group": 2}}]}, "node.device_group = 2 is more than"),
        ({"pools": [{**L4, "node": {"device": "L4"}}]}, "pools[0] (l4): node.price_per_hour is missing"),
    ],
)
def test_values_that_do_not_fit_each_other_are_told(values: dict[str, Any], said: str) -> None:
    done = run_helm(4, "template", values)
    assert done.returncode != 0 and said in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("values", "said", "is_said"),
    [
        ({}, "Jobs may name no bucket without a storage profile yet", True),
        ({"objectStore": {"buckets": ["s3://runs"]}}, "Jobs may name no bucket", False),
        ({}, "Nothing outside of the Kubernetes cluster reaches it yet", True),
        ({"controlPlane": {"service": {"type": "NodePort"}}}, "Nothing outside of", False),
        ({"controlPlane": {"service": {"type": "NodePort"}}}, "Service of type NodePort is plain HTTP", True),
        (
            {
                "controlPlane": {"ingress": {"enabled": True, "host": "a.example.org"}},
                "networkPolicy": {"ingressNamespaces": ["traefik", "kube-system"]},
            },
            "ingress controllers in traefik, kube-system (networkPolicy",
            True,
        ),
        ({}, "NetworkPolicy lets in", False),
        ({"controlPlane": {"tls": {"existingSecret": "cert"}}}, "or set controlPlane.publicUrl to one", True),
        (
            {"controlPlane": {"tls": {"existingSecret": "cert"}, "publicUrl": "https://shoal.internal"}},
            "controlPlane.publicUrl",
            False,
        ),
    ],
)
def test_notes_name_what_is_missing(values: dict[str, Any], said: str, is_said: bool) -> None:
    done = run_helm(4, "install", values, "--dry-run=client")
    assert done.returncode == 0, done.stderr
    assert (said in done.stdout.partition("NOTES:")[2]) is is_said
