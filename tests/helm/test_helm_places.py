"""Where the chart's pods go, and who reaches them."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from helm_ground import A100, CPU, L4, of_kind, pod_templates, rendered, run_helm

APART = {
    "topologyKey": "kubernetes.io/hostname",
    "labelSelector": {"matchLabels": {"ray.io/cluster": "shoal-ray", "ray.io/node-type": "worker"}},
}


def groups_of(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    done = run_helm(4, "template", values)
    assert done.returncode == 0, done.stderr
    (cluster,) = (each for each in yaml.safe_load_all(done.stdout) if each and each["kind"] == "RayCluster")
    return {group["groupName"]: group["template"] for group in cluster["spec"]["workerGroupSpecs"]}


def is_apart(template: dict[str, Any]) -> bool:
    rules = template["spec"].get("affinity", {}).get("podAntiAffinity", {})
    return bool(rules.get("requiredDuringSchedulingIgnoredDuringExecution") == [APART])


def test_no_two_nodes_are_on_one_machine_unless_somebody_allows_it() -> None:
    pools = [A100, L4, {**CPU, "shareMachines": True}]
    assert {name: is_apart(each) for name, each in groups_of({"pools": pools}).items()} == {
        "a100-spot": True,
        "l4": True,
        "cpu": False,
    }
    pools = [A100, {**L4, "shareMachines": False}]
    found = groups_of({"pools": pools, "workers": {"shareMachines": True}})
    assert {name: is_apart(each) for name, each in found.items()} == {"a100-spot": False, "l4": True}
    assert "affinity" not in found["a100-spot"]["spec"]


def test_autoscalers_of_machines_leave_nodes_alone() -> None:
    """The connector says which go; but spot machines that their cloud takes have to be drained."""
    for name, template in groups_of({"pools": [A100, {**L4, "podAnnotations": {"team": "a"}}]}).items():
        annotations = template["metadata"]["annotations"]
        assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
        assert ("karpenter.sh/do-not-disrupt" in annotations) is (name == "l4")
        assert annotations.get("team") == ("a" if name == "l4" else None)


def peers(name: str) -> list[dict[str, Any]]:
    (policy,) = (
        each for each in rendered(4, "pools") if (each["kind"], each["metadata"]["name"]) == ("NetworkPolicy", name)
    )
    return [each["podSelector"] for each in policy["spec"]["ingress"][0]["from"] if "podSelector" in each]


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", ())
    )


@pytest.mark.parametrize(
    ("policy", "node_type", "may"),
    [
        ("shoal", "head", True),
        ("shoal", "worker", False),
        ("shoal-redis", "head", True),
        ("shoal-redis", "redis-cleanup", True),
        ("shoal-redis", "worker", False),
        ("shoal-ray", "worker", True),
    ],
)
def test_code_of_jobs_reaches_neither_control_plane_nor_redis(policy: str, node_type: str, may: bool) -> None:
    """As KubeRay labels pods, and the job that empties Redis."""
    labels = {"ray.io/cluster": "shoal-ray", "ray.io/node-type": node_type}
    assert any(selects(each, labels) for each in peers(policy)) is may


def test_the_labels_of_the_chart_do_not_say_what_kuberay_says() -> None:
    for where, template in pod_templates(rendered(4, "pools")):
        assert not any(name.startswith("ray.io/") for name in template["metadata"].get("labels", {})), where


@pytest.mark.parametrize(
    ("values", "is_said"),
    [
        ({}, False),
        ({"controlPlane": {"service": {"type": "LoadBalancer"}}}, True),
        ({"controlPlane": {"service": {"type": "NodePort"}}, "networkPolicy": {"enabled": False}}, False),
        ({"controlPlane": {"ingress": {"enabled": True, "host": "a.example.org", "className": "alb"}}}, True),
        (
            {
                "controlPlane": {"service": {"type": "LoadBalancer"}},
                "networkPolicy": {"extraFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]},
            },
            False,
        ),
    ],
)
def test_notes_say_when_nobody_outside_is_let_in(values: dict[str, Any], is_said: bool) -> None:
    done = run_helm(4, "install", values, "--dry-run=client")
    assert done.returncode == 0, done.stderr
    assert ("its NetworkPolicy lets none in yet" in done.stdout) is is_said


def test_who_is_named_is_let_in() -> None:
    block = {"ipBlock": {"cidr": "10.0.0.0/8"}}
    done = run_helm(4, "template", {"networkPolicy": {"extraFrom": [block]}})
    policies = [each for each in yaml.safe_load_all(done.stdout) if each and each["kind"] == "NetworkPolicy"]
    (mine,) = (each for each in policies if each["metadata"]["name"] == "shoal")
    assert block in mine["spec"]["ingress"][0]["from"]
    assert of_kind("pools", "NetworkPolicy", "shoal")
