"""A real API server of Kubernetes, with etcd behind it: roles, conflicts and deletions are its own. Its programs are
made by tests/helm/kube/build.sh. There is no kubelet, no scheduler and no controller: nothing runs, and what these
would do a test does.

It is Kubernetes 1.20, so definitions of KubeRay lose what that does not know yet, and `policy/v1` is missing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import ssl
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from servers import ProgramMissing, free_ports
from started_nodes import certificate
from waiting import eventually

BUILD = Path(__file__).parent / "helm" / "kube" / "build.sh"
_ADMIN = "the-administrator"
_START_S = 120.0
_MERGE = "application/merge-patch+json"
_AUDITED = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}


@dataclass(frozen=True, slots=True)
class Call:
    """As rules of a Role have it, and whether it was allowed; `namespace` is empty for what belongs to the whole
    cluster. `user` is NAMESPACE:ACCOUNT, or the name of another user."""

    user: str
    verb: str
    group: str
    resource: str
    name: str
    namespace: str
    is_allowed: bool


class Refused(Exception):
    def __init__(self, status: int, why: str) -> None:
        super().__init__(status, why)
        self.status = status

    def __str__(self) -> str:
        return f"status {self.args[0]}: {self.args[1]}"


class KubeServer:
    """`folder` has its certificate, its logs and a configuration for Helm."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.authority = folder / "tls.crt"
        self.config = folder / "kubeconfig"
        self._audit = folder / "audit.log"
        secured = ssl.create_default_context(cafile=self.authority)
        self._http = httpx.Client(base_url=url, verify=secured, timeout=30, trust_env=False)

    def ask(self, method: str, path: str, token: str = _ADMIN, kind: str = "", **body: Any) -> dict[str, Any]:
        """`kind` is that of the body where it is no plain JSON. Raises Refused."""
        headers = {"Authorization": f"Bearer {token}", **({"Content-Type": kind} if kind else {})}
        response = self._http.request(method, path, headers=headers, **body)
        said = response.json() if response.content.startswith(b"{") else {"message": response.text}
        if not response.is_success:
            raise Refused(response.status_code, said.get("message", ""))
        return dict(said)

    def create(self, document: Mapping[str, Any], namespace: str = "") -> dict[str, Any]:
        return self.ask("POST", self.place(document, namespace), json=dict(document))

    def merge(self, path: str, change: Mapping[str, Any]) -> dict[str, Any]:
        return self.ask("PATCH", path, kind=_MERGE, content=json.dumps(change))

    def place(self, document: Mapping[str, Any], namespace: str = "") -> str:
        """Where objects of its kind are."""
        version, kind = document["apiVersion"], document["kind"]
        api = f"/apis/{version}" if "/" in version else f"/api/{version}"
        (known,) = (each for each in self._kinds(api) if each["kind"] == kind and "/" not in each["name"])
        return f"{api}/namespaces/{namespace}/{known['name']}" if known["namespaced"] else f"{api}/{known['name']}"

    def _kinds(self, api: str) -> list[dict[str, Any]]:
        return list(self.ask("GET", api)["resources"])

    def token_of(self, namespace: str, account: str) -> str:
        """As the kubelet has one made for a pod."""
        wanted = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": []}}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        return str(self.ask("POST", path, json=wanted)["status"]["token"])

    def account_folder(self, folder: Path, namespace: str, account: str) -> Path:
        """What a pod of this account finds in its folder."""
        folder.mkdir(exist_ok=True)
        (folder / "namespace").write_text(namespace)
        (folder / "ca.crt").write_bytes(self.authority.read_bytes())
        (folder / "token").write_text(self.token_of(namespace, account))
        return folder

    def calls(self) -> list[Call]:
        """All that was ever asked, discovery left out."""
        found = [_call(json.loads(line)) for line in self._audit.read_text().splitlines()]
        return [call for call in found if call is not None]

    def close(self) -> None:
        self._http.close()


def _call(event: Mapping[str, Any]) -> Call | None:
    about = event.get("objectRef")
    if about is None:
        return None
    resource = "/".join(filter(None, (about["resource"], about.get("subresource", ""))))
    decision = event.get("annotations", {}).get("authorization.k8s.io/decision")
    where = [about.get(name, "") for name in ("name", "namespace")]
    user = event["user"].get("username", "").removeprefix("system:serviceaccount:")
    return Call(user, event["verb"], about.get("apiGroup", ""), resource, *where, decision == "allow")


@functools.cache
def programs() -> Path:
    """Built where they are not there yet. Raises ProgramMissing, with why they cannot be."""
    done = subprocess.run(["sh", str(BUILD)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ProgramMissing(f"no API server of Kubernetes: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return Path(done.stdout.strip().splitlines()[-1])


@contextlib.contextmanager
def kube_server(folder: Path) -> Iterator[KubeServer]:
    """Raises ProgramMissing."""
    found = programs()
    store, peers, port = free_ports(3)
    made, key = certificate(folder, "127.0.0.1")
    accounts = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    (folder / "accounts.key").write_bytes(accounts.private_bytes(serialization.Encoding.PEM, *form))
    (folder / "tokens.csv").write_text(f"{_ADMIN},admin,admin,system:masters\n")
    (folder / "audited.yaml").write_text(yaml.safe_dump(_AUDITED))
    etcd = [f"--data-dir={folder}/etcd", "--unsafe-no-fsync", "--log-level=warn"]
    etcd += [f"--listen-client-urls=http://127.0.0.1:{store}", f"--advertise-client-urls=http://127.0.0.1:{store}"]
    etcd += [f"--listen-peer-urls=http://127.0.0.1:{peers}"]
    api = [f"--etcd-servers=http://127.0.0.1:{store}", "--bind-address=127.0.0.1", f"--secure-port={port}"]
    api += ["--insecure-port=0", f"--tls-cert-file={made}", f"--tls-private-key-file={key}", f"--cert-dir={folder}"]
    api += ["--service-cluster-ip-range=10.0.0.0/24", f"--token-auth-file={folder}/tokens.csv"]
    # Whoever makes accounts' tokens for pods is no part of it: tests ask for them.
    api += ["--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount", "--allow-privileged=true"]
    api += ["--service-account-issuer=https://kubernetes.default.svc"]
    api += [f"--service-account-{use}-file={folder}/accounts.key" for use in ("key", "signing-key")]
    api += [f"--audit-policy-file={folder}/audited.yaml", f"--audit-log-path={folder}/audit.log"]
    url = f"https://127.0.0.1:{port}"
    with (
        _running([str(found / "etcd"), *etcd], folder / "etcd.log"),
        _running([str(found / "kube-apiserver"), *api], folder / "kube-apiserver.log") as process,
        contextlib.closing(KubeServer(url, folder)) as server,
    ):
        eventually(lambda: _is_ready(server, process, folder / "kube-apiserver.log"), _START_S)
        server.config.write_text(yaml.safe_dump(_kubeconfig(url, made)))
        yield server


def _is_ready(server: KubeServer, process: subprocess.Popen[bytes], log: Path) -> bool:
    if process.poll() is not None:
        raise RuntimeError(f"kube-apiserver ended: {log.read_text()[-3000:]}")
    try:
        server.ask("GET", "/readyz")
        # Made behind it, a moment later.
        server.ask("GET", "/apis/rbac.authorization.k8s.io/v1/clusterroles/system:basic-user")
        server.ask("GET", "/api/v1/namespaces/default")
    except (httpx.HTTPError, Refused):
        return False
    return True


@contextlib.contextmanager
def _running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {"PATH": os.environ["PATH"], "HOME": str(log.parent)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)


def _kubeconfig(url: str, authority: Path) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "it",
        "clusters": [{"name": "it", "cluster": {"server": url, "certificate-authority": str(authority)}}],
        "users": [{"name": "admin", "user": {"token": _ADMIN}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "admin"}}],
    }


def define(server: KubeServer, path: Path) -> None:
    """Makes the kinds of this CustomResourceDefinition known, and waits until they are."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    definition = _older(yaml.load(path.read_text(encoding="utf-8"), loader))
    definition.pop("status", None)
    server.create(definition)
    spec = definition["spec"]
    for version in (each["name"] for each in spec["versions"]):
        api = f"/apis/{spec['group']}/{version}"
        for path in (api, f"{api}/{spec['names']['plural']}"):
            eventually(functools.partial(_is_served, server, path), 60)


def _is_served(server: KubeServer, path: str) -> bool:
    try:
        server.ask("GET", path)
    except Refused:
        return False
    return True


def _older(schema: Any) -> Any:
    """Without what Kubernetes 1.20 knows nothing of: rules in CEL, and keys of lists that have a default."""
    if isinstance(schema, list):
        return [_older(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    newer = {"x-kubernetes-validations", "x-kubernetes-list-map-keys"}
    newer |= {"x-kubernetes-list-type"} if schema.get("x-kubernetes-list-type") == "map" else set()
    newer |= {"default"} if schema.get("default") == "" else set()
    return {key: _older(value) for key, value in schema.items() if key not in newer}
