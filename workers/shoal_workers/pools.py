"""Which pools this cluster has, and who makes their nodes: from the settings of its operator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
from pydantic import ValidationError

from shoal_planner.documents import MalformedDocument, read_document
from shoal_planner.errors import InvalidField
from shoal_planner.rented_pools import parse_pools
from shoal_workers.cluster_ray import RayCluster
from shoal_workers.pools_kuberay import KubeRayPools, KubernetesApi
from shoal_workers.pools_ray import RayPools
from shoal_workers.provisioner import Member, NodeMaker, Provisioner
from shoal_workers.settings import ProvisionerSettings, WorkerSettings

log = structlog.get_logger()


def pools_given(settings: ProvisionerSettings | None = None) -> dict[str, Any] | None:
    """By whom, and the POOLS file with its entries, as plain values; None where nobody gets nodes. Raises OSError,
    MalformedDocument and InvalidField."""
    settings = settings or _settings()
    if settings.provisioner == "none":
        return None
    if settings.provisioner_pools is None:
        raise InvalidField("SHOAL_PROVISIONER_POOLS", None, "is required: the file that names the pools")
    if settings.provisioner == "kuberay" and not settings.provisioner_raycluster:
        raise InvalidField("SHOAL_PROVISIONER_RAYCLUSTER", None, "is required: the name of the RayCluster")
    path = settings.provisioner_pools.absolute()
    entries = _entries(path, path.read_text(encoding="utf-8"))
    return {
        "by": settings.provisioner,
        "raycluster": settings.provisioner_raycluster,
        "path": str(path),
        "pools": entries,
    }


def _entries(path: Path, text: str) -> list[dict[str, Any]]:
    """Raises MalformedDocument and InvalidField."""
    entries: Any = read_document(text, str(path))
    try:
        parse_pools(entries)
    except InvalidField as error:
        raise InvalidField(f"{path}: {error.field}", error.value, error.problem) from error
    return list(entries)


class PoolsFile:
    """The entries as they were given, and from then on as the file says. Where this machine has no such file, or it
    cannot be used as it is, those of before hold."""

    def __init__(self, path: Path, entries: list[dict[str, Any]]) -> None:
        self._path = path
        self._good = entries
        self._text: str | None = None

    def entries(self) -> list[dict[str, Any]]:
        try:
            text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return self._good
        if text == self._text:
            return self._good
        self._text = text
        try:
            entries = _entries(self._path, text)
        except (MalformedDocument, InvalidField) as error:
            log.warning("pools not changed", why=str(error))
            return self._good
        if entries != self._good:
            log.info("pools changed", pools=[entry["name"] for entry in entries])
        self._good = entries
        return entries


def _settings() -> ProvisionerSettings:
    try:
        return ProvisionerSettings()
    except ValidationError as error:
        first = error.errors()[0]
        name, problem = f"SHOAL_{first['loc'][0]}".upper(), first["msg"]
        raise InvalidField(name, first["input"], problem[:1].lower() + problem[1:]) from error


def provisioner_of(
    given: dict[str, Any] | None, cluster: RayCluster, notify: Callable[[Member, float], None]
) -> Provisioner | None:
    """`given` by whoever connected the cluster, else read here. Raises as `pools_given` does, and PoolsUnreachable."""
    given = given or pools_given()
    if given is None:
        return None
    maker: NodeMaker
    if given["by"] == "kuberay":
        settings = WorkerSettings()
        api = KubernetesApi(settings.kubernetes_url, settings.kubernetes_account_dir)
        maker = KubeRayPools(api, given["raycluster"])
    else:
        maker = RayPools(notify, cluster.hold, cluster.leave)
    file = PoolsFile(Path(given["path"]), given["pools"])
    return Provisioner(file.entries, maker, cluster.members)
