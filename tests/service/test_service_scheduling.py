"""Several jobs on one cluster: what it is wished to do with each, and what their users are told."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_plane import Connector, ok
from control_plane import job_mapping as any_job

from shoal_planner.cluster import parse_cluster, snapshot_to_mapping
from shoal_planner.job import parse_job
from shoal_planner.limits import deadline_at_s
from shoal_planner.plan import plan_to_mapping
from shoal_planner.search import plan
from shoal_recovery.journal import Entry, Event, PlanAdopted, StateChanged, StepDone
from shoal_recovery.journal_shares import ShareChanged, ShareTaken
from shoal_service.jobs import rfc3339

NODES = {"nodes": [{"name": "n", "count": 4, "device": "T4", "price_per_hour": 1.0}]}


def job_mapping(**changes: Any) -> dict[str, Any]:
    return any_job(model={"layers": 2}, **changes)


class Played:
    """A job as its supervisor would bring it along: it takes what it is told once it is told to play on."""

    def __init__(
        self,
        connector: Connector,
        http: httpx.Client,
        spec: dict[str, Any],
        at_s: float = 1000.0,
        project: str = "default",
    ) -> None:
        self.connector, self.http, self.spec = connector, http, spec
        self.id = str(ok(http.post("/v1/jobs", params={"project": project}, json=spec))["id"])
        self.seq, self.epoch, self.step, self.at_s = 0, 0, 0, at_s

    def say(self, *events: Event) -> None:
        entries = [
            Entry(seq=self.seq + 1 + index, at_s=self.at_s + self.seq, event=e) for index, e in enumerate(events)
        ]
        ok(self.connector.send(self.id, entries))
        self.seq += len(events)

    def state(self, state: str, code: str = "code") -> None:
        self.say(StateChanged(state=state, code=code, reason="because"))

    def begins(self) -> None:
        self.take()
        self.state("starting")
        self.runs_on(self.told()["nodes"])
        self.state("running")

    def runs_on(self, nodes: list[str] | None) -> None:
        cluster = parse_cluster(NODES)
        used = [node.id for node in cluster.nodes if nodes is None or node.id in nodes]
        cluster = cluster.without({node.id for node in cluster.nodes} - set(used))
        found = plan(parse_job(self.spec), cluster).plan
        self.epoch += 1
        adopted = PlanAdopted(
            epoch=self.epoch,
            plan_id=found.plan_id,
            step=self.step,
            reason="",
            plan=plan_to_mapping(found),
            snapshot=snapshot_to_mapping(cluster),
        )
        self.say(adopted, self._done())

    def _done(self) -> StepDone:
        self.step += 1
        samples = ((8 * (self.step - 1), 8 * self.step),)
        return StepDone(
            epoch=self.epoch,
            step=self.step,
            loss=2.0,
            grad_norm=1.0,
            lr=3e-4,
            tokens=256,
            duration_s=0.5,
            samples=samples,
        )

    def wish(self) -> dict[str, Any]:
        return next(wish for wish in self.connector.wishes()["jobs"] if wish["id"] == self.id)

    def told(self) -> dict[str, Any]:
        share: dict[str, Any] = self.wish()["share"]
        return share

    def take(self) -> None:
        told = self.told()
        if told["nodes"] is not None:
            nodes = tuple(told["nodes"])
            self.say(
                ShareChanged(version=told["version"], nodes=nodes, reason=told["reason"]),
                ShareTaken(version=told["version"], nodes=nodes),
            )

    def shown(self) -> dict[str, Any]:
        found: dict[str, Any] = ok(self.http.get(f"/v1/jobs/{self.id}"))
        return found


def started(api: httpx.Client) -> Connector:
    connector = Connector(http=api, cluster=parse_cluster(NODES))
    ok(connector.renew())
    return connector


def stored(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return job_mapping(checkpoint={"uri": (tmp_path / "store").as_uri()}, **changes)


def test_a_second_job_gets_what_the_first_one_has_left(api: httpx.Client) -> None:
    connector = started(api)
    first = Played(connector, api, job_mapping())
    assert first.told()["nodes"] is None, "a job that is alone has all nodes that are and will be there"
    first.begins()
    second = Played(connector, api, job_mapping())
    version = connector.wishes()["version"]
    kept, told = first.told(), second.told()
    assert (len(kept["nodes"]), told["nodes"]) == (2, [])
    assert second.id in kept["reason"]
    share, status = second.shown()["share"], second.shown()["status"]
    assert (status["state"], status["code"], share["queue_position"]) == ("queued", "waits_for_nodes", 1)
    assert f"{first.id} leaves n-" in status["reason"]
    assert first.shown()["share"]["leaving"] is None, "nobody knows yet"
    # An older version taken says nothing of the newest.
    first.say(ShareTaken(version=kept["version"] - 1, nodes=None))
    assert second.told()["nodes"] == []
    first.take()
    assert connector.wishes()["version"] != version
    given = second.told()["nodes"]
    assert len(given) == 2 and not {*given} & {*first.told()["nodes"]}
    assert second.shown()["share"]["queue_position"] is None
    second.begins()
    assert first.shown()["share"]["code"] == "shares_nodes"
    second.state("succeeded")
    assert first.told()["nodes"] is None, "it does not grow back"


def test_a_lower_priority_goes_entirely_with_its_state_and_comes_back(api: httpx.Client, tmp_path: Path) -> None:
    connector = started(api)
    low = Played(connector, api, stored(tmp_path, priority="low"))
    low.begins()
    high = Played(connector, api, job_mapping(priority="high", limits={"min_devices": 4}))
    assert low.wish()["wish"] == "paused"
    assert low.wish()["why"]["code"] == "preempted_by_priority" and high.id in low.wish()["why"]["words"]
    assert low.shown()["wish"] == "run", "its user wants what it always wanted"
    assert len(low.told()["nodes"]) == 4, "it needs its nodes until its state is safe"
    assert high.told()["nodes"] == []
    ok(api.post(f"/v1/jobs/{high.id}/cancel"))
    high.state("cancelled")
    assert (low.wish()["wish"], low.wish()["why"]) == ("run", None), "nobody needs its nodes any more"
    high = Played(connector, api, job_mapping(priority="high", limits={"min_devices": 4}))
    assert low.wish()["wish"] == "paused"
    low.state("draining")
    low.state("paused", "preempted_by_priority")
    status = low.shown()["status"]
    assert (status["state"], status["code"]) == ("queued", "preempted_by_priority")
    assert f"gave its nodes away as {high.id}, of higher priority, needs its nodes" in status["reason"]
    assert len(high.told()["nodes"]) == 4
    high.begins()
    status = low.shown()["status"]
    assert (status["code"], low.shown()["share"]["queue_position"]) == ("preempted_by_priority", 1)
    assert "stands in its store" in status["reason"] and "number 1 of 1 in the queue" in status["reason"]
    high.state("succeeded")
    assert low.wish()["wish"] == "run" and low.told()["nodes"] is None
    low.begins()
    assert low.shown()["status"]["state"] == "running"


def test_who_lost_all_nodes_that_it_may_use_leaves_the_others_to_whom_they_suit(
    api: httpx.Client, tmp_path: Path
) -> None:
    others = {"name": "b", "count": 2, "device": "L4"}
    connector = Connector(http=api, cluster=parse_cluster({"nodes": [*NODES["nodes"], others]}))
    ok(connector.renew())
    picky = Played(connector, api, stored(tmp_path, limits={"device_types": ["T4"]}))
    picky.begins()
    assert picky.told()["nodes"] is None
    connector.cluster = parse_cluster({"nodes": [others]})
    ok(connector.renew())
    other = Played(connector, api, job_mapping())
    assert picky.wish()["wish"] == "paused" and picky.wish()["why"]["code"] == "preempted_by_priority"
    words = f"as no plan of it fits the nodes that it has left, and {other.id} needs some of them"
    assert picky.wish()["why"]["words"] == words
    picky.state("draining")
    picky.state("paused", "preempted_by_priority")
    assert len(other.told()["nodes"]) == 2
    assert picky.shown()["status"]["state"] == "queued"


def test_without_a_store_a_job_only_shrinks(api: httpx.Client) -> None:
    connector = started(api)
    low = Played(connector, api, job_mapping(priority=-5, limits={"min_devices": 2}))
    low.begins()
    high = Played(connector, api, job_mapping(priority=5, limits={"min_devices": 3}))
    assert low.wish()["wish"] == "run"
    assert high.told()["nodes"] == []
    status = high.shown()["status"]
    assert status["code"] == "waits_for_nodes"
    assert f"in use by {low.id} (4 nodes, without an object store to go to)" in status["reason"]


def test_what_a_job_may_have_at_most(api: httpx.Client) -> None:
    connector = started(api)
    capped = Played(connector, api, job_mapping(limits={"max_price_per_hour": 3.0}))
    assert len(capped.told()["nodes"]) == 3
    capped.begins()
    small = Played(connector, api, job_mapping(limits={"max_devices": 1}))
    assert len(small.told()["nodes"]) == 1


def test_a_limit_of_price_below_all_plans_is_waited_for_and_told(api: httpx.Client) -> None:
    connector = started(api)
    dear = job_mapping(limits={"max_price_per_hour": 1.5, "min_devices": 2})
    said = "limits.max_price_per_hour = 1.5 USD, and the cheapest nodes that a plan of it was found for cost 2 USD"
    rehearsed = ok(api.post("/v1/jobs", params={"dry_run": 1}, json=dear))
    assert (rehearsed["cluster_id"], rehearsed["plan"]) == ("local", None) and said in rehearsed["reason"]
    job = Played(connector, api, dear)
    assert job.told()["nodes"] == []
    status = job.shown()["status"]
    assert (status["state"], status["code"]) == ("queued", "price_above_limit")
    assert said in status["reason"] and "waits for lower prices or a higher limit" in status["reason"]
    assert job.shown()["share"]["code"] == "price_above_limit"
    assert said in api.get(f"/jobs/{job.id}", headers={"Accept": "text/html"}).text
    after = Played(connector, api, job_mapping())
    assert len(after.told()["nodes"]) == 4, "it holds up nobody"
    after.begins()
    after.state("succeeded")
    refused = api.post("/v1/plans", json={"job": dear, "cluster": NODES})
    assert (refused.status_code, refused.json()["code"]) == (422, "price_above_limit"), refused.text
    assert refused.json()["param"] == "limits.max_price_per_hour"
    ok(api.post(f"/v1/jobs/{job.id}/limits", json={"max_price_per_hour": 2}))
    assert len(job.told()["nodes"]) == 2
    assert job.shown()["status"]["code"] == "submitted"


def test_nodes_are_given_only_once_whoever_asks(api: httpx.Client) -> None:
    """A cluster that is asked often changes nothing, and drills are nodes that nobody begins on."""
    connector = started(api)
    ok(api.post("/v1/nodes/n-0/preempt", json={"notice_s": 3600}))
    jobs = [Played(connector, api, job_mapping()) for _ in range(3)]
    versions = {connector.wishes()["version"] for _ in range(5)}
    assert len(versions) == 1
    given = [node for job in jobs for node in job.told()["nodes"] or []]
    assert sorted(given) == ["n-1", "n-2", "n-3"]
    ok(api.post(f"/v1/jobs/{jobs[0].id}/cancel"))
    assert jobs[0].shown()["status"]["state"] == "cancelling"


def test_a_budget_that_is_spent_and_raised(
    api: httpx.Client, tmp_path: Path, eventually: Callable[..., object]
) -> None:
    """Four nodes of a dollar, for an hour and a little more."""
    connector = started(api)
    refused = api.post("/v1/jobs", json=job_mapping(limits={"budget_usd": 5}))
    assert refused.json()["detail"].startswith("limits.budget_usd = 5.0: needs a checkpoint.uri")
    job = Played(connector, api, stored(tmp_path, limits={"budget_usd": 4.5}), at_s=time.time() - 3600)
    job.begins()
    warning = eventually(lambda: job.shown()["share"]["warning"])
    assert str(warning).startswith("89% of its budget is spent, 4.0")
    ok(api.post(f"/v1/jobs/{job.id}/limits", json={"budget_usd": 2}))
    eventually(lambda: job.wish()["wish"] == "paused")
    assert job.wish()["why"]["code"] == "budget_spent"
    assert "as its budget is spent, 4.0" in job.wish()["why"]["words"]
    assert job.shown()["status"]["state"] == "running", "nothing stops before its state is safe"
    job.at_s += 3600
    job.state("draining")
    job.state("paused")
    status = job.shown()["status"]
    assert (status["state"], status["code"]) == ("paused", "budget_spent")
    refused = api.post(f"/v1/jobs/{job.id}/resume")
    assert (refused.status_code, refused.json()["code"]) == (409, "budget_spent")
    assert ok(api.post(f"/v1/jobs/{job.id}/limits", json={"budget_usd": 100}))["spec"]["limits"]["budget_usd"] == 100
    assert ok(api.post(f"/v1/jobs/{job.id}/resume"))["status"]["state"] == "queued"
    assert job.wish()["wish"] == "run" and job.wish()["why"] is None
    job.begins()
    assert job.shown()["share"]["warning"] is None
    job.state("succeeded")
    assert api.post(f"/v1/jobs/{job.id}/limits", json={"priority": 3}).json()["code"] == "job_ended"


def test_a_deadline_that_passes(api: httpx.Client, tmp_path: Path, eventually: Callable[..., object]) -> None:
    job_id = ok(api.post("/v1/jobs", json=stored(tmp_path, limits={"deadline": "2999-01-31T18:00:00Z"})))["id"]
    for wrong, words in (
        ({"deadline": "tomorrow"}, "limits.deadline = 'tomorrow': must be a moment"),
        ({"deadline": "2999-01-31T18:00:00"}, "must say its offset from UTC"),
        ({"priority": "urgent"}, "priority = 'urgent': must be a whole number or low or normal or high"),
        ({"max_devices": 0}, "limits.max_devices = 0: must be at least 1"),
        ({"budget_usd": -1}, "limits.budget_usd = -1.0: must be more than zero"),
    ):
        refused = api.post(f"/v1/jobs/{job_id}/limits", json=wrong)
        assert refused.status_code == 422 and words in refused.json()["detail"], refused.json()
    soon = rfc3339(time.time() + 2)
    ok(api.post(f"/v1/jobs/{job_id}/limits", json={"deadline": soon, "priority": "high"}))

    def status() -> dict[str, Any]:
        found: dict[str, Any] = ok(api.get(f"/v1/jobs/{job_id}"))
        return found

    eventually(lambda: status()["status"]["state"] == "paused")
    assert status()["status"]["code"] == "deadline_passed"
    assert status()["share"]["priority"] == 100
    assert api.post(f"/v1/jobs/{job_id}/resume").json()["code"] == "deadline_passed"
    # Other limits change beside a deadline that has passed, which a form sends back as it is.
    assert ok(api.post(f"/v1/jobs/{job_id}/limits", json={"max_devices": 3}))["spec"]["limits"]["deadline"] == soon
    ok(api.post(f"/v1/jobs/{job_id}/limits", json={"deadline": soon, "max_devices": None}))
    cloned = api.post(f"/v1/jobs/{job_id}/clone", json={})
    assert (cloned.status_code, cloned.json()["param"]) == (422, "limits.deadline")
    assert f"limits.deadline = '{soon}': has passed already" in cloned.json()["detail"]
    later = {"overrides": {"limits": {"deadline": "2999-01-31T18:00:00Z"}}}
    assert api.post(f"/v1/jobs/{job_id}/clone", json=later).status_code == 201
    ok(api.post(f"/v1/jobs/{job_id}/limits", json={"deadline": None}))
    assert ok(api.post(f"/v1/jobs/{job_id}/resume"))["status"]["state"] == "queued"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_deadline_that_has_passed_is_refused(
    api: httpx.Client, tmp_path: Path, eventually: Callable[..., object]
) -> None:
    past = "2001-01-31T18:00:00Z"
    document = stored(tmp_path, limits={"deadline": past})
    job_id = ok(api.post("/v1/jobs", json=stored(tmp_path)))["id"]
    overrides = {"overrides": {"limits": {"deadline": past}}}
    for path, body in (
        ("/v1/jobs", document),
        ("/v1/jobs?dry_run=1", document),
        (f"/v1/jobs/{job_id}/clone", overrides),
        (f"/v1/jobs/{job_id}/clone", {**overrides, "dry_run": True}),
        (f"/v1/jobs/{job_id}/limits", {"deadline": past}),
    ):
        refused = api.post(path, json=body)
        assert (refused.status_code, refused.json()["param"]) == (422, "limits.deadline"), path
        assert f"limits.deadline = '{past}': has passed already" in refused.json()["detail"]
    assert len(ok(api.get("/v1/jobs"))["items"]) == 1
    # Whoever asks again under its key hears of the job that was made, whatever time it is.
    soon = stored(tmp_path, limits={"deadline": rfc3339(time.time() + 1)})
    first = ok(api.post("/v1/jobs", json=soon, headers={"Idempotency-Key": "once"}))
    eventually(lambda: time.time() > deadline_at_s(soon["limits"]["deadline"]))
    assert ok(api.post("/v1/jobs", json=soon, headers={"Idempotency-Key": "once"}))["id"] == first["id"]


def test_a_job_that_runs_is_resized(api: httpx.Client, tmp_path: Path) -> None:
    job = Played(started(api), api, stored(tmp_path))
    job.begins()
    assert job.told()["nodes"] is None

    def resize(**size: Any) -> httpx.Response:
        return api.post(f"/v1/jobs/{job.id}/resize", json=size)

    etag = api.get(f"/v1/jobs/{job.id}").headers["ETag"]
    resized = resize(max_devices=2)
    assert ok(resized)["spec"]["limits"]["max_devices"] == 2 and resized.headers["ETag"] != etag
    assert len(job.told()["nodes"]) == 2
    refused = api.post(f"/v1/jobs/{job.id}/resize", json={"max_devices": 3}, headers={"If-Match": etag})
    assert (refused.status_code, refused.json()["code"]) == (412, "precondition_failed")
    refused = resize(min_devices=2)
    assert (refused.status_code, refused.json()["code"]) == (409, "job_has_nodes")
    assert "pause it, resize it, and resume it" in refused.json()["detail"]
    ok(resize(max_devices=None))
    assert job.told()["nodes"] is None
    ok(api.post(f"/v1/jobs/{job.id}/pause"))
    job.state("paused")
    refused = resize(min_devices=3, max_devices=2)
    assert refused.status_code == 422 and "limits.max_devices = 2: must be at least min_devices (3)" in refused.text
    assert ok(resize(min_devices=3))["spec"]["limits"]["min_devices"] == 3
    ok(api.post(f"/v1/jobs/{job.id}/resume"))
    assert job.wish()["spec"]["limits"]["min_devices"] == 3, "whoever runs it from here on goes by that"


def test_a_job_rests_when_its_time_is_over(
    api: httpx.Client, tmp_path: Path, eventually: Callable[..., object]
) -> None:
    job = Played(started(api), api, stored(tmp_path, limits={"max_duration": "36000d"}))
    refused = api.post("/v1/jobs", json=stored(tmp_path, limits={"max_duration": "soon"}))
    assert (
        refused.status_code == 422 and "limits.max_duration = 'soon': must be a number of s, m, h or d" in refused.text
    )
    refused = api.post("/v1/jobs", json=job_mapping(limits={"max_duration": "2h"}))
    assert "limits.max_duration = '2h': needs a checkpoint.uri" in refused.json()["detail"]
    job.begins()  # in 1970
    assert job.shown()["wish"] == "run"
    ok(api.post(f"/v1/jobs/{job.id}/limits", json={"max_duration": "12h"}))
    eventually(lambda: job.wish()["wish"] == "paused")
    assert job.wish()["why"]["code"] == "max_duration_passed"
    assert "as limits.max_duration (12h) has passed since 1970-01-01" in job.wish()["why"]["words"]
    job.state("draining")
    job.say(StateChanged(state="paused", code="max_duration_passed", reason=job.wish()["why"]["words"]))
    assert api.post(f"/v1/jobs/{job.id}/resume").json()["code"] == "max_duration_passed"
    ok(api.post(f"/v1/jobs/{job.id}/limits", json={"max_duration": None}))
    assert ok(api.post(f"/v1/jobs/{job.id}/resume"))["status"]["state"] == "queued"


def test_jobs_of_other_projects_are_told_of_without_a_name(api: httpx.Client, tmp_path: Path) -> None:
    """Not in what they wait for, whom they make room for, or whom they share with, on any page or in any answer."""
    connector = started(api)
    for project in ("other", "third"):
        ok(api.post("/v1/projects", json={"id": project}))
    low = Played(connector, api, stored(tmp_path, name="low-one", priority="low"))
    low.begins()
    small = Played(connector, api, job_mapping(name="small-one"), project="third")
    assert low.told()["reason"] == "given to a job of another project"
    assert "number 1 of 1 in the queue: a job of another project leaves n-" in small.shown()["status"]["reason"]
    ok(api.post(f"/v1/jobs/{small.id}/cancel"))
    small.state("cancelled")
    high = Played(
        connector, api, job_mapping(name="high-one", priority="high", limits={"min_devices": 4}), project="other"
    )
    assert low.wish()["why"]["words"] == "as a job of another project, of higher priority, needs its nodes"
    assert "in the queue: a job of another project leaves n-" in high.shown()["status"]["reason"]
    low.state("draining")
    low.state("paused", "preempted_by_priority")
    high.begins()
    assert "in use by a job of another project (4 nodes, of higher priority)" in low.shown()["status"]["reason"]
    jobs = {"default": low, "other": high, "third": small}
    for project, own in jobs.items():
        token = ok(api.post("/v1/tokens", json={"name": "t", "role": "viewer", "project": project}))["secret"]
        paths = [f"/v1/jobs/{own.id}", f"/v1/jobs/{own.id}/events", f"/jobs/{own.id}", "/v1/jobs", "/v1/nodes", "/"]
        with httpx.Client(base_url=api.base_url, headers={"Authorization": f"Bearer {token}"}) as viewer:
            seen = "".join(viewer.get(path).raise_for_status().text for path in [*paths, "/v1/clusters", "/nodes"])
        for other in jobs.values():
            assert (other.id in seen) == (other.spec["name"] in seen) == (other is own), project
