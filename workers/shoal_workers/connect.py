"""Offers a running Ray cluster to a control plane: starts its connector, which stays. For `shoal connect`.

Run as `python -m shoal_workers.connect` on a machine of the cluster, with one JSON object on standard input: `server`,
`token`, `cluster_id` and `address` (of the Ray cluster; "auto" finds the one of this machine).
"""

from __future__ import annotations

import json
import sys

import ray

from shoal_planner.documents import MalformedDocument
from shoal_planner.errors import InvalidField
from shoal_workers.cluster_ray import NAMESPACE
from shoal_workers.connector import start_connector
from shoal_workers.pools import pools_given


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


if __name__ == "__main__":
    main()
