"""A provider of nodes for Ray's autoscaler, whose machines are instances of an EC2 (moto's) that has few of each type;
the raylet of each runs on this machine, as moto's instances run nothing."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import boto3
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider
from ray.autoscaler.node_launch_exception import NodeLaunchException
from ray.autoscaler.tags import TAG_RAY_USER_NODE_TYPE

REGION = "us-east-1"


def instances(ec2: Any, *states: str) -> dict[str, str]:
    """Instance type by id, of those in one of these states."""
    pages = ec2.get_paginator("describe_instances").paginate(
        Filters=[{"Name": "instance-state-name", "Values": states}]
    )
    found = (each for page in pages for group in page["Reservations"] for each in group["Instances"])
    return {each["InstanceId"]: each["InstanceType"] for each in found}


class LimitedEc2(FakeMultiNodeProvider):  # type: ignore[misc]
    """`capacity_file` says how many instances of each type there are."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._capacity_file = Path(provider_config["capacity_file"])
        self._ec2 = boto3.session.Session().client("ec2", region_name=REGION)
        self._image = self._ec2.describe_images()["Images"][0]["ImageId"]
        self._instances: dict[str, str] = {}

    def _next_hex_node_id(self) -> str:
        return (uuid.uuid4().hex + uuid.uuid4().hex)[:56]

    def _create_node_with_resources_and_labels(
        self, node_config: dict[str, Any], tags: dict[str, str], count: int, resources: Any, labels: Any
    ) -> None:
        kind = node_config["InstanceType"]
        there = list(instances(self._ec2, "pending", "running").values()).count(kind)
        if there >= json.loads(self._capacity_file.read_text())[kind]:
            problem = f"We currently do not have sufficient {kind} capacity in the zone that was asked for."
            raise NodeLaunchException("InsufficientCapacity", problem, None)
        made = self._ec2.run_instances(ImageId=self._image, InstanceType=kind, MinCount=1, MaxCount=1)
        before = set(self._nodes)
        super()._create_node_with_resources_and_labels(node_config, tags, count, resources, labels)
        (node,) = set(self._nodes) - before
        assert self._nodes[node]["tags"][TAG_RAY_USER_NODE_TYPE] == tags[TAG_RAY_USER_NODE_TYPE]
        self._instances[node] = made["Instances"][0]["InstanceId"]

    def terminate_node(self, node_id: str) -> None:
        super().terminate_node(node_id)
        self._ec2.terminate_instances(InstanceIds=[self._instances[node_id]])
