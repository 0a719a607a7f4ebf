"""The chart and what it runs: variables, commands and labels are those that the programs know."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from helm_ground import A100, CHART, COMBINATIONS, L4, ROOT, of_kind, pod_templates, rendered, run_helm
from typer.main import get_command

from shoal.cli import app
from shoal.settings import ClientSettings
from shoal_planner.catalogue import device_type
from shoal_planner.cluster import parse_cluster
from shoal_planner.errors import InvalidField
from shoal_planner.market import parse_market
from shoal_service.settings import Settings
from shoal_workers.cluster_ray import node_of
from shoal_workers.settings import WorkerSettings

GUIDE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
PROVISIONER = {"SHOAL_PROVISIONER", "SHOAL_PROVISIONER_RAYCLUSTER", "SHOAL_PROVISIONER_POOLS"}
RAY_LABEL = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9._-]{0,61}[a-zA-Z0-9])?")


def containers(combination: str) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{where}: {container['name']}", container)
        for where, template in pod_templates(rendered(4, combination))
        for container in template["spec"]["containers"]
    ]


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_variables_are_settings(combination: str) -> None:
    known = {f"SHOAL_{name.upper()}" for kind in (Settings, ClientSettings) for name in kind.model_fields}
    known |= {f"SHOAL_WORKER_{name.upper()}" for name in WorkerSettings.model_fields} | PROVISIONER
    for where, container in containers(combination):
        for variable in container.get("env", ()):
            if variable["name"].startswith("SHOAL_") and not variable["name"].startswith("SHOAL_STORAGE_"):
                assert variable["name"] in known, where


def test_settings_are_those_of_the_program_that_have_no_value_of_their_own() -> None:
    """Kubernetes takes a variable once; and one that nobody reads would pass for a limit that holds."""
    properties = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["properties"]
    own = {"data_dir", "tokens_dir", "database_url", "host", "port", "public_url", "tls_cert", "tls_key"}
    own |= {"behind_proxy", "trusted_proxies"} | {name for name in Settings.model_fields if name.startswith("oidc_")}
    allowed = properties["controlPlane"]["properties"]["settings"]["propertyNames"]["enum"]
    assert allowed == sorted(set(Settings.model_fields) - own)
    allowed = properties["workers"]["properties"]["settings"]["propertyNames"]["enum"]
    assert allowed == sorted(set(WorkerSettings.model_fields) - {"kubernetes_node", "kubernetes_pod"})


def test_values_of_settings_are_taken_by_the_control_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    (deployment,) = of_kind("production", "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable.get("value", "postgresql://from-a-secret"))
    settings = Settings()
    assert (settings.no_progress_s, settings.metrics_jobs, settings.plan_time_limit_s) == (300.0, 1000000, 2.5)
    assert settings.behind_proxy and settings.public_url == "https://shoal.example.org"
    assert settings.trusted_proxies == "10.0.0.0/8" and settings.admin_addresses == {"ops@example.org"}
    assert str(settings.tokens_path) == "/etc/shoal/tokens"
    settings.places.check({"checkpoint": {"uri": "s3://runs/a"}, "data": {"uri": "s3://text/books/b"}})
    with pytest.raises(InvalidField, match=r"must lie in s3://runs, s3://text/books"):
        settings.places.check({"checkpoint": {"uri": "s3://text/a"}})


def test_values_of_settings_are_taken_by_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    (cluster,) = of_kind("production", "RayCluster")
    (container,) = cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable.get("value", "of-this-pod"))
    settings = WorkerSettings()
    assert (settings.disk_limit_bytes, settings.silence_s) == (2 * 2**40, 3.5)
    assert settings.kubernetes_pod == settings.kubernetes_node == "of-this-pod"
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {str(settings.memory_dir.parent), str(settings.disk_dir)} <= mounted


@pytest.mark.parametrize(
    ("size", "size_bytes"), [("3Ti", 3 * 2**40), ("1.5G", 1.5e9), (20_000_000_000, 2e10), ("100Gi", 100 * 2**30)]
)
def test_snapshots_and_data_leave_room_on_the_scratch_volume(
    size: str | int, size_bytes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who writes more than a volume may hold is evicted, with all that it has."""

    def limits(**workers: Any) -> tuple[int, int]:
        values = {"pools": [{**L4, "scratch": {"size": size}}], "workers": workers}
        (cluster,) = (
            each
            for each in yaml.safe_load_all(run_helm(4, "template", values).stdout)
            if each and each["kind"] == "RayCluster"
        )
        (container,) = cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"]
        told = [each for each in container["env"] if each["name"].endswith("_BYTES")]
        assert len(told) == 2 == len({each["name"] for each in told})
        for each in told:
            monkeypatch.setenv(each["name"], each["value"])
        settings = WorkerSettings()
        return settings.disk_limit_bytes, settings.data_cache_bytes

    assert limits() == pytest.approx((0.64 * size_bytes, 0.16 * size_bytes), abs=1)
    assert limits(settings={"disk_limit_bytes": 7, "data_cache_bytes": 8}) == (7, 8)
    default = WorkerSettings.model_fields
    if size == "100Gi":
        assert limits() == (default["disk_limit_bytes"].default, default["data_cache_bytes"].default)


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_commands_and_their_options_exist(combination: str) -> None:
    known = get_command(app).commands  # type: ignore[attr-defined]
    started = [
        container["args"] for _, container in containers(combination) if container.get("args", [""])[0] == "shoal"
    ]
    assert started
    for _, command, *options in started:
        names = {name for parameter in known[command].params for name in parameter.opts}
        assert {option.partition("=")[0] for option in options} <= names
    for _, template in pod_templates(rendered(4, combination)):
        spec = template["spec"]
        stopped = spec["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        for seconds in re.findall(r"shoal pre-stop ([0-9.]+)", " ".join(stopped)):
            assert "pre-stop" in known
            assert 0 < float(seconds) <= spec["terminationGracePeriodSeconds"] - 10, "Ray has to end, too"


def test_commands_of_the_guide_exist() -> None:
    named = re.findall(r"(?:^|`|\()shoal ([a-z][a-z-]*)", GUIDE, flags=re.MULTILINE)
    assert len(named) >= 8 and set(named) <= set(get_command(app).commands)  # type: ignore[attr-defined]


def test_every_node_waits_for_jobs_before_it_is_stopped() -> None:
    for cluster in (of_kind(combination, "RayCluster") for combination in ("pools", "production")):
        for group in cluster[0]["spec"]["workerGroupSpecs"]:
            spec = group["template"]["spec"]
            assert "shoal pre-stop 105; ray stop" in spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
            assert spec["terminationGracePeriodSeconds"] == 120


@pytest.mark.parametrize("pool", [A100, L4], ids=lambda pool: str(pool["name"]))
def test_a_nodes_labels_are_the_node_of_a_cluster_file(pool: dict[str, Any]) -> None:
    """Whoever plans for the pool's shape plans for what it will be."""
    (cluster,) = of_kind("pools", "RayCluster")
    (group,) = (each for each in cluster["spec"]["workerGroupSpecs"] if each["groupName"] == pool["name"])
    labels = group["labels"]
    assert labels["shoal.io/pool"] == pool["name"]
    assert all(RAY_LABEL.fullmatch(value) for value in labels.values())
    entry = {"NodeID": "f" * 56, "NodeManagerHostname": "pod-0", "Resources": {"memory": 256.0 * 2**30}}
    said = {**pool["node"], "name": "pod", "spot": pool.get("spot", False)}
    (meant,) = parse_cluster({"nodes": [{**said, "host_memory_gib": pool["node"].get("host_memory_gib", 256)}]}).nodes
    assert node_of(entry, labels) == meant
    device_type(meant.device, ())


@pytest.mark.parametrize(
    ("combination", "image", "of_gpus"),
    [
        ("no provisioning", "shoal-worker:0.1.0", "shoal-worker:0.1.0-cuda"),
        ("spot everywhere", "shoal-worker:0.1.0", "shoal-worker:0.1.0-cuda"),
        ("digests", f"shoal-worker@sha256:{'1' * 64}", f"shoal-worker@sha256:{'1' * 64}"),
    ],
)
def test_pools_of_gpus_get_an_image_with_cuda_unless_one_is_named(combination: str, image: str, of_gpus: str) -> None:
    (cluster,) = of_kind(combination, "RayCluster")
    for container in cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]:
        assert container["image"] == image
    for group in cluster["spec"]["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        is_cpu = group["labels"]["shoal.io/device"].startswith("cpu-")
        assert container["image"] == (image if is_cpu else of_gpus), group["groupName"]


@pytest.mark.parametrize(
    ("platform", "key", "value"),
    [
        ("eks", "eks.amazonaws.com/capacityType", "SPOT"),
        ("karpenter", "karpenter.sh/capacity-type", "spot"),
        ("gke", "cloud.google.com/gke-spot", "true"),
        ("aks", "kubernetes.azure.com/scalesetpriority", "spot"),
    ],
)
def test_spot_pools_go_to_spot_machines_and_nothing_else_does(platform: str, key: str, value: str) -> None:
    for where, template in pod_templates(rendered(4, platform)):
        spec = template["spec"]
        if where.endswith("a100-spot"):
            assert spec["nodeSelector"] == {key: value, "topology.kubernetes.io/zone": "us-east-1a"}
            assert set(spec["affinity"]) == {"podAntiAffinity"}
            assert any(toleration["key"] == "cloud.google.com/gke-spot" for toleration in spec["tolerations"])
        else:
            (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
                "nodeSelectorTerms"
            ]
            assert {"key": key, "operator": "NotIn", "values": [value]} in term["matchExpressions"], where


def test_the_connector_knows_the_pools_as_they_are() -> None:
    (config,) = of_kind("pools", "ConfigMap", "-pools")
    (cluster,) = of_kind("pools", "RayCluster")
    pools = yaml.safe_load(config["data"]["pools.yaml"])
    groups = cluster["spec"]["workerGroupSpecs"]
    assert [pool["name"] for pool in pools] == [group["groupName"] for group in groups]
    for pool, group in zip(pools, groups, strict=True):
        assert (pool["min"], pool["max"]) == (group["minReplicas"], group["maxReplicas"])
        assert str(pool["node"]["spot"]).lower() == group["labels"]["shoal.io/spot"]
        parse_market({"offers": [{"name": pool["name"], "available": pool["max"], **pool["node"]}]})
        assert pool.get("zones") == (["us-east-1a"] if pool["name"] == "a100-spot" else None)
        assert pool.get("instance_type") == ("g6.xlarge" if pool["name"] == "l4" else None)
    for container in cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]:
        told = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert told["SHOAL_PROVISIONER"] == "kuberay"
        assert told["SHOAL_PROVISIONER_RAYCLUSTER"] == cluster["metadata"]["name"]
        assert told["SHOAL_PROVISIONER_POOLS"] == "/etc/shoal/pools/pools.yaml"
        assert any(mount["mountPath"] == "/etc/shoal/pools" for mount in container["volumeMounts"])
    assert cluster["spec"]["enableInTreeAutoscaling"] is False


def test_a_pool_that_is_nowhere_in_particular_has_no_zone_to_ask_prices_of() -> None:
    done = run_helm(4, "template", {"pools": [{**L4, "node": {**L4["node"], "zone": "default"}}]})
    (config,) = (each for each in yaml.safe_load_all(done.stdout) if each and each["kind"] == "ConfigMap")
    (pool,) = yaml.safe_load(config["data"]["pools.yaml"])
    assert "zones" not in pool and pool["node"]["zone"] == "default"


def test_without_provisioning_pools_have_as_many_nodes_as_is_said() -> None:
    (cluster,) = of_kind("no provisioning", "RayCluster")
    assert {group["groupName"]: group["replicas"] for group in cluster["spec"]["workerGroupSpecs"]} == {
        "a100-spot": 0,
        "l4": 2,
        "cpu": 0,
    }
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    assert not any(variable["name"] in PROVISIONER for variable in head["containers"][0]["env"])
    assert not of_kind("no provisioning", "ConfigMap")


@pytest.mark.parametrize("combination", ["pools", "production", "cluster alone"])
def test_nobody_asks_ray_for_anything_without_the_token(combination: str) -> None:
    (cluster,) = of_kind(combination, "RayCluster")
    assert cluster["spec"]["authOptions"]["mode"] == "token"
    secret = cluster["spec"]["authOptions"]["secretName"]
    for where, container in containers(combination):
        if not where.startswith("RayCluster"):
            continue
        told = {variable["name"]: variable for variable in container["env"]}
        assert told["RAY_AUTH_MODE"]["value"] == "token", where
        assert told["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": secret, "key": "auth_token"}, where


@pytest.mark.parametrize("combination", ["pools", "production"])
def test_ray_tells_its_makers_nothing(combination: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._common.usage import usage_lib

    (cluster,) = of_kind(combination, "RayCluster")
    groups = (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"])
    for container in (group["template"]["spec"]["containers"][0] for group in groups):
        with monkeypatch.context() as patched:
            patched.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
            for variable in container["env"]:
                patched.setenv(variable["name"], variable.get("value", "of-a-secret"))
            assert not usage_lib.usage_stats_enabled(), container["name"]


def test_the_head_computes_nothing_and_shares_its_ray_with_the_connector() -> None:
    (cluster,) = of_kind("pools", "RayCluster")
    group = cluster["spec"]["headGroupSpec"]
    assert group["rayStartParams"]["num-cpus"] == "0" and "labels" not in group
    ray, connector = group["template"]["spec"]["containers"]
    shared = {"/tmp/ray", "/dev/shm"}
    assert all(shared <= {mount["mountPath"] for mount in each["volumeMounts"]} for each in (ray, connector))
    assert group["template"]["spec"]["shareProcessNamespace"] is True, "Ray is found by its processes"
    assert connector["args"][-2:] == ["--server=http://shoal.training.svc:8700", "--cluster-id=ray"]


def test_the_control_plane_is_found_by_its_own_certificate() -> None:
    (cluster,) = of_kind("tls", "RayCluster")
    ray, connector = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert "--server=https://shoal.training.svc:443" in connector["args"]
    for container in (ray, connector):
        assert {"name": "SSL_CERT_FILE", "value": "/etc/shoal/server-ca/ca.crt"} in container["env"]
    (monitor,) = of_kind("tls", "ServiceMonitor")
    assert monitor["spec"]["endpoints"][0]["scheme"] == "https"
    (deployment,) = of_kind("tls", "Deployment")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert container["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert "SHOAL_BEHIND_PROXY" not in {variable["name"] for variable in container["env"]}


def test_prometheus_scrapes_with_a_token_of_its_own_as_the_rules_expect() -> None:
    (monitor,) = of_kind("production", "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")
    assert endpoint["authorization"] == {
        "type": "Bearer",
        "credentials": {"name": "shoal-tokens", "key": "metrics-token"},
    }
    assert {"targetLabel": "job", "replacement": "shoal"} in endpoint["relabelings"]
    (service,) = of_kind("production", "Service", "shoal")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()


def test_migrations_come_before_the_servers_that_need_them() -> None:
    for combination, when in {
        "default": "post-install,pre-upgrade",
        "production": "pre-install,pre-upgrade",
        "database url": "pre-install,pre-upgrade",
    }.items():
        (job,) = of_kind(combination, "Job")
        assert job["metadata"]["annotations"]["helm.sh/hook"] == when
        (container,) = job["spec"]["template"]["spec"]["containers"]
        (plane,) = of_kind(combination, "Deployment")
        assert container["image"] == plane["spec"]["template"]["spec"]["containers"][0]["image"]
    (secret,) = of_kind("database url", "Secret", "-database")
    assert secret["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade,pre-rollback"
    assert int(secret["metadata"]["annotations"]["helm.sh/hook-weight"]) < 0, "it is there before the job"


def test_passwords_stand_in_secrets_alone() -> None:
    for document in rendered(4, "database url"):
        assert document["kind"] == "Secret" or "postgresql://shoal:secret" not in yaml.safe_dump(document)


def test_servers_are_replaced_when_their_database_is_another_one() -> None:
    (deployment,) = of_kind("database url", "Deployment")
    assert re.fullmatch("[0-9a-f]{64}", deployment["spec"]["template"]["metadata"]["annotations"]["checksum/database"])


def test_the_test_pod_trusts_whom_the_connector_trusts() -> None:
    (pod,) = of_kind("tls", "Pod")
    (container,) = pod["spec"]["containers"]
    told = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert told["SHOAL_SERVER"].startswith("https://")
    (mount,) = container["volumeMounts"]
    assert told["SSL_CERT_FILE"] == f"{mount['mountPath']}/ca.crt"
    assert pod["spec"]["volumes"] == [{"name": mount["name"], "configMap": {"name": "shoal-ca"}}]
