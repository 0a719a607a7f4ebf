"""How metrics are called, and that what is called a counter never falls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import httpx
import pytest
from control_plane import STALLED_S, Connector, job_mapping, ok
from figures import figures_of, long_story
from prometheus_client.parser import text_string_to_metric_families

from shoal_recovery.journal import StepDone
from shoal_service.job_metrics import time_over, time_parts


def test_time_that_is_over_never_falls_and_is_told_apart_in_the_end() -> None:
    told = long_story()
    before: dict[str, float] = {}
    for until in range(1, len(told.entries) + 1):
        found = figures_of(told.entries[:until], 1e9 - 2)
        over = time_over(found)
        assert all(over[name] >= before.get(name, 0.0) for name in over), (until, before, over)
        before = over
    parts = time_parts(found, told.now_s)
    for name in ("evaluation", "recovery", "waiting", "paused"):
        assert over[name] == pytest.approx(parts[name]), name
    assert over["startup"] == pytest.approx(parts["starting"])
    # All of what was rolled back was done again by now; copies that held up a step did so although it counts no more.
    num_redone = sum(isinstance(entry.event, StepDone) for entry in told.entries) - told.step
    assert num_redone == 3 and over["redone"] == pytest.approx(parts["redone"] - num_redone * STALLED_S)
    assert over["checkpoint"] == pytest.approx(parts["checkpoint"] + num_redone * STALLED_S)
    assert over["productive"] == pytest.approx(parts["productive"])
    older = replace(found, states={"starting": 1.0})  # as versions of before have left them
    assert time_over(older)["redone"] == found.redone_s


def test_the_names_that_dashboards_elsewhere_expect(http: httpx.Client) -> None:
    """What is asked of a job, a recovery, a node or the service is called so wherever Shoal's figures are read."""
    ok(Connector(http=http).renew())
    job_id = str(ok(http.post("/v1/jobs", json=job_mapping()))["id"])
    ok(Connector(http=http).send(job_id, long_story().entries))
    kinds: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            kinds.setdefault(sample.name, set()).update(sample.labels)
    for name, labels in NAMES.items():
        has = kinds.get(name, kinds.get(f"{name}_bucket"))
        assert has is not None and has >= labels, (name, has)


NAMES: Mapping[str, set[str]] = {
    "shoal_job_info": {"job_id", "project", "model", "state"},
    "shoal_jobs": {"state"},
    "shoal_job_step": {"job_id"},
    "shoal_job_tokens_total": {"job_id"},
    "shoal_job_loss": {"job_id"},
    "shoal_job_goodput_ratio": {"job_id"},
    "shoal_job_time_seconds_total": {"kind"},
    "shoal_node_preemptions_total": {"market", "device", "zone", "signal"},
    "shoal_preemption_notice_seconds": {"job_id"},
    "shoal_recoveries_total": {"cause", "outcome"},
    "shoal_recovery_duration_seconds": {"phase"},
    "shoal_recovery_bytes_total": {"source", "tier"},
    "shoal_checkpoint_duration_seconds": {"tier"},
    "shoal_checkpoint_age_seconds": {"job_id"},
    "shoal_plan_predicted_step_seconds": {"job_id"},
    "shoal_step_duration_seconds": {"job_id"},
    "shoal_planner_duration_seconds": set(),
    "shoal_job_cost_dollars_total": {"market"},
    "shoal_instance_price_dollars_per_hour": {"instance_type", "zone", "market"},
    "shoal_http_request_duration_seconds": {"route"},
    "shoal_db_pool_in_use": set(),
}
