"""What one process of this server counts of its own work, for Prometheus. Replicas count apart: their counters are
added up by whoever reads them. What all replicas know is in the database, and job_metrics.py's."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from sqlalchemy.pool import Pool, QueuePool

from shoal_recovery.journal import Entry

_ANSWERS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_DELAYS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
_SEARCHES_S = (0.001, 0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Meters:
    """One of each per application, in a registry of its own."""

    def __init__(self) -> None:
        # When each series began: twice as many of them, and of no use to anybody here.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        registry = self.registry
        ProcessCollector(registry=registry)
        build = Gauge("shoal_build_info", "The version of this server.", ["version"], registry=registry)
        build.labels(version("shoal")).set(1)
        self.requests = Counter(
            "shoal_http_requests", "Requests that were answered.", ["method", "route", "status"], registry=registry
        )
        self.answers = Histogram(
            "shoal_http_request_duration_seconds",
            "From a request to the beginning of its answer; long polls are held open on purpose.",
            ["method", "route"],
            buckets=_ANSWERS_S,
            registry=registry,
        )
        self.streams = Gauge(
            "shoal_event_streams", "Streams of server-sent events that are open.", ["route"], registry=registry
        )
        self.entries = Counter(
            "shoal_journal_entries", "Entries added to journals of jobs.", ["kind"], registry=registry
        )
        self.entry_delay = Histogram(
            "shoal_journal_delay_seconds",
            "How old the newest entry was when a batch of entries was added, by the clocks of both machines.",
            buckets=_DELAYS_S,
            registry=registry,
        )
        self.decisions = Histogram(
            "shoal_scheduler_decision_duration_seconds",
            "How long it took to decide which nodes of a cluster each job may use.",
            buckets=_SEARCHES_S,
            registry=registry,
        )
        self.searches = Histogram(
            "shoal_planner_duration_seconds",
            "How long searches for plans took that this server made, at submissions and for pages.",
            buckets=_SEARCHES_S,
            registry=registry,
        )
        self.deliveries = Counter(
            "shoal_webhook_deliveries", "Attempts to tell webhooks something.", ["outcome"], registry=registry
        )
        self.database_away = Counter(
            "shoal_database_failures", "Times that the database did not answer, or was too busy.", registry=registry
        )
        self._connections = Gauge(
            "shoal_db_pool_in_use", "Connections to the database that are in use.", registry=registry
        )

    def watch(self, pool: Pool) -> None:
        self._connections.set_function(lambda: pool.checkedout() if isinstance(pool, QueuePool) else 0)

    def ingested(self, entries: Sequence[Entry], now_s: float) -> None:
        """A batch of new entries was added to a journal."""
        for entry in entries:
            self.entries.labels(entry.event.kind).inc()
        self.entry_delay.observe(max(0.0, now_s - entries[-1].at_s))
