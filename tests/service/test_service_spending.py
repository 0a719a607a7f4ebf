"""What a job has cost: prices times the hours for which it had nodes, over losses and returns."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from control_plane import Connector, job_mapping, ok, story

from shoal.cli_show import show_job
from shoal_service.spending import spending
from shoal_service.timeline import Event

HOUR_S = 3600.0


def snapshot(*nodes: tuple[str, str, float], spot: bool = False) -> dict[str, Any]:
    entries = [{"id": i, "device": d, "devices": 2, "spot": spot, "price_per_hour": p} for i, d, p in nodes]
    return {"snapshot": {"nodes": entries}}


def told(*rows: tuple[float, str, dict[str, Any]]) -> list[Event]:
    return [Event(seq=n, at_s=at_h * HOUR_S, kind=kind, payload=said) for n, (at_h, kind, said) in enumerate(rows)]


def test_prices_times_hours_over_losses_and_returns() -> None:
    both = snapshot(("a", "T4", 0.5), ("b", "T4", 0.5), ("c", "A40", 2.0))
    events = told(
        (10, "plan_adopted", both),
        (12, "node_lost", {"node": "a"}),
        (12, "plan_adopted", snapshot(("b", "T4", 0.5), ("c", "A40", 2.0))),
        (15, "node_joined", {"node": "a"}),
        (15.5, "plan_adopted", both),
        (16, "node_lost", {"node": "c"}),
    )
    found = spending(events, 20 * HOUR_S)
    a_h, b_h, c_h = 2 + 5, 10, 6
    assert found.usd == pytest.approx(0.5 * (a_h + b_h) + 2.0 * c_h)
    assert [(charge.device, charge.num_nodes, charge.node_hours) for charge in found.charges] == [
        ("A40", 1, pytest.approx(c_h)),
        ("T4", 2, pytest.approx(a_h + b_h)),
    ]
    assert spending(events, 20 * HOUR_S + 1800).usd > found.usd


def test_spot_and_other_nodes_are_told_apart_and_no_plan_costs_nothing() -> None:
    events = told(
        (0, "plan_adopted", snapshot(("a", "T4", 0.5))), (0, "plan_adopted", snapshot(("b", "T4", 0.2), spot=True))
    )
    assert [(charge.spot, charge.usd) for charge in spending(events, HOUR_S).charges] == [(False, 0.5), (True, 0.2)]
    assert spending([], HOUR_S).usd == 0
    assert spending(told((0, "node_joined", {"node": "x"})), HOUR_S).charges == ()


def test_the_cost_of_a_job_over_http(
    api: httpx.Client, connector: Connector, capsys: pytest.CaptureFixture[str]
) -> None:
    connector.renew()
    job = ok(api.post("/v1/jobs", json=job_mapping()))
    entries = story(job_mapping(), started_at_s=1000.0).entries
    ok(connector.send(job["id"], entries))
    cost = ok(api.get(f"/v1/jobs/{job['id']}/cost"))
    events = [Event(seq=e.seq, at_s=e.at_s, kind=e.event.kind, payload={}) for e in entries]
    prices = {node.id: node.price_per_hour for node in connector.cluster.nodes}
    whole_h = (events[-1].at_s - entries[1].at_s) / HOUR_S
    away_h = sum(
        e.at_s * sign for e in entries for kind, sign in (("node_joined", 1), ("node_lost", -1)) if e.event.kind == kind
    )
    assert cost["usd"] == pytest.approx(whole_h * sum(prices.values()) - away_h / HOUR_S * prices["spot-1"])
    assert sum(charge["usd"] for charge in cost["charges"]) == pytest.approx(cost["usd"])
    show_job({**ok(api.get(f"/v1/jobs/{job['id']}")), "cost": cost})
    assert "cost so far" in capsys.readouterr().out
    assert api.get("/v1/jobs/job_none/cost").status_code == 404
