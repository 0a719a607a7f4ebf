"""The files of Ray's cluster launcher, and the sources of the launcher that they are held to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
CLUSTERS = ROOT / "deploy/clusters"
CLOUDS = ("aws", "gcp", "azure")
HEAD = "head"


def cluster(cloud: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CLUSTERS / cloud / "cluster.yaml").read_text(encoding="utf-8"))
    return found


def workers(cloud: str) -> dict[str, dict[str, Any]]:
    return {name: each for name, each in cluster(cloud)["available_node_types"].items() if name != HEAD}


def pools(cloud: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((CLUSTERS / cloud / "pools.yaml").read_text(encoding="utf-8"))
    return found


def launcher() -> Path:
    """Where Ray's providers of machines are."""
    import ray.autoscaler._private as package

    return Path(package.__path__[0])


def ray_source(path: str) -> str:
    return (launcher() / path).read_text(encoding="utf-8")
