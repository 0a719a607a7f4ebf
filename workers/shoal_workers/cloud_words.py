"""What clouds and Kubernetes say to a machine of its own end, read. Pure: texts in, notices out; asking is `clouds` and
`kubernetes`.

AWS: spot instance action and rebalance recommendation (EC2 user guide, "Spot Instance interruption notices"). GCP:
`preempted` and `maintenance-event` (Compute Engine, "Preemptible VM instances"). Azure: scheduled events of version
2020-07-01. Kubernetes: taints that those who remove nodes put on them first, and the deletion of a pod. Where nobody
says when, the least that is promised is taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from shoal_workers.messages import GiveNotice

AWS_SPOT = "aws spot"
AWS_REBALANCE = "aws rebalance"
GCP_PREEMPTION = "gcp preemption"
GCP_MAINTENANCE = "gcp maintenance"
AZURE = "azure scheduled event"
KUBERNETES_NODE = "kubernetes node"
KUBERNETES_POD = "kubernetes pod"

_REBALANCE_TAINT = "aws-node-termination-handler/rebalance-recommendation"
_REBALANCE_LEAD_S = 600.0  # no end is announced, only that one is likelier: the node is not used for so long
_POD_STOP_S = 15.0  # of a pod's grace period, what the chart's preStop leaves to Ray's own end
_GCP_PREEMPTION_LEAD_S = 30.0
_GCP_MAINTENANCE_LEAD_S = 60.0
# Taints that mean that a node goes, why, and how long after they appear at least. Those that keep pods away from a node
# that stays (cordons, pressure, taints of spot pools) are none of them.
_ENDING_TAINTS: Mapping[str, tuple[str, float]] = {
    "ToBeDeletedByClusterAutoscaler": ("removed by the cluster autoscaler", 30.0),
    "karpenter.sh/disrupted": ("removed by Karpenter", 30.0),
    "cloud.google.com/impending-node-termination": ("terminated by its cloud", 15.0),
    "aws-node-termination-handler/spot-itn": ("interrupted as a spot instance", 120.0),
    "aws-node-termination-handler/scheduled-maintenance": ("ended by a scheduled event", 120.0),
    "aws-node-termination-handler/asg-lifecycle-termination": ("ended by its scaling group", 30.0),
    _REBALANCE_TAINT: ("an interruption has become likely", _REBALANCE_LEAD_S),
    "node.cloudprovider.kubernetes.io/shutdown": ("shut down", 0.0),
    "node.kubernetes.io/out-of-service": ("out of service", 0.0),
}
# Azure's is the asset tag of the chassis; its vendor is that of every machine under Hyper-V.
_FIRMWARE_MARKS: Mapping[str, str] = {
    "AWS": "amazon",
    "GCP": "google compute engine",
    "Azure": "7783-7084-3265-9085-8269-3286-77",
}
_AZURE_ENDS = ("Preempt", "Terminate", "Redeploy", "Reboot")  # after these nothing is left in memory; Freeze passes


def aws_spot(text: str, now_s: float) -> GiveNotice:
    """Raises ValueError for anything else."""
    said = _mapping(json.loads(text))
    ends, action = str(said["time"]), str(said["action"])
    lead_s = max(0.0, _timestamp(ends) - now_s)
    return GiveNotice(source=AWS_SPOT, name=f"{action} {ends}", why=action, lead_s=lead_s)


def aws_rebalance(text: str, now_s: float) -> GiveNotice | None:
    """None also for one whose time is up: it stands for as long as the machine does. Raises ValueError for anything
    else."""
    given = str(_mapping(json.loads(text))["noticeTime"])
    lead_s = _timestamp(given) + _REBALANCE_LEAD_S - now_s
    if lead_s <= 0:
        return None
    return GiveNotice(source=AWS_REBALANCE, name=given, why="an interruption has become likely", lead_s=lead_s)


def gcp_preempted(text: str) -> GiveNotice | None:
    if text.strip() != "TRUE":
        return None
    return GiveNotice(source=GCP_PREEMPTION, name="preempted", why="preempted", lead_s=_GCP_PREEMPTION_LEAD_S)


def gcp_maintenance(text: str) -> GiveNotice | None:
    """None also where the machine is moved while it runs."""
    if text.strip() != "TERMINATE_ON_HOST_MAINTENANCE":
        return None
    why = "terminated for the maintenance of its host"
    return GiveNotice(source=GCP_MAINTENANCE, name=text.strip(), why=why, lead_s=_GCP_MAINTENANCE_LEAD_S)


def azure_event(text: str, machine: str, now_s: float) -> GiveNotice | None:
    """The first event that ends this machine; the document tells those of its neighbours, too. Raises ValueError."""
    found = []
    for event in map(_mapping, _list(_mapping(json.loads(text)).get("Events"))):
        if event["EventType"] in _AZURE_ENDS and machine in _list(event["Resources"]):
            begins = str(event.get("NotBefore") or "")  # empty once it has begun
            lead_s = max(0.0, parsedate_to_datetime(begins).timestamp() - now_s) if begins else 0.0
            kind = str(event["EventType"])
            found.append(GiveNotice(source=AZURE, name=str(event["EventId"]), why=kind.lower(), lead_s=lead_s))
    return min(found, key=lambda notice: notice.lead_s, default=None)


def kubernetes_node(text: str, now_s: float) -> GiveNotice | None:
    """Of the node's object: the ending taint that leaves the least time. Raises ValueError."""
    found = []
    for taint in map(_mapping, _list(_mapping(_mapping(json.loads(text))["spec"]).get("taints"))):
        if taint["key"] in _ENDING_TAINTS:
            why, lead_s = _ENDING_TAINTS[taint["key"]]
            added = taint.get("timeAdded")
            passed_s = 0.0 if added is None else max(0.0, now_s - _timestamp(str(added)))
            if taint["key"] == _REBALANCE_TAINT and passed_s >= lead_s:
                continue  # nobody takes it off again
            name = f"{taint['key']} {added or ''}".strip()
            found.append(GiveNotice(source=KUBERNETES_NODE, name=name, why=why, lead_s=max(0.0, lead_s - passed_s)))
    return min(found, key=lambda notice: notice.lead_s, default=None)


def kubernetes_pod(text: str, now_s: float) -> GiveNotice | None:
    """Of the pod's object: once its deletion is asked for it says by when the pod is gone. Its processes are let be
    until shortly before that (`pre_stop`). Raises ValueError."""
    ends = _mapping(_mapping(json.loads(text))["metadata"]).get("deletionTimestamp")
    if ends is None:
        return None
    lead_s = max(0.0, _timestamp(str(ends)) - _POD_STOP_S - now_s)
    return GiveNotice(source=KUBERNETES_POD, name=str(ends), why="its pod is being deleted", lead_s=lead_s)


def vendor(firmware: str) -> str | None:
    """The cloud whose machine this is, as its firmware (DMI) says; None where it names none that we know."""
    said = firmware.lower()
    return next((name for name, mark in _FIRMWARE_MARKS.items() if mark in said), None)


def azure_machine(text: str) -> str:
    """The name that events call this machine by. Raises ValueError."""
    name = _mapping(json.loads(text)).get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"name = {name!r}: an Azure machine has one")
    return name


class _Lacking(dict[str, Any]):
    """A mapping whose missing keys are errors of the text, as all others are."""

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"{key}: is missing in {dict(self)}")


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r}: must be an object")
    return _Lacking(value)


def _list(value: Any) -> Sequence[Any]:
    """Null is how some write a list that is empty."""
    if not isinstance(value, list | None):
        raise ValueError(f"{value!r}: must be a list")
    return value or ()


def _timestamp(text: str) -> float:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r}: must say its time zone")
    return moment.timestamp()
