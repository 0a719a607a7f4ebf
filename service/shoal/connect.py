"""`shoal connect`: offers the Ray cluster of this machine to a control plane elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys

from shoal.cli_show import say
from shoal.client import Client
from shoal.errors import ShoalError


class NotConnected(ShoalError):
    pass


def connector_token(client: Client, cluster_id: str) -> str:
    """A token that may speak for this cluster and do nothing else: the client's own, if it is such a one, or a new one,
    which only an administrator of the server can make. Raises ShoalError."""
    if client.people.me()["kind"] == "connector":
        return client.token
    made = client.people.create_token(f"connector of {cluster_id}", role="connector", cluster_id=cluster_id)
    return str(made["secret"])


def run_connect(*, server: str, cluster_id: str, address: str) -> None:
    """Returns when the connector runs in the cluster, where it stays. Raises ShoalError."""
    with Client(server) as client:
        order = {
            "server": client.server,
            "token": connector_token(client, cluster_id),
            "cluster_id": cluster_id,
            "address": address,
        }
    done = subprocess.run(
        [sys.executable, "-m", "shoal_workers.connect"],
        input=json.dumps(order),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise NotConnected(
            done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "the connector did not start"
        )
    say(f"the Ray cluster is offered to {server} as {cluster_id}")
