"""What the operator KubeRay makes of the groups of a RayCluster: the commands of their pods, and variables that the
chart does not give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from helm_ground import NAMESPACE

DOMAIN = f"{NAMESPACE}.svc.cluster.local"
_PORT = 6379
_UID = "5d1c2f7a-4b7e-4a53-9c1e-8f0e6b1d2c3a"  # of the RayCluster, as Kubernetes gives one to each object
_RECONNECT_S = 600

Cluster = Mapping[str, Any]


def whole_name(service: str) -> str:
    return f"{service}.{DOMAIN}"


def head_service(cluster: Cluster) -> str:
    """By which name workers reach the head: headless, so the address behind it is that of the head's pod."""
    return whole_name(f"{cluster['metadata']['name']}-head-svc")


def head_command(cluster: Cluster, group: Mapping[str, Any], more: Mapping[str, str]) -> list[str]:
    options = {**more, **group["rayStartParams"]}
    if "redisPassword" in _fault_tolerance(cluster):
        options["redis-password"] = "$REDIS_PASSWORD"
    return _ray_start(options, group, "--head")


def worker_command(cluster: Cluster, group: Mapping[str, Any]) -> list[str]:
    return _ray_start({"address": f"{head_service(cluster)}:{_PORT}", **group["rayStartParams"]}, group)


def variables(cluster: Cluster, *, of_head: bool) -> Iterable[Mapping[str, Any]]:
    """Of the container of Ray, those of the chart going before them."""
    host = "127.0.0.1" if of_head else head_service(cluster)
    told = {
        "RAY_CLUSTER_NAME": cluster["metadata"]["name"],
        "RAY_PORT": str(_PORT),
        "RAY_ADDRESS": f"{host}:{_PORT}",
        "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
    }
    if not of_head:
        told |= {"FQ_RAY_IP": host, "RAY_IP": host.partition(".")[0]}
    options = _fault_tolerance(cluster)
    if options and not of_head:
        told["RAY_gcs_rpc_server_reconnect_timeout_s"] = str(_RECONNECT_S)
    if options and of_head:
        told |= {"RAY_external_storage_namespace": _UID, "RAY_REDIS_ADDRESS": options["redisAddress"]}
    yield from ({"name": name, "value": value} for name, value in told.items())
    if "redisPassword" in options and of_head:
        yield {"name": "REDIS_PASSWORD", **options["redisPassword"]}


def _fault_tolerance(cluster: Cluster) -> Mapping[str, Any]:
    found: Mapping[str, Any] = cluster["spec"].get("gcsFaultToleranceOptions", {})
    return found


def _ray_start(options: Mapping[str, str], group: Mapping[str, Any], *first: str) -> list[str]:
    """What resources say goes into options that the group does not give, and the labels of the group are those of
    Ray's node. The shell reads the options as they are, and so puts in what variables they name."""
    resources = group["template"]["spec"]["containers"][0]["resources"]
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    known: dict[str, str] = {"metrics-export-port": "8080", "dashboard-agent-listen-port": "52365", "block": "true"}
    if cpus := limits.get("cpu", requests.get("cpu")):
        known["num-cpus"] = str(int(cpus))
    if memory := limits.get("memory"):
        known["memory"] = str(_bytes(memory))
    if labels := group.get("labels"):
        known["labels"] = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
    switches = {"true": lambda name: [f"--{name}"], "false": lambda name: []}
    words = ["ray", "start", *first]
    for name, value in sorted({**known, **options}.items()):
        plain = value not in switches or name == "include-dashboard"
        words += [f"--{name}={value}"] if plain else switches[value](name)
    return ["bash", "-c", f"ulimit -n 65536; {' '.join(words)}"]


def _bytes(quantity: str) -> int:
    units = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
    return int(quantity[:-2]) * units[quantity[-2:]]
