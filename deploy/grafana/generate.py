"""Writes the dashboards of Grafana from what stands here: python deploy/grafana/generate.py

Figures that every replica of the control plane reads from the database are taken once (`max by`), those that each
counts by itself are added up; docs/watching.md says which are which.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "dashboards"
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_OF_JOB = 'project=~"$project",job_id=~"$job"'
_COLUMNS, _WIDTH, _HEIGHT = 3, 8, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """`queries` are expressions with the legend of each; `unit` is one of Grafana's names."""

    title: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    kind: str = "timeseries"
    says: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    uid: str
    title: str
    variables: Sequence[Mapping[str, Any]]
    panels: Sequence[Panel]


def of_jobs(name: str, *labels: str) -> str:
    """A figure that the database has, once, of the chosen jobs."""
    return f"max by ({', '.join(('job_id', *labels))}) ({name}{{{_OF_JOB}}})"


def grown(name: str, span: str, *labels: str, more: Sequence[str] = ()) -> str:
    """By how much such a counter grew, by `labels`, of all chosen jobs together; it has `more` labels besides."""
    kept = ", ".join(("job_id", *labels, *more))
    return f"sum by ({', '.join(labels)}) (max by ({kept}) (increase({name}{{{_OF_JOB}}}[{span}])))"


def slowest(name: str, span: str, *labels: str) -> str:
    """Within which 95 of 100 of what such a histogram of jobs counts lay."""
    kept = ", ".join((*labels, "le"))
    counted = f"max by (job_id, {kept}) (increase({name}_bucket{{{_OF_JOB}}}[{span}]))"
    return f"histogram_quantile(0.95, sum by ({kept}) ({counted}))"


def of_service(name: str, *labels: str, where: str = "") -> str:
    """The same of what each process counts by itself."""
    kept = ", ".join((*labels, "le"))
    return f"histogram_quantile(0.95, sum by ({kept}) (rate({name}_bucket{where}[5m])))"


JOBS = (
    Panel(
        title="Jobs by state",
        queries=[('sum by (state) (max by (project, state) (shoal_jobs{project=~"$project"}))', "{{state}}")],
    ),
    Panel(
        title="Jobs that ended in a day",
        queries=[
            (
                "sum by (outcome) (max by (project, outcome) "
                '(increase(shoal_jobs_ended_total{project=~"$project"}[24h])))',
                "{{outcome}}",
            )
        ],
    ),
    Panel(title="Loss", queries=[(of_jobs("shoal_job_loss"), "{{job_id}}")], unit="none"),
    Panel(title="Tokens per second", queries=[(of_jobs("shoal_job_tokens_per_second"), "{{job_id}}")], unit="none"),
    Panel(
        title="Seconds of a step, and predicted",
        queries=[
            (of_jobs("shoal_job_step_seconds"), "{{job_id}}"),
            (of_jobs("shoal_plan_predicted_step_seconds"), "{{job_id}} predicted"),
        ],
        unit="s",
    ),
    Panel(
        title="Steps, 95 of 100 within",
        queries=[(slowest("shoal_step_duration_seconds", "1h", "job_id"), "{{job_id}}")],
        unit="s",
    ),
    Panel(
        title="Progress",
        queries=[(f"{of_jobs('shoal_job_step')} / {of_jobs('shoal_job_steps_planned')}", "{{job_id}}")],
        unit="percentunit",
    ),
    Panel(title="Goodput", queries=[(of_jobs("shoal_job_goodput_ratio"), "{{job_id}}")], unit="percentunit"),
    Panel(title="MFU", queries=[(of_jobs("shoal_job_mfu_ratio"), "{{job_id}}")], unit="percentunit"),
    Panel(
        title="Where time went",
        queries=[(f"sum by (kind) ({of_jobs('shoal_job_elapsed_seconds', 'kind')})", "{{kind}}")],
        unit="s",
    ),
    Panel(
        title="Time that was over in an hour",
        queries=[(grown("shoal_job_time_seconds_total", "1h", "kind"), "{{kind}}")],
        unit="s",
    ),
    Panel(
        title="Recoveries in an hour",
        queries=[(grown("shoal_recoveries_total", "1h", "cause", "outcome"), "{{cause}} {{outcome}}")],
    ),
    Panel(
        title="A recovery, 95 of 100 within",
        queries=[(slowest("shoal_recovery_duration_seconds", "6h", "phase"), "{{phase}}")],
        unit="s",
    ),
    Panel(
        title="Where state came from in an hour",
        queries=[(grown("shoal_recovery_bytes_total", "1h", "tier", "source"), "{{tier}} ({{source}})")],
        unit="bytes",
    ),
    Panel(
        title="Nodes",
        queries=[
            (f"sum by (market) ({of_jobs('shoal_job_nodes', 'market')})", "{{market}}"),
            (f"sum({of_jobs('shoal_job_nodes_leaving')})", "leaving"),
            (f"sum({of_jobs('shoal_job_nodes_slow')})", "slow"),
        ],
    ),
    Panel(
        title="Nodes lost in an hour",
        queries=[
            (grown("shoal_node_preemptions_total", "1h", "signal", more=("market", "device", "zone")), "{{signal}}")
        ],
    ),
    Panel(
        title="Where nodes were lost in a day",
        queries=[
            (
                grown("shoal_node_preemptions_total", "24h", "market", "device", "zone", more=("signal",)),
                "{{market}} {{device}} {{zone}}",
            )
        ],
    ),
    Panel(
        title="Told before nodes go, 95 of 100 within",
        queries=[(slowest("shoal_preemption_notice_seconds", "24h", "job_id"), "{{job_id}}")],
        unit="s",
    ),
    Panel(
        title="Steps done again in an hour, and skipped",
        queries=[
            (grown("shoal_job_redone_steps_total", "1h", "job_id"), "{{job_id}} redone"),
            (grown("shoal_job_lost_steps_total", "1h", "job_id"), "{{job_id}} lost"),
            (of_jobs("shoal_job_skipped_steps"), "{{job_id}} skipped so far"),
        ],
    ),
    Panel(
        title="Age of the newest checkpoint",
        queries=[(of_jobs("shoal_checkpoint_age_seconds"), "{{job_id}}")],
        unit="s",
    ),
    Panel(
        title="Checkpoints in an hour",
        queries=[
            (grown("shoal_job_checkpoints_total", "1h", "outcome"), "{{outcome}}"),
            (of_jobs("shoal_job_store_failing"), "{{job_id}}: the store takes nothing"),
        ],
    ),
    Panel(
        title="Bringing a step to the store, 95 of 100 within",
        queries=[(slowest("shoal_checkpoint_duration_seconds", "6h", "job_id"), "{{job_id}}")],
        unit="s",
    ),
    Panel(
        title="The newest checkpoint",
        queries=[
            (of_jobs("shoal_job_checkpoint_bytes"), "{{job_id}}"),
        ],
        unit="bytes",
    ),
    Panel(
        title="Steps not in the store yet",
        queries=[(f"{of_jobs('shoal_job_step')} - {of_jobs('shoal_job_checkpoint_step')}", "{{job_id}}")],
    ),
    Panel(
        title="Dollars per hour",
        queries=[
            (
                f"sum by (job_id, market) ({of_jobs('shoal_job_cost_dollars_per_hour', 'market')})",
                "{{job_id}} {{market}}",
            )
        ],
        unit="currencyUSD",
    ),
    Panel(
        title="Dollars so far, and the budget",
        queries=[
            (f"sum by (job_id) ({of_jobs('shoal_job_cost_dollars_total', 'market')})", "{{job_id}}"),
            (of_jobs("shoal_job_budget_dollars"), "{{job_id}} budget"),
        ],
        unit="currencyUSD",
    ),
    Panel(
        title="Dollars per million tokens",
        queries=[
            (
                f"1e6 * sum by (job_id) ({of_jobs('shoal_job_cost_dollars_total', 'market')})"
                f" / {of_jobs('shoal_job_tokens_total')}",
                "{{job_id}}",
            )
        ],
        unit="currencyUSD",
    ),
    Panel(title="Jobs without progress", queries=[(f"{of_jobs('shoal_job_stuck')} == 1", "{{job_id}}")]),
    Panel(
        title="Which jobs",
        queries=[(f"max by (job_id, name, model, project, state, cluster) (shoal_job_info{{{_OF_JOB}}})", "")],
        kind="table",
    ),
)

SERVICE = (
    Panel(
        title="Alerts that fire",
        queries=[('ALERTS{alertname=~"Shoal.*",alertstate="firing"}', "")],
        kind="table",
    ),
    Panel(
        title="Replicas that answer, by version",
        queries=[('sum(up{job="shoal"})', "up"), ("count by (version) (shoal_build_info)", "{{version}}")],
    ),
    Panel(
        title="Requests per second", queries=[("sum by (status) (rate(shoal_http_requests_total[5m]))", "{{status}}")]
    ),
    Panel(
        title="Answers, 95 of 100 within",
        queries=[
            (of_service("shoal_http_request_duration_seconds", "route", where='{route!~".*wishes"}'), "{{route}}"),
        ],
        unit="s",
    ),
    Panel(title="Open streams of events", queries=[("sum by (route) (shoal_event_streams)", "{{route}}")]),
    Panel(
        title="Entries of journals per second",
        queries=[("sum by (kind) (rate(shoal_journal_entries_total[5m]))", "{{kind}}")],
    ),
    Panel(
        title="Journals behind, 95 of 100 within",
        queries=[("histogram_quantile(0.95, sum by (le) (rate(shoal_journal_delay_seconds_bucket[5m])))", "delay")],
        unit="s",
    ),
    Panel(
        title="Sharing a cluster out, 95 of 100 within",
        queries=[
            (
                "histogram_quantile(0.95, sum by (le) (rate(shoal_scheduler_decision_duration_seconds_bucket[5m])))",
                "decision",
            )
        ],
        unit="s",
    ),
    Panel(title="The oldest job in the queue", queries=[("max(shoal_queue_oldest_job_seconds)", "waits")], unit="s"),
    Panel(
        title="Clusters that are heard of",
        queries=[("max by (cluster) (shoal_cluster_connected)", "{{cluster}}")],
    ),
    Panel(
        title="Nodes",
        queries=[
            (
                "sum by (cluster, device, market) (max by (cluster, device, market) (shoal_cluster_nodes))",
                "{{cluster}} {{device}} {{market}}",
            )
        ],
    ),
    Panel(
        title="Nodes of pools",
        queries=[
            (
                "sum by (cluster, pool, state) (max by (cluster, pool, state) (shoal_pool_nodes))",
                "{{cluster}} {{pool}} {{state}}",
            )
        ],
    ),
    Panel(
        title="Asked of pools in an hour",
        queries=[
            (
                f"sum by (pool) (max by (cluster, pool) (increase(shoal_pool_nodes_{what}_total[1h])))",
                f"{{{{pool}}}} {what}",
            )
            for what in ("asked", "came", "short", "released")
        ],
    ),
    Panel(
        title="What a node costs in an hour",
        queries=[
            (
                "min by (cluster, instance_type, zone, market) (shoal_instance_price_dollars_per_hour)",
                "{{cluster}} {{instance_type}} {{zone}} {{market}}",
            ),
            ("min by (cluster, pool) (shoal_pool_price_dollars_per_hour)", "{{cluster}}: one more of {{pool}}"),
        ],
        unit="currencyUSD",
    ),
    Panel(
        title="Searches for plans, 95 of 100 within",
        queries=[("histogram_quantile(0.95, sum by (le) (rate(shoal_planner_duration_seconds_bucket[5m])))", "search")],
        unit="s",
    ),
    Panel(
        title="Database",
        queries=[
            ("min(shoal_database_up)", "answers"),
            ("sum(increase(shoal_database_failures_total[5m]))", "failures in 5 minutes"),
            ("sum by (instance) (shoal_db_pool_in_use)", "connections of {{instance}}"),
        ],
    ),
    Panel(
        title="Leases of duties",
        queries=[("max by (duty) (shoal_duty_lease_seconds)", "{{duty}}")],
        unit="s",
        says="What one replica does for all; one that is missing is done by nobody at the moment.",
    ),
    Panel(
        title="Webhooks",
        queries=[
            ("sum by (outcome) (increase(shoal_webhook_deliveries_total[1h]))", "{{outcome}} in an hour"),
            ("max(shoal_webhook_deliveries_pending)", "pending"),
        ],
    ),
    Panel(
        title="Trackers that take nothing, and jobs without figures",
        queries=[("max(shoal_trackers_failing)", "trackers"), ("max(shoal_jobs_left_out)", "jobs left out")],
    ),
    Panel(
        title="CPUs of each replica",
        queries=[('rate(process_cpu_seconds_total{job="shoal"}[5m])', "{{instance}}")],
    ),
    Panel(
        title="Memory of each replica",
        queries=[('process_resident_memory_bytes{job="shoal"}', "{{instance}}")],
        unit="bytes",
    ),
    Panel(
        title="Open files of each replica, of those allowed",
        queries=[('process_open_fds{job="shoal"} / process_max_fds{job="shoal"}', "{{instance}}")],
        unit="percentunit",
    ),
)


def _choice(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


DASHBOARDS = (
    Dashboard(
        uid="shoal",
        title="Shoal: jobs",
        variables=(
            _choice("project", "label_values(shoal_jobs, project)"),
            _choice("job", 'label_values(shoal_job_info{project=~"$project"}, job_id)'),
        ),
        panels=JOBS,
    ),
    Dashboard(uid="shoal-service", title="Shoal: control plane and clusters", variables=(), panels=SERVICE),
)


def drawn(dashboard: Dashboard) -> dict[str, Any]:
    """As Grafana reads it."""
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Source"}
    return {
        "title": dashboard.title,
        "uid": dashboard.uid,
        "tags": ["shoal"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source, *dashboard.variables]},
        "panels": [_drawn(number, panel) for number, panel in enumerate(dashboard.panels)],
    }


def _drawn(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, _COLUMNS)
    is_table = panel.kind == "table"
    form = {"format": "table", "instant": True} if is_table else {}
    return {
        "id": number + 1,
        "type": panel.kind,
        "title": panel.title,
        **({"description": panel.says} if panel.says else {}),
        "datasource": _SOURCE,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": row * _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"expr": expression, "legendFormat": legend, "refId": chr(ord("A") + place), **form}
            for place, (expression, legend) in enumerate(panel.queries)
        ],
    }


def texts() -> dict[Path, str]:
    """What each file must hold."""
    return {FOLDER / f"{each.uid}.json": json.dumps(drawn(each), indent=1) + "\n" for each in DASHBOARDS}


if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text, encoding="utf-8")
