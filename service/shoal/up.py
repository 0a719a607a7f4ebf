"""`shoal up`: a local Ray cluster of unequal nodes, a control plane and a connector, until Ctrl-C."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.cli_input import read_cluster
from shoal.cli_show import say
from shoal.local_shoal import DEFAULT_CLUSTER, LocalOptions, LocalShoal
from shoal.settings import ClientSettings
from shoal_planner.documents import read_document


def run_up(cluster: Path | None, port: int, data_dir: Path | None) -> int:
    """Returns after Ctrl-C. Raises BadUsage, ShoalError."""
    options = LocalOptions(
        cluster=cluster_mapping(cluster), data_dir=(data_dir or ClientSettings().data_dir).expanduser(), port=port
    )
    with LocalShoal(options, say) as shoal:
        with shoal.client() as client:
            say(f"sign in (once)  {client.login_link()['url']}")
        say(f"token          {options.data_dir / 'admin.token'}")
        say("Ctrl-C stops all of it")
        try:
            shoal.wait()
        except KeyboardInterrupt:
            say("stopping")
    return 0


def cluster_mapping(path: Path | None) -> Mapping[str, Any]:
    """The checked content of a cluster file, or the default cluster. Raises BadUsage."""
    if path is None:
        return DEFAULT_CLUSTER
    read_cluster(str(path))
    mapping: Mapping[str, Any] = read_document(path.read_text(encoding="utf-8"), str(path))
    return mapping
