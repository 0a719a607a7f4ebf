"""Offers a running Ray cluster to a control plane: starts its connector, which stays. For `shoal connect`.

Run as `python -m shoal_workers.connect` on a machine of the cluster, with one JSON object on standard input: `server`,
`token`, `cluster_id` and `address` (of the Ray cluster; "auto" finds the one of this machine). With `stay` it stays,
too, until it finds that the connector has ended for good, or the cluster has.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import ray
import structlog

from shoal_planner.documents import MalformedDocument
from shoal_planner.errors import InvalidField
from shoal_workers.cluster_ray import NAMESPACE, connector_name
from shoal_workers.connector import PoolsGiven, start_connector
from shoal_workers.pools import pools_given

log = structlog.get_logger()

_LOOK_S = 5.0
_ANSWER_S = 30.0
_START_S = 120.0
_RESTART_S = 10.0


def main() -> None:
    order = json.load(sys.stdin)
    try:
        pools = pools_given()
    except (OSError, MalformedDocument, InvalidField) as error:
        sys.exit(f"SHOAL_PROVISIONER: {error}")
    try:
        ray.init(address=order["address"], namespace=NAMESPACE, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError) as error:
        sys.exit(f"no Ray cluster at {order['address']}: {error}")
    cluster_id = order["cluster_id"]
    try:
        # It holds nothing that cannot be asked for again: another one may take its place at any time.
        if not answers(cluster_id) or pools_of(cluster_id) != pools:
            end_connector(cluster_id)
        start_connector(order["server"], order["token"], cluster_id, {}, pools, timeout_s=_START_S)
        if order.get("stay"):
            log.info("cluster offered", server=order["server"], cluster=cluster_id)
            watch(cluster_id)
    except ray.exceptions.RayError as error:
        end_connector(cluster_id)
        sys.exit(f"the connector of {cluster_id} does not run ({type(error).__name__})")


def answers(cluster_id: str) -> bool:
    """Whether there is a connector of this cluster, and it is well."""
    try:
        _ask(cluster_id)
        return True
    except ray.exceptions.RayError:
        return False


def pools_of(cluster_id: str) -> PoolsGiven:
    """What the connector of this cluster was given when it was started. Raises RayError."""
    ask = getattr(_connector(cluster_id), "pools", None)  # one of an earlier version does not tell
    given: PoolsGiven = None if ask is None else ray.get(ask.remote(), timeout=_ANSWER_S)
    return given


def watch(cluster_id: str, wait: Callable[[float], None] = time.sleep) -> None:
    """Raises RayError once the connector has to be started again. One that Ray starts again by itself is waited for,
    but not for long: it may be bound to a head that is there no more."""
    looks = 0
    while True:
        wait(_LOOK_S)
        try:
            _ask(cluster_id)
            looks = 0
        except ray.exceptions.ActorUnavailableError:
            looks += 1
            if looks * _LOOK_S >= _RESTART_S:
                raise


def end_connector(cluster_id: str) -> None:
    """One that hangs, or that a head which was started anew knows as bound to the one before, would keep its name from
    the next one."""
    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        ray.kill(ray.get_actor(connector_name(cluster_id), namespace=NAMESPACE), no_restart=True)


def _ask(cluster_id: str) -> None:
    """Raises RayError: ActorDiedError where there is none."""
    ray.get(_connector(cluster_id).alive.remote(), timeout=_ANSWER_S)


def _connector(cluster_id: str) -> Any:
    """Raises ActorDiedError."""
    try:
        return ray.get_actor(connector_name(cluster_id), namespace=NAMESPACE)
    except ValueError as error:
        raise ray.exceptions.ActorDiedError from error


if __name__ == "__main__":
    main()
