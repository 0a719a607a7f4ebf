"""The RayCluster that the chart renders, run: each pod in a network, a mount and a process namespace of its own, each
container with its own variables, volumes and command, with what KubeRay adds to them. Needs root, `ip` and `unshare`.

It is started as KubeRay starts it, but for three things: no images (the programs are those of this checkout), no
dashboard, which takes a gigabyte, and nobody who restarts a container.
"""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import yaml
from helm_ground import NAMESPACE, run_helm
from networks import Network
from started_nodes import certificate, control_plane
from waiting import eventually

CLUSTER_ID = "pods"
HEAD = "head"
_PROGRAMS = Path(sys.executable).parent
_START_S = 300.0
_PORT = 6379
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_RAY_TOKEN = "0123456789abcdef" * 4
# What is written stays in the pod, and places that this machine lacks can be mounted on. Ray finds its address by a way
# out, and its name.
_PAUSE = """
set -e
mount --make-rprivate /
for place in etc var; do
    mkdir -p "$1/$place" "$1/.$place"
    mount -t overlay overlay -o "lowerdir=/$place,upperdir=$1/$place,workdir=$1/.$place" "/$place"
done
mount -t tmpfs tmpfs /run
hostname "$2"
echo "$3 $2" >>/etc/hosts
ip route add default via "$4"
touch "$1/ready"
sleep infinity &
wait
"""


class RenderedPods:
    """`workers` are the pods, by names, and the pools that they are of; `values` those of the chart. `folder` takes
    logs and what pods write. A context."""

    def __init__(self, folder: Path, workers: Mapping[str, str], values: Mapping[str, Any]) -> None:
        self._folder = folder
        self._workers = dict(workers)
        self._values = values
        self._closing = contextlib.ExitStack()
        self._pauses: dict[str, subprocess.Popen[bytes]] = {}
        self._containers: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
        self._templates: dict[str, Any] = {}
        self.network = Network((HEAD, *workers))
        self.kubernetes: KubernetesPods

    def __enter__(self) -> RenderedPods:
        try:
            self._ray = Path(self._closing.enter_context(tempfile.TemporaryDirectory(prefix="rp-")))
            self._closing.enter_context(self.network)
            self._closing.callback(self._end_all)
            made, key = certificate(self._folder, self.network.address)
            data = self._folder / "control-plane"
            url, self.client = self._closing.enter_context(control_plane(data, self.network.address, made, key))
            self.kubernetes = self._closing.enter_context(kubernetes_pods(self.network.address))
            token = self.client.people.create_token("connector", role="connector", cluster_id=CLUSTER_ID)["secret"]
            self._secrets = {
                "connector": {"connector-token": token, "admin-token": "-"},
                "ray-token": {"auth_token": _RAY_TOKEN},
            }
            self._configs = {"server-ca": {"ca.crt": made.read_text()}}
            self.cluster = self._rendered(url)
            self._start_head()
            for name, pool in self._workers.items():
                self._start_worker(name, pool)
        except BaseException:
            self._closing.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def log(self, pod: str, container: str) -> str:
        return (self._folder / f"{pod}-{container}.log").read_text(errors="replace")

    def delete(self, pod: str) -> float:
        """As `kubectl delete pod`: the API says by when it ends, its hook runs, then it is ended. How long the hook
        took."""
        spec = self._templates[pod]["spec"]
        grace_s = spec["terminationGracePeriodSeconds"]
        self.kubernetes.delete(pod, grace_s)
        (container,) = spec["containers"]
        began_s = datetime.now(UTC)
        hook = self._inside(pod, container, container["lifecycle"]["preStop"]["exec"]["command"])
        with (self._folder / f"{pod}-pre-stop.log").open("wb") as log:
            subprocess.run(hook, stdout=log, stderr=log, timeout=grace_s, check=False)
        took_s = (datetime.now(UTC) - began_s).total_seconds()
        self.kill(pod)
        self.kubernetes.forget(pod)
        return took_s

    def kill(self, pod: str) -> None:
        """As a machine that loses its power: with the first process of a process namespace all others end."""
        pause = self._pauses.pop(pod)
        with contextlib.suppress(ProcessLookupError):
            os.kill(_first_child(pause.pid), signal.SIGKILL)
        pause.wait(30)

    # --- what is rendered, and what KubeRay makes of it ---

    def _rendered(self, url: str) -> dict[str, Any]:
        own = {
            "controlPlane": {"enabled": False},
            "connector": {"server": url, "clusterId": CLUSTER_ID, "serverCaConfigMap": "server-ca"},
            "auth": {"existingSecret": "connector"},
            "rayCluster": {"auth": {"existingSecret": "ray-token"}, **self._values.get("rayCluster", {})},
        }
        own["workers"] = {**self._values.get("workers", {})}
        settings = {"kubernetes_url": self.kubernetes.url, **own["workers"].get("settings", {})}
        own["workers"] = {**own["workers"], "settings": settings}
        done = run_helm(4, "template", {**self._values, **own})
        assert done.returncode == 0, done.stderr
        documents = [each for each in yaml.safe_load_all(done.stdout) if each]
        for each in documents:
            if each["kind"] == "ConfigMap":
                self._configs[each["metadata"]["name"]] = each["data"]
            if each["kind"] == "Secret":
                data = {key: base64.b64decode(value).decode() for key, value in each["data"].items()}
                self._secrets[each["metadata"]["name"]] = data
        (found,) = (each for each in documents if each["kind"] == "RayCluster")
        return dict(found)

    def _start_head(self) -> None:
        group = self.cluster["spec"]["headGroupSpec"]
        ray, *others = group["template"]["spec"]["containers"]
        self._start_pod(HEAD, group["template"])
        options = {"include-dashboard": "false", **group["rayStartParams"]}
        self._run(HEAD, ray, _ray_start(options, ray, group.get("labels") or {}, "--head"))
        for container in others:
            self._run(HEAD, container, container["args"])
        eventually(lambda: self._has_started(HEAD, ray["name"]), _START_S)

    def _start_worker(self, name: str, pool: str) -> None:
        (group,) = (each for each in self.cluster["spec"]["workerGroupSpecs"] if each["groupName"] == pool)
        (container,) = group["template"]["spec"]["containers"]
        self._start_pod(name, group["template"])
        options = {"address": f"{self.network.host(HEAD)}:{_PORT}", **group["rayStartParams"]}
        self._run(name, container, _ray_start(options, container, group["labels"]))
        eventually(lambda: self._has_started(name, container["name"]), _START_S)

    def _has_started(self, pod: str, container: str) -> bool:
        assert self._containers[pod, container].poll() is None, self.log(pod, container)
        return "Ray runtime started" in self.log(pod, container)

    # --- pods ---

    def _start_pod(self, pod: str, template: Mapping[str, Any]) -> None:
        self._templates[pod] = template
        written = self._folder / pod
        written.mkdir()
        command = ["ip", "netns", "exec", self.network.namespace(pod)]
        command += ["unshare", "--mount", "--pid", "--fork", "--uts", "--mount-proc", "--kill-child"]
        command += ["bash", "-c", _PAUSE, "pause", str(written), pod, self.network.host(pod), self.network.address]
        with (self._folder / f"{pod}-pause.log").open("wb") as log:
            self._pauses[pod] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        eventually((written / "ready").exists, 60)
        self.kubernetes.add(pod)
        account = written / "account"
        account.mkdir()
        for name, text in (
            ("token", "token"),
            ("namespace", NAMESPACE),
            ("ca.crt", self._configs["server-ca"]["ca.crt"]),
        ):
            (account / name).write_text(text)
        self._mount(pod, "--bind", account, _ACCOUNT)
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        mounted: set[str] = set()
        for container in template["spec"]["containers"]:
            for mount in container["volumeMounts"]:
                if mount["mountPath"] not in mounted:  # containers see the same one at the same place
                    mounted.add(mount["mountPath"])
                    self._volume(pod, volumes[mount["name"]], mount["mountPath"])

    def _volume(self, pod: str, volume: Mapping[str, Any], place: str) -> None:
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            self._mount(pod, "-ttmpfs", Path("tmpfs"), place)
            return
        # Ray's sockets have paths that may not be long: its own folder is where it says, which is below /tmp.
        folder = self._ray / pod if place == "/tmp/ray" else self._folder / pod / volume["name"]
        folder.mkdir(parents=True)
        for name, text in self._configs.get(volume.get("configMap", {}).get("name", ""), {}).items():
            (folder / name).write_text(text)
        self._mount(pod, "--bind", folder, place)

    def _mount(self, pod: str, how: str, what: Path, place: str) -> None:
        script = f"mkdir -p {place} && mount {how} {what} {place}"
        subprocess.run([*self._enter(pod), "sh", "-c", script], check=True, capture_output=True, timeout=60)

    def _run(self, pod: str, container: Mapping[str, Any], command: Sequence[str]) -> None:
        with (self._folder / f"{pod}-{container['name']}.log").open("wb") as log:
            self._containers[pod, container["name"]] = subprocess.Popen(
                self._inside(pod, container, command), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _inside(self, pod: str, container: Mapping[str, Any], command: Sequence[str]) -> list[str]:
        variables = self._environment(pod, container)
        return [*self._enter(pod), "env", "-i", *(f"{name}={value}" for name, value in variables.items()), *command]

    def _enter(self, pod: str) -> list[str]:
        inner = str(_first_child(self._pauses[pod].pid))
        return ["nsenter", "--target", inner, "--net", "--mount", "--pid", "--uts", "--"]

    def _environment(self, pod: str, container: Mapping[str, Any]) -> dict[str, str]:
        """Of the image, of the chart, and what KubeRay adds."""
        (self._folder / pod / "home").mkdir(exist_ok=True)
        image = {
            "PATH": f"{_PROGRAMS}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self._folder / pod / "home"),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "OMP_NUM_THREADS": "1",
        }
        fields = {"metadata.name": pod, "spec.nodeName": f"machine-of-{pod}"}
        told = {}
        for variable in container["env"]:
            source = variable.get("valueFrom", {})
            if "secretKeyRef" in source:
                told[variable["name"]] = self._secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
            elif "fieldRef" in source:
                told[variable["name"]] = fields[source["fieldRef"]["fieldPath"]]
            else:
                told[variable["name"]] = variable["value"]
        if container["name"] not in ("ray-head", "ray-worker"):
            return {**image, **told}
        ip = "127.0.0.1" if pod == HEAD else self.network.host(HEAD)
        kuberay = {
            "RAY_CLUSTER_NAME": self.cluster["metadata"]["name"],
            "RAY_PORT": str(_PORT),
            "RAY_ADDRESS": f"{ip}:{_PORT}",
            "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
            **({} if pod == HEAD else {"FQ_RAY_IP": ip, "RAY_IP": ip}),
        }
        return {**image, **kuberay, **told}

    def _end_all(self) -> None:
        for pod in list(self._pauses):
            self.kill(pod)
        for container in self._containers.values():
            container.wait(30)
        shutil.rmtree(self._ray, ignore_errors=True)


def _ray_start(
    options: Mapping[str, str], container: Mapping[str, Any], labels: Mapping[str, str], *first: str
) -> list[str]:
    """What KubeRay makes of a group: what resources say goes into options that the group does not give, and the labels
    of the group are those of Ray's node."""
    resources = container["resources"]
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    known: dict[str, str] = {"metrics-export-port": "8080", "dashboard-agent-listen-port": "52365", "block": "true"}
    if cpus := limits.get("cpu", requests.get("cpu")):
        known["num-cpus"] = str(int(cpus))
    if memory := limits.get("memory"):
        known["memory"] = str(_bytes(memory))
    if labels:
        known["labels"] = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
    switches = {"true": lambda name: [f"--{name}"], "false": lambda name: []}
    words = ["ray", "start", *first]
    for name, value in sorted({**known, **options}.items()):
        plain = value not in switches or name == "include-dashboard"
        words += [f"--{name}={value}"] if plain else switches[value](name)
    return ["bash", "-c", f"ulimit -n 65536; {shlex.join(words)}"]


def _bytes(quantity: str) -> int:
    units = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
    return int(quantity[:-2]) * units[quantity[-2:]]


def _first_child(pid: int) -> int:
    """Of `unshare`, the first process of the namespace."""
    found = eventually(lambda: _namespaced(psutil.Process(pid)), 30)
    return int(found)


def _namespaced(process: psutil.Process) -> int | None:
    for child in process.children(recursive=True):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{child.pid}/status").read_text()
            (inner,) = (line.split()[1:] for line in fields.splitlines() if line.startswith("NSpid:"))
            if inner[-1] == "1" and len(inner) > 1:
                return child.pid
    return None


class KubernetesPods:
    """What agents ask of the API of Kubernetes: the object of their own pod."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._pods: dict[str, dict[str, Any]] = {}

    def add(self, pod: str) -> None:
        self._pods[pod] = {"kind": "Pod", "metadata": {"name": pod}}

    def delete(self, pod: str, grace_s: float) -> None:
        ends = datetime.now(UTC) + timedelta(seconds=grace_s)
        self._pods[pod] = {"kind": "Pod", "metadata": {"name": pod, "deletionTimestamp": f"{ends:%Y-%m-%dT%H:%M:%SZ}"}}

    def forget(self, pod: str) -> None:
        self._pods.pop(pod, None)

    def answer(self, path: str) -> tuple[int, dict[str, Any]]:
        found = self._pods.get(path.removeprefix(f"/api/v1/namespaces/{NAMESPACE}/pods/"))
        return (404, {"kind": "Status"}) if found is None else (200, found)


@contextlib.contextmanager
def kubernetes_pods(host: str) -> Iterator[KubernetesPods]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, value = pods.answer(self.path)
            raw = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer((host, 0), Handler)
    pods = KubernetesPods(f"http://{host}:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield pods
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
