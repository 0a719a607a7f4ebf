"""Ray actors around an agent and a rank: they start it, say where it listens, and die with their node.

Killing a raylet does not kill the actors that it started, so each asks the kernel to be killed with it. A ghost that
lived on all the same would be fenced by its epoch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading

import ray

from shoal_workers.allocator import importing, keep_memory
from shoal_workers.cluster_key import join_cluster
from shoal_workers.greeting import Pass, hold
from shoal_workers.lifeline import Lifeline
from shoal_workers.log_output import LOGS, LogFile, Output
from shoal_workers.settings import WorkerSettings

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_when_cut_off(lifeline: Lifeline) -> None:
    """At once and without a word: nobody is there who could hear one."""

    def wait() -> None:
        lifeline.wait_for_end()
        os._exit(1)

    threading.Thread(target=wait, name="cut-off", daemon=True).start()


@ray.remote
class AgentActor:
    def __init__(self, cluster_id: str, node: str) -> None:
        with importing():
            from shoal_recovery.store import open_store
            from shoal_workers.agent import Agent
            from shoal_workers.clouds import FIRMWARE, CloudWatch, Metadata, find_cloud
            from shoal_workers.kubernetes import find_kubernetes

        die_with_parent()
        join_cluster()
        settings = WorkerSettings()
        self._agent = Agent(
            node=node,
            memory_dir=settings.memory_dir / cluster_id / node,
            disk_dir=settings.disk_dir / cluster_id / node,
            disk_limit_bytes=settings.disk_limit_bytes,
            host=settings.bind_host,
            heartbeat_s=settings.heartbeat_s,
            open_store=open_store,
            lifeline=Lifeline(
                cut_off_s=settings.cut_off_s, ends_itself_s=settings.ends_itself_s, orphaned_s=settings.orphaned_s
            ),
            log_limit_bytes=settings.log_limit_bytes,
        )
        self._agent.start()
        _end_when_cut_off(self._agent.lifeline)
        if settings.notice_period_s > 0:
            metadata = Metadata(settings.metadata_url)
            CloudWatch(self._agent.notices, lambda: find_cloud(metadata, FIRMWARE), settings.notice_period_s).start()
        if settings.kubernetes_period_s > 0:
            CloudWatch(self._agent.notices, lambda: find_kubernetes(settings), settings.kubernetes_period_s).start()
        self._host = settings.advertise_host or ray.util.get_node_ip_address()

    def address(self) -> tuple[str, int]:
        return self._host, self._agent.port

    def pid(self) -> int:
        return os.getpid()


@ray.remote
class RankActor:
    """Knows no key of the cluster, only the `token` of its job: it runs code of users."""

    def __init__(self, cluster_id: str, node: str, job: str, index: int, token: bytes) -> None:
        settings = WorkerSettings()
        output = Output(LogFile(settings.disk_dir / cluster_id / node / LOGS / job))
        output.take()  # first of all, so that whatever goes wrong here is told
        with importing():
            from shoal_workers.rank import Rank  # torch is heavy; only the process that needs it loads it

        die_with_parent()
        keep_memory()
        hold(Pass(job, token))
        self._rank = Rank(node=node, index=index, settings=settings, output=output)
        self._rank.start()
        _end_when_cut_off(self._rank.lifeline)
        self._host = settings.advertise_host or ray.util.get_node_ip_address()

    def address(self) -> tuple[str, int]:
        return self._host, self._rank.port

    def pid(self) -> int:
        return os.getpid()
