"""The roles of Azure allow the head what Ray's provider asks there and nothing else, each at the scope where it asks;
what the handbook says of identities is what Ray does. Nothing here speaks to Azure, and its libraries are not needed:
Ray's sources and templates are read."""

from __future__ import annotations

import ast
import json
from typing import Any

from cluster_files import ROOT, cluster, pools, ray_source, workers

# What Ray's provider calls on the head, as (CLIENT, GROUP, OPERATION), by the actions that it needs.
ACTIONS = {
    ("compute", "virtual_machines", "list"): {"Microsoft.Compute/virtualMachines/read"},
    ("compute", "virtual_machines", "get"): {"Microsoft.Compute/virtualMachines/read"},
    ("compute", "virtual_machines", "instance_view"): {"Microsoft.Compute/virtualMachines/instanceView/read"},
    ("compute", "virtual_machines", "update"): {"Microsoft.Compute/virtualMachines/write"},
    ("compute", "virtual_machines", "delete"): {"Microsoft.Compute/virtualMachines/delete"},
    ("compute", "disks", "delete"): {"Microsoft.Compute/disks/delete"},
    ("compute", "resource_skus", "list"): {"Microsoft.Compute/skus/read"},
    ("network", "network_interfaces", "get"): {"Microsoft.Network/networkInterfaces/read"},
    ("network", "network_interfaces", "delete"): {"Microsoft.Network/networkInterfaces/delete"},
    ("network", "public_ip_addresses", "get"): {"Microsoft.Network/publicIPAddresses/read"},
    ("network", "public_ip_addresses", "delete"): {"Microsoft.Network/publicIPAddresses/delete"},
    ("resource", "deployments", "create_or_update"): {
        "Microsoft.Resources/deployments/write",
        "Microsoft.Resources/deployments/read",
        "Microsoft.Resources/deployments/operationstatuses/read",
    },
}
# Of machines that are kept stopped: cache_stopped_nodes is off.
UNUSED = {("compute", "virtual_machines", "start"), ("compute", "virtual_machines", "deallocate")}
OF_THE_SUBSCRIPTION = {"Microsoft.Compute/skus/read"}
# What the template of a machine refers to, which is checked for whoever deploys it; a disk is made of an image.
REFERRED = {
    "Microsoft.Compute/disks/read",
    "Microsoft.Compute/disks/write",
    "Microsoft.ManagedIdentity/userAssignedIdentities/assign/action",
    "Microsoft.ManagedIdentity/userAssignedIdentities/read",
    "Microsoft.Network/networkInterfaces/join/action",
    "Microsoft.Network/networkSecurityGroups/join/action",
    "Microsoft.Network/networkSecurityGroups/read",
    "Microsoft.Network/publicIPAddresses/join/action",
    "Microsoft.Network/virtualNetworks/read",
    "Microsoft.Network/virtualNetworks/subnets/join/action",
    "Microsoft.Network/virtualNetworks/subnets/read",
    "Microsoft.Resources/subscriptions/resourceGroups/read",
}
# vCPUs, devices, Gbit/s and GiB of a size. The image has the driver for these.
SIZES = {
    "Standard_NC24ads_A100_v4": ("A100-PCIE-80G", 24, 1, 20, 220),
    "Standard_NC48ads_A100_v4": ("A100-PCIE-80G", 48, 2, 40, 440),
    "Standard_NC40ads_H100_v5": ("H100-NVL-94G", 40, 1, 40, 320),
    "Standard_NC64as_T4_v3": ("T4", 64, 4, 32, 440),
}


def role(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / f"deploy/iam/{name}.json").read_text(encoding="utf-8"))
    assert not [action for action in found["Actions"] if "*" in action]
    assert found["NotActions"] == []
    return found


def resources(template: str) -> dict[str, dict[str, Any]]:
    found = json.loads(ray_source(f"_azure/{template}.json"))["resources"]
    return {each["type"]: each for each in found}


def called() -> set[tuple[str, str, str]]:
    """By all methods but those of `ray down`, which the head does not run."""
    provider = next(
        node for node in ast.parse(ray_source("_azure/node_provider.py")).body if isinstance(node, ast.ClassDef)
    )
    methods = [each for each in provider.body if isinstance(each, ast.FunctionDef) and "cleanup" not in each.name]
    found = set()
    for node in (node for method in methods for node in ast.walk(method) if isinstance(node, ast.Call)):
        name = ast.unparse(node.func)
        if name == "get_azure_sdk_function":
            told = {each.arg: each.value for each in node.keywords}
            name = f"{ast.unparse(told['client'])}.{ast.literal_eval(told['function_name'])}"
        parts = name.split(".")
        if len(parts) == 4 and parts[0] == "self" and parts[1].endswith("_client"):
            found.add((parts[1].removesuffix("_client"), parts[2], parts[3]))
    return found


def test_the_roles_of_the_head_allow_what_ray_calls_and_nothing_else() -> None:
    assert called() == ACTIONS.keys() | UNUSED
    asked = set().union(*ACTIONS.values())
    made = {f"{kind}/write" for kind in resources("azure-vm-template")}
    allowed = set(role("azure-head")["Actions"])
    # Azure tells no upper from lower case there, and its own template writes Ip.
    assert {each.lower() for each in allowed} == {
        each.lower() for each in asked - OF_THE_SUBSCRIPTION | made | REFERRED
    }
    assert set(role("azure-head-zones")["Actions"]) == OF_THE_SUBSCRIPTION


def test_what_is_asked_of_the_subscription_is_allowed_there() -> None:
    """A role for a resource group does not reach the list of sizes, and Ray then goes on without zones."""
    (group,) = role("azure-head")["AssignableScopes"]
    (subscription,) = role("azure-head-zones")["AssignableScopes"]
    provider = cluster("azure")["provider"]
    assert subscription == f"/subscriptions/{provider['subscription_id']}"
    assert group == f"{subscription}/resourceGroups/{provider['resource_group']}"


def test_all_machines_have_the_identity_of_the_head_as_the_handbook_says() -> None:
    method = ray_source("_azure/node_provider.py").partition("def _create_node(")[2].partition("\n    def ")[0]
    assert 'template_params["msi"] = self.provider_config["msi"]' in method, "whatever a type says"
    assert "## Azure" in chapter() and "**Every machine has the identity of the head.**" in chapter()


def test_ray_up_gives_contributor_whoever_made_the_identity() -> None:
    given = resources("azure-config-template")
    assert "condition" in given["Microsoft.ManagedIdentity/userAssignedIdentities"]
    assert "condition" not in given["Microsoft.Authorization/roleAssignments"], "msi_name saves from it: say so"
    assert "--role Contributor" in chapter()


def chapter() -> str:
    text = (ROOT / "docs/clouds.md").read_text(encoding="utf-8")
    return "## Azure\n" + text.partition("\n## Azure\n")[2].partition("\n## ")[0]


def test_machines_are_of_sizes_for_which_the_image_has_the_driver() -> None:
    kinds = workers("azure")
    for pool in pools("azure"):
        kind = kinds[pool["name"]]
        given = kind["node_config"]["azure_arm_parameters"]
        device, cpus, devices, gbit_per_s, memory_gib = SIZES[given["vmSize"]]
        assert (kind["labels"]["shoal.io/device"], kind["resources"]["CPU"]) == (device, cpus)
        assert pool["node"]["devices"] == devices
        assert pool["node"]["inter_gbit_per_s"] <= gbit_per_s and pool["node"]["host_memory_gib"] <= memory_gib
        assert (given["imagePublisher"], given["imageOffer"]) == ("microsoft-dsvm", "ubuntu-hpc")


def test_each_parameter_of_a_machine_is_one_of_rays_template() -> None:
    known = json.loads(ray_source("_azure/azure-vm-template.json"))["parameters"].keys() | {"availability_zone"}
    for name, kind in cluster("azure")["available_node_types"].items():
        assert kind["node_config"]["azure_arm_parameters"].keys() <= known, name
