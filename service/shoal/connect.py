"""`shoal connect`: offers the Ray cluster of this machine to a control plane elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys

from shoal.cli_show import say
from shoal.client import Client
from shoal.errors import ShoalError
from shoal.settings import ClientSettings


class NotConnected(ShoalError):
    pass


def run_connect(*, server: str, cluster_id: str, address: str) -> None:
    """Returns when the connector runs in the cluster, where it stays. Raises ShoalError."""
    with Client(server) as client:
        client.nodes()  # it answers, and takes our token
        order = {
            "server": client.server,
            "token": ClientSettings().find_token() or "",
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
