"""The files of Ray's cluster launcher: Ray takes them, each worker type is a pool of pools.yaml, and what it labels its
nodes with is what Shoal reads. The policies of AWS allow what is called, and nothing else."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.client
import botocore.session
import pytest
import yaml
from botocore import xform_name
from cluster_files import CLOUDS, CLUSTERS, HEAD, ROOT, cluster, launcher, pools, ray_source, workers
from moto import mock_aws

from shoal_planner.cluster import parse_cluster
from shoal_workers.cluster_ray import node_of
from shoal_workers.node_options import labels_for
from shoal_workers.settings import NodeSettings, WorkerSettings

# Asked for by EC2 on behalf of who rents: roles and images are given by name.
BESIDES = {"iam:PassRole", "ssm:GetParameters"}
S3_ACTIONS = {  # of S3's own, where they are not called as the operation
    "HeadObject": "GetObject",
    "ListObjectsV2": "ListBucket",
    "CreateMultipartUpload": "PutObject",
    "UploadPart": "PutObject",
    "CompleteMultipartUpload": "PutObject",
    "ListMultipartUploads": "ListBucketMultipartUploads",
    "ListParts": "ListMultipartUploadParts",
}


@pytest.mark.parametrize("cloud", CLOUDS)
def test_ray_takes_the_file(cloud: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    given = cluster(cloud)
    prepared = prepare_config(given)
    validate_config(prepared)
    assert given["provider"]["cache_stopped_nodes"] is False, "a stopped machine costs, and needs more permissions"
    for name in ("setup_commands", "head_setup_commands", "initialization_commands"):
        assert prepared[name] == [], "defaults of Ray's would install another Ray"
    assert prepared["head_start_ray_commands"] == given["head_start_ray_commands"]


@pytest.mark.parametrize("cloud", CLOUDS)
def test_nodes_run_the_start_scripts(cloud: str) -> None:
    given = cluster(cloud)
    (head,), (worker,) = given["head_start_ray_commands"], given["worker_start_ray_commands"]
    assert head.split()[1:3] == [*worker.split()[1:2], HEAD] and worker.split()[2] == "worker"
    assert "--autoscaling-config=/var/lib/shoal/ray_bootstrap_config.yaml" in head.split()
    assert (CLUSTERS / "node" / Path(head.split()[1]).name).exists()
    assert 'start-$role.sh" --block' in (CLUSTERS / "node/run-node.sh").read_text()
    (remote,) = given["file_mounts"]
    assert head.split()[1].startswith(f"{remote}/")
    in_container = remote.replace("~", "/var/lib/shoal")  # the home of the image's user
    assert f"SHOAL_PROVISIONER_POOLS={in_container}/pools.yaml" in (CLUSTERS / "node/node.env").read_text()


@pytest.mark.parametrize("cloud", CLOUDS)
def test_pools_are_the_worker_types(cloud: str) -> None:
    given, types = pools(cloud), workers(cloud)
    assert {pool["name"] for pool in given} == types.keys()
    assert {True, False} == {pool["node"]["spot"] for pool in given}, "pools are to be mixed"
    assert len({pool["node"]["device"] for pool in given}) >= 3
    assert cluster(cloud)["max_workers"] == sum(pool["max"] for pool in given)
    for pool in given:
        kind = types[pool["name"]]
        assert (pool["min"], pool["max"]) == (kind["min_workers"], kind["max_workers"])
        assert kind["resources"][f"shoal-pool-{pool['name']}"] == 1
        assert kind["resources"]["GPU"] == pool["node"]["devices"]
        (expected,) = parse_cluster({"nodes": [{"name": "n", **pool["node"]}]}).nodes
        seen = node_of({"NodeID": "0" * 56}, kind["labels"])
        for field in ("device", "devices", "spot", "price_per_hour", "intra_bytes_per_s", "inter_bytes_per_s"):
            assert getattr(seen, field) == pytest.approx(getattr(expected, field)), (pool["name"], field)
        spot_of = {"aws": "InstanceMarketOptions", "gcp": "provisioningModel", "azure": "priority"}[cloud]
        assert (spot_of in json.dumps(kind["node_config"])) is pool["node"]["spot"]


def test_a_machine_of_aws_has_the_network_of_the_interfaces_that_it_gets() -> None:
    """One, where none are listed: EC2's largest machines have several cards, and reach their rate over all of them."""
    per_card = {"g5.12xlarge": (1, 40), "g6.12xlarge": (1, 40), "p4d.24xlarge": (4, 100)}
    kinds = workers("aws")
    for pool in pools("aws"):
        num_cards, gbit_per_s = per_card[pool["instance_type"]]
        config = kinds[pool["name"]]["node_config"]
        assert config["InstanceType"] == pool["instance_type"]
        attached = len(config.get("NetworkInterfaces", [0]))
        assert pool["node"].get("nics", 1) == attached <= num_cards
        assert pool["node"]["inter_gbit_per_s"] <= gbit_per_s


def disk_gb(cloud: str, config: dict[str, Any]) -> int:
    """Of the one disk that a machine has: system, images, and what jobs keep there."""
    match cloud:
        case "aws":
            (disk,) = config["BlockDeviceMappings"]
            return int(disk["Ebs"]["VolumeSize"])
        case "gcp":
            (disk,) = config["disks"]
            return int(disk["initializeParams"]["diskSizeGb"])
        case _:
            return int(config["azure_arm_parameters"]["osDiskSize"])


@pytest.mark.parametrize("cloud", CLOUDS)
def test_disks_have_room_for_what_nodes_keep(cloud: str) -> None:
    settings = WorkerSettings()
    system_gib = 100  # of an image for accelerators, two of our images while one is replaced, journals and logs
    kept_gib = (settings.disk_limit_bytes + settings.data_cache_bytes) / 2**30
    for name, kind in workers(cloud).items():
        assert disk_gb(cloud, kind["node_config"]) >= kept_gib + system_gib, name
    assert disk_gb(cloud, cluster(cloud)["available_node_types"][HEAD]["node_config"]) >= system_gib


def test_prices_of_aws_are_those_of_the_zones_that_machines_come_from() -> None:
    zones = cluster("aws")["provider"]["availability_zone"].split(",")
    assert {pool["name"]: pool.get("zones") for pool in pools("aws")} == dict.fromkeys(workers("aws"), zones)


def test_what_gcp_is_told_of_zones_and_disks_is_of_the_clusters_zone() -> None:
    given = cluster("gcp")
    provider = given["provider"]
    zone = f"projects/{provider['project_id']}/zones/{provider['availability_zone']}"
    for kind in given["available_node_types"].values():
        (disk,) = kind["node_config"]["disks"]
        assert disk["initializeParams"]["diskType"] == f"{zone}/diskTypes/pd-balanced"
        for accelerator in kind["node_config"].get("guestAccelerators", []):
            assert accelerator["acceleratorType"].startswith(f"{zone}/acceleratorTypes/")


# Modules of Ray's providers whose name is not that of their package.
PACKAGES = {
    "google.auth": "google-auth",
    "google.oauth2": "google-auth",
    "google_auth_httplib2": "google-auth-httplib2",
    "googleapiclient": "google-api-python-client",
}


@pytest.mark.parametrize(("cloud", "folder"), [("aws", "aws"), ("gcp", "gcp"), ("azure", "_azure")])
def test_the_launcher_finds_the_libraries_of_its_cloud(cloud: str, folder: str) -> None:
    """In what the handbook has installed beside shoal[worker], and the head's image too."""
    pins = {
        name
        for file in ("worker", f"cloud-{cloud}")
        for name in re.findall(
            r"^([\w.-]+)==", (ROOT / f"deploy/requirements/{file}.txt").read_text(encoding="utf-8"), flags=re.MULTILINE
        )
    }
    asked = {name for path in sorted((launcher() / folder).rglob("*.py")) for name in imported(path.read_text())}
    assert asked, "of this cloud"
    for module in asked:
        parts = module.split(".")
        known = (".".join(parts[: number + 1]) for number in range(len(parts)))
        assert any(PACKAGES.get(name, name.replace(".", "-")) in pins for name in known), module
    assert f"cloud-{cloud}.txt" in (ROOT / "docs/clouds.md").read_text(encoding="utf-8") or cloud == "aws"


def imported(text: str) -> set[str]:
    """Modules that are neither Python's nor Ray's."""
    nodes = list(ast.walk(ast.parse(text)))
    found = {each.name for node in nodes if isinstance(node, ast.Import) for each in node.names}
    found |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name for name in found if name.partition(".")[0] not in {"ray", *sys.stdlib_module_names}}


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_node_takes_the_labels_that_the_launcher_gives_it(cloud: str) -> None:
    """Ray's launcher puts them into the environment of the start command."""
    for name, kind in workers(cloud).items():
        settings = NodeSettings.model_validate({"RAY_OVERRIDE_LABELS": json.dumps(kind["labels"])})
        labels = labels_for(settings, "ip-10-0-0-7.ec2.internal", kind["resources"]["GPU"], lambda: None)
        assert (labels["pool"], labels["node"]) == (name, "ip-10-0-0-7")


def allowed(*files: str) -> set[str]:
    found: set[str] = set()
    for file in files:
        for statement in json.loads((ROOT / "deploy/iam" / file).read_text())["Statement"]:
            assert statement["Effect"] == "Allow"
            actions = statement["Action"]
            found |= {actions} if isinstance(actions, str) else set(actions)
    assert not [action for action in found if "*" in action]
    return found


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, str]]]:
    """What anybody in this process asks of AWS, as (SERVICE, OPERATION)."""
    calls: set[tuple[str, str]] = set()
    call = botocore.client.BaseClient._make_api_call

    def noted(client: Any, operation: str, arguments: Any) -> Any:
        calls.add((client.meta.service_model.service_name, operation))
        return call(client, operation, arguments)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", noted)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "some-key")
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    with mock_aws():
        yield calls


@pytest.mark.long
def test_the_policies_allow_what_ray_calls_and_nothing_else(called: set[tuple[str, str]]) -> None:
    """`ray up` looks around and rents the head; the head's autoscaler rents, labels and ends workers."""
    from ray.autoscaler._private.aws.config import bootstrap_aws
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
    from ray.autoscaler._private.util import prepare_config

    config = prepare_config(on_moto(cluster("aws")))
    called.clear()
    config = bootstrap_aws(AWSNodeProvider.fillout_available_node_types_resources(config))
    looked = as_actions(called)
    called.clear()
    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    tags = {
        "ray-node-kind": "worker",
        "ray-node-status": "uninitialized",
        "ray-launch-config": "x",
        "ray-node-name": "n",
    }
    provider.create_node(config["available_node_types"]["a10g-spot"]["node_config"], tags, 2)
    provider.create_node(config["available_node_types"]["l4-spot"]["node_config"], tags, 1)
    nodes = provider.non_terminated_nodes({})
    for node in nodes:
        assert provider.is_running(node) and not provider.is_terminated(node) and provider.internal_ip(node)
    provider.set_node_tags(nodes[0], {"ray-node-status": "up-to-date"})
    provider.terminate_node(nodes[0])
    provider.terminate_nodes(nodes[1:])
    rented = as_actions(called)
    assert {"ec2:RunInstances", "ec2:TerminateInstances"} <= rented
    assert allowed("aws-head.json") == rented | BESIDES
    assert allowed("aws-launcher.json") == looked | rented | BESIDES


def on_moto(config: dict[str, Any]) -> dict[str, Any]:
    """With a network, an image and roles that are there."""
    session = botocore.session.get_session()
    ec2, iam = (session.create_client(name, region_name=config["provider"]["region"]) for name in ("ec2", "iam"))
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    subnets = []
    for number, zone in enumerate(config["provider"]["availability_zone"].split(",")):
        subnet = ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.0.{number}.0/24", AvailabilityZone=zone)
        subnets.append(subnet["Subnet"]["SubnetId"])
        ec2.modify_subnet_attribute(SubnetId=subnets[-1], MapPublicIpOnLaunch={"Value": True})
    group = ec2.create_security_group(GroupName="shoal", Description="shoal", VpcId=vpc)["GroupId"]
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    for name in ("shoal-head", "shoal-worker"):
        iam.create_instance_profile(InstanceProfileName=name)
    for kind in config["available_node_types"].values():
        kind["node_config"] |= {"SubnetIds": subnets, "SecurityGroupIds": [group], "ImageId": image}
    return config


def as_actions(calls: set[tuple[str, str]]) -> set[str]:
    return {f"{service}:{operation}" for service, operation in calls}


def our_calls(service: str) -> set[str]:
    """The operations that our sources call by name, as actions of a policy."""
    model = botocore.session.get_session().get_service_model(service)
    operations = {xform_name(name): name for name in model.operation_names}
    found = set()
    for folder in ("planner", "recovery", "service", "workers"):
        for path in (ROOT / folder).glob("*/*.py"):
            text = path.read_text(encoding="utf-8")
            if "botocore" not in text and "boto3" not in text and path.name != "multipart.py":
                continue
            for node in ast.walk(ast.parse(text)):
                named = getattr(node, "attr", None) or getattr(node, "value", None)
                if isinstance(named, str) and named in operations:
                    found.add(operations[named])
    if service == "s3":
        found = {S3_ACTIONS.get(name, name) for name in found}
    return {f"{service}:{name}" for name in found}


def test_the_object_store_policy_allows_what_is_called_and_nothing_else() -> None:
    assert allowed("aws-object-store.json") == our_calls("s3")


def test_the_control_plane_may_ask_for_prices_and_nothing_else() -> None:
    prices = {"ec2:DescribeSpotPriceHistory", "ec2:DescribeInstanceTypeOfferings"}
    assert allowed("aws-control-plane.json") == prices | our_calls("ec2")


def test_the_roles_are_the_ones_that_nodes_are_given() -> None:
    types = cluster("aws")["available_node_types"]
    given = {kind["node_config"]["IamInstanceProfile"]["Name"] for kind in types.values()}
    passed = {"aws-head.json": "shoal-worker", "aws-launcher.json": "shoal-head"}
    assert given == set(passed.values())
    for file, role in passed.items():
        assert f":role/{role}" in (ROOT / "deploy/iam" / file).read_text()


def test_the_role_of_gcp_has_what_ray_calls() -> None:
    """`instances().insert` needs `compute.instances.create`; what else an insert needs is said by its fields."""
    names = {"insert": "create", "setLabels": "setLabels", "list": "list", "get": "get", "delete": "delete"}
    provider = ast.parse(ray_source("gcp/node.py"))
    calls = {
        node.func.attr
        for node in ast.walk(provider)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "self.resource.instances()"
    }
    unused = {"start", "stop"}  # of stopped nodes that would be used again: cache_stopped_nodes is off
    assert calls - unused == names.keys()
    role = yaml.safe_load((ROOT / "deploy/iam/gcp-head.yaml").read_text())
    assert {f"compute.instances.{names[call]}" for call in calls - unused} <= set(role["includedPermissions"])


def test_the_roles_that_ray_gives_itself_on_gcp_are_those_that_the_handbook_takes_away() -> None:
    given = ray_source("gcp/config.py").partition("\nDEFAULT_SERVICE_ACCOUNT_ROLES = ")[2].partition("]")[0] + "]"
    text = (ROOT / "docs/clouds.md").read_text(encoding="utf-8")
    (taken,) = re.findall(r"^for role in ([\w. ]+); do\n +gcloud", text, flags=re.MULTILINE)
    kept = {"roles/iam.roleViewer"}  # which lets it look at roles
    assert {f"roles/{role}" for role in taken.split()} == set(ast.literal_eval(given)) - kept
