"""The pure parts of what pages show: limits, alerts, prices, use of devices, copies of layers, bills by project."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from control_plane import ALL_NODES, Story, job_mapping, snapshot, story

from shoal_planner.cluster import ClusterSnapshot, parse_cluster
from shoal_planner.job import parse_job
from shoal_recovery.journal import JobState, entry_to_mapping
from shoal_service.access import ADMINISTRATOR, Kind, Principal, Role
from shoal_service.errors import BadInput
from shoal_service.ledger import Bill, by_project
from shoal_service.pages_people import offered
from shoal_service.pages_submit import beginning_at
from shoal_service.panels_alerts import NO_PROGRESS_S, STUCK_S, Standing, alerts_of, by_job
from shoal_service.panels_limits import limits_of_form, limits_panel
from shoal_service.panels_prices import price_histories
from shoal_service.spending import spending
from shoal_service.survival import survival
from shoal_service.timeline import Event
from shoal_service.utilisation import in_percent, mfu_per_rate, node_uses

FINE = Standing(
    state=JobState.RUNNING,
    reason="training",
    since_at_s=0.0,
    stepped_at_s=5000.0,
    step_s=1.0,
    odd_loss=None,
    warning=None,
    spent=None,
    store_problem=None,
    silence=None,
)
NOW_S = 5001.0


def events(told: Story | None = None) -> list[Event]:
    told = told or story(job_mapping(), started_at_s=1000.0)
    every = (
        Event(seq=entry.seq, at_s=entry.at_s, kind=entry.event.kind, payload=entry_to_mapping(entry))
        for entry in told.entries
    )
    return [event for event in every if event.kind != "step_done"]


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({}, []),
        ({"state": JobState.FAILED, "reason": "rank 3 ended"}, ["failed"]),
        ({"state": JobState.SUCCEEDED, "stepped_at_s": None, "odd_loss": "It is not a number."}, []),
        ({"stepped_at_s": NOW_S - NO_PROGRESS_S - 1}, ["no_progress"]),
        ({"stepped_at_s": NOW_S - NO_PROGRESS_S - 1, "step_s": 300.0}, []),
        ({"stepped_at_s": None, "since_at_s": NOW_S - NO_PROGRESS_S - 1}, ["no_progress"]),
        ({"state": JobState.RECOVERING, "since_at_s": NOW_S - STUCK_S - 1}, ["stuck"]),
        ({"state": JobState.RECOVERING, "since_at_s": NOW_S - STUCK_S + 1}, []),
        ({"state": JobState.WAITING, "since_at_s": NOW_S - STUCK_S - 1}, ["stuck"]),
        ({"state": JobState.PAUSED, "spent": "as its budget is spent"}, ["budget"]),
        ({"warning": "85% of its budget is spent"}, ["budget"]),
        (
            {"odd_loss": "It is not a number.", "store_problem": "no room", "silence": "cluster a is not heard of"},
            ["loss", "store", "cluster"],
        ),
        ({"warning": "85% of it", "stepped_at_s": NOW_S - NO_PROGRESS_S - 1}, ["no_progress", "budget"]),
    ],
)
def test_alerts_are_what_somebody_should_look_at(changes: dict[str, object], codes: Sequence[str]) -> None:
    found = alerts_of(dataclasses.replace(FINE, **changes), NOW_S)  # type: ignore[arg-type]
    assert [alert.code for alert in found] == codes
    assert all(alert.text[-1] == "." or "problem" in alert.text or ":" in alert.text for alert in found)


def test_of_several_jobs_the_worst_goes_first() -> None:
    soon = alerts_of(dataclasses.replace(FINE, warning="85% of it"), NOW_S)
    failed = alerts_of(dataclasses.replace(FINE, state=JobState.FAILED), NOW_S)
    assert [job for job, _ in by_job({"job_1": (), "job_2": soon, "job_3": failed})] == ["job_3", "job_2"]


def test_limits_tell_what_is_left() -> None:
    spec = job_mapping(limits={"budget_usd": 0.5, "max_devices": 4, "deadline": "2027-01-31T18:00:00Z"})
    spent = spending(events(), end_at_s=1040.0, ended=False, tokens=60 * 256)
    assert spent.usd is not None
    found = limits_panel(spec, spent, 1_801_418_000.0)
    assert found.budget is not None and found.budget.left_usd == pytest.approx(0.5 - spent.usd)
    assert found.budget.lasts_s == pytest.approx((0.5 - spent.usd) / 15.0 * 3600)
    assert found.deadline_in_s == pytest.approx(400.0)
    assert dict(found.fields) == {
        "budget_usd": "0.5",
        "max_price_per_hour": "",
        "max_devices": "4",
        "deadline": "2027-01-31T18:00:00Z",
        "priority": "normal",
    }
    gone = limits_panel(job_mapping(limits={"budget_usd": 0.01}), spent, 0.0).budget
    assert gone is not None and (gone.left_usd, gone.share, gone.lasts_s) == (0.0, 1.0, None)
    assert limits_panel(job_mapping(), spent, 0.0).budget is None


def test_limits_are_read_from_their_form() -> None:
    form = {"budget_usd": " 12.5 ", "max_devices": "", "priority": "-5", "csrf": "x"}
    assert limits_of_form(form).model_dump(exclude_unset=True) == {
        "budget_usd": 12.5,
        "max_devices": None,
        "priority": -5,
    }
    assert limits_of_form({"priority": "--5"}).priority == "--5", "refused with all other names"
    assert limits_of_form({"priority": ""}).model_dump(exclude_unset=True) == {}
    with pytest.raises(BadInput, match="max_devices = 'many'") as found:
        limits_of_form({"max_devices": "many"})
    assert found.value.param == "max_devices"


def test_prices_are_told_as_they_changed() -> None:
    def cluster(spot_usd: float) -> ClusterSnapshot:
        spot = {"name": "spot", "count": 2, "device": "T4", "devices": 1, "zone": "b", "spot": True}
        big = {"name": "big", "count": 2, "device": "A100-80G", "devices": 2, "zone": "a"}
        return parse_cluster({"nodes": [big, spot | {"price_per_hour": spot_usd}]})

    told = Story(job=parse_job(job_mapping()), cluster=snapshot(), now_s=1000.0)
    for usd in (0.2, 0.2, 0.3, 0.1):
        told.adopt(ALL_NODES, cluster(usd), "a plan")
        told.now_s += 10.0
    (found,) = price_histories(events(told))
    assert (found.name, found.market, found.zone) == ("1 x T4", "spot", "b")
    assert found.points == ((0.0, 0.2), (20.0, 0.3), (30.0, 0.1))
    assert (found.low, found.high, found.now) == (0.1, 0.3, 0.1)
    assert found.path(40.0) == "M0.0 10.0 H50.0 V3.0 H75.0 V17.0 H100"
    assert price_histories([]) == ()


def test_use_of_nodes_adds_up_to_that_of_the_job() -> None:
    spec, adopted = job_mapping(), events()[1].payload
    predicted = adopted["plan"]["predicted"]
    (rate,) = set(mfu_per_rate(events()[1:2]).values())
    assert rate * predicted["tokens_per_s"] == pytest.approx(predicted["mfu"])
    found = node_uses(spec, adopted, predicted["step_s"])
    assert set(found) == {"big-0", "big-1", "spot-0", "spot-1"}
    # Weighed by the peaks of their devices, the shares of nodes are that of the job.
    peaks = {"big-0": 2 * 19.5, "big-1": 2 * 19.5, "spot-0": 8.1, "spot-1": 8.1}
    weighed = sum((found[node].mfu or 0.0) * peak for node, peak in peaks.items()) / sum(peaks.values())
    assert weighed == pytest.approx(predicted["mfu"], rel=0.01)
    assert all(0 < (use.memory or 0.0) < 1 for use in found.values())
    assert {use.mfu for use in node_uses(spec, adopted, None).values()} == {None}
    assert node_uses(spec, {**adopted, "plan": {"pipelines": "of another version"}}, 1.0) == {}
    assert (in_percent(0.412), in_percent(0.000321)) == ("41 %", "0.032 %")


def test_copies_are_told_by_layer() -> None:
    adopted = events()[1].payload
    found = survival(job_mapping(), adopted)
    first = found.units[0]
    assert (first.units, first.fewest, first.most) == ("embedding", 2, 2)
    assert any("layer" in each.units for each in found.units)
    assert sum(each.num_bytes for each in found.units) == sum(count for _, count in found.coverage)
    alone = survival(job_mapping(), {**adopted, "plan": {**adopted["plan"], "copies": 0}})
    assert min(each.fewest for each in alone.units) == 1


def test_bills_are_summed_by_project() -> None:
    def bill(project: str, usd: float | None, rate: float = 0.0, unpriced: float = 0.0) -> Bill:
        return Bill(job_id="job", project=project, usd=usd, usd_per_hour=rate, unpriced_node_hours=unpriced)

    bills = [bill("a", 1.0), bill("b", 2.0, 3.0), bill("a", 0.5, 1.0), bill("a", None, unpriced=4.0)]
    large, small = by_project(bills)
    assert (large.of, large.usd, large.usd_per_hour, large.num_jobs) == ("b", 2.0, 3.0, 1)
    assert (small.of, small.usd, small.unpriced_node_hours, small.num_jobs) == ("a", 1.5, 4.0, 3)


def test_a_restored_job_begins_with_stored_weights() -> None:
    spec = job_mapping(checkpoint={"uri": "s3://bucket/place/"})
    found = beginning_at(spec, "job_1", 40)
    assert found["train"]["init_from"] == "s3://bucket/place/job_1" and found["train"]["init_step"] == 40
    assert parse_job(found).train.init_step == 40
    with pytest.raises(BadInput, match="has stored no weights"):
        beginning_at(job_mapping(), "job_1", 40)


def test_only_tokens_that_may_be_made_are_offered() -> None:
    assert ("", "server_admin") in offered(ADMINISTRATOR, ["default"])
    user = Principal(subject="user_1", name="x", kind=Kind.USER, owner="user_1", roles=(("default", Role.MEMBER),))
    assert offered(user, ["default"]) == [("default", "viewer"), ("default", "member")]
    token = dataclasses.replace(user, kind=Kind.TOKEN)
    assert offered(token, ["default"]) == []
