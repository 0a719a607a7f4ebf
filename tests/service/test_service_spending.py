"""What a job has cost and costs now: prices times the hours for which it had nodes, over losses and returns; as API,
command line and page of the job say it."""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_plane import ALL_NODES, Connector, Story, job_mapping, ok, snapshot, story

from shoal import cli
from shoal_planner.job import parse_job
from shoal_service.spending import Rented, Spending, spending
from shoal_service.timeline import Event
from shoal_service.words import dollars

HOUR_S = 3600.0


def known(*nodes: tuple[str, str, float], spot: bool = False) -> dict[str, Any]:
    entries = [{"id": i, "device": d, "devices": 2, "spot": spot, "price_per_hour": p} for i, d, p in nodes]
    return {"snapshot": {"nodes": entries}}


def told(*rows: tuple[float, str, dict[str, Any]]) -> list[Event]:
    return [Event(seq=n, at_s=at_h * HOUR_S, kind=kind, payload=said) for n, (at_h, kind, said) in enumerate(rows)]


def account(events: list[Event], end_h: float, *, ended: bool = False, tokens: int = 0) -> Spending:
    return spending(events, end_at_s=end_h * HOUR_S, ended=ended, tokens=tokens)


def test_prices_times_hours_over_losses_and_returns() -> None:
    both = known(("a", "T4", 0.5), ("b", "T4", 0.5), ("c", "A40", 2.0))
    events = told(
        (10, "plan_adopted", both),
        (12, "node_lost", {"node": "a"}),
        (12, "plan_adopted", known(("b", "T4", 0.5), ("c", "A40", 2.0))),
        (15, "node_joined", {"node": "a"}),
        (15.5, "plan_adopted", both),
        (16, "node_lost", {"node": "c"}),
    )
    found = account(events, 20, tokens=4_000_000)
    a_h, b_h, c_h = 2 + 5, 10, 6
    assert found.usd == pytest.approx(0.5 * (a_h + b_h) + 2.0 * c_h)
    assert [(charge.device, charge.num_nodes, charge.node_hours) for charge in found.charges] == [
        ("A40", 1, pytest.approx(c_h)),
        ("T4", 2, pytest.approx(a_h + b_h)),
    ]
    # b, and a that came back, are still there.
    assert found.usd_per_hour == pytest.approx(1.0)
    assert found.usd is not None and found.usd_per_million_tokens == pytest.approx(found.usd / 4)
    assert account(events, 20.5).usd == pytest.approx(found.usd + 0.5)
    done = account(events, 20, ended=True)
    assert (done.usd, done.usd_per_hour) == (pytest.approx(found.usd), 0)
    assert [charge.num_nodes_now for charge in done.charges] == [0, 0]


def test_spot_and_other_nodes_are_told_apart_and_no_plan_costs_nothing() -> None:
    events = told((0, "plan_adopted", known(("a", "T4", 0.5))), (0, "plan_adopted", known(("b", "T4", 0.2), spot=True)))
    assert [(charge.spot, charge.usd) for charge in account(events, 1).charges] == [(False, 0.5), (True, 0.2)]
    assert (account([], 1).usd, account([], 1).usd_per_million_tokens) == (0, None)
    assert account(told((0, "node_joined", {"node": "x"})), 1).charges == ()


def test_what_has_no_price_is_unknown_and_not_nothing() -> None:
    events = told(
        (0, "plan_adopted", known(("a", "T4", 0.5), ("b", "T4", 0.0), ("c", "A40", 0.0))),
        (3, "node_lost", {"node": "c"}),
    )
    found = account(events, 4, tokens=1_000_000)
    assert (found.usd, found.usd_per_hour, found.usd_per_million_tokens) == (2.0, 0.5, 2.0)
    assert (found.unpriced_node_hours, found.unpriced_nodes_now) == (3 + 4, 1)
    assert [(charge.price_per_hour, charge.usd) for charge in found.charges] == [(None, None), (None, None), (0.5, 2.0)]
    # With the only node that has a price gone, so is all knowledge of what an hour costs; what was spent stays known.
    later = account([*events, *told((4, "node_lost", {"node": "a"}))], 5)
    assert (later.usd, later.usd_per_hour) == (2.0, None)
    never = account(told((0, "plan_adopted", known(("b", "T4", 0.0)))), 4, tokens=1_000_000)
    assert (never.usd, never.usd_per_hour, never.usd_per_million_tokens) == (None, None, None)


def rented(number: int, node: str | None, since_h: float, until_h: float | None, price: float = 0.5) -> Rented:
    return Rented(
        id=number,
        node=node,
        device="T4",
        devices=2,
        spot=True,
        price_per_hour=price,
        since_at_s=since_h * HOUR_S,
        until_at_s=None if until_h is None else until_h * HOUR_S,
    )


def test_what_is_rented_costs_from_its_start_and_no_hour_is_counted_twice() -> None:
    whole = [rented(1, "a", 8, None), rented(2, None, 8, 9), rented(3, "b", 9, None)]
    waiting = spending((), end_at_s=10 * HOUR_S, ended=False, tokens=0, rented=whole)
    assert (waiting.usd, waiting.beside_plans_usd, waiting.usd_per_hour) == (2.0, 2.0, 1.0), "before there is a plan"
    assert [(each.num_nodes, each.num_nodes_now, each.node_hours) for each in waiting.charges] == [(3, 2, 4.0)]
    events = told(
        (10, "plan_adopted", known(("a", "T4", 0.4), spot=True)),
        (12, "node_lost", {"node": "a"}),
        (13, "node_joined", {"node": "a"}),
        (15, "node_lost", {"node": "a"}),
    )
    found = spending(events, end_at_s=16 * HOUR_S, ended=False, tokens=0, rented=whole)
    # a: in plans for 4 of the 8 hours, at the price that the cluster states.
    assert found.beside_plans_usd == pytest.approx(0.5 * (2 + 1 + 1) + 0.5 + 0.5 * 7)
    assert found.usd == pytest.approx(0.4 * 4 + found.beside_plans_usd)
    assert sum(each.usd or 0.0 for each in found.charges) == pytest.approx(found.usd)
    assert found.usd_per_hour == 1.0, "a and b are there, and in no plan"
    there = spending(events[:1], end_at_s=16 * HOUR_S, ended=False, tokens=0, rented=whole)
    assert there.usd_per_hour == pytest.approx(0.4 + 0.5)
    over = spending(events, end_at_s=14 * HOUR_S, ended=True, tokens=0, rented=whole)
    assert (over.usd_per_hour, over.beside_plans_usd) == (0, pytest.approx(0.5 * (2 + 1) + 0.5 + 0.5 * 5))


def test_prices_that_change_hold_from_then_on() -> None:
    found = spending(
        (),
        end_at_s=10 * HOUR_S,
        ended=False,
        tokens=0,
        rented=[rented(1, "a", 6, 8), rented(2, "a", 8, None, 0.7), rented(3, "b", 12, None)],
    )
    assert found.usd == pytest.approx(2 * 0.5 + 2 * 0.7), "a clock that is ahead makes no money"
    assert found.usd_per_hour == pytest.approx(0.7 + 0.5)


def test_dollars_for_people() -> None:
    assert [dollars(usd) for usd in (0, 0.000213, 0.0123, 0.75, 41.2, 12345.6)] == [
        "$0", "$0.00021", "$0.012", "$0.75", "$41.20", "$12,346",
    ]  # fmt: skip


def test_the_cost_of_a_job_over_http(api: httpx.Client, connector: Connector) -> None:
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
    assert (cost["usd_per_hour"], cost["unpriced_node_hours"]) == (0, 0)
    assert cost["usd_per_million_tokens"] == pytest.approx(cost["usd"] / (60 * 8 * 32) * 1e6)
    assert api.get("/v1/jobs/job_none/cost").status_code == 404


def running_job(api: httpx.Client, connector: Connector, unpriced: frozenset[str]) -> str:
    """A job on four nodes of which some have no price."""
    nodes = tuple(
        dataclasses.replace(node, price_per_hour=0.0) if node.id in unpriced else node for node in snapshot().nodes
    )
    cluster = dataclasses.replace(snapshot(), nodes=nodes)
    connector.cluster = cluster
    ok(connector.renew())
    job_id = str(ok(api.post("/v1/jobs", json=job_mapping()))["id"])
    told = Story(job=parse_job(job_mapping()), cluster=cluster, now_s=time.time() - 7201)
    told.state("starting", "planned", "starting")
    told.adopt(ALL_NODES, cluster, "first plan of this job")
    told.state("running", "stepping", "training")
    told.train(20)
    ok(connector.send(job_id, told.entries))
    return job_id


def part(page: str, name: str) -> str:
    """The words of a part of a page."""
    found = re.search(rf'<section [^>]*id="part-{name}".*?</section>', page, re.DOTALL)
    assert found is not None
    return " ".join(re.sub(r"<[^>]*>", " ", found[0]).split())


@pytest.mark.parametrize(
    ("unpriced", "on_page", "in_status", "in_neither"),
    [
        (
            frozenset(),
            (
                r"far \$30\.\d\d ",
                r"now \$15\.00 for 4 nodes",
                r"tokens \$5,[89]\d\d ",
                r"A100-80G on demand 2 2 \$7\.30 4",
            ),
            (r"far 30\.\d\d USD", r"now 4 nodes: 15\.00 USD", r"2 x 2 A100-80G, 4\S* node-hours: 29\.\d\d USD"),
            "unknown|at least|not stated",
        ),
        (
            frozenset({"big-0", "big-1"}),
            (
                r"far at least \$0\.8\d ",
                r"now at least \$0\.40 for 4 nodes",
                "2 2 not stated 4.* unknown",
                "2 of them are here",
            ),
            (r"far at least 0\.8\d USD \(some nodes have no price\)", "cost unknown: no price stated", r"0\.8\d USD"),
            r"\$0 | 0 USD|0\.00 USD",
        ),
        (
            frozenset({"big-0", "big-1", "spot-0", "spot-1"}),
            (r"None of this job's nodes has a price; it has had them for 8\S* node-hours", "unknown"),
            (r"far unknown: no node has a price", "now 4 nodes: unknown: no node has a price"),
            r"\$0|0\.00 USD|at least",
        ),
    ],
    ids=("all known", "partly known", "nothing known"),
)
def test_the_page_and_the_command_line_say_what_is_known(
    api: httpx.Client,
    connector: Connector,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    unpriced: frozenset[str],
    on_page: tuple[str, ...],
    in_status: tuple[str, ...],
    in_neither: str,
) -> None:
    job_id = running_job(api, connector, unpriced)
    shown = part(api.get(f"/jobs/{job_id}").text, "cost")
    monkeypatch.setenv("SHOAL_SERVER", str(api.base_url))
    monkeypatch.setenv("SHOAL_DATA_DIR", str(tmp_path / "data"))
    assert cli.run(["status", job_id]) == 0
    status = " ".join(capsys.readouterr().out.split())
    for words, expected in ((shown, on_page), (status, in_status)):
        for pattern in expected:
            assert re.search(pattern, words), (pattern, words)
        assert not re.search(in_neither, words), words


def test_a_job_without_nodes_has_cost_nothing_yet(api: httpx.Client) -> None:
    job_id = ok(api.post("/v1/jobs", json=job_mapping()))["id"]
    assert "Nothing yet: no plan has taken any nodes." in part(api.get(f"/jobs/{job_id}").text, "cost")
