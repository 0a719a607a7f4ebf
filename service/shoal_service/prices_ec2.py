"""What spot instances of AWS cost now, and where it has which types, by its own account. The only file of the control
plane that asks a cloud; boto3, which is loaded only then, finds credentials and addresses as ever. Needs the
permissions ec2:DescribeSpotPriceHistory and ec2:DescribeInstanceTypeOfferings, and no others."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any

_ZONE = re.compile(r"([a-z]{2}(?:-[a-z]+)+-\d+)[a-z]")
_SYSTEM = "Linux/UNIX"
_WAIT = {"connect_timeout": 5, "read_timeout": 10, "retries": {"max_attempts": 2}}


class PricesUnknown(Exception):
    """The cloud did not answer, or refused."""


def region_of(zone: str) -> str | None:
    """That of us-east-1a is us-east-1; None: it is no zone of AWS."""
    found = _ZONE.fullmatch(zone)
    return None if found is None else found[1]


def offered_in(instance_types: Collection[str], region: str | None) -> frozenset[tuple[str, str]]:
    """Which of these types there are in which zones of a region, in principle. Raises PricesUnknown."""
    kinds = [{"Name": "instance-type", "Values": sorted(instance_types)}]
    asked = {"LocationType": "availability-zone", "Filters": kinds}
    pages = _pages("describe_instance_type_offerings", "what is offered in", region, asked)
    return frozenset(
        (each["InstanceType"], each["Location"]) for page in pages for each in page["InstanceTypeOfferings"]
    )


def spot_prices(instance_types: Collection[str], region: str | None) -> Mapping[tuple[str, str], float]:
    """By instance type and zone, dollars an hour, of a region (None: the one of boto3's own configuration). Raises
    PricesUnknown."""
    newest: dict[tuple[str, str], tuple[datetime, float]] = {}
    asked = {
        "InstanceTypes": sorted(instance_types),
        "ProductDescriptions": [_SYSTEM],
        "StartTime": datetime.now(UTC),
    }
    for page in _pages("describe_spot_price_history", "spot prices of", region, asked):
        for each in page["SpotPriceHistory"]:
            key, at = (each["InstanceType"], each["AvailabilityZone"]), each["Timestamp"]
            if key not in newest or at > newest[key][0]:
                newest[key] = at, float(each["SpotPrice"])
    return {key: usd for key, (_, usd) in newest.items()}


def _pages(call: str, what: str, region: str | None, asked: Mapping[str, Any]) -> list[Any]:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        client = boto3.session.Session().client("ec2", region_name=region, config=Config(**_WAIT))
        return list(client.get_paginator(call).paginate(**asked))
    except (BotoCoreError, ClientError, ValueError) as error:
        raise PricesUnknown(f"{what} {region or 'the default region'}: {error}") from error
