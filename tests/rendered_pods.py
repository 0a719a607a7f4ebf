"""The RayCluster that the chart renders, run: each pod in a network, a mount and a process namespace of its own, each
container with its own variables, volumes and command, with what KubeRay adds to them. Needs root, `ip` and `unshare`.

It is started as KubeRay starts it, but for three things: no images (the programs are those of this checkout), no
dashboard, which takes a gigabyte, and nobody who restarts a container or makes another pod of the head, unless asked.
The Redis of the chart, where it renders one, is a pod, too.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kuberay
import psutil
import yaml
from helm_ground import NAMESPACE, run_helm
from kubernetes_pods import KubernetesPods, kubernetes_pods
from name_server import name_server
from networks import Network
from started_nodes import certificate, control_plane
from waiting import eventually

CLUSTER_ID = "pods"
HEAD = "head"
REDIS = "redis"
_NEXT_HEAD = "head-again"
_PROGRAMS = Path(sys.executable).parent
_PROGRAMS_INSIDE = "/run/programs"  # there, too, as the volume of a pod may lie over where they are
_START_S = 600.0
_TRAINING_NICE = 15  # in a cluster what trains has machines of its own, and keeps no head from starting
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_RAY_TOKEN = "0123456789abcdef" * 4
# What is written stays in the pod, and places that this machine lacks can be mounted on. Ray finds its address by a way
# out, and its name; services have names, too, and their addresses may change.
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
printf 'nameserver %s\nsearch %s\noptions ndots:5\n' "$4" "$5" >/etc/resolv.conf
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
        self._services: dict[str, str] = {}
        self.head = HEAD
        """The pod that is the head now."""
        self.network = Network((HEAD, _NEXT_HEAD, REDIS, *workers))
        self.kubernetes: KubernetesPods

    def __enter__(self) -> RenderedPods:
        try:
            self._ray = Path(self._closing.enter_context(tempfile.TemporaryDirectory(prefix="rp-")))
            self._closing.enter_context(self.network)
            self._closing.enter_context(name_server(self.network.address, self._services))
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
            documents = self._rendered(url)
            (self.cluster,) = (each for each in documents if each["kind"] == "RayCluster")
            for each in documents:
                if each["kind"] == "StatefulSet":
                    self._start_redis(each)
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

    def crash_head(self) -> None:
        """All processes of Ray's container end at once, as where its memory is used up; the pod and the connector's
        container stay."""
        self._end(self.head, "ray-head")

    def restart_head(self) -> None:
        """As the kubelet does with a container that has ended: in the same pod, with what its volumes hold."""
        self._run_head()

    def lose_head(self) -> None:
        """As when its pod is deleted: all its connections close. (Of a machine that only falls silent nobody knows
        whether it is gone; then ranks stop, as in a partition.)"""
        self.kill(self.head)
        self.network.cut(self.head)
        self.kubernetes.forget(self.head)

    def replace_head(self) -> None:
        """As KubeRay does with a head that is gone: another pod, which has another address, behind the same service."""
        self.head = _NEXT_HEAD
        self._start_head()

    def read(self, pod: str, pattern: str) -> Iterator[str]:
        """Of files in a pod, by a pattern of their absolute paths, those that stay long enough to be read."""
        root = Path(f"/proc/{_first_child(self._pauses[pod].pid)}/root")
        for path in root.glob(pattern.lstrip("/")):
            with contextlib.suppress(FileNotFoundError):
                yield path.read_text()

    # --- what is rendered ---

    def _rendered(self, url: str) -> list[dict[str, Any]]:
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
        return documents

    def _start_redis(self, stateful_set: Mapping[str, Any]) -> None:
        template = stateful_set["spec"]["template"]
        claimed = [{"name": each["metadata"]["name"]} for each in stateful_set["spec"]["volumeClaimTemplates"]]
        spec = {**template["spec"], "volumes": [*template["spec"]["volumes"], *claimed]}
        self._services[kuberay.whole_name(stateful_set["spec"]["serviceName"])] = self.network.host(REDIS)
        self._start_pod(REDIS, {**template, "spec": spec})
        (container,) = spec["containers"]
        self._run(REDIS, container, [*container["command"], *container["args"]])

    def _start_head(self) -> None:
        self._services[kuberay.head_service(self.cluster)] = self.network.host(self.head)
        template = self.cluster["spec"]["headGroupSpec"]["template"]
        self._start_pod(self.head, template)
        for container in template["spec"]["containers"][1:]:
            self._run(self.head, container, container["args"])
        self._run_head()

    def _run_head(self) -> None:
        group = self.cluster["spec"]["headGroupSpec"]
        ray = group["template"]["spec"]["containers"][0]
        self._run_ray(self.head, ray, kuberay.head_command(self.cluster, group, {"include-dashboard": "false"}))

    def _start_worker(self, name: str, pool: str) -> None:
        (group,) = (each for each in self.cluster["spec"]["workerGroupSpecs"] if each["groupName"] == pool)
        (container,) = group["template"]["spec"]["containers"]
        self._start_pod(name, group["template"])
        self._run_ray(name, container, kuberay.worker_command(self.cluster, group))
        for process in self._processes(name, container["name"]):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.nice(_TRAINING_NICE)

    def _run_ray(self, pod: str, container: Mapping[str, Any], command: Sequence[str]) -> None:
        """Returns when Ray has started. It gives up where the machine is so busy that its agents take longer than 15 s;
        a container that has ended is started again, as the kubelet does."""
        self._run(pod, container, command)

        def has_started() -> bool:
            said = self.log(pod, container["name"])
            if self._containers[pod, container["name"]].poll() is not None:
                self._end(pod, container["name"])
                self._run(pod, container, command)
            assert "Ray runtime started" in said, said
            return True

        eventually(has_started, _START_S)

    # --- pods ---

    def _start_pod(self, pod: str, template: Mapping[str, Any]) -> None:
        self._templates[pod] = template
        written = self._folder / pod
        written.mkdir()
        command = ["ip", "netns", "exec", self.network.namespace(pod)]
        command += ["unshare", "--mount", "--pid", "--fork", "--uts", "--mount-proc", "--kill-child"]
        command += ["bash", "-c", _PAUSE, "pause", str(written), pod, self.network.host(pod), self.network.address]
        command += [kuberay.DOMAIN]
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
        self._mount(pod, "--bind", Path(sys.prefix), _PROGRAMS_INSIDE)
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
                self._inside(pod, container, command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _end(self, pod: str, container: str) -> None:
        """Whatever runs in it, at once."""

        def ended() -> bool:
            left = self._processes(pod, container)
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            return not left  # none began meanwhile

        eventually(ended, 30)
        self._containers[pod, container].wait(30)

    def _processes(self, pod: str, container: str) -> list[psutil.Process]:
        """What starts a container begins a session, which Ray never leaves."""
        session = self._containers[pod, container].pid
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

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
            "PATH": f"{_PROGRAMS}:{_PROGRAMS_INSIDE}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self._folder / pod / "home"),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "OMP_NUM_THREADS": "1",
        }
        fields = {"metadata.name": pod, "spec.nodeName": f"machine-of-{pod}"}
        added: Iterable[Mapping[str, Any]] = ()
        if container["name"] in ("ray-head", "ray-worker"):
            added = kuberay.variables(self.cluster, of_head=container["name"] == "ray-head")
        told = {}
        for variable in (*added, *container["env"]):
            source = variable.get("valueFrom", {})
            if "secretKeyRef" in source:
                told[variable["name"]] = self._secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
            elif "fieldRef" in source:
                told[variable["name"]] = fields[source["fieldRef"]["fieldPath"]]
            else:
                told[variable["name"]] = variable["value"]
        return {**image, **told}

    def _end_all(self) -> None:
        for pod in list(self._pauses):
            self.kill(pod)
        for container in self._containers.values():
            container.wait(30)
        shutil.rmtree(self._ray, ignore_errors=True)


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
