"""Test ground of the chart: Helm 3 and 4, values to render it with, and the schemas that what comes out must obey.

`python tests/helm_ground.py` renders the golden files anew, to be looked at.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parent.parent
CHART = ROOT / "helm" / "shoal"
GOLDEN = Path(__file__).parent / "helm" / "golden"
MAJORS = (3, 4)
KUBERNETES = ("1.29", "1.30", "1.31", "1.32", "1.33")
NAMESPACE = "training"

Document = dict[str, Any]

A100 = {
    "name": "a100-spot",
    "spot": True,
    "min": 0,
    "max": 8,
    "node": {
        "device": "A100-80G",
        "devices": 8,
        "zone": "us-east-1a",
        "price_per_hour": 14.7,
        "preemptions_per_hour": 0.05,
        "host_memory_gib": 1024,
        "disk_gib": 3000,
        "intra_gb_per_s": 300,
        "inter_gbit_per_s": 100,
        "nics": 4,
        "device_group": 2,
        "group_gb_per_s": 600,
    },
    "image": {"tag": "0.1.0-cuda"},
    "resources": {"requests": {"cpu": "90", "memory": "1000Gi"}, "limits": {"memory": "1000Gi"}},
    "sharedMemory": "600Gi",
    "scratch": {"size": "3Ti", "storageClass": "local-nvme"},
}
L4 = {
    "name": "l4",
    "instanceType": "g6.xlarge",
    "min": 1,
    "max": 4,
    "replicas": 2,
    "node": {"device": "L4", "price_per_hour": 0.8},
}
CPU = {"name": "cpu", "min": 0, "max": 3, "node": {"device": "cpu-2t", "price_per_hour": 0.1, "host_memory_gib": 2}}

# One for each way in which people run it, and each switch both ways.
COMBINATIONS: Mapping[str, dict[str, Any]] = {
    "default": {},
    "pools": {"pools": [A100, L4, CPU]},
    "eks": {
        "platform": "eks",
        "pools": [A100, {**A100, "name": "a100", "spot": False, "node": {"device": "A100-80G", "price_per_hour": 33}}],
    },
    "karpenter": {"platform": "karpenter", "pools": [A100]},
    "gke": {"platform": "gke", "pools": [A100, L4], "networkPolicy": {"ingressNamespaces": ["gke-managed"]}},
    "aks": {"platform": "aks", "pools": [A100], "images": {"registry": "team.azurecr.io/shoal"}},
    "production": {
        "controlPlane": {
            "replicas": 3,
            "settings": {"no_progress_s": 300, "metrics_jobs": 1000000, "plan_time_limit_s": 2.5},
            "trustedProxies": ["10.0.0.0/8"],
            "ingress": {
                "enabled": True,
                "className": "nginx",
                "host": "shoal.example.org",
                "tlsSecret": "shoal-tls",
                "annotations": {"nginx.ingress.kubernetes.io/proxy-buffering": "off"},
            },
            "oidc": {
                "issuer": "https://accounts.example.org",
                "clientId": "shoal",
                "existingSecret": "oidc",
                "admins": ["ops@example.org"],
                "audience": "shoal-api",
            },
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "podDisruptionBudget": {"maxUnavailable": "34%"},
            "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/shoal"}},
            "podLabels": {"team": "training"},
            "podAnnotations": {"example.org/note": "control plane"},
            "priorityClassName": "first-services",
            "nodeSelector": {"pool": "services"},
            "tolerations": [{"key": "services", "operator": "Exists"}],
            "extraEnv": [{"name": "MLFLOW_TRACKING_URI", "value": "https://mlflow.example.org"}],
            "extraEnvFrom": [{"secretRef": {"name": "mlflow"}}],
            "extraVolumes": [{"name": "more", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
        },
        "auth": {"existingSecret": "shoal-tokens"},
        "database": {"external": {"existingSecret": "shoal-db-app"}},
        "objectStore": {
            "endpoint": "https://minio.example.org:9000",
            "region": "eu-1",
            "existingSecret": "minio-keys",
            "buckets": ["s3://runs", "s3://text/books"],
            "caConfigMap": "minio-ca",
            "profiles": [{"name": "ARCHIVE", "existingSecret": "archive-keys"}],
        },
        "rayCluster": {
            "auth": {"existingSecret": "ray-token"},
            "gcsFaultTolerance": {"redisAddress": "redis.example.org:6379", "existingSecret": "redis-password"},
            "head": {"extraEnv": [{"name": "A", "value": "b"}], "podLabels": {"team": "training"}},
        },
        "workers": {"settings": {"disk_limit_bytes": 2199023255552, "silence_s": 3.5}, "runtimeClassName": "nvidia"},
        "pools": [A100, L4],
        "images": {"registry": "registry.example.org/team/", "pullSecrets": ["registry"]},
    },
    "tls": {
        "controlPlane": {
            "tls": {"existingSecret": "shoal-cert", "hasCa": True},
            "serviceMonitor": {"enabled": True},
            "service": {"type": "LoadBalancer", "port": 443, "annotations": {"example.org/internal": "true"}},
            "publicUrl": "https://shoal.internal",
        },
        "connector": {"serverCaConfigMap": "shoal-ca"},
        "pools": [L4],
    },
    "database url": {
        "database": {"external": {"url": "postgresql://shoal:secret@db.example.org/shoal?sslmode=require"}}
    },
    "plane alone": {"rayCluster": {"enabled": False}, "controlPlane": {"migrations": {"enabled": False}}},
    "cluster alone": {
        "controlPlane": {"enabled": False},
        "auth": {"existingSecret": "shoal-connector"},
        "connector": {"server": "https://shoal.example.org", "clusterId": "east.1"},
        "pools": [CPU],
    },
    "no provisioning": {"provisioning": {"enabled": False}, "pools": [A100, L4, CPU]},
    "no roles": {"rbac": {"create": False}, "networkPolicy": {"enabled": False}, "pools": [L4]},
    "own pods alone": {"rbac": {"nodes": False}, "pools": [L4]},
    "head in memory": {"rayCluster": {"gcsFaultTolerance": {"enabled": False}}, "pools": [CPU]},
    "spot everywhere": {
        "controlPlane": {"onDemandOnly": False, "podDisruptionBudget": {"enabled": False}},
        "rayCluster": {"head": {"onDemandOnly": False}, "gcsFaultTolerance": {"embedded": {"onDemandOnly": False}}},
        "database": {"embedded": {"onDemandOnly": False, "storage": {"storageClass": "fast", "size": "100Gi"}}},
        "pools": [{**L4, "gpuResource": "", "nodeSelector": {"gpu": "l4"}, "affinity": {"nodeAffinity": {}}}],
    },
    "names": {"fullnameOverride": "a-name-as-long-as-any-of-them-may-be-40", "pools": [A100]},
    "digests": {
        "images": {"controlPlane": {"tag": f"sha256:{'0' * 64}"}, "worker": {"tag": f"sha256:{'1' * 64}"}},
        "pools": [L4],
    },
}
GOLDEN_OF = ("pools", "production", "cluster alone")


def helm(major: int) -> Path:
    """The program of this major version; the test is skipped where it could not be had."""
    path = Path(os.environ.get(f"HELM_{major}", Path(sys.prefix) / "helm" / str(major) / "helm"))
    if not path.exists():
        pytest.skip(f"no Helm {major} at {path}: tests/helm/install.sh fetches it")
    return path


def run_helm(major: int, command: str, values: Mapping[str, Any], *options: str) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(dict(values), file)
        file.flush()
        named = () if command == "lint" else ("shoal",)
        arguments = [helm(major), command, *named, CHART, "--values", file.name, "--namespace", NAMESPACE, *options]
        return subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=60)


@functools.cache
def rendered_text(major: int, combination: str) -> str:
    done = run_helm(major, "template", COMBINATIONS[combination])
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def rendered(major: int, combination: str) -> tuple[Document, ...]:
    """In an order of their own, so that two are compared easily."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found = [document for document in yaml.load_all(rendered_text(major, combination), loader) if document]
    return tuple(sorted(found, key=lambda document: (document["kind"], document["metadata"]["name"])))


def of_kind(combination: str, kind: str, name: str = "", major: int = 4) -> list[Document]:
    """Those whose names end so."""
    return [
        document
        for document in rendered(major, combination)
        if document["kind"] == kind and document["metadata"]["name"].endswith(name)
    ]


def pod_templates(documents: tuple[Document, ...]) -> Iterator[tuple[str, Document]]:
    """Every pod that comes of it, with who makes it; of a RayCluster by groups."""
    for document in documents:
        where = f"{document['kind']} {document['metadata']['name']}"
        spec = document.get("spec", {})
        if document["kind"] == "Pod":
            yield where, {"metadata": document["metadata"], "spec": spec}
        elif document["kind"] == "RayCluster":
            yield f"{where} head", spec["headGroupSpec"]["template"]
            for group in spec.get("workerGroupSpecs", ()):
                yield f"{where} {group['groupName']}", group["template"]
        elif "template" in spec:
            yield where, spec["template"]


def without_secrets(documents: tuple[Document, ...]) -> list[Document]:
    """What is made at random differs each time."""
    return [
        {**document, "data": dict.fromkeys(document["data"], "...")} if document["kind"] == "Secret" else document
        for document in documents
    ]


def golden_path(combination: str) -> Path:
    return GOLDEN / f"{combination.replace(' ', '-')}.yaml"


def golden_text(combination: str) -> str:
    return yaml.safe_dump_all(without_secrets(rendered(3, combination)), sort_keys=True, width=120)


# What schemas say -----------------------------------------------------------------------------------------------------


@functools.cache
def kubernetes_validator(version: str, kind: str, api_version: str) -> jsonschema.Draft202012Validator | None:
    """Of Kubernetes' own kinds, strict about fields that nobody knows; None for kinds of others."""
    from kubernetes_validate.utils import schema_contents
    from referencing import Registry, Resource

    folder = _schema_folder(version)
    named = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    try:
        schema = schema_contents(f"{folder}/{kind.lower()}-{named}.json", version)
    except FileNotFoundError:
        return None
    registry: Any = Resource.from_contents(schema) @ Registry()
    registry = _definitions(version) @ registry
    return jsonschema.Draft202012Validator(schema, registry=registry)


@functools.cache
def _definitions(version: str) -> Any:
    from kubernetes_validate.utils import schema_contents
    from referencing import Resource

    return Resource.from_contents(schema_contents(f"{_schema_folder(version)}/_definitions.json", version))


@functools.cache
def _schema_folder(version: str) -> str:
    from kubernetes_validate.utils import all_versions

    (full,) = {each for each in all_versions() if each.startswith(f"{version}.")}
    return f"kubernetes-json-schema/v{full}-local-strict"


@functools.cache
def ray_cluster_validator() -> jsonschema.Draft202012Validator:
    """Of KubeRay's RayCluster; the test is skipped where its definition is not there."""
    folder = Path(os.environ.get("KUBERAY_CRDS", ROOT.parent / "shared" / "kuberay-crds"))
    path = folder / "ray.io_rayclusters.yaml"
    if not path.exists():
        pytest.skip(f"no definition of RayCluster at {path}: KUBERAY_CRDS says where it is")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    definition = yaml.load(path.read_text(encoding="utf-8"), loader)
    (version,) = (each for each in definition["spec"]["versions"] if each["name"] == "v1")
    return jsonschema.Draft202012Validator(_strict(version["schema"]["openAPIV3Schema"]))


def _strict(schema: Any) -> Any:
    """As the API server understands a schema of a custom resource: what it does not know is refused here (there it
    would be dropped), quantities may be numbers, and what has a default need not be given."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: value for key, value in schema.items() if not key.startswith("x-") and key != "properties"}
    made = {
        key: _strict(value) if key in ("items", "additionalProperties", "anyOf") else value
        for key, value in made.items()
    }
    if schema.get("x-kubernetes-int-or-string"):
        made = {"type": ["integer", "string"]}
    if "properties" in schema:
        made["properties"] = {name: _strict(each) for name, each in schema["properties"].items()}
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
        if schema.get("required"):
            given = [name for name in schema["required"] if "default" not in schema["properties"].get(name, {})]
            made["required"] = given
    return made


def errors_of(validator: Any, document: Document) -> list[str]:
    kind, name = document["kind"], document["metadata"]["name"]
    return [f"{kind} {name}: {error.json_path}: {error.message}" for error in validator.iter_errors(document)]


def key_of(document: Document) -> str:
    return json.dumps(document, sort_keys=True)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for each in GOLDEN_OF:
        golden_path(each).write_text(golden_text(each), encoding="utf-8")
