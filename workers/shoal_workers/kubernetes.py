"""Asks the API of the Kubernetes cluster that a node runs in whether its node or its pod are to go away.

Owns requests; what the objects mean is `cloud_words`, and who asks again and again is `clouds.CloudWatch`.
"""

from __future__ import annotations

import http.client
from pathlib import Path

import structlog

from shoal_workers import cloud_words as words
from shoal_workers.clouds import Answer, Metadata, MetadataSilent
from shoal_workers.messages import GiveNotice
from shoal_workers.settings import WorkerSettings

log = structlog.get_logger()


class Kubernetes:
    """`account_dir` is what the pod was given to ask with: it is read each time, as all of it changes. Each of `node`
    and `pod` is asked about that has a name and that the account may see. Raises MetadataSilent without an account, and
    without an answer."""

    def __init__(self, url: str, account_dir: Path, *, node: str | None, pod: str | None) -> None:
        try:
            namespace = (account_dir / "namespace").read_text().strip()
        except OSError as error:
            raise MetadataSilent(f"no account to ask Kubernetes with: {error}") from error
        self._url, self._account_dir = url, account_dir
        paths = {
            words.KUBERNETES_NODE: None if node is None else f"/api/v1/nodes/{node}",
            words.KUBERNETES_POD: None if pod is None else f"/api/v1/namespaces/{namespace}/pods/{pod}",
        }
        self._paths = {source: path for source, path in paths.items() if path is not None and self._may_see(path)}

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self._paths)

    def notice(self, source: str) -> GiveNotice | None:
        return _read(source, self._object(self._paths[source]))

    def _may_see(self, path: str) -> bool:
        """What is forbidden stays so; who does not answer now may later."""
        answer = self._ask(path)
        if answer.status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN, http.client.NOT_FOUND):
            log.warning("Kubernetes does not show it", path=path, status=answer.status)
            return False
        return True

    def _object(self, path: str) -> Answer:
        answer = self._ask(path)
        if answer.status != http.client.OK:
            raise MetadataSilent(f"GET {path}: status {answer.status}")
        return answer

    def _ask(self, path: str) -> Answer:
        try:
            token = (self._account_dir / "token").read_text().strip()
            api = Metadata(self._url, self._account_dir / "ca.crt")
        except OSError as error:
            raise MetadataSilent(f"no account to ask Kubernetes with: {error}") from error
        return api.ask(path, {"Authorization": f"Bearer {token}", "Accept": "application/json"})


def find_kubernetes(settings: WorkerSettings) -> Kubernetes | None:
    """None where this node is no pod, or its account may see nothing. Raises MetadataSilent where none answers now."""
    node, pod = settings.kubernetes_node, settings.kubernetes_pod
    if node is None and pod is None:
        return None
    found = Kubernetes(settings.kubernetes_url, settings.kubernetes_account_dir, node=node, pod=pod)
    return found if found.sources else None


def _read(source: str, answer: Answer) -> GiveNotice | None:
    read = words.kubernetes_node if source == words.KUBERNETES_NODE else words.kubernetes_pod
    return read(answer.text, answer.now_s)
