"""Where the machine stands, and whether it is a spot one, as the metadata service of its cloud says. Owns what is asked
and how answers read; what is announced of the machine's end is `clouds`."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from dataclasses import dataclass

from shoal_workers.clouds import Metadata, MetadataSilent

_TOKEN_TTL_S = "60"
_GOOGLE = {"Metadata-Flavor": "Google"}
_AZURE = {"Metadata": "true"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """`zone` is an availability zone: nodes of one zone fail, and are taken away, together."""

    zone: str
    spot: bool


def find_place(metadata: Metadata) -> Place | None:
    """None where no cloud answers that we know. Tries take at most a second or two each."""
    kinds: tuple[Callable[[Metadata], Place], ...] = (_of_aws, _of_gcp, _of_azure)
    for kind in kinds:
        try:
            return kind(metadata)
        except (MetadataSilent, ValueError, LookupError, TypeError, AttributeError):  # not this one's words
            continue
    return None


def _of_aws(metadata: Metadata) -> Place:
    token = metadata.ask("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": _TOKEN_TTL_S}, "PUT")
    if token.status != http.client.OK:
        raise MetadataSilent(f"no token: status {token.status}")
    signed = {"X-aws-ec2-metadata-token": token.text.strip()}
    zone = metadata.text("/latest/meta-data/placement/availability-zone", signed).text.strip()
    cycle = metadata.text("/latest/meta-data/instance-life-cycle", signed).text.strip()
    return Place(zone=zone, spot=cycle == "spot")


def _of_gcp(metadata: Metadata) -> Place:
    zone = metadata.text("/computeMetadata/v1/instance/zone", _GOOGLE)
    if zone.headers.get("metadata-flavor") != "Google":
        raise MetadataSilent("an answer, but not Google's")
    preemptible = metadata.text("/computeMetadata/v1/instance/scheduling/preemptible", _GOOGLE).text
    return Place(zone=zone.text.strip().rpartition("/")[2], spot=preemptible.strip().upper() == "TRUE")


def _of_azure(metadata: Metadata) -> Place:
    """Zones are numbers within a location there, and not every machine is in one."""
    said = json.loads(metadata.text("/metadata/instance/compute?api-version=2021-02-01", _AZURE).text)
    location, zone = str(said["location"]), str(said.get("zone") or "")
    return Place(zone=f"{location}-{zone}" if zone else location, spot=said.get("priority") == "Spot")
