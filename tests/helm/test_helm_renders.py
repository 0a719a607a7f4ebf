"""What the chart renders, with Helm 3 and 4: it is the same, it is what Kubernetes and KubeRay take, and it is what was
looked at."""

from __future__ import annotations

import functools

import pytest
from helm_ground import (
    COMBINATIONS,
    GOLDEN_OF,
    KUBERNETES,
    MAJORS,
    errors_of,
    golden_path,
    golden_text,
    helm,
    key_of,
    kubernetes_validator,
    pod_templates,
    ray_cluster_validator,
    rendered,
    run_helm,
    without_secrets,
)

# Of operators whose definitions are not at hand; what is in them is tested by name.
FOREIGN = {"RayCluster", "ServiceMonitor"}


@pytest.fixture(autouse=True)
def _both_programs() -> None:
    for major in MAJORS:
        helm(major)


@functools.cache
def valid(version: str, key: str) -> tuple[str, ...]:
    """Most documents are the same in many combinations."""
    import json

    document = json.loads(key)
    validator = kubernetes_validator(version, document["kind"], document["apiVersion"])
    if validator is None:
        return () if document["kind"] in FOREIGN else (f"{document['kind']}: nobody knows this kind",)
    return tuple(errors_of(validator, document))


def test_there_are_enough_combinations() -> None:
    assert len(COMBINATIONS) >= 12


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_both_versions_of_helm_render_the_same(combination: str) -> None:
    three, four = (without_secrets(rendered(major, combination)) for major in MAJORS)
    assert three == four


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize("combination", ["default", "production", "cluster alone"])
def test_it_is_a_chart_as_charts_should_be(major: int, combination: str) -> None:
    done = run_helm(major, "lint", COMBINATIONS[combination], "--strict")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_it(version: str) -> None:
    found = {key_of(document) for combination in COMBINATIONS for document in rendered(4, combination)}
    assert not [error for key in sorted(found) for error in valid(version, key)]


def test_strict_means_strict() -> None:
    (deployment,) = (each for each in rendered(4, "default") if each["kind"] == "Deployment")
    wrong = {**deployment, "spec": {**deployment["spec"], "replica": 2}}
    assert valid("1.33", key_of(wrong))
    named = {**deployment, "spec": {**deployment["spec"], "replicas": "two"}}
    assert valid("1.29", key_of(named))


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_kuberay_takes_it(combination: str) -> None:
    clusters = [document for document in rendered(4, combination) if document["kind"] == "RayCluster"]
    assert len(clusters) == (combination != "plane alone")
    for cluster in clusters:
        assert not errors_of(ray_cluster_validator(), cluster)
        assert len(cluster["metadata"]["name"]) <= 32, "KubeRay makes names of services and pods of it"


def test_kuberays_definition_is_strict_too() -> None:
    (cluster,) = (each for each in rendered(4, "pools") if each["kind"] == "RayCluster")
    for change in ({"headGroup": {}}, {"rayVersion": 2.6}, {"authOptions": {"mode": "none"}}):
        assert errors_of(ray_cluster_validator(), {**cluster, "spec": {**cluster["spec"], **change}})


@pytest.mark.parametrize("combination", GOLDEN_OF)
def test_it_is_what_was_looked_at(combination: str) -> None:
    """After a change on purpose: `python tests/helm_ground.py`, and look at the difference."""
    assert golden_text(combination) == golden_path(combination).read_text(encoding="utf-8")


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_no_object_is_made_twice_and_all_are_of_this_release(combination: str) -> None:
    documents = rendered(4, combination)
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(set(names)) == len(names)
    for document in documents:
        labels = document["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "shoal"
        assert labels["app.kubernetes.io/component"]


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_pods_need_no_rights_on_their_machine(combination: str) -> None:
    """As the Pod Security Standard `restricted` asks for."""
    for where, template in pod_templates(rendered(4, combination)):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0, where
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, where
        assert not spec.get("hostNetwork") and not spec.get("hostPID"), where
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False, where
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, where
            assert container["resources"]["limits"]["memory"], where
            assert ":" in container["image"] or "@" in container["image"], where
        assert not any("hostPath" in volume for volume in spec.get("volumes", ())), where


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_no_service_sets_a_variable_of_ours(combination: str) -> None:
    """Of a Service called `shoal` Kubernetes would tell all pods SHOAL_PORT=tcp://..., which is a setting."""
    for where, template in pod_templates(rendered(4, combination)):
        assert template["spec"]["enableServiceLinks"] is False, where


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_what_is_mounted_and_asked_for_is_there(combination: str) -> None:
    """Volumes, and Secrets and ConfigMaps of this release."""
    documents = rendered(4, combination)
    made = {
        (document["kind"], document["metadata"]["name"]): set(document["data"])
        for document in documents
        if document["kind"] in ("Secret", "ConfigMap")
    }
    accounts = {document["metadata"]["name"] for document in documents if document["kind"] == "ServiceAccount"}
    for where, template in pod_templates(documents):
        spec = template["spec"]
        volumes = {volume["name"] for volume in spec.get("volumes", ())}
        claims = {"data"} if where.startswith("StatefulSet") else set()
        assert spec.get("serviceAccountName") in {*accounts, None}, where
        for container in spec["containers"]:
            mounts = container.get("volumeMounts", ())
            assert {mount["name"] for mount in mounts} <= volumes | claims, where
            assert len({mount["mountPath"] for mount in mounts}) == len(mounts), where
            names = [variable["name"] for variable in container.get("env", ())]
            assert len(set(names)) == len(names), where
            for variable in container.get("env", ()):
                reference = variable.get("valueFrom", {}).get("secretKeyRef")
                if reference and reference["name"].startswith("shoal") and ("Secret", reference["name"]) in made:
                    assert reference["key"] in made["Secret", reference["name"]], (where, reference)
