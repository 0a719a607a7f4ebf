"""Notices of Kubernetes, as its API has them: read, and asked for over TLS of a server that answers as it does."""

from __future__ import annotations

import http.server
import json
import queue
import ssl
import subprocess
import threading
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from shoal_workers import cloud_words as words
from shoal_workers.clouds import CloudWatch, MetadataSilent
from shoal_workers.kubernetes import Kubernetes, find_kubernetes
from shoal_workers.messages import GiveNotice, Noticed, Withdrawn
from shoal_workers.notices import Notices
from shoal_workers.pools_kuberay import KubernetesApi
from shoal_workers.provisioner import PoolsUnreachable
from shoal_workers.settings import WorkerSettings

NOW_S = 1_795_000_000.0  # 2026-11-18T11:06:40Z
NODE, POD = "/api/v1/nodes/gpu-3", "/api/v1/namespaces/training/pods/worker-7"


def node_with(*taints: dict[str, str]) -> str:
    return json.dumps({"kind": "Node", "metadata": {"name": "gpu-3"}, "spec": {"taints": list(taints)}})


def taint(key: str, **more: str) -> dict[str, str]:
    return {"key": key, "effect": "NoSchedule", **more}


def pod_with(**metadata: str) -> str:
    return json.dumps({"kind": "Pod", "metadata": {"name": "worker-7", **metadata}})


def test_taints_that_mean_the_end_are_told_from_those_that_do_not() -> None:
    kept = [
        taint("node.kubernetes.io/unschedulable"),
        taint("node.kubernetes.io/memory-pressure"),
        taint("kubernetes.azure.com/scalesetpriority", value="spot"),
        taint("nvidia.com/gpu", value="present"),
    ]
    assert words.kubernetes_node(node_with(*kept), NOW_S) is None
    assert words.kubernetes_node('{"kind": "Node", "spec": {}}', NOW_S) is None
    assert words.kubernetes_node('{"kind": "Node", "spec": {"taints": null}}', NOW_S) is None
    spot = taint("aws-node-termination-handler/spot-itn", timeAdded="2026-11-18T11:06:10Z")
    found = words.kubernetes_node(node_with(*kept, spot), NOW_S)
    assert found is not None
    assert (found.source, found.why, found.lead_s) == ("kubernetes node", "interrupted as a spot instance", 90.0)
    sooner = words.kubernetes_node(node_with(spot, taint("cloud.google.com/impending-node-termination")), NOW_S)
    assert sooner is not None and sooner.lead_s == 15.0
    advice = taint("aws-node-termination-handler/rebalance-recommendation", timeAdded="2026-11-18T11:06:10Z")
    likelier = words.kubernetes_node(node_with(advice), NOW_S)
    assert likelier is not None and likelier.lead_s == 570.0
    assert words.kubernetes_node(node_with(advice), NOW_S + 570) is None, "its time is up, and the taint stays"
    again = words.kubernetes_node(node_with(spot), NOW_S + 10)
    assert again is not None and again.name == found.name, "or it would be a new notice each time"


def test_a_pod_that_is_being_deleted_says_by_when() -> None:
    assert words.kubernetes_pod(pod_with(), NOW_S) is None
    found = words.kubernetes_pod(pod_with(deletionTimestamp="2026-11-18T11:07:10Z"), NOW_S)
    assert found is not None and (found.source, found.lead_s) == ("kubernetes pod", 15.0)
    late = words.kubernetes_pod(pod_with(deletionTimestamp="2026-11-18T11:06:50Z"), NOW_S)
    assert late is not None and late.lead_s == 0.0, "what is left belongs to Ray's own end"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"spec": {"taints": [{}]}, "metadata": []}', '{"spec": {"taints": 7}}']
)
def test_what_is_no_object_of_kubernetes_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        words.kubernetes_node(text, NOW_S)
    with pytest.raises(ValueError):
        words.kubernetes_pod(text, NOW_S)


class Api(http.server.ThreadingHTTPServer):
    """An API server: `objects` by path, for whoever shows `token`; `forbidden` are paths that the account may not
    see."""

    daemon_threads = True

    def __init__(self, certificate: Path, key: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.objects: dict[str, str] = {NODE: node_with(), POD: pod_with()}
        self.forbidden: set[str] = set()
        self.token = "first"
        self.asked = 0


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        self.server.asked += 1
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._say(401, "{}")
        elif self.path in self.server.forbidden:
            self._say(403, "{}")
        elif self.path in self.server.objects:
            self._say(200, self.server.objects[self.path])
        else:
            self._say(404, "{}")

    def _say(self, status: int, text: str) -> None:
        self.send_response_only(status)
        self.send_header("Date", formatdate(NOW_S, usegmt=True))
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


def certify(folder: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "ca.crt")]
    subprocess.run([*command, *names, *files], check=True, capture_output=True)


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """What a pod finds in its folder, with a certificate of 127.0.0.1 and its key beside it."""
    certify(tmp_path)
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("training")
    return tmp_path


@pytest.fixture
def api(account: Path) -> Iterator[Api]:
    started = Api(account / "ca.crt", account / "key.pem")
    thread = threading.Thread(target=started.serve_forever, args=(0.01,))
    thread.start()
    yield started
    started.shutdown()
    thread.join()
    started.server_close()


def settings(api: Api, account: Path, **more: str) -> WorkerSettings:
    names = {"kubernetes_node": "gpu-3", "kubernetes_pod": "worker-7"} | more
    url = f"https://127.0.0.1:{api.server_port}"
    return WorkerSettings(kubernetes_url=url, kubernetes_account_dir=account, **names)


def said(found: Kubernetes) -> dict[str, GiveNotice | None]:
    return {source: found.notice(source) for source in found.sources}


def test_kubernetes_is_asked_with_the_account_of_the_pod(api: Api, account: Path) -> None:
    found = find_kubernetes(settings(api, account))
    assert found is not None
    assert said(found) == {words.KUBERNETES_NODE: None, words.KUBERNETES_POD: None}
    api.token = "second"
    with pytest.raises(MetadataSilent, match="status 401"):
        said(found)
    (account / "token").write_text("second")  # as it is renewed now and then
    api.objects[NODE] = node_with(taint("ToBeDeletedByClusterAutoscaler"))
    assert found.notice(words.KUBERNETES_NODE) == words.kubernetes_node(api.objects[NODE], NOW_S)


def test_what_the_account_may_not_see_is_left_alone(api: Api, account: Path) -> None:
    api.forbidden.add(NODE)
    found = find_kubernetes(settings(api, account))
    assert found is not None and said(found) == {words.KUBERNETES_POD: None}
    api.forbidden.add(POD)
    assert find_kubernetes(settings(api, account)) is None
    assert find_kubernetes(WorkerSettings(kubernetes_account_dir=account)) is None, "this is no pod"


def test_without_an_account_or_with_another_authority_nothing_is_asked(api: Api, account: Path, tmp_path: Path) -> None:
    with pytest.raises(MetadataSilent, match="no account to ask Kubernetes with"):
        Kubernetes("https://127.0.0.1:9", tmp_path / "nowhere", node="gpu-3", pod=None)
    certify(account)  # the server has the one of before
    with pytest.raises(MetadataSilent, match="CERTIFICATE_VERIFY_FAILED"):
        Kubernetes(f"https://127.0.0.1:{api.server_port}", account, node="gpu-3", pod=None)
    assert api.asked == 0


def test_whom_to_trust_is_read_anew_as_its_authority_changes(api: Api, account: Path) -> None:
    """Within the life of a pod: the kubelet puts the new one into its folder."""
    right = (account / "ca.crt").read_bytes()
    agent = find_kubernetes(settings(api, account))
    connector = KubernetesApi(f"https://127.0.0.1:{api.server_port}", account)
    assert agent is not None and connector.get(POD)["kind"] == "Pod"
    certify(account)
    connector.close()  # as when the server has ended the connection
    with pytest.raises(MetadataSilent, match="CERTIFICATE_VERIFY_FAILED"):
        said(agent)
    with pytest.raises(PoolsUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
        connector.get(POD)
    (account / "ca.crt").write_bytes(right)
    assert said(agent) == {words.KUBERNETES_NODE: None, words.KUBERNETES_POD: None}
    assert connector.get(POD)["kind"] == "Pod"
    connector.close()


def test_a_node_that_is_not_shown_now_hides_no_end_of_its_pod(api: Api, account: Path) -> None:
    notices = Notices("n0")
    events: queue.SimpleQueue[Noticed | Withdrawn] = queue.SimpleQueue()
    notices.watch(events)
    found = find_kubernetes(settings(api, account))
    assert found is not None
    del api.objects[NODE]
    api.objects[POD] = pod_with(deletionTimestamp="2026-11-18T11:07:10Z")
    CloudWatch(notices, lambda: found, 0.01).look(found)
    told = events.get_nowait()
    assert isinstance(told, Noticed) and told.source == words.KUBERNETES_POD
    assert events.empty()


def test_an_api_that_is_away_at_first_is_asked_until_it_answers(api: Api, account: Path) -> None:
    """Who is a pod has one: it is not as seldom as of a machine where nobody may be."""
    notices, asked = Notices("n0"), []
    events: queue.SimpleQueue[Noticed | Withdrawn] = queue.SimpleQueue()
    notices.watch(events)
    api.objects[NODE] = node_with(taint("karpenter.sh/disrupted"))

    def find() -> Kubernetes | None:
        asked.append(len(asked))
        away = settings(api, account).model_copy(update={"kubernetes_url": "https://127.0.0.1:9"})
        return find_kubernetes(away if len(asked) < 8 else settings(api, account))

    watch = CloudWatch(notices, find, 0.01)
    watch.start()
    try:
        told = events.get(timeout=10.0)
        assert isinstance(told, Noticed) and told.source == words.KUBERNETES_NODE
    finally:
        watch.close()
    assert len(asked) == 8


def test_the_notice_stands_until_the_taint_is_gone(api: Api, account: Path) -> None:
    notices = Notices("n0")
    events: queue.SimpleQueue[Noticed | Withdrawn] = queue.SimpleQueue()
    notices.watch(events)
    watch = CloudWatch(notices, lambda: find_kubernetes(settings(api, account)), 0.01)
    watch.start()
    try:
        eventually(lambda: api.asked > 4, 10.0)
        api.objects[NODE] = node_with(taint("karpenter.sh/disrupted"))
        told = events.get(timeout=10.0)
        assert isinstance(told, Noticed)
        assert (told.source, told.why) == (words.KUBERNETES_NODE, "removed by Karpenter")
        api.objects[NODE] = node_with()
        assert events.get(timeout=10.0) == Withdrawn(source=words.KUBERNETES_NODE)
    finally:
        watch.close()
    assert events.empty()
