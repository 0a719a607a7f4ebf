"""A Ray cluster of several real raylets on this machine that pose as unequal nodes, for `shoal up` and `shoal demo`.

Run as `python -m shoal_workers.local`: one JSON object on standard input says what to start; then one command a line
(`{"do": "kill", "nodes": [ID, ...]}`, `{"do": "add", "node": ID}`, `{"do": "pids", "node": ID}`, `{"do": "stop"}`),
each answered by one line on standard output. The end of standard input stops everything. Owns the raylets; nothing else
starts or ends them.

A node that is killed dies as a machine does: its raylet and every process it started get SIGKILL at once, and its
folders in memory and on disk are deleted.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import psutil
import ray
from ray.cluster_utils import Cluster

from shoal_planner.cluster import ClusterSnapshot, Node, parse_cluster
from shoal_workers import allocator
from shoal_workers.cluster_ray import NAMESPACE, figures_of, labels_of
from shoal_workers.connector import start_connector
from shoal_workers.nurseries import WORKER, Nurseries

# With Ray's defaults a dead raylet is noticed after 13 s, and new actors are placed on it meanwhile.
_SYSTEM_CONFIG = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
_OBJECT_STORE_BYTES = 80_000_000
_LOOK_S = 0.5
_raylet: Any = ray._raylet
_DASHBOARD_AGENT = os.path.join("dashboard", "agent.py")
_TRIES = 100
_FIRST_PORT = 12_000  # those below have owners by convention


class LocalCluster:
    """`data_dir` holds what is on the nodes' disks; `memory_dir` must be in memory, and is this cluster's alone. Unless
    it `forks_workers` they start by themselves, as on nodes that are machines of their own."""

    def __init__(self, cluster_id: str, data_dir: Path, memory_dir: Path, *, forks_workers: bool = True) -> None:
        self._cluster_id = cluster_id
        self._disk_dir = data_dir / "nodes"
        self._memory_dir = memory_dir
        self._env = {
            "SHOAL_WORKER_MEMORY_DIR": str(memory_dir),
            "SHOAL_WORKER_DISK_DIR": str(self._disk_dir),
            "SHOAL_WORKER_BIND_HOST": "127.0.0.1",
            "SHOAL_WORKER_ADVERTISE_HOST": "127.0.0.1",
            # Many processes share few cores here: what is only slow must not pass for dead. Deaths close connections.
            "SHOAL_WORKER_SILENCE_S": "5",
            "OMP_NUM_THREADS": "1",
            **allocator.ENVIRONMENT,
            # A device of two threads would spin at every barrier, on cores that other nodes' threads wait for: with
            # two cores and four nodes its layers took 25 times as long.
            "OMP_WAIT_POLICY": "PASSIVE",
            "RAY_AUTH_MODE": "disabled",
            # Ray has workers give way to whatever else runs (niceness 15): beside a neighbour steps and recoveries then
            # take three times as long.
            "RAY_worker_niceness": "0",
            # A raylet does not wait for its helpers (_expect), so the first rank may come before the one that makes
            # environments listens; after the usual second it would have been there for half of it.
            "RAY_agent_manager_retry_interval_ms": "50",
            # With one CPU, Ray would have a rank wait until the agent has come up.
            "RAY_worker_maximum_startup_concurrency": "4",
        }
        self._raylets: dict[str, Any] = {}
        self._stopping = threading.Event()
        head_dir = data_dir / "head"  # what the head knows outlives it, but not this cluster
        shutil.rmtree(head_dir, ignore_errors=True)
        self._env |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(head_dir)}
        os.environ.update(self._env)  # what raylets and their workers inherit
        self._nurseries = Nurseries(memory_dir) if forks_workers else None
        self._worker = None if self._nurseries is None else WORKER  # None: Ray's own
        if self._nurseries is not None:
            os.environ.update(self._nurseries.environment)
        _without_dashboard()
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "worker_path": self._worker,
                "object_store_memory": _OBJECT_STORE_BYTES,
                "include_dashboard": False,
                "include_log_monitor": False,  # agents bring home what is printed
                "_system_config": _SYSTEM_CONFIG,
            },
        )
        ray.init(address=self._cluster.address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")

        self._keeper = threading.Thread(target=self._keep_head, name="head", daemon=True)
        self._keeper.start()

    def _keep_head(self) -> None:
        """One that dies comes back as it was."""
        head = self._cluster.head_node
        while not self._stopping.wait(_LOOK_S):
            if any(info.process.poll() is not None for info in head.all_processes.get("gcs_server", ())):
                head.kill_gcs_server(check_alive=False)
                head.start_gcs_server()

    def add(self, node: Node) -> None:
        """Returns when the cluster knows the node."""
        incarnation, port = ray.NodeID.from_random().hex(), _idle_port()
        self._expect(incarnation, port)
        self._raylets[node.id] = self._cluster.add_node(
            wait=True,
            num_cpus=1,
            object_store_memory=_OBJECT_STORE_BYTES,
            labels=labels_of(node),
            runtime_env_agent_port=port,
            worker_path=self._worker,
            env_vars={"RAY_OVERRIDE_NODE_ID_FOR_TESTING": incarnation},
        )
        for process in self._processes(self._raylets[node.id]):
            with contextlib.suppress(psutil.Error):
                if any(word.endswith(_DASHBOARD_AGENT) for word in process.cmdline()):
                    process.nice(19)  # it takes a second of a core, for nobody

    def _expect(self, incarnation: str, port: int) -> None:
        """A raylet joins when its helpers have left word where they listen, which takes them a second of importing;
        nobody needs them so early, or at all. So the word is there before them: what they will say themselves."""
        folder = self._cluster.head_node.get_session_dir_path()
        _raylet.persist_port(folder, incarnation, _raylet.RUNTIME_ENV_AGENT_PORT_NAME, port)
        for name in (
            _raylet.METRICS_AGENT_PORT_NAME,
            _raylet.METRICS_EXPORT_PORT_NAME,
            _raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME,
        ):
            _raylet.persist_port(folder, incarnation, name, -1)  # there is no dashboard

    def kill(self, node_ids: list[str]) -> float:
        """As machines that vanish at once; when, by the wall clock. Raises KeyError."""
        raylets = [self._raylets.pop(node_id) for node_id in node_ids]
        for raylet in raylets:
            os.kill(_raylet_pid(raylet), signal.SIGSTOP)  # or what it starts from here on would escape the list
        victims = [process for raylet in raylets for process in self._processes(raylet)]
        blow_s = time.time()
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGKILL)
        psutil.wait_procs(victims, timeout=10)
        for folder, node_id in itertools.product((self._memory_dir, self._disk_dir), node_ids):
            shutil.rmtree(folder / self._cluster_id / node_id, ignore_errors=True)
        return blow_s

    def pids(self, node_id: str) -> dict[str, Any]:
        """The raylet of a node, and what it started. Raises KeyError."""
        raylet = self._raylets[node_id]
        return {"raylet": _raylet_pid(raylet), "all": [process.pid for process in self._processes(raylet)]}

    def stop(self) -> None:
        self._stopping.set()
        self._keeper.join()
        for raylet in list(self._raylets.values()):
            for process in self._processes(raylet):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        ray.shutdown()
        self._cluster.shutdown()
        if self._nurseries is not None:
            self._nurseries.close()
        shutil.rmtree(self._memory_dir, ignore_errors=True)

    def _processes(self, raylet: Any) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        pids = [_raylet_pid(raylet)]
        pids += [info.process.pid for infos in raylet.all_processes.values() for info in infos]
        for pid in dict.fromkeys(pids):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                found += [process, *process.children(recursive=True)]
        forked = [] if self._nurseries is None else self._nurseries.processes(_raylet_pid(raylet))
        return list(dict.fromkeys([*found, *forked]))


def _without_dashboard() -> None:
    """Agents of a dashboard that is not there take 0.75 s of a core to start on each node, and go on looking for events
    and figures. Where Ray finds none of what a dashboard needs it starts small ones."""
    sys.modules["ray.dashboard.optional_deps"] = None  # type: ignore[assignment]


def _idle_port() -> int:
    """On all addresses, and if possible none that the kernel would give to somebody else before it is listened on."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first_given = int(file.read().split()[0])
    below = range(_FIRST_PORT, max(_FIRST_PORT, first_given))
    for port in (*random.sample(below, k=min(_TRIES, len(below))), 0):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("", port))
            return int(tried.getsockname()[1])
    raise OSError(f"no port is idle for a node, of {_TRIES} tried")


def _raylet_pid(raylet: Any) -> int:
    pid: int = raylet.all_processes["raylet"][0].process.pid
    return pid


def serve(commands: IO[str], answers: IO[str]) -> None:
    """Starts what the first line says and obeys the others."""

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    start = json.loads(commands.readline())
    snapshot = parse_cluster(start["cluster"])
    data_dir, memory_dir = Path(start["data_dir"]), Path(start["memory_dir"])
    cluster = LocalCluster(start["cluster_id"], data_dir, memory_dir, forks_workers=start.get("forks_workers", True))
    try:
        for node in snapshot.nodes:
            if node.id not in start.get("later", []):
                cluster.add(node)
                answer(event="node_started", node=node.id)
        if start.get("server"):
            start_connector(start["server"], start["token"], start["cluster_id"], figures_of(snapshot))
        answer(event="ready", address=cluster._cluster.address)
        for line in commands:
            command = json.loads(line)
            if command["do"] == "stop":
                break
            answer(**_obey(cluster, snapshot, command))
    finally:
        cluster.stop()
        answer(event="stopped")


def _obey(cluster: LocalCluster, snapshot: ClusterSnapshot, command: dict[str, Any]) -> dict[str, Any]:
    try:
        match command:
            case {"do": "kill", "nodes": list(node_ids)}:
                return {"event": "killed", "nodes": node_ids, "at_s": cluster.kill(node_ids)}
            case {"do": "add", "node": str(node_id)}:
                cluster.add(snapshot.node(node_id))
                return {"event": "node_started", "node": node_id}
            case {"do": "pids", "node": str(node_id)}:
                return {"event": "pids", "node": node_id, **cluster.pids(node_id)}
            case _:
                return {"event": "error", "problem": f"unknown command {command}"}
    except KeyError as error:
        return {"event": "error", "problem": f"no node {error} here"}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever Ray prints must not mix with the answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the whole terminal; the parent stops us in order
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
