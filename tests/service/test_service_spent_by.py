"""Who created jobs, and what they have cost by project and by person."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from control_plane import Connector, job_mapping, ok, story

from shoal_recovery.journal import entry_to_mapping
from shoal_service.ledger import Bill, OpenBill, by_person
from shoal_service.spending import spending
from shoal_service.timeline import Event


def test_bills_are_summed_by_person() -> None:
    def bill(who: str | None, usd: float | None) -> Bill:
        return Bill(job_id="job", project="p", usd=usd, usd_per_hour=1.0, unpriced_node_hours=0.0, created_by=who)

    found = by_person([bill("user_1", 1.0), bill("admin", 0.5), bill("user_1", 2.0), bill(None, None)])
    assert [(each.of, each.usd, each.num_jobs) for each in found] == [
        ("user_1", 3.0, 2),
        ("admin", 0.5, 1),
        ("", 0.0, 1),
    ]


def test_jobs_and_money_are_told_by_who_created_them(api: httpx.Client, connector: Connector) -> None:
    ok(connector.renew())
    mine = ok(api.post("/v1/jobs", json=job_mapping(name="mine")))
    assert mine["created_by"] == "admin"
    invited = ok(api.post("/v1/projects/default/members", json={"email": "ada@example.org", "role": "member"}))
    user = invited["user_id"]
    token = ok(api.post("/v1/tokens", json={"name": "t", "role": "member", "project": "default"}))
    with httpx.Client(base_url=api.base_url, headers={"Authorization": f"Bearer {token['secret']}"}) as holder:
        theirs = ok(holder.post("/v1/jobs", json=job_mapping(name="theirs")))
        assert theirs["created_by"] == "admin", "whose token it is"
        clone = ok(holder.post(f"/v1/jobs/{mine['id']}/clone"))
        assert clone["created_by"] == "admin"
    ok(connector.send(mine["id"], story(job_mapping(), started_at_s=time.time() - 60).entries))

    def listed(**params: Any) -> list[str]:
        return [job["id"] for job in ok(api.get("/v1/jobs", params=params))["items"]]

    assert listed(created_by="me") == listed(created_by="admin") == [clone["id"], theirs["id"], mine["id"]]
    assert listed(created_by=user) == []
    spent = ok(api.get("/v1/spending"))
    (project,), (person,) = spent["by_project"], spent["by_person"]
    assert (project["project"], person["person"], person["name"]) == ("default", "admin", "administrator")
    assert person["usd"] == project["usd"] > 0 and person["num_jobs"] == spent["num_jobs"] == 3
    nodes = api.get("/nodes", headers={"Accept": "text/html"}).text
    assert "Who created the jobs" in nodes and "administrator" in nodes
    assert "by administrator" in api.get("/", headers={"Accept": "text/html"}).text


def test_what_jobs_cost_that_go_on_grows_as_their_own_pages_say(api: httpx.Client, connector: Connector) -> None:
    """Sums are carried on between entries of the journal; the job's own answer adds all of it up anew."""
    ok(connector.renew())
    job = ok(api.post("/v1/jobs", json=job_mapping()))
    entries = story(job_mapping(), started_at_s=time.time() - 7200).entries
    kinds = [entry.event.kind for entry in entries]
    plan, lost = kinds.index("plan_adopted"), kinds.index("node_lost")
    for told in (entries[: plan + 2], entries[plan + 2 : lost + 1]):
        ok(connector.send(job["id"], told))
        for _ in range(2):
            (project,) = ok(api.get("/v1/spending"))["by_project"]
            alone = ok(api.get(f"/v1/jobs/{job['id']}/cost"))
            assert project["usd"] == pytest.approx(alone["usd"], rel=1e-4) and project["usd"] > 0
            assert project["usd_per_hour"] == pytest.approx(alone["usd_per_hour"])


@pytest.mark.parametrize("is_priced", [True, False])
def test_a_bill_that_is_carried_on_is_that_of_the_whole_journal(is_priced: bool) -> None:
    entries = story(job_mapping(), started_at_s=1000.0).entries
    before = entries[: [entry.event.kind for entry in entries].index("node_lost")]
    told = [entry_to_mapping(entry) for entry in before]
    events = [Event(seq=each["seq"], at_s=each["at_s"], kind=each["kind"], payload=each) for each in told]
    if not is_priced:
        for event in events:
            for node in event.payload.get("snapshot", {}).get("nodes", ()):
                node["price_per_hour"] = 0.0

    def bill(at_s: float) -> tuple[Bill, int]:
        spent = spending(events, end_at_s=at_s, ended=False, tokens=1)
        made = Bill(
            job_id="j",
            project="p",
            usd=spent.usd,
            usd_per_hour=spent.usd_per_hour or 0.0,
            unpriced_node_hours=spent.unpriced_node_hours,
        )
        return made, spent.unpriced_nodes_now

    now_s = events[-1].at_s + 60
    first, unpriced = bill(now_s)
    carried = OpenBill(mark=(1, None), at_s=now_s, bill=first, unpriced_nodes=unpriced).until(now_s + 1800)
    later, _ = bill(now_s + 1800)
    assert (carried.usd is None) == (later.usd is None) == (not is_priced)
    if is_priced:
        assert carried.usd == pytest.approx(later.usd) and later.usd > 2 * (first.usd or 0)
    else:
        assert carried.unpriced_node_hours == pytest.approx(later.unpriced_node_hours)
        assert later.unpriced_node_hours > first.unpriced_node_hours
