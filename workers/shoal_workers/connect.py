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

import ray
import structlog

from shoal_planner.documents import MalformedDocument
from shoal_planner.errors import InvalidField
from shoal_workers.cluster_ray import NAMESPACE, connector_name
from shoal_workers.connector import start_connector
from shoal_workers.pools import pools_given

log = structlog.get_logger()

_LOOK_S = 5.0
_ANSWER_S = 60.0


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
    start_connector(order["server"], order["token"], order["cluster_id"], {}, pools)
    if order.get("stay"):
        log.info("cluster offered", server=order["server"], cluster=order["cluster_id"])
        sys.exit(watch(order["cluster_id"]))


def watch(cluster_id: str, wait: Callable[[float], None] = time.sleep) -> str:
    """Returns why the connector has to be started again. One that Ray starts again by itself is waited for."""
    while True:
        wait(_LOOK_S)
        connector = None
        try:
            connector = ray.get_actor(connector_name(cluster_id), namespace=NAMESPACE)
            ray.get(connector.alive.remote(), timeout=_ANSWER_S)
        except ray.exceptions.ActorUnavailableError:
            continue
        except (ValueError, ray.exceptions.RayError) as error:
            if connector is not None:  # one that hangs would keep its name from the next one
                with contextlib.suppress(ValueError, ray.exceptions.RayError):
                    ray.kill(connector, no_restart=True)
            return f"the connector of {cluster_id} is gone: {type(error).__name__}"


if __name__ == "__main__":
    main()
