"""`shoal connect` and `shoal pre-stop`: a Ray cluster is offered to a control plane elsewhere; a node of it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from shoal.cli_show import say
from shoal.client import Client
from shoal.errors import NotAServer, RequestRefused, ShoalError

_AGAIN_S = 2.0
_PASSING = (408, 429)  # what is refused now, and may be granted later; as all that is the server's own fault
_SERVER_ERROR = 500


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
    _offer(_order(server, cluster_id, address))
    say(f"the Ray cluster is offered to {server} as {cluster_id}")


def stay_connected(*, server: str, cluster_id: str, address: str) -> None:
    """Never returns: waits for control plane and cluster, starts the connector, and starts it again wherever it has
    ended for good, as with the head of the cluster. Raises ShoalError for what no waiting mends."""
    order = None
    while True:
        try:
            order = order or _order(server, cluster_id, address)
            _offer({**order, "stay": True})
        except ShoalError as error:
            if _is_final(error):
                raise
            say(f"{error}; trying again")
        time.sleep(_AGAIN_S)


def wait_for_leave(limit_s: float) -> None:
    """Returns when no rank computes on this machine any more, or `limit_s` is over."""
    subprocess.run([sys.executable, "-m", "shoal_workers.pre_stop", str(limit_s)], check=False)


def _is_final(error: ShoalError) -> bool:
    if isinstance(error, RequestRefused):
        return error.status < _SERVER_ERROR and error.status not in _PASSING
    return isinstance(error, NotAServer)


def _order(server: str, cluster_id: str, address: str) -> dict[str, object]:
    """What the connector is told. Raises ShoalError."""
    with Client(server) as client:
        token = connector_token(client, cluster_id)
        return {"server": client.server, "token": token, "cluster_id": cluster_id, "address": address}


def _offer(order: dict[str, object]) -> None:
    """In a process of its own: what talks to Ray is no part of this package. Raises NotConnected."""
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
