"""What the fields of CLUSTER and MARKET documents mean, in a sentence each, for editors that know their JSON Schemas.
docs/files.md says more. A test holds that every field has a description."""

from __future__ import annotations

from collections.abc import Mapping

NODES: Mapping[str, str] = {
    "name": "Nodes of this shape have the ids NAME-0, NAME-1 and so on.",
    "device": "A device type of the catalogue, or one of `devices`.",
    "devices": "How many devices each node has.",
    "count": "How many such nodes there are.",
    "intra_gb_per_s": "Gigabytes per second between devices of one node; by default what such devices have.",
    "inter_gbit_per_s": "Gigabits per second of each network interface.",
    "zone": "Nodes of one zone may fail together.",
    "host": "Shapes with one host are parts of the same machines, HOST-0, HOST-1 and so on, each with its own devices.",
    "spot": "Whether the cloud may take the node away.",
    "price_per_hour": "Dollars an hour for one node; 0: nobody stated it.",
    "preemptions_per_hour": "How often one such node is lost in an hour; only with spot: true.",
    "nics": "How many network interfaces a node has.",
    "host_memory_gib": "The node's own memory; by default what clouds usually give such nodes.",
    "disk_gib": "The node's disk.",
    "device_group": "So many devices of a node share faster links.",
    "group_gb_per_s": "Gigabytes per second between devices of one such group.",
}
DEVICES: Mapping[str, str] = {
    "memory_gib": "Memory of one device.",
    "tflops_bf16": "Peak of matrix products in bf16, in 10^12 operations per second.",
    "tflops_fp32": "The same in fp32.",
    "memory_gb_per_s": "Gigabytes per second between the device and its memory.",
    "efficiency": "The share of the peak that this job reaches, memory and all.",
    "threads": "Of a CPU device: how many threads it computes with.",
}
LINKS: Mapping[str, str] = {
    "from": "A zone.",
    "to": "Another zone, or the same: nodes of that zone with each other.",
    "gbit_per_s": "Gigabits per second of one flow, at most.",
    "latency_ms": "Milliseconds until the first byte is there.",
    "incast": "Which part of a byte's time each input of a sum beyond `fan_in` adds.",
    "fan_in": "So many inputs of a sum meet at a receiver without slowing each other down.",
}
DOCUMENT: Mapping[str, str] = {
    "nodes": "Shapes of nodes, and how many there are of each.",
    "offers": "Shapes of nodes that can be rented, and how many of each.",
    "devices": "Figures of device types that you know better than the catalogue does, by name.",
    "links": "What connects zones, in either direction.",
    "available": "How many such nodes there are, those that are held included.",
    "offered_price": "Dollars an hour for one node.",
}
